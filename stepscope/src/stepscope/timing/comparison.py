"""Interleaved timing of variants, in an order balanced over two rounds, by one process or all ranks of a job."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from stepscope.base import staging, terminal
from stepscope.base.confidence import Interval, geometric, together
from stepscope.base.wording import counted, digits, rounded
from stepscope.timing.stopwatch import Item, Timing, limited, longest_of, synchronize, warm_up

if TYPE_CHECKING:
    import pandas as pd

SEED = 2021  # for the order in each round; any fixed number serves
EQUAL = 0.02  # two variants are called equal if they differ by no more than this share
CERTAIN = 1.1  # a throughput has three digits if the ends of its interval differ by less than this factor, else two
FASTER, SLOWER, SAME, NOISY = "faster", "slower", "equal", "too noisy to say"


def outcome(ratio: Interval) -> str:
    """Classify the ratio of two variants as `FASTER`, `SLOWER`, the `SAME` or `NOISY`.

    It is the same if the whole interval lies between 1 / (1 + `EQUAL`) and 1 + `EQUAL`. Otherwise it is faster or
    slower if 1 lies outside of the interval.
    """
    if ratio.lowest >= 1 / (1 + EQUAL) and ratio.highest <= 1 + EQUAL:
        return SAME
    if ratio.lowest > 1:
        return FASTER
    return SLOWER if ratio.highest < 1 else NOISY


@dataclass(frozen=True)
class Mean:
    """Geometric means of a variant's rounds; for `loading_share`, from 0 to 1, the arithmetic mean."""

    images_per_second: float
    step_ms: float
    loading_share: float


@dataclass(frozen=True)
class Comparison:
    """Interleaved timings of variants: one `Timing` a round for each. The first variant is the baseline.

    Ratios are taken within each round, so that a machine that is slower for a while slows both variants.
    """

    timings: Mapping[str, tuple[Timing, ...]]

    @property
    def names(self) -> list[str]:
        """The variants in the given order."""
        return list(self.timings)

    def mean(self, name: str) -> Mean:
        """Return the means of variant `name`."""
        runs = self.timings[name]
        return Mean(
            statistics.geometric_mean(run.images_per_second for run in runs),
            statistics.geometric_mean(run.step_ms for run in runs),
            statistics.fmean(run.loading_share for run in runs),
        )

    def throughputs(self, name: str) -> list[float]:
        """Return the images per second of variant `name` in each round."""
        return [timing.images_per_second for timing in self.timings[name]]

    def throughput(self, name: str) -> Interval:
        """Return the images per second of variant `name`."""
        return geometric(self.throughputs(name))

    def ratio(self, name: str, to: str | None = None) -> Interval:
        """Return the throughput of variant `name` divided by the throughput of `to`, by default the first.

        With more than two variants, one may seem faster by chance, so the intervals are wider: in 19 of 20 comparisons
        no variant equal to `to` is called faster or slower, see `confidence.together`.
        """
        to = to or self.names[0]
        if name == to:
            return geometric([1.0] * len(self.timings[to]))
        base, ratios = self.throughputs(to), {}
        for other in self.names:
            if other != to:
                ratios[other] = [mine / its for mine, its in zip(self.throughputs(other), base, strict=True)]
        return together(ratios)[name]

    def fastest(self) -> str:
        """Return the variant with the highest throughput.

        The fastest of several was partly lucky: time it again before you state its gain.
        """
        return max(self.names, key=lambda name: self.mean(name).images_per_second)

    def table(self) -> pd.DataFrame:
        """Return means, and ratios to the first variant with their intervals, one variant a row.

        The columns are ``images/s``, ``ms a step``, ``host waits`` and ``ratio``.
        """
        import pandas as pd  # here, because it takes half a second, and a stopwatch does not need it

        return pd.DataFrame.from_dict({name: self._row(name) for name in self.names}, orient="index")

    def _row(self, name: str) -> dict[str, str]:
        rate, mean = self.throughput(name), self.mean(name)
        certain = rate.highest < CERTAIN * rate.lowest
        return {
            "images/s": rounded(rate.mean, 3 if certain else 2),
            "ms a step": rounded(mean.step_ms, 3 if certain else 2),
            "host waits": f"{mean.loading_share:.0%}",
            "ratio": "1×" if name == self.names[0] else with_limits(self.ratio(name)),
        }

    def verdict(self, name: str, to: str | None = None) -> str:
        """Return a sentence on the gain of variant `name` over variant `to`, the first by default."""
        to = to or self.names[0]
        ratio = self.ratio(name, to)
        gain = "" if outcome(ratio) == NOISY else f"{digits(ratio.mean)}× the throughput, "
        return f"{name} against {to}: {gain}{conclusion(ratio)}."

    def verdicts(self, names: Iterable[str] | None = None, to: str | None = None) -> str:
        """Return the verdicts on `names`, by default all variants but `to`: a line for each variant.

        All variants that are too noisy to say share the last line. It names the smallest gain that all of them show.
        """
        to = to or self.names[0]
        ratios = {name: self.ratio(name, to) for name in names or self.names if name != to}
        noisy = [name for name, ratio in ratios.items() if outcome(ratio) == NOISY]
        lines = [self.verdict(name, to) for name in ratios if name not in noisy]
        if noisy:
            widest = max((ratios[name] for name in noisy), key=lambda ratio: ratio.detectable)
            listed = " and ".join(filter(None, [", ".join(noisy[:-1]), noisy[-1]]))
            lines.append(f"{listed} against {to}: {conclusion(widest)}.")
        return "\n".join(lines)


def limits(interval: Interval) -> str:
    """Return the ends of an interval: "1.31 – 1.58"; "unknown" if the interval is too wide to be useful."""
    return "unknown" if interval.wide else " – ".join(_ends(interval))


def with_limits(ratio: Interval) -> str:
    """Return a ratio with its interval: "1.65× (1.31 – 1.98)"."""
    return f"{digits(ratio.mean)}× ({'interval unknown' if ratio.wide else limits(ratio)})"


def _ends(ratio: Interval) -> tuple[str, str]:
    """Return the ends of a ratio's interval, with three decimals if they are equal with two."""
    lowest, highest = digits(ratio.lowest), digits(ratio.highest)
    return (lowest, highest) if lowest != highest else (f"{ratio.lowest:,.3f}", f"{ratio.highest:,.3f}")


def conclusion(ratio: Interval, of: str = "round") -> str:
    """Return the outcome of a ratio in words, with its interval; `of` is "round" or "process", the noun for its values.

    For example "faster (1.31 to 1.58 in 5 rounds)", or "too noisy to say (in 3 rounds only a gain of 2.40× or more
    would show)".
    """
    found = outcome(ratio)
    rounds = counted(ratio.count, of)
    lowest, highest = _ends(ratio)
    if found == SAME:
        return f"equal within {EQUAL:.0%} ({lowest} to {highest} in {rounds})"
    if found == NOISY and ratio.count < 3:
        return f"{found} ({rounds} {'is' if ratio.count == 1 else 'are'} too few)"
    if found == NOISY and not ratio.wide:
        return f"{found} (in {rounds} only a gain of {digits(ratio.detectable)}× or more would show)"
    if ratio.wide:
        return f"{found} ({rounds}, too different for an interval)"
    if lowest == "1.00":  # neither end is 1: the outcome is sure
        lowest = f"{ratio.lowest:.3f}"
    if highest == "1.00":
        highest = f"{ratio.highest:.3f}"
    return f"{found} ({lowest} to {highest} in {rounds})"


def interleaved(variants: Mapping[str, Callable[[], Timing]], rounds: int) -> Comparison:
    """Time variants in rounds of one run each, in a random order that every second round reverses.

    `timing.limit` may end the comparison after two rounds or more; then a line is printed.

    Parameters
    ----------
    variants : mapping of str to callable
        Each times one run, such as a `loop`.
    rounds : int
        Maximum number of rounds; 1 or more.
    """
    if rounds < 1 or not variants:
        raise ValueError(f"Expected at least one variant and one round, found {len(variants)} and {rounds}.")
    longest = longest_of("comparison")
    timings: dict[str, list[Timing]] = {name: [] for name in variants}
    with terminal.bar("interleaved runs", "run", rounds * len(variants)) as bar:
        for order in limited(shuffled(variants, rounds), longest):
            for name in order:
                bar.set_postfix_str(name)
                timings[name].append(variants[name]())
                bar.update()
    done = min(map(len, timings.values()))
    if done < rounds:
        print(f"Timed {done} rounds instead of {rounds}: rounds are slow here, and the limit is {longest:g} s.")
    return Comparison({name: tuple(runs) for name, runs in timings.items()})


def shuffled(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """Yield the names in a random order for every other round, and in the reverse order for the next one.

    So in two rounds each variant runs once before every other variant, and once after. All calls yield equal orders.
    """
    order, chance = list(names), random.Random(SEED)
    for number in range(rounds):
        if number % 2:
            order.reverse()
        else:
            chance.shuffle(order)
        yield order


def interleaved_ranks(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    steps: int,
    images: int = 1,
    warmup: int = 2,
    path: str | Path | None = None,
) -> Comparison:
    """Time variants in rounds of one run each, on all ranks of a job at the same time.

    All ranks must call this with the same arguments; the order is as in `interleaved`. A run begins when all ranks are
    ready, and its time is the slowest rank's. `timing.limit` does not apply, since all ranks must stop together.

    Parameters
    ----------
    variants : mapping of str to callable
        One call is one step, such as forward, backward and optimizer.
    rounds, steps : int
        Rounds, and steps of a run; each 1 or more.
    images : int
        Images of a step, on all ranks together.
    warmup : int
        Untimed steps before a variant's first run: DDP has its final buckets from the third step on. If not 0, one
        untimed step also precedes each later run.
    path : str or Path, optional
        Where rank 0 writes the result as JSON, for `read_comparison`.

    Returns
    -------
    Comparison
        The same on all ranks. In each timing, `durations` are the longest of all ranks for each step, `waits` are 0
        since loading is part of the step, and `begin` is 0 since ranks may have different clocks.

    Raises
    ------
    RuntimeError
        If the process is not a rank of a job.
    ValueError
        If the ranks' calls differ, or without a variant, a round or a step.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "Expected a rank of a job, found no process group: start the script by torchrun, and call "
            "torch.distributed.init_process_group first. For a single process, use timing.interleaved."
        )
    call = {"variants": list(variants), "rounds": rounds, "steps": steps, "images": images, "warmup": warmup}
    for rank, other in enumerate(_of_all_ranks(call)):
        if other != call:
            raise ValueError(f"Expected the same call on all ranks, found {call} here, and {other} on rank {rank}.")
    if min(rounds, steps, len(variants)) < 1:  # true on all ranks, so no rank waits for another
        found = f"{len(variants)}, {rounds} and {steps}"
        raise ValueError(f"Expected at least one variant, one round and one step, found {found}.")
    timings: dict[str, list[Timing]] = {name: [] for name in variants}
    for number, order in enumerate(shuffled(variants, rounds)):
        for name in order:
            timings[name].append(_run(variants[name], steps, images, min(warmup, 1) if number else warmup))
    result = Comparison({name: tuple(runs) for name, runs in timings.items()})
    if path is not None and dist.get_rank() == 0:
        runs = {name: [asdict(run) for run in runs] for name, runs in result.timings.items()}
        staging.write(path, json.dumps({"timings": runs}, indent=1))
    return result


def read_comparison(path: str | Path) -> Comparison:
    """Return the comparison that `interleaved_ranks` wrote to a file; raise ValueError for any other file."""
    try:
        timings = json.loads(Path(path).read_text(encoding="utf-8"))["timings"].items()
        return Comparison({name: tuple(map(_timing, runs)) for name, runs in timings})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a file of timing.interleaved_ranks, found other text: {error!r}.") from None


def _timing(run: dict[str, Any]) -> Timing:
    return Timing(**run | {"waits": tuple(run["waits"]), "durations": tuple(run["durations"])})


def _run(step: Callable[[], object], steps: int, images: int, warmup: int) -> Timing:
    """Time a run on all ranks; return the times of the slowest rank."""
    warm_up(step, warmup)
    _of_all_ranks(None)  # a barrier: all ranks are ready
    synchronize()
    ends = [begin := time.perf_counter()]
    for _ in range(steps):
        step()
        ends.append(time.perf_counter())
    synchronize()
    seconds = time.perf_counter() - begin
    durations = [end - start for start, end in itertools.pairwise(ends)]
    all_seconds, all_durations = zip(*_of_all_ranks((seconds, durations)), strict=True)
    return Timing(images * steps, max(all_seconds), (0.0,) * steps, tuple(map(max, zip(*all_durations, strict=True))))


def _of_all_ranks(mine: Item) -> list[Item]:
    """Return the object of each rank, in the order of ranks; all ranks must call this, and wait for each other."""
    gathered = [mine] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered
