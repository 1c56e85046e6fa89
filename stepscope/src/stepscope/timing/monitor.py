"""Watches the machine while a loop runs: CPU, GPU, what is read and from where, the workers' memory."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    import pandas as pd

INTERVAL = 0.1  # seconds between samples: Linux counts CPU time in hundredths of a second
_PSS_EVERY = 10  # samples: for this sum the system visits all pages, 10 ms for a worker of 400 MB

_Sample = dict[str, float]


class Monitor:
    """A context manager that samples ten times a second, in its own thread, until its block ends or raises.

    It wakes no GPU: GPU memory is sampled only while something else uses the GPU.

    Attributes
    ----------
    absent : tuple of str
        What is unknown on this machine, a line each; `table` lacks these columns.

    Examples
    --------
    >>> with Monitor() as watched:
    ...     time.sleep(0.3)
    >>> "main process, CPU in %" in watched.table()
    True
    """

    def __init__(self):
        self._sources, self.absent = _sources()
        self._samples: list[_Sample] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def table(self) -> pd.DataFrame:
        """Return the samples: one a row, by its second of ``time.perf_counter()``; rates since the previous sample.

        ============================= ===========================================================================
        column                        meaning
        ============================= ===========================================================================
        core N in %                   use of a core, by all programs
        main process, CPU in %        CPU time of this process; above 100 if several of its threads work
        workers, CPU in %             CPU time of a worker, the mean of all; while there are any
        read in MB/s                  what this process and its workers read, from anywhere; 10⁶ bytes
        from disk in MB/s             the part of it that storage delivered, in pages of 4 KiB
        page-cache hits in %          the other part, or a lower bound: files do not fill their last page
        all disks in MB/s             if the above are unknown: what all programs read from all disks
        GPU N in %                    share of the time that any kernel ran, over up to a second before
        GPU N memory in MB            memory in use, by all programs
        workers, RSS in MB            memory of all workers; shared pages count for each of them
        workers, PSS in MB            the same, but shared pages in equal parts; once a second and when one starts
        ============================= ===========================================================================
        """
        import pandas as pd

        samples = pd.DataFrame(self._samples).set_index("time").rename_axis("time in s")
        per_second = samples.diff().div(samples.index.to_series().diff(), axis=0)
        table = samples.filter(regex="in %|in MB$")
        table["main process, CPU in %"] = per_second["main seconds"] * 100
        if samples["workers"].any():
            used = per_second["worker seconds"] * 100 / samples["workers"]
            table["workers, CPU in %"] = used.where(samples["workers"] > 0)
        for name in samples.columns.intersection(["read", "from disk", "all disks"]):
            table[f"{name} in MB/s"] = per_second[name] / 1e6
        if "read" in samples:
            delivered = (per_second["from disk"] / per_second["read"]).where(per_second["read"] > 0)
            table["page-cache hits in %"] = (1 - delivered).clip(lower=0) * 100
        return table.iloc[1:]  # the first sample has no rates

    def _run(self) -> None:
        ended = False
        while not ended:
            sample = {"time": time.perf_counter()}
            for source in self._sources:
                sample |= source()
            self._samples.append(sample)
            ended = self._ended.wait(INTERVAL)


def _sources() -> tuple[list[Callable[[], _Sample]], tuple[str, ...]]:
    sources, absent = [_cores, _Processes()], []
    if sys.platform != "linux":
        sources.append(_disks)
        absent.append("Page cache: only Linux reports what it delivered. Disk reads include all programs.")
        absent.append("PSS: only Linux reports which pages processes share.")
    for gpu in range(torch.cuda.device_count()):
        try:
            _gpu(gpu)
        except Exception as error:  # torch, NVIDIA's library and its driver raise different types
            absent.append(f"GPU {gpu}: its driver does not report how it is used ({error}).")
        else:
            sources.append(partial(_gpu, gpu))
    if not torch.cuda.device_count():
        absent.append("GPU: there is none.")
    return sources, tuple(absent)


def _cores() -> _Sample:
    used = psutil.cpu_percent(percpu=True)  # since this thread's last call
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(len(used))
    return {f"core {core} in %": used[core] for core in allowed if core < len(used)}


def _disks() -> _Sample:
    counters = psutil.disk_io_counters()
    return {"all disks": counters.read_bytes} if counters else {}


def _gpu(gpu: int) -> _Sample:
    sample = {f"GPU {gpu} in %": torch.cuda.utilization(gpu)}
    if torch.cuda.is_initialized():  # otherwise the call would initialize it
        sample[f"GPU {gpu} memory in MB"] = torch.cuda.device_memory_used(gpu) / 1e6
    return sample


class _Processes:
    """Adds up what this process and its workers have used."""

    def __init__(self):
        self._count = 0  # of samples
        self._seconds: dict[int, float] = {}  # of CPU time, by worker; including ended workers

    def __call__(self) -> _Sample:
        total, main = Counter(), psutil.Process()
        # Only processes that multiprocessing started here: other children, such as TensorBoard, are no workers.
        workers = [child.pid for child in multiprocessing.active_children()]
        with_pss = self._count % _PSS_EVERY == 0 or not self._seconds.keys() >= set(workers)
        for pid in workers:
            with suppress(psutil.NoSuchProcess):  # it has ended since
                worker = psutil.Process(pid)
                self._seconds[pid] = _seconds(worker)
                total.update(_read(worker))
                total["workers, RSS in MB"] += worker.memory_info().rss / 1e6
                if with_pss and sys.platform == "linux":
                    total["workers, PSS in MB"] += worker.memory_full_info().pss / 1e6
        total.update(_read(main))  # Linux includes what ended workers read
        self._count += 1
        seconds = {"main seconds": _seconds(main), "worker seconds": sum(self._seconds.values())}
        return {"workers": len(workers), **seconds, **total}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _read(process: psutil.Process) -> _Sample:
    if sys.platform != "linux":
        return {}
    counters = process.io_counters()
    return {"read": counters.read_chars, "from disk": counters.read_bytes}
