"""How much memory tensors took, moment by moment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from helpers.traces.files import NoMemory
from helpers.traces.reading import Trace, load
from helpers.traces.sharing import shared_with_workers
from helpers.traces.timeline import steps

if TYPE_CHECKING:
    import pandas as pd

CPU = 0  # the profiler's number for this type of device


def memory_curve(path: str | Path | Trace) -> pd.DataFrame:
    """Return the memory of tensors after each allocation and release: the curve of the Memory view.

    On a GPU that is all memory that PyTorch has given to tensors. On the CPU it counts from the recording's start, and
    so begins lower than the view's, which counts from the process's first recording: what had been allocated before
    is missing, and its release lets the curve fall below 0. Batches that workers share with this process do not count.

    Parameters
    ----------
    path : str, Path or Trace
        Of a profile recorded with ``profile_memory=True``.

    Returns
    -------
    DataFrame
        A row an event, in their order: `time` in ms since the start of the first step; `device`, "CPU" or "GPU 0" and
        so on; `allocated` in MB (10⁶ bytes).

    Raises
    ------
    NoMemory
        If the trace has no such events.
    NoSteps
        If it marks no steps.
    """
    import pandas as pd

    trace = load(path)
    steps(trace)  # raises NoSteps
    events = [span.events for span in trace.spans]
    begin = min(each["start"][each["kind"] == "step"].min() for each in events)
    table = pd.concat([span.memory for span in trace.spans], ignore_index=True)
    table = _of_allocators(table.dropna(subset=["device_type", "allocated"]))
    if table.empty:
        raise NoMemory(f"{trace.path} has no record of memory. Record the profile with profile_memory=True.")
    on_cpu = table["device_type"] == CPU
    device = "GPU " + table["device"].astype(int).astype(str)
    before = (table["allocated"] - table["change"])[on_cpu].head(1).sum()  # 0 without the CPU
    return pd.DataFrame(
        {
            "time": (table["start"] - begin) / 1e3,
            "device": device.mask(on_cpu, "CPU"),
            "allocated": (table["allocated"] - on_cpu * before) / 1e6,
        }
    ).reset_index(drop=True)


def _of_allocators(events: pd.DataFrame) -> pd.DataFrame:
    """Return the events without those of memory shared with workers."""
    of_cpu = events[events["device_type"] == CPU]
    shared = shared_with_workers(
        zip(*(of_cpu[name] for name in ("address", "change", "allocated", "reserved")), strict=True)
    )
    return events.drop(of_cpu.index[shared])
