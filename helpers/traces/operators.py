"""Which operators took most time on the CPU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas as pd

from helpers.traces.reading import Trace, load

NO_ROW = r"Optimizer\.|(Distributed)?DataParallel\.forward$"  # what the Operator view leaves out


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
        runtime calls inside it, and `Host Total Duration (us)`, with them, float. Sorted by self duration. Operators
        outside the steps and in all threads count, too.
    """
    trace = load(path)
    table = pd.concat([_operators(span.events) for span in trace.spans]).groupby("Name").sum()
    return table.sort_values("Host Self Duration (us)", ascending=False, kind="stable").head(count)


def _operators(events: pd.DataFrame) -> pd.DataFrame:
    """Return the calls, self and total time of each operator in one span, as the plugin counts them."""
    host = events[events["host"]]
    host = host.assign(later_end_first=-host["end"]).sort_values(["thread", "start", "later_end_first"])
    parent = _parents(host)
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

    rows = operator & ~same
    self_duration = duration - inside - _runtime_inside(host, events)
    table = pd.DataFrame(
        {"Calls": 1, "Host Self Duration (us)": self_duration[rows], "Host Total Duration (us)": duration[rows]},
        index=pd.Index(name[rows], name="Name"),
    )
    table = table.groupby("Name").sum()
    return table[~table.index.str.match(NO_ROW)]


def _parents(host: pd.DataFrame) -> np.ndarray:
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


def _runtime_inside(host: pd.DataFrame, events: pd.DataFrame) -> np.ndarray:
    """Return the µs of runtime calls that each operator made itself."""
    if "external" not in events:
        return np.zeros(len(host))
    calls = events[(events["kind"] == "Runtime") & events["external"].notna()]
    total = defaultdict(float)
    for external, start, end in zip(calls["external"], calls["start"], calls["end"], strict=True):
        total[external] += end - start
    return np.array([total.pop(external, 0.0) for external in host["external"]])
