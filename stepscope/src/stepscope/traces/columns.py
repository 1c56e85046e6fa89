"""Tables as plain arrays, and computations on them: unions of intervals, and matching the rows of two tables.

Events, and all tables computed from one trace, are `Columns`; tables for users, and tables grouped by rank, are
DataFrames. Creating a DataFrame, cutting it or adding a column takes 0.1 to 0.5 ms, however few rows it has: for the
dozens of operations from a trace to a table, that is more than parsing a trace of a few MB.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


class Columns(dict[str, Any]):  # Any: pandas, which has the Categoricals, is untyped
    """Columns of the same length by name: arrays, or Categoricals. Tables share them, so never write to them."""

    @property
    def height(self) -> int:
        """The number of rows."""
        return len(next(iter(self.values())))

    def rows(self, chosen: np.ndarray) -> Columns:
        """Return some of the rows: `chosen` are their positions, or a mask."""
        return Columns({name: values[chosen] for name, values in self.items()})

    def records(self) -> list[dict[str, Any]]:
        """Return the rows as dicts."""
        return [dict(zip(self, row, strict=True)) for row in zip(*self.values(), strict=True)]

    def table(self, index: str | None = None) -> pd.DataFrame:
        """Return a new DataFrame, with one column as its `index`. Text keeps the dtype object."""
        import pandas as pd  # takes half a second: only for the first table

        def series(values: np.ndarray) -> pd.Series:
            return pd.Series(values, dtype=object if values.dtype == object else None, copy=True)

        table = pd.DataFrame({name: series(values) for name, values in self.items()}, copy=False)
        return table if index is None else table.set_index(index)


def stacked(tables: list[Columns]) -> Columns:
    """Return the rows of tables with the same columns, one table after the other."""
    return Columns({name: np.concatenate([table[name] for table in tables]) for name in tables[0]})


def objects(values: Sequence[object]) -> np.ndarray:
    """Return an array of the objects themselves, lists as well."""
    return np.fromiter(values, object, len(values))


def numbers(values: Sequence[object]) -> np.ndarray:
    """Return values of a trace as float64, NaN for values that are not numbers."""
    with suppress(TypeError, ValueError):
        if (found := np.array(values, float)).ndim == 1:  # lists would give 2
            return found
    return np.array([value if isinstance(value, (int, float)) else math.nan for value in values], float)


def named(names: np.ndarray, accepts: Callable[[str], object]) -> np.ndarray:
    """Return a mask of the names that a function accepts; the function is called once for each different name."""
    accepted = {name: bool(accepts(name)) for name in set(names)}
    return np.array([accepted[name] for name in names], bool)


def places(sought: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return for each sought number the position of the first equal number in `among`, or −1; −1 also for NaN."""
    if not len(among):
        return np.full(len(sought), -1)
    order = np.argsort(among, kind="stable")
    place = order[np.searchsorted(among[order], sought).clip(max=len(order) - 1)]
    return np.where(among[place] == sought, place, -1)


def callers(
    ids: np.ndarray, moments: np.ndarray, of_operators: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return for each call of an accelerator's runtime the position of the operator that made it, or −1 if unknown.

    `ids` and `of_operators` are the External ids of calls and operators, NaN if missing; `moments`, `starts` and `ends`
    are in µs. Call and operator share an External id other than 0. The operator must also have been running: profilers
    of 2023 numbered runtime calls separately, so that ids were equal by chance. Of several operators with the same id,
    only the first to start is considered.
    """
    order = np.argsort(starts, kind="stable")
    place = np.r_[order, -1][places(ids, of_operators[order])]
    running = (np.r_[starts, math.inf][place] <= moments) & (moments <= np.r_[ends, -math.inf][place])
    return np.where(running & (ids != 0), place, -1)


def union(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of the fewest disjoint intervals that cover the same moments, in order."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    reach = np.maximum.accumulate(ends)
    first = np.r_[True, starts[1:] > reach[:-1]]  # intervals that touch no earlier interval
    return starts[first], reach[np.r_[first[1:], True]]


def coverage(starts: np.ndarray, ends: np.ndarray, spans: pd.DataFrame | Columns) -> np.ndarray:
    """Return how much of each span, from its `start` to its `end`, lies in at least one of the intervals."""
    starts, ends = union(starts, ends)
    before = np.r_[0.0, np.cumsum(ends - starts)]  # covered time before each of the now disjoint intervals

    def covered_until(moment: np.ndarray) -> np.ndarray:
        index = np.searchsorted(starts, moment, side="right")
        overshoot = np.r_[0.0, ends][index] - moment
        covered: np.ndarray = before[index] - np.where(index > 0, np.maximum(overshoot, 0), 0)
        return covered

    within: np.ndarray = covered_until(np.asarray(spans["end"])) - covered_until(np.asarray(spans["start"]))
    return within


def shares(starts: np.ndarray, ends: np.ndarray, kinds: np.ndarray, count: int, spans: Columns) -> list[np.ndarray]:
    """Return for each kind the time in each span that its intervals cover, and intervals of lower kinds do not.

    `kinds` are int; kinds of `count` and above do not count. The last array is the uncovered time of each span. All
    times are in µs, rounded to 0.001: the profiler counts in ns.
    """
    parts, before = [], np.zeros(len(spans["start"]))
    for kind in range(count):
        covered = before
        if (kinds == kind).any():
            covered = coverage(starts[kinds <= kind], ends[kinds <= kind], spans)
        parts.append(covered - before)
        before = covered
    parts.append(spans["end"] - spans["start"] - before)
    return [part.round(3) + 0.0 for part in parts]  # no −0.0


def capped_sum(starts: np.ndarray, ends: np.ndarray, values: np.ndarray) -> float:
    """Return ∫ min(1, sum of the values of the intervals at t) dt; no value is negative."""
    moments = np.r_[starts, ends]
    order = np.argsort(moments, kind="stable")
    level = np.cumsum(np.r_[values, -values][order])[:-1]
    return float((np.clip(level, 0, 1) * np.diff(moments[order])).sum())
