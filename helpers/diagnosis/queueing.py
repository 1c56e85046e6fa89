"""How long threads were ready to work while others had the cores: Linux reports it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def of_this_thread() -> float:
    """Return for how many seconds this thread was ready to work while others had the cores; 0 where it is unknown."""
    return _seconds("thread-self")


def of_processes(pids: Iterable[int]) -> float:
    """Return the same for the main threads of processes, added up; a process that has ended counts as 0."""
    return sum(_seconds(str(pid)) for pid in pids)


def _seconds(process: str) -> float:
    try:
        return int(Path("/proc", process, "schedstat").read_text().split()[1]) / 1e9  # see proc_pid_schedstat(5)
    except (OSError, IndexError):
        return 0.0
