"""How long a thread was ready to work while other processes had the cores. Only Linux reports it; elsewhere it is 0."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil


def queued(process: int | str = "thread-self") -> float:
    """Return for how many seconds a thread was ready to work while others had the cores; 0 if that is unknown.

    It is this thread, the first one of a process that is given by its number, or a task such as "self/task/7".
    """
    try:
        return int(Path("/proc", str(process), "schedstat").read_text().split()[1]) / 1e9  # see proc_pid_schedstat(5)
    except (OSError, IndexError):
        return 0.0


def queue_clock(thread: int | None = None) -> Callable[[], float]:
    """Return a function like `queued` that takes a microsecond or two, as its file stays open.

    `thread` is the native number of a thread of this process, by default of this thread.
    """
    path = Path(f"/proc/self/task/{thread or threading.get_native_id()}/schedstat")
    if not path.exists():
        return lambda: 0.0
    file = os.open(path, os.O_RDONLY)

    def clock() -> float:
        try:
            return int(os.pread(file, 100, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # the script closed all files; the number may be another file's now
            return 0.0

    weakref.finalize(clock, os.close, file).atexit = False
    return clock


class Contention:
    """Measures, from its creation on, whether other processes have the cores while this thread is ready to work."""

    def __init__(self) -> None:
        self.begin, self.queued, self.others = time.perf_counter(), queued(), _others()

    def share(self) -> float:
        """Return the share of the time in which processes other than this one and its workers had the cores."""
        held = queued() - self.queued
        return held * self.part(held) / (time.perf_counter() - self.begin)

    def part(self, held: float) -> float:
        """Return the part of `held` seconds of waiting for a core that processes other than its workers caused."""
        return min(1.0, max(0.0, _others() - self.others) / held) if held > 0 else 0.0


def _others() -> float:
    """Return the CPU time of all processes but this one and its children, in s."""
    all_ = psutil.cpu_times()
    idle = sum(getattr(all_, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
    own = sum(os.times()[:4])  # with children that have ended
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            own += sum(child.cpu_times()[:2])
    return float(sum(all_) - idle - own)
