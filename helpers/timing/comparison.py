"""Variants timed interleaved (A B A B …), and what one gained over another."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helpers import config
from helpers.timing.progress import progress
from helpers.timing.stopwatch import Timing, limited

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Comparison:
    """Variants timed interleaved (A B A B …): one `Timing` a round for each. The first variant is what it is about.

    Spread is always the lowest and the highest of the rounds. A ratio is taken within each round, so that a machine
    that is slower for a while slows both of its sides.
    """

    timings: Mapping[str, tuple[Timing, ...]]

    @property
    def names(self) -> list[str]:
        """The variants, in the order they were given."""
        return list(self.timings)

    def median(self, name: str) -> Timing:
        """Return the run of variant `name` with the median throughput (of an even number, the lower middle one)."""
        ordered = sorted(self.timings[name], key=lambda timing: timing.images_per_second)
        return ordered[(len(ordered) - 1) // 2]

    def throughputs(self, name: str) -> list[float]:
        """Return the images per second of every round of variant `name`."""
        return [timing.images_per_second for timing in self.timings[name]]

    def ratios(self, name: str, to: str | None = None) -> list[float]:
        """Return, round by round, the throughput of variant `name` over that of variant `to`, the first by default."""
        base = self.throughputs(to or self.names[0])
        return [mine / other for mine, other in zip(self.throughputs(name), base, strict=True)]

    def table(self) -> pd.DataFrame:
        """Return medians, ratios to the first variant and their spread, one variant a row."""
        import pandas as pd  # here, because it takes half a second, and a stopwatch has no need of it

        rows = {}
        for name in self.names:
            rates, ratios = self.throughputs(name), self.ratios(name)
            median = self.median(name)
            rows[name] = {
                "images/s": f"{statistics.median(rates):,.0f}",
                "lowest – highest": f"{min(rates):,.0f} – {max(rates):,.0f}",
                "ms a step": f"{median.step_ms:.1f}",
                "waiting for data": f"{median.loading_share:.0%}",
                "ratio": f"{statistics.median(ratios):.2f}×" if name != self.names[0] else "1×",
                "its spread": f"{min(ratios):.2f} – {max(ratios):.2f}" if name != self.names[0] else "",
            }
        return pd.DataFrame.from_dict(rows, orient="index")

    def verdict(self, name: str, to: str | None = None) -> str:
        """Say in one sentence what variant `name` gained over variant `to`, the first by default."""
        to = to or self.names[0]
        ratios = self.ratios(name, to)
        ratio, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
        if no_effect(min(ratios), max(ratios)):
            return f"{name} against {to}: no measurable effect here ({ratio:.2f}×; {spread})."
        word = "faster" if ratio > 1 else "slower"
        return f"{name} against {to}: {ratio:.2f}× the throughput, {word} in every round ({spread})."


def interleaved(variants: Mapping[str, Callable[[], Timing]], rounds: int, longest: float | None = None) -> Comparison:
    """Time variants interleaved, A B A B …: what else the machine does meanwhile then meets all of them alike.

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
    with progress(rounds * len(variants), "interleaved runs", "run") as bar:
        for done in limited(range(1, rounds + 1), longest):  # noqa: B007 (it is looked at after the loop)
            for name, run in variants.items():
                bar.set_postfix_str(name)
                timings[name].append(run())
                bar.update()
    if done < rounds:
        print(f"{done} rounds instead of {rounds}: they are slow here, and {longest:g} s were up.")
    return Comparison({name: tuple(runs) for name, runs in timings.items()})


def no_effect(lowest: float, highest: float) -> bool:
    """Whether the spread of a ratio reaches 1, within the 1 % that two runs of the same loop differ by anyway."""
    return lowest <= 1.01 and highest >= 0.99
