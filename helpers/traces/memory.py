"""How much memory tensors took, moment by moment."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from helpers.traces.reading import TRACE_FILE, Trace, TraceError, document, load
from helpers.traces.timeline import steps

CPU = 0  # the profiler's number for this type of device


class NoMemory(TraceError):
    """The trace does not tell what was allocated."""


def memory_curve(path: str | Path | Trace) -> pd.DataFrame:
    """Return the memory of tensors after each allocation and release: the curve of the Memory view.

    On a GPU that is all memory that PyTorch has given to tensors. On the CPU the profiler counts from its own start:
    what had been allocated before is missing, and its release lets the curve fall below 0. Mini-batches that workers
    share with this process do not count.

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
    trace = load(path)
    steps(trace)  # raises NoSteps
    place = trace.path
    files = [place] if place.is_file() else [each for each in place.iterdir() if TRACE_FILE.fullmatch(each.name)]
    events = [event for file in files for event in document(file)["traceEvents"]]
    begin = min(event["ts"] for event in events if str(event.get("name")).startswith("ProfilerStep#"))
    rows = _rows(sorted((event for event in events if event.get("name") == "[memory]"), key=lambda each: each["ts"]))
    if not rows:
        raise NoMemory(f"{place} does not tell what was allocated. Record the profile with profile_memory=True.")
    table = pd.DataFrame(rows, columns=["time", "device", "allocated"])
    return table.assign(time=(table["time"] - begin) / 1e3, allocated=table["allocated"] / 1e6)


def _rows(events: list[dict]) -> list[tuple[float, str, int]]:
    """Return time in µs, device and bytes of each event, without those of memory shared with workers.

    To map shared memory is written as an allocation with its own size as the total reserved, to unmap it as a release
    after which nothing is left; an allocation by the CPU's allocator never reserves.
    """
    rows, shared, allocated = [], set(), 0
    for event in events:
        what = event["args"]
        if what["Device Type"] != CPU:
            rows.append((event["ts"], f"GPU {what['Device Id']}", what["Total Allocated"]))
        elif what["Total Reserved"]:
            shared.add(what["Addr"])
        elif what["Addr"] in shared and what["Bytes"] < 0:
            shared.discard(what["Addr"])
        else:
            allocated += what["Bytes"]
            rows.append((event["ts"], "CPU", allocated))
    return rows
