"""Where the host waited for the accelerator, and where the accelerator only copied."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd

from helpers.traces.accelerators import WAITS
from helpers.traces.intervals import coverage
from helpers.traces.operators import host_events, parents
from helpers.traces.reading import Span, Trace, load
from helpers.traces.timeline import concatenate, steps_of

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
    trace = load(path)
    kept = concatenate(trace, [steps_of(span.events) for span in trace.spans]).index
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
    return concatenate(trace, [_exposed_copies(span.events) for span in trace.spans]).fillna(0.0)


def direction(copy: str) -> str | None:
    """Return which way a copy goes by its name, one of `DIRECTIONS`, or None."""
    found = re.search("HtoD|DtoH|DtoD", copy)
    return DIRECTIONS[found[0]] if found else None


def _waits(span: Span) -> pd.DataFrame:
    events = span.events
    threads = events["thread"][events["operator"]].unique()
    calls = events[(events["kind"] == "Runtime") & events["thread"].isin(threads)]
    copied = _copied(events, calls)
    blocks = pd.Series([PAGEABLE in copy for copy in copied], calls.index, dtype=bool)
    blocks |= calls["name"].map(lambda call: bool(re.search(WAITS, call))).astype(bool)
    ways = pd.Series([direction(copy) for copy in copied], calls.index, dtype=object)
    calls = calls[blocks | ways.notna()]  # those that copy tell the direction to those that wait for them
    host = host_events(pd.concat([events[events["host"]], calls.assign(host=True)]))
    around, rows = parents(host), np.flatnonzero(host.index.isin(calls.index))
    found, inner = host.iloc[rows], around[rows]
    by_operator = ways.loc[found.index].set_axis(inner).dropna()
    by_operator = by_operator[by_operator.index >= 0].groupby(level=0).first().to_dict()
    table = pd.DataFrame(
        {
            "step": _step(events, found["start"].to_numpy()),
            "call": found["name"].to_numpy(object),
            "operator": np.array([_outermost(host, around, row) for row in inner], object),
            "copy": np.array([by_operator.get(row) for row in inner], object),
            "start": found["start"].to_numpy(),
            "end": found["end"].to_numpy(),
        }
    )
    return table[blocks.loc[found.index].to_numpy() & (table["step"] >= 0)].sort_values("start")


def _copied(events: pd.DataFrame, calls: pd.DataFrame) -> list[str]:
    """Return the name of the copy that each call made, or "" if it made none."""
    if "correlation" not in events:
        return [""] * len(calls)
    copies = events[(events["kind"] == "Memcpy") & events["correlation"].notna()]
    named = dict(zip(copies["correlation"], copies["name"], strict=True))
    return [named.get(number, "") for number in calls["correlation"]]


def _outermost(host: pd.DataFrame, around: np.ndarray, row: int) -> str | None:
    """Return the name of the outermost operator of PyTorch's own around a row of `host`, the row included."""
    found = None
    while row >= 0:
        name = host["name"].iat[row]
        found = name if name.startswith("aten::") else found
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


def _exposed_copies(events: pd.DataFrame) -> pd.DataFrame:
    table = steps_of(events)
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
