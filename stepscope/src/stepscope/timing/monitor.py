"""Watches this process and its workers while a loop runs: CPU time, and bytes read, from storage or memory."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import pandas as pd

INTERVAL = 0.1  # seconds between samples: Linux counts CPU time in hundredths of a second


class Monitor:
    """A context manager that samples ten times a second, in its own thread, until its block ends or raises.

    Examples
    --------
    >>> with Monitor() as watched:
    ...     time.sleep(0.3)
    >>> "main process, CPU in %" in watched.table()
    True
    """

    def __init__(self) -> None:
        self._samples: list[dict[str, float]] = []
        self._seconds: dict[int, float] = {}  # of CPU time, by worker; including ended workers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)

    def __enter__(self) -> Monitor:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def table(self) -> pd.DataFrame:
        """Return a row for each sample, by its second of ``time.perf_counter()``; rates since the previous sample.

        ============================= ===========================================================================
        column                        meaning
        ============================= ===========================================================================
        main process, CPU in %        CPU time of this process; above 100 if several of its threads work
        workers, CPU in %             CPU time of a worker, the mean of all workers; NaN without workers
        read in MB/s                  data read by this process and its workers, cached or not; 10⁶ bytes; Linux
        from disk in MB/s             the part of this data that storage delivered, in pages of 4 KiB; Linux
        ============================= ===========================================================================
        """
        import pandas as pd

        samples = pd.DataFrame(self._samples).set_index("time").rename_axis("time in s")
        rates = samples.diff().div(samples.index.to_series().diff(), axis=0)
        table = pd.DataFrame({"main process, CPU in %": rates["main"] * 100})
        if samples["workers"].any():
            used = rates["worker seconds"] * 100 / samples["workers"]
            table["workers, CPU in %"] = used.where(samples["workers"] > 0)
        for name in samples.columns.intersection(["read", "from disk"]):
            table[f"{name} in MB/s"] = rates[name] / 1e6
        return table.iloc[1:]  # the first sample has no rates

    def _run(self) -> None:
        ended = False
        while not ended:
            self._samples.append(self._sample())
            ended = self._ended.wait(INTERVAL)

    def _sample(self) -> dict[str, float]:
        now, read, main = time.perf_counter(), Counter[str](), psutil.Process()
        # Only processes that multiprocessing started here: other children, such as TensorBoard, are not workers.
        workers = [child.pid for child in multiprocessing.active_children() if child.pid is not None]
        for pid in workers:
            with suppress(psutil.NoSuchProcess):  # the worker has ended since
                worker = psutil.Process(pid)
                self._seconds[pid] = _seconds(worker)
                read.update(_read(worker))
        read.update(_read(main))  # Linux includes the bytes read by ended workers
        used = sum(self._seconds.values())
        return {"time": now, "workers": len(workers), "main": _seconds(main), "worker seconds": used, **read}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _read(process: psutil.Process) -> dict[str, int]:
    counters = getattr(process, "io_counters", lambda: None)()
    if counters is None or not hasattr(counters, "read_chars"):  # only Linux counts reads from the page cache
        return {}
    return {"read": counters.read_chars, "from disk": counters.read_bytes}
