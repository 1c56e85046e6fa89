"""Lengths of unions of intervals."""

from __future__ import annotations

import numpy as np
import pandas as pd


def coverage(starts: np.ndarray, ends: np.ndarray, spans: pd.DataFrame) -> np.ndarray:
    """Return how much of each span lies in at least one of the intervals.

    Parameters
    ----------
    starts, ends : ndarray of float, shape (intervals,)
        In the order of the starts.
    spans : DataFrame
        Columns `start` and `end`, one row a span.

    Returns
    -------
    ndarray of float, shape (spans,)
    """
    reach = np.maximum.accumulate(ends)
    first = np.r_[True, starts[1:] > reach[:-1]]  # where an interval touches none of those before it
    starts, ends = starts[first], reach[np.r_[first[1:], True]]
    before = np.r_[0.0, np.cumsum(ends - starts)]  # covered before each of the now disjoint intervals

    def covered_until(moment: pd.Series) -> np.ndarray:
        index = np.searchsorted(starts, moment, side="right")
        overshoot = np.r_[0.0, ends][index] - moment.to_numpy()
        return before[index] - np.where(index > 0, np.maximum(overshoot, 0), 0)

    return covered_until(spans["end"]) - covered_until(spans["start"])
