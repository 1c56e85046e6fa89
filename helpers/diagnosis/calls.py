"""Operators that are short and called so often that to call them is what costs time, by a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from helpers.diagnosis.recorded import Recorded
from helpers.diagnosis.result import Finding
from helpers.wording import counted, percent, printable

if TYPE_CHECKING:
    import pandas as pd

# Calls of one operator, in a step by itself and in a call of an optimizer. A ResNet-50 has 161 tensors of weights.
MANY, MANY_WEIGHTS = 100, 16
# µs in the median. Of a tensor of a few numbers an operator takes 2 to 10 µs on the CPU, where it mostly calls others.
SHORT = 30.0
GAP = 100.0  # µs between two operators that still belong to calling them; what is longer is something else
SHARE = 0.1  # of a step: less is not worth to write it otherwise


def outermost(recorded: Recorded) -> pd.DataFrame:
    """Return the operators of the thread that takes the steps, in order, without those that others call.

    Returns
    -------
    DataFrame
        `name`, `start` and `end` in µs, `length`, `gap` to the next one, and `optimizer`: whether an optimizer calls
        it.
    """
    import pandas as pd

    tables = []
    for span in recorded.trace.spans:
        events = span.events
        steps = events[events["kind"] == "step"]
        events = events[events["thread"].isin(steps["thread"]) & (events["end"] <= steps["end"].max())]
        optimizer = events[events["name"].str.startswith("Optimizer.step")]
        table = events.loc[events["operator"], ["name", "start", "end"]]
        table = table[table["start"] >= table["end"].cummax().shift(fill_value=-np.inf)]
        gap = (table["start"].shift(-1) - table["end"]).clip(0, GAP).fillna(0)
        inside = np.searchsorted(optimizer["start"], table["start"], "right") - 1
        ends = np.append(optimizer["end"].to_numpy(), -np.inf)  # the last one for what is before all of them
        tables.append(
            table.assign(length=table["end"] - table["start"], gap=gap, optimizer=table["start"] < ends[inside])
        )
    return pd.concat(tables, ignore_index=True)


def findings(recorded: Recorded) -> Iterator[tuple[Finding, frozenset[str]]]:
    """Yield what short operators cost, and the names of those operators."""
    table = outermost(recorded)
    table = table[~table["name"].str.startswith("autograd::")]  # what the backward pass calls is PyTorch's own choice
    limit = recorded.host if recorded.on_device else 1.0  # while a GPU is busy, calling costs nothing
    chosen = _often(table[table["optimizer"]], MANY_WEIGHTS * recorded.steps)
    share = min(_share(chosen, recorded), limit)
    if share >= SHARE:
        yield Finding(
            "an optimizer that goes weight by weight", "host", share,
            f"In a step the optimizer calls {_calls(chosen, recorded)}; with what is between them that takes "
            f"{percent(share)} of the time.",
            "SGD(model.parameters(), …, fused=True)  # or foreach=True: all weights at once",
            "fewer launches",
        ), frozenset(chosen["name"])  # fmt: skip
    if recorded.on_device:  # a GPU that waits for it is found by its gaps
        return
    chosen = _often(table[~table["optimizer"]], MANY * recorded.steps)
    share = _share(chosen, recorded)
    if share >= SHARE:
        yield Finding(
            "many small operators", "host", share,
            f"A step calls {_calls(chosen, recorded)}; with what is between them that takes {percent(share)} of the "
            "time.",
            "# one call for the whole batch in the place of a loop in Python",
            "fewer launches",
        ), frozenset(chosen["name"])  # fmt: skip


def _often(table: pd.DataFrame, least: int) -> pd.DataFrame:
    """Return the calls of those operators that are called so often, and are short."""
    calls = table.groupby("name")["length"]
    return table[(calls.transform("size") >= least) & (calls.transform("median") <= SHORT)]


def _share(chosen: pd.DataFrame, recorded: Recorded) -> float:
    return float(chosen[["length", "gap"]].sum().sum() / recorded.total)


def _calls(chosen: pd.DataFrame, recorded: Recorded) -> str:
    """Say which operators are called how often: the three that take most time."""
    calls = chosen.groupby("name")["length"].agg(["size", "sum", "median"]).sort_values("sum", ascending=False)
    each = [
        f"{printable(name)} {round(row['size'] / recorded.steps):,} times" for name, row in calls.head(3).iterrows()
    ]
    others = f" and {counted(len(calls) - 3, 'other')}" if len(calls) > 3 else ""
    return f"{', '.join(each)}{others}, {chosen['length'].median():.0f} µs each in the median"
