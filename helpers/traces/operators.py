"""Which operators took most time, on the CPU and on accelerators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from helpers.traces.reading import Trace, load

NO_ROW = r"Optimizer\.|(Distributed)?DataParallel\.forward$"  # what the Operator view leaves out
ON_DEVICE = ["Kernel", "Memcpy", "Memset", "Communication"]  # kinds of events there; Communication is also on the host


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
    trace = load(path)
    table = pd.concat([_operators(span.events) for span in trace.spans]).groupby("Name").sum()
    if not any(_on_device(span.events).any() for span in trace.spans):
        table = table.drop(columns=["Device Self Duration (us)", "Device Total Duration (us)"])
    return table.sort_values("Host Self Duration (us)", ascending=False, kind="stable").head(count)


def host_events(events: pd.DataFrame) -> pd.DataFrame:
    """Return what ran on the CPU, thread by thread, each event after those around it."""
    host = events[events["host"]]
    return host.assign(later_end_first=-host["end"]).sort_values(["thread", "start", "later_end_first"])


def linked_calls(events: pd.DataFrame, host: pd.DataFrame) -> pd.DataFrame:
    """Return the calls of the accelerator's runtime that can be told to be made by an operator.

    The two share their External id. The operator must also have been running: recorders of 2023 gave runtime calls
    numbers of their own, which are those of operators by chance.

    Parameters
    ----------
    events : DataFrame
        Of a `Span`.
    host : DataFrame
        As `host_events` returns them.

    Returns
    -------
    DataFrame
        Columns `operator`, int, the place of the innermost operator around the call in `host`; `correlation`; and
        `duration` in µs.
    """
    if "external" not in events:
        return pd.DataFrame({"operator": np.zeros(0, int), "correlation": [], "duration": np.zeros(0)})
    place = pd.Series(np.arange(len(host)), index=host["external"].to_numpy())
    place = place[place.index.notna() & ~place.index.duplicated()]
    calls = events[(events["kind"] == "Runtime") & events["external"].notna() & (events["external"] != 0)]
    operator = calls["external"].map(place)
    calls, operator = calls[operator.notna()], operator.dropna().astype(int).to_numpy()
    around = host.iloc[operator]
    running = (around["start"].to_numpy() <= calls["start"]) & (calls["start"] <= around["end"].to_numpy())
    table = pd.DataFrame({"operator": operator, "correlation": calls["correlation"]})
    return table.assign(duration=calls["end"] - calls["start"])[running.to_numpy()]


def _on_device(events: pd.DataFrame) -> pd.Series:
    return events["kind"].isin(ON_DEVICE) & ~events["host"]


def _operators(events: pd.DataFrame) -> pd.DataFrame:
    """Return the calls, self and total times of each operator in one span, as the plugin counts them."""
    host = host_events(events)
    parent = parents(host)
    inner = parent >= 0
    around = np.where(inner, parent, 0)
    name = host["name"].to_numpy()
    operator = host["operator"].to_numpy() & ~host["kind"].isin(["step", "DataLoader"]).to_numpy()
    duration = (host["end"] - host["start"]).to_numpy()

    # An operator whose only child has its own name is one call, not two: a dispatcher that calls itself.
    children = np.bincount(parent[inner], minlength=len(host))
    same = inner & operator & operator[around] & (children[around] == 1) & (name == name[around])
    for row in np.flatnonzero(inner & same[around]):  # the outer ones come first, so theirs are final
        parent[row] = parent[parent[row]]
    charged = inner & ~same
    inside = np.bincount(parent[charged], weights=duration[charged], minlength=len(host))

    calls = linked_calls(events, host)
    by = np.where(same, parent, np.arange(len(host)))[calls["operator"]]
    called = np.bincount(by, weights=calls["duration"], minlength=len(host))
    device_self = np.bincount(by, weights=_launched(events, calls["correlation"]), minlength=len(host))
    device_total = device_self.copy()
    for row in np.flatnonzero(charged)[::-1] if device_total.any() else ():  # the inner ones first
        device_total[parent[row]] += device_total[row]

    rows = operator & ~same
    table = pd.DataFrame(
        {
            "Calls": 1,
            "Host Self Duration (us)": (duration - inside - called)[rows],
            "Host Total Duration (us)": duration[rows],
            "Device Self Duration (us)": device_self[rows],
            "Device Total Duration (us)": device_total[rows],
        },
        index=pd.Index(name[rows], name="Name"),
    )
    table = table.groupby("Name").sum()
    return table[~table.index.str.match(NO_ROW)]


def _launched(events: pd.DataFrame, correlations: pd.Series) -> np.ndarray:
    """Return the µs on the device of what each call launched, by its correlation."""
    if correlations.empty:
        return np.zeros(0)
    work = events[_on_device(events)]
    total = (work["end"] - work["start"]).groupby(work["correlation"].to_numpy()).sum()
    return correlations.map(total).fillna(0).to_numpy(float)


def parents(host: pd.DataFrame) -> np.ndarray:
    """Return for each event the row of the innermost event around it in its thread, or −1."""
    parents = np.full(len(host), -1)
    stack: list[int] = []
    threads, starts, ends = (host[column].to_list() for column in ("thread", "start", "end"))
    for row, (thread, start, end) in enumerate(zip(threads, starts, ends, strict=True)):
        while stack and (threads[stack[-1]] != thread or ends[stack[-1]] <= start):
            stack.pop()
        if stack:
            parents[row] = stack[-1]
        stack.append(row)
    return parents
