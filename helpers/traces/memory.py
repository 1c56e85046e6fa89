"""How much memory tensors took, moment by moment."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helpers.traces.columns import Columns
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
    events = [span.event_columns for span in trace.spans]
    begin = min(each["start"][each["kind"] == "step"].min(initial=math.inf) for each in events)
    parts = [span.memory_columns for span in trace.spans]
    table = Columns({name: np.concatenate([each[name] for each in parts]) for name in parts[0]})
    table = _of_allocators(table.rows(~np.isnan(table["device_type"]) & ~np.isnan(table["allocated"])))
    if not len(table["start"]):
        raise NoMemory(f"{trace.path} has no record of memory. Record the profile with profile_memory=True.")
    on_cpu = table["device_type"] == CPU
    names = {number: f"GPU {int(number)}" for number in set(table["device"][~on_cpu].tolist())}
    device = ["CPU" if cpu else names[number] for cpu, number in zip(on_cpu, table["device"].tolist(), strict=True)]
    before = (table["allocated"] - table["change"])[on_cpu][:1].sum()  # 0 without the CPU
    return pd.DataFrame(
        {
            "time": (table["start"] - begin) / 1e3,
            "device": device,
            "allocated": (table["allocated"] - on_cpu * before) / 1e6,
        }
    )


def _of_allocators(events: Columns) -> Columns:
    """Return the events without those of memory shared with workers."""
    on_cpu = events["device_type"] == CPU
    of_cpu = events.rows(on_cpu)
    shared = shared_with_workers(
        zip(*(of_cpu[name].tolist() for name in ("address", "change", "allocated", "reserved")), strict=True)
    )
    kept = ~on_cpu
    kept[on_cpu] = ~np.array(shared, bool)
    return events.rows(kept)
