"""The time of each training step by category, and a comparison of two runs as a table and in words."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.base.wording import PLAIN_NAMES
from stepscope.traces.columns import Columns, places, shares
from stepscope.traces.events import CATEGORIES, Span, Trace, load, marks, once
from stepscope.traces.files import NoSteps, SeveralRecordings


def steps(path: str | Path | Trace) -> pd.DataFrame:
    """Return when each training step started and ended.

    With an accelerator a step ends when all the work that it launched has ended, and the next step starts no earlier.

    Returns
    -------
    DataFrame
        Index `step`, the profiler's number of the step; columns `start` and `end` in µs since the first event.

    Raises NoSteps if no steps are marked, since ``profiler.step()`` was not called, and SeveralRecordings if two spans
    hold the same step.
    """
    trace = load(path)
    return by_step(trace, map(steps_of, trace.spans))


def breakdown(path: str | Path | Trace) -> pd.DataFrame:
    """Return the time of each step by category.

    Returns
    -------
    DataFrame
        Index `step`; one column a category (see the table in `stepscope.traces`), float, in µs. The columns sum to the
        length of the step. ``attrs["total"]`` is the length of all steps in µs.

    Raises NoSteps and SeveralRecordings like `steps`.
    """
    trace = load(path)
    table = by_step(trace, map(breakdown_of, trace.spans))
    table.attrs = {"unit": "µs", "total": float(table.to_numpy().sum())}
    return table


def without_step(trace: Trace, step: int) -> Trace:
    """Return a trace without one of its `steps`: without the host's events in it, and the accelerator's work for it.

    The steps before it and the steps after it become two spans, so that no gap between kernels includes it.
    """
    spans = list[Span]()
    for span in trace.spans:
        marked, found = marks(span), steps_of(span)
        places_of_it = np.flatnonzero(marked["step"] == step)
        if not len(places_of_it):
            spans.append(span)
            continue
        place = int(places_of_it[0])
        on_host = marked["start"][place], marked["end"][place]
        on_device = found["start"][place], found["end"][place]  # the host may be ahead of it by several steps
        parts = [_part(span, on_host[after], on_device[after], after) for after in (False, True)]
        parts = [part for part in parts if marks(part).height]
        # The numbers of events in the file count once
        spans += [replace(part, counts=Counter() if number else span.counts) for number, part in enumerate(parts)]
    return Trace(trace.path, tuple(spans))


def _part(span: Span, on_host: float, on_device: float, after: bool) -> Span:
    """Return the part of a span before a moment, or `after` it.

    The moment is `on_host` for the host's events, and `on_device` for the accelerator's, in µs.
    """

    def rows(table: Columns, of_device: np.ndarray | bool, also: np.ndarray | bool = False) -> Columns:
        moment = np.where(of_device, on_device, on_host)
        chosen = table["start"] >= moment if after else table.get("end", table["start"]) <= moment
        return table.rows(chosen | also)

    events, kind = span.events, span.events["kind"]
    of_device = ~events["host"] & ~((kind == "Runtime") | (kind == "step") | (kind == "dropped"))
    last = of_device & (events["end"] == on_device) & after  # when the device has done it, the next step begins
    return replace(
        span,
        events=rows(events, of_device, also=last),
        kernels=rows(span.kernels, True),
        memory=rows(span.memory, False),
        exchanges=rows(span.exchanges, span.exchanges["kernel"]),
    )


def window(span: Span) -> tuple[float, float]:
    """Return start and end of the time that shares refer to, in µs: of the steps, or without steps of all events."""
    table = steps_of(span) if marks(span).height else span.events
    return table["start"][0], table["end"].max()


def by_step(trace: Trace, tables: Iterable[Columns]) -> pd.DataFrame:
    """Return the tables of all spans as one, with `step` as index; raises the errors of `steps`."""
    tables = [each.table("step") for each in tables]
    table = pd.concat([each for each in tables if len(each)] or tables)
    if not len(table):
        raise NoSteps(
            f"{trace.path} marks no training steps, so their content is unknown. "
            "Call profiler.step() after every step, inside `with torch.profiler.profile(...)`, and record it again."
        )
    if table.index.has_duplicates:
        twice = table.index[table.index.duplicated()][0]
        raise SeveralRecordings(
            f"{trace.path} holds step {twice} more than once: it has several recordings. Name one file, or remove the "
            "older ones."
        )
    return table


@once
def steps_of(span: Span) -> Columns:
    """Return the `steps` of one span, with the column `step`; empty if no step is marked."""
    marked = marks(span)
    starts, ends = _with_device_work(marked["start"], marked["end"], span.events)
    return Columns(step=marked["step"][: len(starts)], start=starts, end=ends)


def step_at(span: Span, moments: np.ndarray) -> np.ndarray:
    """Return for each moment the number of the host's step around it, or −1."""
    steps = marks(span)
    place = np.searchsorted(steps["start"], moments, side="right") - 1
    inside = (place >= 0) & (moments <= np.r_[steps["end"], -math.inf][place])
    return np.where(inside, np.r_[steps["step"], -1][place], -1)


def breakdown_of(span: Span) -> Columns:
    """Cover the steps with one category after the other: each counts the time that no earlier category covers."""
    steps, events = steps_of(span), span.events
    parts = shares(events["start"], events["end"], events["kind"].codes, len(CATEGORIES) - 1, steps)
    return Columns(zip(CATEGORIES, parts, strict=True), step=steps["step"])


def _with_device_work(starts: np.ndarray, ends: np.ndarray, events: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Let each step end when its work on an accelerator has ended, and the next step start no earlier.

    As in TensorBoard, the last step is dropped if it launched less than 80% as much as the step before: the profiler
    may have stopped before the last step's kernels ended.
    """
    if not len(starts):
        return starts, ends
    links = Columns({name: events[name] for name in ("start", "end", "correlation")})
    linked, is_call = ~events["host"] & ~np.isnan(events["correlation"]), events["kind"] == "Runtime"
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
    # Work launched before the first step may delay it.
    first = device["start"][owner == 0].min() if count[0] else -math.inf
    earlier = device["end"][~owned & (device["end"] < first)]
    ends = np.maximum.accumulate(np.r_[earlier.max(initial=starts[0]), ends])
    last = int(np.flatnonzero(count)[-1])
    incomplete = last > 0 and 0.8 * count[last - 1] > count[last]
    kept = (last if incomplete else last + 1) if len(starts) > 1 else 1
    return np.maximum(starts, ends[:-1])[:kept], ends[1:][:kept]


# Two runs.


def difference(before: str | Path | Trace, after: str | Path | Trace) -> pd.DataFrame:
    """Compare the mean steps of two runs, category by category.

    There is no interval: the steps of a trace are not independent, since workers deliver their batches in turn, and two
    recordings of the same code differ. To test a difference, time both variants in interleaved rounds.

    Returns
    -------
    DataFrame
        Index `category`; columns `before`, `after` and `change`, in ms a step.
    """
    means = {name: breakdown(path).mean() / 1e3 for name, path in (("before", before), ("after", after))}
    return pd.DataFrame(means).rename_axis("category").assign(change=means["after"] - means["before"])


def sentence(change: pd.DataFrame) -> str:
    """Return a `difference` in words: "loading 71.6 → 0.5 ms a step, copies 0.0 → 2.0 ms a step".

    The largest change comes first. Changes below 2% of the longer mean step are left out, since two traces of the same
    code differ by as much.
    """
    least = 0.02 * max(change["before"].sum(), change["after"].sum())
    large = change[change["change"].abs() >= least].sort_values("change", key=abs, ascending=False, kind="stable")
    if large.empty:
        return f"no change of {least:.2g} ms a step or more"
    decimals = max(0, round(1 - math.log10(least)))
    return ", ".join(
        f"{PLAIN_NAMES[name]} {before:.{decimals}f} → {after:.{decimals}f} ms a step"
        for name, before, after in large[["before", "after"]].itertuples()
    )
