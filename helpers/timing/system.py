"""What the operating system, and PyTorch's library for the CPU, report of a function or of workers."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

if TYPE_CHECKING:
    import pandas as pd


def system_calls(function: Callable[[], object]) -> pd.Series:
    """Count what this thread asks of the operating system while `function` runs.

    Returns
    -------
    Series of int
        Its name says who counted: ``"strace"``, where that is installed and may watch this process (Linux): calls by
        their name. Otherwise ``"psutil"``: ``read`` and ``write`` alone, together of all threads (Linux, Windows); or
        nothing (macOS).
    """
    import pandas as pd

    if (counted := _by_strace(function)) is not None:
        return pd.Series(counted, name="strace", dtype=int)
    process = psutil.Process()
    if not hasattr(process, "io_counters"):
        function()
        return pd.Series(dtype=int, name="psutil")
    before = process.io_counters()
    function()
    after = process.io_counters()
    reads, writes = after.read_count - before.read_count, after.write_count - before.write_count
    return pd.Series({"read": reads, "write": writes}, name="psutil")


def onednn(function: Callable[[], object]) -> pd.DataFrame:
    """Count what oneDNN, PyTorch's library for networks on the CPU, does while `function` runs, by its own log.

    The profiler shows a convolution as one operator. The log also shows what the library does inside it: above all
    ``reorder``, which writes a tensor anew in the order that the library computes in.

    Returns
    -------
    DataFrame
        Index `primitive`, such as ``"convolution"``; columns `calls`, int, and `ms`, all of them together. Empty where
        PyTorch has no oneDNN.
    """
    import pandas as pd

    level = torch.backends.mkldnn.VERBOSE_ON
    with tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        terminal = os.dup(1)  # the library writes to the file descriptor, past Python
        os.dup2(log.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(level) if torch.backends.mkldnn.is_available() else nullcontext():
                function()
        finally:
            os.dup2(terminal, 1)
            os.close(terminal)
        log.seek(0)
        lines = [line.decode(errors="replace").strip().split(",") for line in log]
    # onednn_verbose,v1,primitive,exec,cpu,reorder,…,milliseconds
    executed = [line for line in lines if line[0] == "onednn_verbose" and line[2:4] == ["primitive", "exec"]]
    calls = [(line[5], float(line[-1])) for line in executed]
    table = pd.DataFrame(calls, columns=["primitive", "ms"]).groupby("primitive")["ms"].agg(["size", "sum"])
    return table.set_axis(["calls", "ms"], axis=1)


def read_from_disk_mb(function: Callable[[], object]) -> float | None:
    """Megabytes (10⁶ bytes) that the disk delivers to this process while `function` runs, without the page cache.

    None where the system does not report it: Linux does.
    """
    if sys.platform != "linux":
        return None
    before = psutil.Process().io_counters().read_bytes
    function()
    return (psutil.Process().io_counters().read_bytes - before) / 1e6


def forget(folder: Path) -> bool:
    """Ask the system to drop the files in `folder` from its page cache, so that they are read from the disk again.

    Nothing else is dropped: neither the names and sizes of files, nor what the disk itself keeps in memory, nor pages
    that a process has mapped. Works without special rights, on Linux.

    Returns
    -------
    bool
        Whether the system can be asked.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    os.sync()  # what is not yet on the disk would stay
    for path in Path(folder).rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)
    return True


def warm(folder: Path) -> None:
    """Read all files in `folder` once, so that they lie in the page cache, as far as the memory has room for them."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


def worker_memory_mb() -> list[float]:
    """Memory of each worker that runs now, in MB (10⁶ bytes).

    Pages that several processes share are charged to each in equal parts (PSS) where the system reports that, on Linux;
    elsewhere only the pages that a process has alone count (USS).
    """
    return [getattr(info, "pss", info.uss) / 1e6 for info in _workers()]


def worker_growth_mb(dataset: torch.utils.data.Dataset) -> float:
    """Memory that one forked worker gains in a pass over `dataset`, in MB (10⁶ bytes).

    Counts the pages that the worker has for itself alone (USS), from its first batch of 1,000 items to the end
    of the pass. For Linux: elsewhere processes cannot be forked safely, or not at all.
    """
    loader = torch.utils.data.DataLoader(
        dataset, 1_000, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    before = max(info.uss for info in _workers())
    for _ in batches:
        pass
    return (max(info.uss for info in _workers()) - before) / 1e6


def _by_strace(function: Callable[[], object]) -> dict[str, int] | None:
    """Let strace watch this thread meanwhile; None if it cannot."""
    if not shutil.which("strace"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "calls")
        command = ["strace", "-c", "-o", str(table), "-p", str(threading.get_native_id())]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        if "attached" not in strace.stderr.readline():
            strace.kill()
            strace.communicate()
            return None
        try:
            function()
        finally:
            strace.send_signal(signal.SIGINT)  # detaches from this process and writes the table
            strace.communicate()
        # % time, seconds, µs a call, calls, errors if any, name; between two rulers
        _, rows, _ = re.split(r"\n?[- ]*-{6}[- ]*\n", table.read_text())
        calls = {row[-1]: int(row[3]) for row in map(str.split, rows.splitlines())}
        return {name: count for name, count in calls.items() if name not in ("kill", "wait4")}  # those end strace


def _workers() -> list:
    # Only what multiprocessing started here: other children, such as TensorBoard, are no workers.
    return [psutil.Process(child.pid).memory_full_info() for child in multiprocessing.active_children()]
