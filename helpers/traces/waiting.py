"""Where the host waited for the accelerator, and where the accelerator only copied."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helpers.traces.intervals import coverage
from helpers.traces.keeping import once
from helpers.traces.operators import host_events, outer_first, parents
from helpers.traces.reading import Span, Trace, load
from helpers.traces.timeline import concatenate, steps_of
from helpers.traces.utilization import WAITS

if TYPE_CHECKING:
    import pandas as pd

# In the name of a copy; AMD's say Host for any memory. Copies from and to pageable memory wait for the accelerator
# whatever they are called: "API synchronization behavior" in the documentation of the CUDA Runtime API.
PAGEABLE = "Pageable"
DIRECTIONS = {"HtoD": "to the device", "DtoH": "from the device", "DtoD": "within the device"}


def waits(path: str | Path | Trace) -> pd.DataFrame:
    """Return the calls of the accelerator's runtime in which the host waited for it, in the steps.

    Only threads that run operators count: the one that pins memory may wait without holding up the training.

    Returns
    -------
    DataFrame
        A row a call: `step`, the profiler's number; `call`, its name; `operator`, the outermost operator of PyTorch
        around it (``aten::item``), None if there is none; `copy`, "to the device", "from the device" or "within the
        device" if the innermost one copies so, or None; `start` and `end` in µs.

    Raises
    ------
    NoSteps, SeveralRecordings
        As `steps`.
    """
    import pandas as pd

    trace = load(path)
    kept = concatenate(trace, [steps_of(span) for span in trace.spans]).index
    found = pd.concat([_waits(span) for span in trace.spans], ignore_index=True)
    return found[found["step"].isin(kept)].reset_index(drop=True)


def exposed_copies(path: str | Path | Trace) -> pd.DataFrame:
    """Return in each step how long the accelerator copied and ran no kernel, by the kind of copy.

    Returns
    -------
    DataFrame
        Index `step`; a column for each name of a copy ("Memcpy HtoD (Pageable -> Device)"), in µs. Of two at the same
        time the first by name counts.

    Raises
    ------
    NoSteps, SeveralRecordings
        As `steps`.
    """
    trace = load(path)
    return concatenate(trace, [_exposed_copies(span) for span in trace.spans]).fillna(0.0)


def direction(copy: str) -> str | None:
    """Return which way a copy goes by its name, one of `DIRECTIONS`, or None."""
    found = re.search("HtoD|DtoH|DtoD", copy)
    return DIRECTIONS[found[0]] if found else None


@once
def _waits(span: Span) -> pd.DataFrame:
    """Return the `waits` of one span, those outside of the steps as well, which have step −1."""
    import pandas as pd

    calls = _waiting_or_copying(span)
    host = pd.concat([host_events(span).table(), calls], ignore_index=True)
    host = host.iloc[outer_first(host["thread"].cat.codes, host["start"], host["end"])]
    around = parents(host)
    rows = np.flatnonzero(host["waits"].notna())
    found, inner = host.iloc[rows], around[rows]
    directions = found["direction"].set_axis(inner).dropna()  # the call that copies and the one that waits differ
    of_operator = directions[directions.index >= 0].groupby(level=0).first()
    table = pd.DataFrame(
        {
            "step": _step(span.events, found["start"].to_numpy()),
            "call": found["name"].to_numpy(object),
            "operator": np.array([_outermost(host["name"].to_numpy(), around, row) for row in inner], object),
            "copy": np.array([of_operator.get(row) for row in inner], object),
            "start": found["start"].to_numpy(),
            "end": found["end"].to_numpy(),
        }
    )
    return table[found["waits"].to_numpy(bool)].sort_values("start")


def _waiting_or_copying(span: Span) -> pd.DataFrame:
    """Return the runtime calls that wait for the accelerator or copy, of the threads that run operators.

    They have the columns `waits`, bool, and `direction`, of the copy that the call made, or None.
    """
    events = span.events
    threads = events["thread"][events["operator"]].unique()
    calls = events[(events["kind"] == "Runtime") & events["thread"].isin(threads)]
    copies = _copies(events, calls)
    waits = calls["name"].isin(_matching(WAITS, calls["name"])) | copies.isin(_matching(PAGEABLE, copies))
    directions = copies.map({copy: direction(copy) for copy in copies.unique()}).astype(object)
    return calls.assign(waits=waits, direction=directions)[waits | directions.notna()]


def _matching(pattern: str, names: pd.Series) -> list[str]:
    return [name for name in names.unique() if re.search(pattern, name)]


def _copies(events: pd.DataFrame, calls: pd.DataFrame) -> pd.Series:
    """Return the name of the copy that each call made, or "" if it made none."""
    import pandas as pd

    if "correlation" not in events:
        return pd.Series("", calls.index, dtype=object)
    copies = events[(events["kind"] == "Memcpy") & events["correlation"].notna()]
    named = dict(zip(copies["correlation"], copies["name"], strict=True))
    return pd.Series([named.get(number, "") for number in calls["correlation"]], calls.index, dtype=object)


def _outermost(names: np.ndarray, around: np.ndarray, row: int) -> str | None:
    """Return the name of the outermost operator of PyTorch's own around a row, the row included."""
    found = None
    while row >= 0:
        if names[row].startswith("aten::"):
            found = names[row]
        row = around[row]
    return found


def _step(events: pd.DataFrame, moments: np.ndarray) -> np.ndarray:
    """Return the number of the step on the host in which each moment lies, or −1."""
    marks = events[events["kind"] == "step"]
    if marks.empty:
        return np.full(len(moments), -1)
    number = marks["name"].str.removeprefix("ProfilerStep#").astype(int).to_numpy()
    place = np.searchsorted(marks["start"].to_numpy(), moments, side="right") - 1
    inside = (place >= 0) & (moments <= marks["end"].to_numpy()[place])
    return np.where(inside, number[place], -1)


@once
def _exposed_copies(span: Span) -> pd.DataFrame:
    """Return the `exposed_copies` of one span: each name is charged what it adds to the kernels and those before it."""
    import pandas as pd

    table, events = steps_of(span), span.events
    chosen = (events["kind"] == "Kernel").to_numpy()
    starts, ends = events["start"].to_numpy(), events["end"].to_numpy()
    covered, columns = coverage(starts[chosen], ends[chosen], table), {}
    copies = events["kind"] == "Memcpy"
    for name in sorted(events["name"][copies].unique()):
        chosen = chosen | (copies & (events["name"] == name)).to_numpy()
        now = coverage(starts[chosen], ends[chosen], table)
        columns[name] = now - covered
        covered = now
    return pd.DataFrame(columns, index=table.index)
