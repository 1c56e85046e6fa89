"""What a rank computed and exchanged, from its trace: what the profiler tab's Distributed view puts side by side.

Operations and steps are those of `helpers.traces`. An operation of gloo lasts as gloo recorded it, one of NCCL as long
as its kernel. It belongs to the step that issued it. All times are in µs, on the rank's own clock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from helpers.traces import Span
from helpers.traces.exchanging import operations
from helpers.traces.intervals import coverage, union
from helpers.traces.timeline import steps_of, window

Intervals = tuple[np.ndarray, np.ndarray]  # starts and ends, disjoint, in order

EXCHANGING = re.compile(r"c10d::|_?c10d_functional::|record_param_comms|(gloo|nccl):")


@dataclass(frozen=True, eq=False)
class Operation:
    """A communication operation of one rank.

    Attributes
    ----------
    name : str
        With the backend, such as "gloo:all_reduce".
    step : str
    group : str
        The process group and its ranks; empty where it is not recorded, as with gloo.
    size : int or None
        Bytes that this rank gave; None where they are unknown.
    start, end : float
    """

    name: str
    step: str
    group: str
    size: int | None
    start: float
    end: float


@dataclass(frozen=True)
class Recorded:
    """What a rank computed and exchanged in its steps.

    Attributes
    ----------
    steps : dict of str to list of float
        Of each step the time of computation alone, of both, of communication alone, and of neither.
    operations : list of Operation
        Those of the steps, in the order in which they were issued.
    without_kernels : bool
        Whether NCCL was called and none of its kernels was recorded.
    with_shapes : bool
        Whether the shapes of tensors were recorded.
    """

    steps: dict[str, list[float]]
    operations: list[Operation]
    without_kernels: bool
    with_shapes: bool


def recorded(span: Span) -> Recorded:
    """Return what a rank computed and exchanged.

    Computation is the time in which kernels run that are not NCCL's; without any, in which a thread runs operators,
    other than those that issue an exchange or wait for it. Without marked steps all is step 0, as in the Overview.
    """
    found = operations(span)
    marked = steps_of(span)
    names = [str(number) for number in marked.index]
    bounds = marked[["start", "end"]].to_numpy()
    step_of = [None if math.isnan(step) else str(int(step)) for step in found["step"]]
    if not names and (whole := window(span)):
        names, bounds, step_of = ["0"], np.array([whole]), ["0"] * len(step_of)
    communication = _union(found["start"], found["end"])
    kernels = span.event_columns.rows(span.event_columns["kind"] == "Kernel")
    of_gpu = _union(kernels["start"], kernels["end"])
    computation = of_gpu if len(kernels["start"]) else _computing(span, communication)
    exchanges = span.communication_columns
    return Recorded(
        _overlap(computation, communication, names, bounds),
        [
            Operation(f"{backend}:{name}", step, group, None if math.isnan(size) else int(size), start, end)
            for backend, name, step, group, size, start, end in zip(
                found["backend"],
                found["operation"],
                step_of,
                found["group"],
                *(found[column].tolist() for column in ("bytes", "start", "end")),
                strict=True,
            )
            if step in names
        ],
        not exchanges["kernel"].any() and any(name.startswith("nccl:") for name in exchanges["name"]),
        "record_shapes" in span.settings,
    )


def _computing(span: Span, communication: Intervals) -> Intervals:
    """Return when any thread runs an operator, and does not issue an exchange or wait for one meanwhile.

    An operator that issues one, such as a hook of the backward pass, waits as long as there is communication and no
    operator runs within it: waiting is not always recorded by itself.
    """
    events = span.event_columns
    events = events.rows(events["host"] & np.isin(events["kind"], ["CPU Exec", "Communication"]))
    threads = events["thread"].codes
    exchanges = {name: EXCHANGING.match(name) is not None for name in set(events["name"])}
    exchanging = np.array([exchanges[name] for name in events["name"]], bool)
    parts = []
    for thread in np.unique(threads):
        issues = events.rows(exchanging & (threads == thread))
        others = events.rows(~exchanging & (threads == thread))
        first, after = (np.searchsorted(issues["start"], others[edge]) for edge in ("start", "end"))
        blocked = _union(issues["start"], issues["end"])
        for rows, blocks in (
            (others.rows(first == after), [blocked]),
            (others.rows(first < after), [blocked, communication]),
        ):
            parts.append(_without(_union(rows["start"], rows["end"]), _joined(blocks)))
    return _joined(parts)


def _overlap(
    computation: Intervals, communication: Intervals, names: list[str], bounds: np.ndarray
) -> dict[str, list[float]]:
    spans = {"start": bounds[:, 0], "end": bounds[:, 1]}
    computing, communicating = (coverage(*each, spans) for each in (computation, communication))
    either = coverage(*_joined([computation, communication]), spans)
    parts = [
        either - communicating,
        computing + communicating - either,
        either - computing,
        spans["end"] - spans["start"] - either,
    ]
    table = np.stack(parts, axis=1).round(3) + 0.0  # no −0.0
    return dict(zip(names, table.tolist(), strict=True))


def _union(starts: np.ndarray, ends: np.ndarray) -> Intervals:
    order = np.argsort(starts, kind="stable")
    return union(starts[order], ends[order])


def _joined(parts: Sequence[Intervals]) -> Intervals:
    return _union(*(np.concatenate([part[side] for part in parts] or [np.zeros(0)]) for side in (0, 1)))


def _without(covered: Intervals, blocked: Intervals) -> Intervals:
    """Return what the first cover and the second do not."""
    moments = np.concatenate([*covered, *blocked])
    order = np.argsort(moments, kind="stable")
    counts = [len(each) for each in (*covered, *blocked)]
    in_first = np.cumsum(np.repeat([1, -1, 0, 0], counts)[order])[:-1] > 0
    in_second = np.cumsum(np.repeat([0, 0, 1, -1], counts)[order])[:-1] > 0
    moments = moments[order]
    chosen = in_first & ~in_second
    return moments[:-1][chosen], moments[1:][chosen]
