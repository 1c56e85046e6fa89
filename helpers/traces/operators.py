"""Which operators took most time, on the CPU and on accelerators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helpers.traces.keeping import once
from helpers.traces.linking import makers
from helpers.traces.reading import Span, Trace, load

if TYPE_CHECKING:
    import pandas as pd

NO_ROW = r"Optimizer\.|(Distributed)?DataParallel\.forward$"  # what the Operator view leaves out
ON_DEVICE = ["Kernel", "Memcpy", "Memset", "Communication"]  # kinds of events there; Communication is also on the host
DEVICE_COLUMNS = ["Device Self Duration (us)", "Device Total Duration (us)"]


def top_operators(path: str | Path | Trace, count: int = 10) -> pd.DataFrame:
    """Return the operators that took most time on the CPU: the Operator view's table.

    Parameters
    ----------
    path : str, Path or Trace
    count : int
        How many to return.

    Returns
    -------
    DataFrame
        Index `Name`, the operator's; columns `Calls`, int; `Host Self Duration (us)`, without the operators and
        runtime calls inside it, and `Host Total Duration (us)`, with them, float. If the trace has work of an
        accelerator also `Device Self Duration (us)`, of the kernels, copies and memory fills that the operator itself
        launched, and `Device Total Duration (us)`, with those of the operators inside it. Sorted by the host's self
        duration. Operators outside the steps and in all threads count, too.
    """
    return _all_operators(load(path)).head(count)


@once
def _all_operators(trace: Trace) -> pd.DataFrame:
    import pandas as pd

    table = pd.concat([_by_name(span) for span in trace.spans]).groupby("Name").sum()
    if not any(_on_device(span.events).any() for span in trace.spans):
        table = table.drop(columns=DEVICE_COLUMNS)
    return table.sort_values("Host Self Duration (us)", ascending=False, kind="stable")


@once
def host_events(span: Span) -> pd.DataFrame:
    """Return what ran on the CPU, thread by thread, each event after those around it."""
    events = span.events
    return nested(events[events["host"]])


def nested(events: pd.DataFrame) -> pd.DataFrame:
    """Return events thread by thread, each after those around it."""
    return events.assign(later_end_first=-events["end"]).sort_values(["thread", "start", "later_end_first"])


def parents(nested: pd.DataFrame) -> np.ndarray:
    """Return for each of `nested` events the row of the innermost event around it in its thread, or −1."""
    parents = np.full(len(nested), -1)
    around: list[int] = []  # the outermost first
    threads, starts, ends = (nested[column].to_list() for column in ("thread", "start", "end"))
    for row, (thread, start) in enumerate(zip(threads, starts, strict=True)):
        while around and (threads[around[-1]] != thread or ends[around[-1]] <= start):
            around.pop()
        if around:
            parents[row] = around[-1]
        around.append(row)
    return parents


@once
def linked_calls(span: Span) -> pd.DataFrame:
    """Return the calls of the accelerator's runtime that are known to be made by an operator; see `makers`.

    Returns
    -------
    DataFrame
        Columns `operator`, int, the place of the operator in `host_events`; `correlation`; and `duration` in µs.
    """
    import pandas as pd

    events, host = span.events, host_events(span)
    if "external" not in events:
        return pd.DataFrame({"operator": np.zeros(0, int), "correlation": [], "duration": np.zeros(0)})
    calls = events[events["kind"] == "Runtime"]
    operators = (host[column].to_numpy() for column in ("external", "start", "end"))
    operator = makers(calls["external"].to_numpy(), calls["start"].to_numpy(), *operators)
    duration = calls["end"] - calls["start"]
    table = pd.DataFrame({"operator": operator, "correlation": calls["correlation"], "duration": duration})
    return table[operator >= 0]


@once
def _by_name(span: Span) -> pd.DataFrame:
    """Return the calls, self and total times of all operators of one name, as the plugin counts them."""
    table = _calls(span).groupby("Name").sum()
    return table[~table.index.str.match(NO_ROW)]


def _calls(span: Span) -> pd.DataFrame:
    """Return a row for each call of an operator, with its self and total times."""
    import pandas as pd

    host = host_events(span)
    is_operator = (host["operator"] & ~host["kind"].isin(["step", "DataLoader"])).to_numpy()
    innermost = parents(host)
    counted_as = _counted_as(host["name"].to_numpy(), is_operator, innermost)
    counts = counted_as == np.arange(len(host))
    around = np.where(innermost >= 0, counted_as[innermost], -1)

    def add_up(rows: np.ndarray, amounts: np.ndarray) -> np.ndarray:
        return np.bincount(rows, weights=amounts, minlength=len(host))

    duration = (host["end"] - host["start"]).to_numpy()
    inner = counts & (around >= 0)
    in_operators = add_up(around[inner], duration[inner])

    calls = linked_calls(span)
    caller = counted_as[calls["operator"]]
    in_calls = add_up(caller, calls["duration"])
    on_device = add_up(caller, _launched(span.events, calls["correlation"]))

    chosen = is_operator & counts
    table = {
        "Calls": 1,
        "Host Self Duration (us)": (duration - in_operators - in_calls)[chosen],
        "Host Total Duration (us)": duration[chosen],
        "Device Self Duration (us)": on_device[chosen],
        "Device Total Duration (us)": _with_inner(on_device, around, inner)[chosen],
    }
    return pd.DataFrame(table, index=pd.Index(host["name"].to_numpy()[chosen], name="Name"))


def _counted_as(names: np.ndarray, is_operator: np.ndarray, innermost: np.ndarray) -> np.ndarray:
    """Return for each event the row that it counts as: its own, or that of the operator which it repeats.

    An operator whose only child has its own name is one call, not two: a dispatcher that calls itself.
    """
    inner = np.flatnonzero(innermost >= 0)
    around = innermost[inner]
    only_child = np.bincount(around, minlength=len(names))[around] == 1
    repeats = only_child & is_operator[inner] & is_operator[around] & (names[inner] == names[around])
    counted_as = np.arange(len(names))
    for row in inner[repeats]:  # the outer ones come first, so theirs are final
        counted_as[row] = counted_as[innermost[row]]
    return counted_as


def _with_inner(amounts: np.ndarray, around: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Return the amount of each row with those of the rows inside it."""
    total = amounts.copy()
    if not total.any():
        return total
    for row in np.flatnonzero(inner)[::-1]:  # the innermost ones first
        total[around[row]] += total[row]
    return total


def _launched(events: pd.DataFrame, correlations: pd.Series) -> np.ndarray:
    """Return the µs on the device of what each call launched, by its correlation."""
    if correlations.empty:
        return np.zeros(0)
    work = events[_on_device(events)]
    total = (work["end"] - work["start"]).groupby(work["correlation"].to_numpy()).sum()
    return correlations.map(total).fillna(0).to_numpy(float)


def _on_device(events: pd.DataFrame) -> pd.Series:
    return events["kind"].isin(ON_DEVICE) & ~events["host"]
