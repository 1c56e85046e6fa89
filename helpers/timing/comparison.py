"""Variants timed interleaved, in random order within each round, and what one gained over another."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers import config
from helpers.confidence import Interval, geometric
from helpers.timing.progress import progress
from helpers.timing.stopwatch import Timing, limited
from helpers.wording import counted, digits

if TYPE_CHECKING:
    import pandas as pd

EQUAL = 0.02  # two variants are called equal if they differ by no more than this share
FASTER, SLOWER, SAME, NOISY = "faster", "slower", "equal", "too noisy to say"


def outcome(ratio: Interval, equal: float = EQUAL) -> str:
    """Return what a ratio shows: that a variant is `FASTER` or `SLOWER` than the other, the `SAME`, or `NOISY`.

    Parameters
    ----------
    ratio : Interval
    equal : float
        They are the same if the whole interval lies between 1 / (1 + `equal`) and 1 + `equal`. Else one of them is
        faster if 1 lies outside of the interval.
    """
    if 1 / (1 + equal) <= ratio.lowest and ratio.highest <= 1 + equal:
        return SAME
    if ratio.lowest > 1:
        return FASTER
    return SLOWER if ratio.highest < 1 else NOISY


@dataclass(frozen=True)
class Mean:
    """What the rounds of a variant took on average.

    Attributes
    ----------
    images_per_second, step_ms, seconds : float
        Geometric means of the throughput, of the milliseconds a step, and of the seconds a run.
    loading_share : float
        Mean share of the time that was spent waiting for batches, 0 to 1.
    """

    images_per_second: float
    step_ms: float
    seconds: float
    loading_share: float


@dataclass(frozen=True)
class Comparison:
    """Variants timed interleaved: one `Timing` a round for each. The first variant is what it is about.

    A ratio is taken within each round, so that a machine that is slower for a while slows both of its sides.
    """

    timings: Mapping[str, tuple[Timing, ...]]

    @property
    def names(self) -> list[str]:
        """The variants, in the order they were given."""
        return list(self.timings)

    def mean(self, name: str) -> Mean:
        """Return what variant `name` took on average."""
        runs = self.timings[name]
        return Mean(
            statistics.geometric_mean(run.images_per_second for run in runs),
            statistics.geometric_mean(run.step_ms for run in runs),
            statistics.geometric_mean(run.seconds for run in runs),
            statistics.fmean(run.loading_share for run in runs),
        )

    def throughputs(self, name: str) -> list[float]:
        """Return the images per second of every round of variant `name`."""
        return [timing.images_per_second for timing in self.timings[name]]

    def throughput(self, name: str) -> Interval:
        """Return the images per second of variant `name`."""
        return geometric(self.throughputs(name))

    def ratios(self, name: str, to: str | None = None) -> list[float]:
        """Return, round by round, the throughput of variant `name` over that of variant `to`, the first by default."""
        base = self.throughputs(to or self.names[0])
        return [mine / other for mine, other in zip(self.throughputs(name), base, strict=True)]

    def ratio(self, name: str, to: str | None = None) -> Interval:
        """Return the throughput of variant `name` over that of variant `to`, the first by default."""
        return geometric(self.ratios(name, to))

    def fastest(self, names: Iterable[str] | None = None) -> str:
        """Return which variant had the highest throughput: of `names`, or of all.

        It was partly lucky, the more so the more there were: time it again before you say by how much it is faster.
        """
        return max(names or self.names, key=lambda name: self.mean(name).images_per_second)

    def table(self) -> pd.DataFrame:
        """Return means, ratios to the first variant and their 95% intervals, one variant a row."""
        import pandas as pd  # here, because it takes half a second, and a stopwatch has no need of it

        rows = {}
        for name in self.names:
            rate, ratio, mean = self.throughput(name), self.ratio(name), self.mean(name)
            first = name == self.names[0]
            rows[name] = {
                "images/s": f"{rate.mean:,.0f}",
                "95% interval": limits(rate, "{:,.0f}".format),
                "ms a step": f"{mean.step_ms:.1f}",
                "host waits": f"{mean.loading_share:.0%}",
                "ratio": "1×" if first else f"{digits(ratio.mean)}×",
                "its 95% interval": "" if first else limits(ratio),
            }
        return pd.DataFrame.from_dict(rows, orient="index")

    def verdict(self, name: str, to: str | None = None, equal: float = EQUAL) -> str:
        """Say in one sentence what variant `name` gained over variant `to`, the first by default.

        Parameters
        ----------
        equal : float
            As in `outcome`.
        """
        to = to or self.names[0]
        ratio = self.ratio(name, to)
        return f"{name} against {to}: {digits(ratio.mean)}× the throughput, {conclusion(ratio, equal)}."


def limits(interval: Interval, write: Callable[[float], str] = digits) -> str:
    """Return the ends of an interval: "1.31 – 1.58"; "unknown" if it is so wide that it says nothing."""
    return "unknown" if interval.wide else f"{write(interval.lowest)} – {write(interval.highest)}"


def conclusion(ratio: Interval, equal: float = EQUAL) -> str:
    """Return the outcome of a ratio in words, with its interval: "faster (1.31 to 1.58 in 5 rounds)"."""
    found = outcome(ratio, equal)
    rounds = counted(ratio.count, "round")
    ends = f"{digits(ratio.lowest)} to {digits(ratio.highest)} in {rounds}"
    if found == SAME:
        return f"equal within {equal:.0%} ({ends})"
    if found == NOISY:
        ends = f"{rounds}, too different for an interval" if ratio.wide else ends
        return f"{found} ({ends}); take more rounds, or a quieter machine"
    lowest, highest = (f"{end:.3f}" if digits(end) == "1.00" else digits(end) for end in (ratio.lowest, ratio.highest))
    return f"{found} ({lowest} to {highest} in {rounds})"  # neither end is 1, or it would not be sure


def interleaved(variants: Mapping[str, Callable[[], Timing]], rounds: int, longest: float | None = None) -> Comparison:
    """Time variants in rounds of one run each: what else the machine does meanwhile then meets all of them alike.

    The order within a round is random, and the same each time that this is called: else a variant would always follow
    the same other one, and start with the caches and the clock rate that it leaves.

    Parameters
    ----------
    variants : mapping of str to callable
        Each times one run, such as a `loop`.
    rounds : int
        How often to go through them, at most.
    longest : float, optional
        Seconds after which no further round begins, once there are two; by default ``longest_comparison`` of the
        preset. If rounds are left out, that is printed.
    """
    longest = config.preset().longest_comparison if longest is None else longest
    timings, done = {name: [] for name in variants}, 0
    order, chance = list(variants), random.Random(config.SEED)
    with progress(rounds * len(variants), "interleaved runs", "run") as bar:
        for done in limited(range(1, rounds + 1), longest):  # noqa: B007 (it is looked at after the loop)
            chance.shuffle(order)
            for name in order:
                bar.set_postfix_str(name)
                timings[name].append(variants[name]())
                bar.update()
    if done < rounds:
        print(f"{done} rounds instead of {rounds}: they are slow here, and {longest:g} s were up.")
    return Comparison({name: tuple(runs) for name, runs in timings.items()})
