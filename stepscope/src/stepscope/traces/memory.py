"""The memory of tensors over time."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.traces.columns import Columns, objects, stacked
from stepscope.traces.events import Trace, load, marks
from stepscope.traces.files import TraceError
from stepscope.traces.step_times import steps

CPU = 0  # the profiler's number for this type of device


def memory_curve(path: str | Path | Trace) -> pd.DataFrame:
    """Return the memory of tensors after each allocation and release: the curve of the Memory view.

    On a GPU the curve shows all memory that PyTorch has allocated to tensors. On the CPU it counts from the recording's
    start, and so begins lower than in the view, which counts from the process's first recording. Earlier allocations
    are missing, so their release can lower the curve below 0. Batches in memory shared with workers do not count.

    The profile must be recorded with ``profile_memory=True``.

    Returns
    -------
    DataFrame
        One row an event, in order: `time` in ms since the start of the first step; `device`, "CPU", "GPU 0" and so on;
        `allocated` in MB (10⁶ bytes).

    Raises TraceError if the trace has no such events, NoSteps if it marks no steps.
    """
    trace = load(path)
    steps(trace)  # raises NoSteps
    begin = min(marks(span)["start"].min(initial=math.inf) for span in trace.spans)
    table = stacked([span.memory for span in trace.spans])
    table = table.rows(~np.isnan(table["device_type"]) & ~np.isnan(table["allocated"]))
    on_cpu = table["device_type"] == CPU
    of_cpu = table.rows(on_cpu)
    events = (of_cpu[name].tolist() for name in ("address", "change", "allocated", "reserved"))
    own = np.ones(table.height, bool)
    own[on_cpu] = ~np.array(shared_with_workers(zip(*events, strict=True)), bool)
    table, on_cpu = table.rows(own), on_cpu[own]
    if not table.height:
        raise TraceError(f"{trace.path} has no record of memory. Record the profile with profile_memory=True.")
    before = (table["allocated"] - table["change"])[on_cpu][:1].sum()  # 0 without events of the CPU
    names = {number: f"GPU {number:.0f}" for number in set(table["device"][~on_cpu].tolist())}
    return Columns(
        time=(table["start"] - begin) / 1e3,
        device=np.where(on_cpu, "CPU", objects([names.get(number) for number in table["device"].tolist()])),
        allocated=(table["allocated"] - on_cpu * before) / 1e6,
    ).table()


def shared_with_workers(events: Iterable[Sequence[int]]) -> list[bool]:
    """Return for each memory event of the CPU whether it maps or unmaps memory that is shared with a worker.

    Mapping a batch from a worker's shared memory is recorded like an allocation, but with 0 as the total allocated and
    the batch's size as the total reserved; unmapping is recorded with 0 for both. Events of the CPU's allocator always
    have 0 reserved, and as total allocated the previous total plus the change. If a batch was mapped before the
    recording, the total of its unmapping, 0, differs from this sum.

    Events are in order; each has its address, its change in bytes, and the total bytes allocated and reserved after it.
    """
    shared, mapped, before = [], set(), 0
    for address, change, allocated, reserved in events:
        maps = reserved > 0
        unmaps = allocated == 0 > change and (address in mapped or before + change != 0)
        if maps:
            mapped.add(address)
        elif unmaps:
            mapped.discard(address)
        else:
            before = allocated
        shared.append(maps or unmaps)
    return shared
