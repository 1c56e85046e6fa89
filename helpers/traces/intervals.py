"""Lengths of unions of intervals, and sums over intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from helpers.traces.columns import Columns


def union(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends of the fewest disjoint intervals that cover the same moments.

    Parameters
    ----------
    starts, ends : ndarray of float, shape (intervals,)
        In the order of the starts.
    """
    if not len(starts):
        return starts, ends
    reach = np.maximum.accumulate(ends)
    first = np.r_[True, starts[1:] > reach[:-1]]  # where an interval touches none of those before it
    return starts[first], reach[np.r_[first[1:], True]]


def coverage(starts: np.ndarray, ends: np.ndarray, spans: pd.DataFrame | Columns) -> np.ndarray:
    """Return how much of each span lies in at least one of the intervals.

    Parameters
    ----------
    starts, ends : ndarray of float, shape (intervals,)
        In the order of the starts.
    spans : DataFrame or Columns
        Columns `start` and `end`, one row a span.

    Returns
    -------
    ndarray of float, shape (spans,)
    """
    starts, ends = union(starts, ends)
    before = np.r_[0.0, np.cumsum(ends - starts)]  # covered before each of the now disjoint intervals

    def covered_until(moment: np.ndarray) -> np.ndarray:
        index = np.searchsorted(starts, moment, side="right")
        overshoot = np.r_[0.0, ends][index] - moment
        return before[index] - np.where(index > 0, np.maximum(overshoot, 0), 0)

    return covered_until(np.asarray(spans["end"])) - covered_until(np.asarray(spans["start"]))


def capped_sum(starts: np.ndarray, ends: np.ndarray, values: np.ndarray) -> float:
    """Return ∫ min(1, sum of the values of the intervals at t) dt.

    Parameters
    ----------
    starts, ends, values : ndarray of float, shape (intervals,)
        In any order; no value negative.
    """
    moments = np.r_[starts, ends]
    order = np.argsort(moments, kind="stable")
    level = np.cumsum(np.r_[values, -values][order])[:-1]
    return float((np.clip(level, 0, 1) * np.diff(moments[order])).sum())
