"""Measures how long a thread was ready to work while other processes had the cores; 0 except on Linux."""

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
    """Return for how many seconds a thread was queued: ready to work while no core was free; 0 if unknown.

    `process` is a process id (its first thread counts), or a task such as "self/task/7"; by default this thread.
    """
    try:
        return (
            int(Path("/proc", str(process), "schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
        )  # see proc_pid_schedstat(5)
    except (OSError, IndexError):
        return 0.0


def queue_clock(thread: int | None = None) -> Callable[[], float]:
    """Return a function like `queued` that takes only one or two µs, because its file stays open.

    `thread` is the native id of a thread of this process; by default this thread.
    """
    path = Path(f"/proc/self/task/{thread or threading.get_native_id()}/schedstat")
    if not path.exists():
        return lambda: 0.0
    file = os.open(path, os.O_RDONLY)

    def clock() -> float:
        try:
            return int(os.pread(file, 100, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # the script closed all files, or reuses the descriptor
            return 0.0

    weakref.finalize(clock, os.close, file).atexit = False
    return clock


class Contention:
    """Measures from its creation on how long this thread is queued because other processes have the cores."""

    def __init__(self) -> None:
        self.begin, self.queued, self.cpu_of_others = time.perf_counter(), queued(), _cpu_of_others()

    def share(self) -> float:
        """Return the share of the time in which this thread was queued because of processes other than its workers."""
        waited = queued() - self.queued
        return waited * self.part_of_others(waited) / (time.perf_counter() - self.begin)

    def part_of_others(self, waited: float) -> float:
        """Return the share of `waited` seconds of queueing that processes other than the workers caused."""
        return min(1.0, max(0.0, _cpu_of_others() - self.cpu_of_others) / waited) if waited > 0 else 0.0


def _cpu_of_others() -> float:
    """Return the CPU time of all processes except this process and its children, in s."""
    all_ = psutil.cpu_times()
    idle = sum(getattr(all_, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
    own = sum(os.times()[:4])  # with children that have ended
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            own += sum(child.cpu_times()[:2])
    return float(sum(all_) - idle - own)
