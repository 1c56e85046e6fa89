"""Which operator made which call of an accelerator's runtime."""

from __future__ import annotations

import math

import numpy as np


def makers(
    numbers: np.ndarray, moments: np.ndarray, of_operators: np.ndarray, starts: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Return for each call of an accelerator's runtime the place of the operator that made it, or −1 if unknown.

    The two share their External id, which is not 0. The operator must also have been running: recorders of 2023 gave
    runtime calls numbers of their own, which are those of operators by chance. Of several operators with one number
    the first to start counts.

    Parameters
    ----------
    numbers, moments : ndarray of float, shape (calls,)
        External id, NaN where there is none, and start in µs.
    of_operators, starts, ends : ndarray of float, shape (operators,)
        External id, NaN where there is none, start and end in µs.
    """
    if not len(of_operators):
        return np.full(len(numbers), -1)
    order = np.lexsort((starts, of_operators))
    place = order[np.searchsorted(of_operators[order], numbers).clip(max=len(order) - 1)]
    known = (of_operators[place] == numbers) & (numbers != 0)
    running = (starts[place] <= moments) & (moments <= ends[place])
    return np.where(known & running, place, -1)


def places(sought: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return for each number the place of the first that equals it among others, or −1. NaN equals none."""
    if not len(among):
        return np.full(len(sought), -1)
    order = np.argsort(among, kind="stable")
    place = order[np.searchsorted(among[order], sought).clip(max=len(order) - 1)]
    return np.where(among[place] == sought, place, -1)


def numbers(values: list) -> np.ndarray:
    """Return what stands in a trace as float, NaN for what is no number."""
    try:
        return np.array(values, float)
    except (TypeError, ValueError):
        return np.array([value if isinstance(value, (int, float)) else math.nan for value in values], float)
