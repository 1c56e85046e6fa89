"""The operators that took most time, on the CPU and on accelerators."""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.traces.columns import Columns, callers, places
from stepscope.traces.events import Span, Trace, load, once

NO_ROW = r"Optimizer\.|(Distributed)?DataParallel\.forward$"  # the Operator view has no row for these
DEVICE_COLUMNS = ["Device Self Duration (us)", "Device Total Duration (us)"]


def top_operators(path: str | Path | Trace, count: int = 10) -> pd.DataFrame:
    """Return the `count` operators that took most time on the CPU: the Operator view's table.

    Returns
    -------
    DataFrame
        Index `Name`, the operator's; columns `Calls`, int; `Host Self Duration (us)`, without the operators and
        runtime calls inside it, and `Host Total Duration (us)`, with them, float. If the trace has work of an
        accelerator also `Device Self Duration (us)`, of the kernels, copies and memory fills that the operator itself
        launched, and `Device Total Duration (us)`, which includes work of the operators inside it. Sorted by the
        host's self duration. Operators in all threads count, also outside the steps.
    """
    trace = load(path)
    table = pd.concat([_calls(span) for span in trace.spans]).groupby("Name").sum()
    table = table[[re.match(NO_ROW, name) is None for name in table.index]]
    if not any((~span.events["host"] & (span.events["kind"] != "Runtime")).any() for span in trace.spans):
        table = table.drop(columns=DEVICE_COLUMNS)
    return table.sort_values("Host Self Duration (us)", ascending=False, kind="stable").head(count)


@once
def host_events(span: Span) -> Columns:
    """Return the events of the CPU, thread by thread, outer events before inner ones."""
    return nested(span.events.rows(span.events["host"]))


def nested(events: Columns) -> Columns:
    """Return events thread by thread, outer events before inner ones."""
    return events.rows(np.lexsort((-events["end"], events["start"], events["thread"].codes)))


def parents(events: Columns) -> np.ndarray:
    """Return for each event in the order of `nested` the position of the innermost event around it, or −1."""
    parents = np.full(events.height, -1)
    around: list[int] = []  # the outermost first
    threads, starts, ends = (events[column].tolist() for column in ("thread", "start", "end"))
    for row, (thread, start) in enumerate(zip(threads, starts, strict=True)):
        while around and (threads[around[-1]] != thread or ends[around[-1]] <= start):
            around.pop()
        if around:
            parents[row] = around[-1]
        around.append(row)
    return parents


@once
def linked_calls(span: Span) -> Columns:
    """Return the calls of the accelerator's runtime whose operator is known; see `callers`.

    Columns: `operator`, int, the operator's position in `host_events`; `correlation`; and `duration` in µs.
    """
    events, host = span.events, host_events(span)
    calls = events.rows(events["kind"] == "Runtime")
    operator = callers(calls["external"], calls["start"], host["external"], host["start"], host["end"])
    duration = calls["end"] - calls["start"]
    return Columns(operator=operator, correlation=calls["correlation"], duration=duration).rows(operator >= 0)


def _calls(span: Span) -> pd.DataFrame:
    """Return a row for each call of an operator, with its self and total times."""
    host = host_events(span)
    is_operator = host["operator"] & (host["kind"] != "step") & (host["kind"] != "DataLoader")
    innermost = parents(host)
    counted_as = _counted_as(host["name"], is_operator, innermost)
    counts = counted_as == np.arange(len(counted_as))
    around = np.where(innermost >= 0, counted_as[innermost], -1)

    def add_up(rows: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        return np.bincount(rows, weights=amounts, minlength=len(counted_as))

    duration = host["end"] - host["start"]
    inner = counts & (around >= 0)
    calls = linked_calls(span)
    caller = counted_as[calls["operator"]]
    inside = add_up(around[inner], duration[inner]) + add_up(caller, calls["duration"])
    on_device = add_up(caller, _launched(span.events, calls["correlation"]))

    chosen = is_operator & counts
    table = {
        "Calls": 1,
        "Host Self Duration (us)": (duration - inside)[chosen],
        "Host Total Duration (us)": duration[chosen],
        "Device Self Duration (us)": on_device[chosen],
        "Device Total Duration (us)": _with_inner(on_device, around, inner)[chosen],
    }
    return pd.DataFrame(table, index=pd.Index(host["name"][chosen], name="Name"))


def _counted_as(names: np.ndarray, is_operator: np.ndarray, innermost: np.ndarray) -> np.ndarray:
    """Return for each event the row that it counts for: its own row, or the row of the operator that it repeats.

    An operator and its only child of the same name are one call: PyTorch's dispatcher has called itself.
    """
    inner = np.flatnonzero(innermost >= 0)
    around = innermost[inner]
    only_child = np.bincount(around, minlength=len(names))[around] == 1
    repeats = only_child & is_operator[inner] & is_operator[around] & (names[inner] == names[around])
    counted_as = np.arange(len(names))
    for row in inner[repeats]:  # outer rows come first, so their values are final
        counted_as[row] = counted_as[innermost[row]]
    return counted_as


def _with_inner(amounts: np.ndarray, around: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Return the amount of each row plus the amounts of the rows inside it."""
    if not amounts.any():
        return amounts
    total, outer = amounts.tolist(), around.tolist()
    for row in np.flatnonzero(inner)[::-1].tolist():  # innermost rows first
        total[outer[row]] += total[row]
    return np.array(total)


def _launched(events: Columns, correlations: np.ndarray) -> np.ndarray:
    """Return for each call, given by its correlation, the device time in µs of the work that the call launched."""
    work = events.rows(~events["host"] & (events["kind"] != "Runtime"))
    ids, call = np.unique(work["correlation"], return_inverse=True)
    total = np.bincount(call, weights=work["end"] - work["start"])
    launched: np.ndarray = np.r_[total, 0.0][places(correlations, ids)]
    return launched
