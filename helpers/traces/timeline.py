"""Where the time of each training step went."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helpers.traces.columns import Columns
from helpers.traces.files import NoSteps, SeveralRecordings
from helpers.traces.intervals import coverage
from helpers.traces.keeping import once
from helpers.traces.linking import places
from helpers.traces.reading import CATEGORIES, Span, Trace, load

if TYPE_CHECKING:
    import pandas as pd


def steps(path: str | Path | Trace) -> pd.DataFrame:
    """Return when each training step started and ended.

    With an accelerator a step ends when all that it launched has ended, and the next one starts no earlier.

    Returns
    -------
    DataFrame
        Index `step`, the profiler's number of the step; columns `start` and `end` in µs since the first event.

    Raises
    ------
    NoSteps
        If no steps are marked: ``profiler.step()`` was not called.
    SeveralRecordings
        If two spans hold the same step.
    """
    trace = load(path)
    return concatenate(trace, [steps_of(span) for span in trace.spans])


def breakdown(path: str | Path | Trace) -> pd.DataFrame:
    """Return where the time of each step went.

    Returns
    -------
    DataFrame
        Index `step`; one column a category (see the table at the top), float, in µs. The columns sum to the length
        of the step. ``attrs["total"]`` is the length of all steps in µs.

    Raises
    ------
    NoSteps, SeveralRecordings
        As `steps`.
    """
    trace = load(path)
    table = concatenate(trace, [_breakdown(span) for span in trace.spans])
    table.attrs = {"unit": "µs", "total": float(table.to_numpy().sum())}
    return table


def loading_share(path: str | Path | Trace) -> float:
    """Return the share of the steps' time in which they waited for loading, from 0 to 1."""
    table = breakdown(path)
    return float(table["DataLoader"].sum() / table.attrs["total"])


def window(span: Span) -> tuple[float, float] | None:
    """Return the time that shares are of: from the first step's start to the last one's end.

    Without steps: from the first operator's start to the end of the last one or of what they launched, as the plugin
    has it. None if there are no operators either.

    Returns
    -------
    tuple of float, or None
        Start and end in µs since the trace's first event.
    """
    table = steps_of(span)
    starts, ends = table["start"].to_numpy(), table["end"].to_numpy()
    if not len(starts):
        events = span.event_columns
        host = events["host"]
        if not host.any():
            return None
        starts, ends = _with_device_work(
            events["start"][host].min(keepdims=True), events["end"][host].max(keepdims=True), events
        )
    return starts[0], ends[-1]


def concatenate(trace: Trace, tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Put the tables of all spans under each other, a row a step; errors as those of `steps`."""
    import pandas as pd

    table = pd.concat([table for table in tables if len(table)] or tables[:1])
    if not len(table):
        raise NoSteps(
            f"{trace.path} marks no training steps, so what each step did is unknown. "
            "Call profiler.step() after every step, inside `with torch.profiler.profile(...)`, and record it again."
        )
    if table.index.has_duplicates:
        twice = table.index[table.index.duplicated()][0]
        raise SeveralRecordings(
            f"{trace.path} holds step {twice} more than once: traces of several recordings. Name one file, or remove "
            "the older ones."
        )
    return table


@once
def steps_of(span: Span) -> pd.DataFrame:
    """Return the `steps` of one span; none if it marks none."""
    import pandas as pd

    events = span.event_columns
    marks = events.rows(events["kind"] == "step")
    numbers = [int(name.removeprefix("ProfilerStep#")) for name in marks["name"]]
    starts, ends = _with_device_work(marks["start"], marks["end"], events)
    index = pd.Index(numbers[: len(starts)], dtype=int, name="step")
    return pd.DataFrame({"start": starts, "end": ends}, index=index)


@once
def _breakdown(span: Span) -> pd.DataFrame:
    """Cover the steps with one category after the other: each is charged what it adds to those before it."""
    import pandas as pd

    table, events = steps_of(span), span.event_columns
    rank, starts, ends = events["kind"].codes, events["start"], events["end"]
    covered = np.zeros(len(table))
    columns = {}
    for number, category in enumerate(CATEGORIES[:-1]):
        now = covered
        if (rank == number).any():
            now = coverage(starts[rank <= number], ends[rank <= number], table)
        columns[category] = now - covered
        covered = now
    columns["Other"] = (table["end"] - table["start"]).to_numpy() - covered
    return pd.DataFrame(columns, index=table.index).round(3) + 0.0  # the profiler counts in ns; no −0.0


def _with_device_work(starts: np.ndarray, ends: np.ndarray, events: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Let each step end when what it launched on an accelerator has ended, and the next one start no earlier.

    As in TensorBoard, the last step is dropped if it launched less than 80% of what the one before it did: the
    profiler may have ended before its kernels did.
    """
    if not len(starts) or "correlation" not in events:
        return starts, ends
    linked, is_call = ~events["host"] & ~np.isnan(events["correlation"]), events["kind"] == "Runtime"
    links = Columns({name: events[name] for name in ("start", "end", "correlation")})
    calls, device = links.rows(linked & is_call), links.rows(linked & ~is_call)
    step = np.searchsorted(starts, calls["start"], side="right") - 1
    inside = (step >= 0) & (calls["end"] <= ends[step])
    owner = np.r_[step[inside], -1][places(device["correlation"], calls["correlation"][inside])]
    owned = owner >= 0
    if not owned.any():
        return starts, ends
    count = np.bincount(owner[owned], minlength=len(starts))
    ends = ends.copy()
    np.maximum.at(ends, owner[owned], device["end"][owned])
    # What was launched before the first step may delay it.
    first = device["start"][owner == 0].min() if count[0] else -math.inf
    earlier = device["end"][~owned & (device["end"] < first)]
    ends = np.maximum.accumulate(np.r_[earlier.max(initial=starts[0]), ends])
    last = int(np.flatnonzero(count)[-1])
    incomplete = last > 0 and 0.8 * count[last - 1] > count[last]
    kept = (last if incomplete else last + 1) if len(starts) > 1 else 1
    return np.maximum(starts, ends[:-1])[:kept], ends[1:][:kept]
