"""Looks for steps that take longer from one to the next, and for memory that grows with each step."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from stepscope import thresholds
from stepscope.observe.long_steps import usual_works
from stepscope.observe.recorder import StepRecord


def longer_s(phases: Sequence[Sequence[StepRecord]]) -> float:
    """Return how much longer a step takes than the step before it, in s; 0 if that is not certain.

    Only steps of one phase are compared, since a profiler makes steps longer. The first phase gives the number, and the
    steps of the phases after it must get longer, too.
    """
    first, *later = [usual_works(records) for records in phases]
    together = [first, *later]
    if not later or min(map(len, together)) < thresholds.LEAST_STEPS_OF_A_TREND:
        return 0.0
    ordered = min(_ordered([first]), _ordered(later)) >= thresholds.ORDERED
    deviation = math.sqrt(sum(n * (n - 1) * (2 * n + 5) / 18 for n in map(len, together)))  # of a random order
    sure = sum(map(_rising, together)) >= thresholds.DEVIATIONS * deviation
    return _slope(first) if ordered and sure else 0.0


def _rising(values: Sequence[float]) -> float:
    """Return how many pairs of values rise, minus how many fall (Kendall)."""
    return float(np.triu(np.sign(np.subtract.outer(values, values).T)).sum())


def _ordered(series: Sequence[Sequence[float]]) -> float:
    """Return the share of rising pairs minus the share of falling pairs, of all pairs within a series."""
    return sum(map(_rising, series)) / sum(len(values) * (len(values) - 1) / 2 for values in series)


def _slope(values: Sequence[float]) -> float:
    """Return the median difference of two values, divided by their distance (Theil and Sen)."""
    pairs = ((values[j] - values[i]) / (j - i) for j in range(len(values)) for i in range(j))
    return max(0.0, statistics.median(pairs))


def memory(gpu: torch.device | None = None) -> tuple[int, int]:
    """Return the memory of this process that no file and no other process shares, and of its GPU tensors, in bytes.

    The first number is 0 where the system does not report it: only Linux does.
    """
    own = 0
    with suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm", "rb", buffering=0) as file:  # a third of the time of `Path.read_text`
            _, resident, shared, *_ = map(int, file.read().split())
        own = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
    # A seventh of the time that `memory_allocated` takes; empty if this process uses no GPU
    allocated = torch.cuda.memory_stats_as_nested_dict(gpu).get("allocated_bytes", {})
    return own, allocated.get("all", {}).get("current", 0)


def steady_growth(sizes: Sequence[int]) -> float:
    """Return the growth of memory per step in bytes; 0 if it is slight, or does not go on until the last step."""
    if len(sizes) < thresholds.LEAST_STEPS_OF_A_TREND:
        return 0.0
    middle, grown = sizes[len(sizes) // 2], (sizes[-1] - sizes[0]) / (len(sizes) - 1)
    goes_on = _ordered([sizes]) >= thresholds.STEADY and sizes[-1] - middle >= (middle - sizes[0]) / 2
    return grown if goes_on and grown >= thresholds.GROWTH_OF_A_STEP_BYTES else 0.0
