"""How sure a mean of a few measurements is: Student's 95% intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Student's t for 1 to 8 degrees of freedom: 95% of the distribution lie between −t and t.
# Abramowitz and Stegun, Handbook of Mathematical Functions, table 26.10.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306)


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% confidence interval: in 19 of 20 cases it holds the mean that very many values would have.

    Attributes
    ----------
    mean : float
    lowest, highest : float
        The ends of the interval; the lowest and the highest possible value if there is one measurement only.
    count : int
        How many values it is of.
    """

    mean: float
    lowest: float
    highest: float
    count: int

    @property
    def wide(self) -> bool:
        """Of a value above 0: whether the ends are a factor of a hundred apart, so that to print them says nothing."""
        return self.highest >= 100 * self.lowest


def geometric(values: Iterable[float]) -> Interval:
    """Return the geometric mean of values above 0, such as ratios, and its interval: Student's, of their logarithms."""
    logarithms = [math.log(value) for value in values]
    return around(statistics.fmean(logarithms), logarithms)


def around(mean: float, logarithms: Sequence[float]) -> Interval:
    """Return the interval around exp(`mean`) that follows from the scatter of some logarithms."""
    count = len(logarithms)
    if count < 2:
        return Interval(math.exp(mean), 0.0, math.inf, count)
    reach = student(count - 1) * statistics.stdev(logarithms) / math.sqrt(count)
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(min(mean + reach, 700.0)), count)


def change(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the difference of two arithmetic means, and its interval by Welch's formula.

    The degrees of freedom are those of the smaller sample, which makes it a little too wide.
    """
    mean, count = statistics.fmean(after) - statistics.fmean(before), min(len(before), len(after))
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    variance = sum(statistics.variance(values) / len(values) for values in (before, after))
    reach = student(count - 1) * math.sqrt(variance)
    return Interval(mean, mean - reach, mean + reach, count)


def student(freedom: int) -> float:
    """Return the t between whose two signs 95% of Student's distribution lie, to 0.3%, for degrees of freedom."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    # The expansion in 1 / freedom: Abramowitz and Stegun, 26.7.5.
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def without_hiccup(values: Sequence[float]) -> list[float]:
    """Return the values with the largest one as the second largest: what the machine does once is no one's fault."""
    ordered = sorted(values)
    return [min(value, ordered[-2]) for value in values] if len(ordered) > 1 else list(values)
