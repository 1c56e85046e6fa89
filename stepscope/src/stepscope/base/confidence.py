"""Student's confidence intervals for means of a few measurements, also for several means together."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

_SURE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% confidence interval: in 19 of 20 cases it contains the true mean."""

    mean: float
    lowest: float  #: The ends of the interval; with one measurement only, the lowest and the highest possible value
    highest: float
    count: int  #: The number of values

    @property
    def wide(self) -> bool:
        """For values above 0: whether the ends differ by a factor of 100 or more, and so are not worth printing."""
        return self.highest >= 100 * self.lowest

    @property
    def detectable(self) -> float:
        """For a ratio: the smallest gain, as a ratio, that this number of values with this scatter shows.

        This is the minimum detectable effect, (t for 95% + t for 80%) × the standard error. It aims at a power of 80%;
        simulations show 68% with 3 values and 79% with 10, since the scatter is estimated from so few.
        """
        if self.count < 3 or self.wide:  # two values do not show their scatter
            return math.inf
        reach = math.log(self.highest / self.lowest) / 2
        return math.exp(reach * (1 + student(self.count - 1, 0.6) / student(self.count - 1)))


def geometric(values: Iterable[float], share: float = _SURE) -> Interval:
    """Return the geometric mean of values above 0, such as ratios, and Student's interval of their logarithms.

    The interval contains the true mean in this `share` of cases. Raises ValueError for other values, or no values.
    """
    values = list(values)
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(f"Expected numbers above 0, found {values}.")
    logarithms = [math.log(value) for value in values]
    return around(statistics.fmean(logarithms), logarithms, share)


def around(mean: float, logarithms: Sequence[float], share: float = _SURE) -> Interval:
    """Return the interval around exp(`mean`) that follows from the scatter of some logarithms."""
    count = len(logarithms)
    if count < 2:
        return Interval(math.exp(mean), 0.0, math.inf, count)
    reach = student(count - 1, share) * _scatter(logarithms) / math.sqrt(count)
    reach = min(reach, 700.0 - abs(mean))  # beyond, a float would overflow
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), count)


def together(samples: Mapping[str, Sequence[float]]) -> dict[str, Interval]:
    """Return geometric means of samples of equal length, with simultaneous confidence intervals.

    In 19 of 20 cases no interval of a sample with true mean 1 excludes 1, however many samples there are. The interval
    of the mean farthest from 1 is the widest, and each interval that excludes 1 narrows the next. This is Holm's method
    (Scandinavian Journal of Statistics 6, 1979). It requires only Student's intervals, while Dunnett's method assumes
    equal variances, which loaders and networks do not have.
    """

    def distance(name: str) -> float:  # in standard deviations
        logarithms = [math.log(value) for value in samples[name]]
        return abs(statistics.fmean(logarithms)) / (_scatter(logarithms) or 1e-300)

    intervals, left = {}, len(samples)
    for name in sorted(samples, key=distance, reverse=True):
        interval = intervals[name] = geometric(samples[name], 1 - (1 - _SURE) / left)
        left -= not interval.lowest <= 1 <= interval.highest
    return intervals


def _scatter(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample; the exact `statistics.stdev` takes ten times as long."""
    mean = statistics.fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def change(before: Sequence[float], after: Sequence[float]) -> Interval:
    """Return the difference of two arithmetic means, and its interval by Welch's formula.

    The degrees of freedom are those of the smaller sample, which makes the interval a little too wide.
    """
    mean, count = statistics.fmean(after) - statistics.fmean(before), min(len(before), len(after))
    if count < 2:
        return Interval(mean, -math.inf, math.inf, count)
    variance = sum(_scatter(values) ** 2 / len(values) for values in (before, after))
    reach = student(count - 1) * math.sqrt(variance)
    return Interval(mean, mean - reach, mean + reach, count)


@cache
def student(freedom: int, share: float = _SURE) -> float:
    """Return t so that this share of Student's distribution lies between −t and t, for `freedom` degrees of freedom."""
    low, high = 0.0, math.pi / 2  # of the angle whose tangent is t / √freedom
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < share else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _within(angle: float, freedom: int) -> float:
    """Return the share between −t and t, where t = √freedom × tan(angle).

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4: series for odd and even `freedom`.
    """
    odd, cosine = freedom % 2, math.cos(angle)
    term, series = cosine if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        series += term
        term *= (power + 1) / (power + 2) * cosine**2
    return 2 / math.pi * (angle + math.sin(angle) * series) if odd else math.sin(angle) * series


def without_hiccup(values: Sequence[float]) -> list[float]:
    """Return the values with the largest set to the second largest: a single stall of the machine is not a fault."""
    ordered = sorted(values)
    return [min(value, ordered[-2]) for value in values] if len(ordered) > 1 else list(values)
