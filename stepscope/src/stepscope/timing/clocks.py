"""Two clocks: loading alone and compute alone predict the time of the loop."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from stepscope.base.confidence import Interval, around, geometric
from stepscope.base.wording import signed_percent
from stepscope.timing import loaders
from stepscope.timing.comparison import EQUAL, FASTER, SAME, SLOWER, interleaved, outcome
from stepscope.timing.stopwatch import Timing, longest_of, loop, synchronize, timed

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TwoClocks:
    """Interleaved times of loading alone, compute alone and the loop, and the prediction from the first two."""

    loading: tuple[Timing, ...]  #: One a round
    compute: tuple[Timing, ...]
    loop: tuple[Timing, ...]
    workers: int  #: Worker processes of the loader; with workers, loading runs in the background
    #: Milliseconds that this process takes to launch the work of a step on a GPU; None without a GPU.
    host_ms: float | None = None

    @property
    def loading_ms(self) -> float:
        """Milliseconds of loading a batch: the geometric mean of the rounds, like all times here."""
        return _mean_ms(self.loading)

    @property
    def compute_ms(self) -> float:
        """Milliseconds of a step on a batch that is already loaded."""
        return _mean_ms(self.compute)

    @property
    def loop_ms(self) -> float:
        """Milliseconds of a batch in the loop."""
        return _mean_ms(self.loop)

    @property
    def predicted_ms(self) -> float:
        """Milliseconds of a batch in the loop, predicted from the two clocks."""
        return self.predict(self.loading_ms, self.compute_ms)

    @property
    def ratio(self) -> Interval:
        """The loop's time divided by the predicted time; its interval follows from the scatter of the rounds."""
        rounds = zip(self.loading, self.compute, self.loop, strict=True)
        times = ([clock.step_ms for clock in clocks] for clocks in rounds)
        logarithms = [math.log(loop / self.predict(loading, compute)) for loading, compute, loop in times]
        return around(math.log(self.loop_ms / self.predicted_ms), logarithms)

    @property
    def error(self) -> float:
        """The measured time of the loop minus the predicted time, as a share of the predicted time."""
        return self.ratio.mean - 1

    @property
    def ceiling(self) -> float:
        """The factor by which the loop would be faster if loading took no time."""
        return self.loop_ms / self.compute_ms

    def predict(self, loading: float, compute: float) -> float:
        """Return the loop's time for a batch, if loading and compute do not slow each other down; all times in ms.

        With workers, it is the larger of the two times, since loading continues during a step. Without workers it is
        their sum; on a GPU, which computes while this process loads, the larger of compute and loading plus `host_ms`.
        """
        if self.workers:
            return max(loading, compute)
        return max(loading + (self.host_ms or compute), compute)

    def table(self) -> pd.DataFrame:
        """Return the clocks, their prediction and the loop, a row each, with 95% intervals."""
        import pandas as pd

        times = [geometric(run.step_ms for run in runs) for runs in (self.loading, self.compute, self.loop)]
        ends = ["unknown" if each.wide else f"{each.lowest:.1f} – {each.highest:.1f}" for each in times]
        rows = [(f"{each.mean:.1f}", interval) for each, interval in zip(times, ends, strict=True)]
        rows.insert(2, (f"{self.predicted_ms:.1f}", ""))
        names = ["loading alone", "compute alone", "the loop, predicted", "the loop, measured"]
        return pd.DataFrame(rows, index=names, columns=["ms a batch", "95% interval"])

    def verdict(self) -> str:
        """Return a sentence with the predicted and the measured time, and the difference: + if the loop is longer."""
        ratio, result = self.ratio, outcome(self.ratio)
        words = {FASTER: "longer", SLOWER: "shorter", SAME: f"equal within {EQUAL:.0%}"}
        ends = f"{signed_percent(ratio.lowest - 1)} to {signed_percent(ratio.highest - 1)}"
        if ratio.wide:
            ends = "the rounds are too different for an interval"
        return (
            f"{self.predicted_ms:.1f} ms predicted, {self.loop_ms:.1f} ms measured: {signed_percent(self.error)} "
            f"({ends}), {words.get(result, result)}."
        )


def _mean_ms(runs: Iterable[Timing]) -> float:
    return statistics.geometric_mean(run.step_ms for run in runs)


def two_clocks(loader: Iterable[object], step: loaders.Step, steps: int, rounds: int) -> TwoClocks:
    """Time loading alone, compute alone on one kept batch, and the loop, interleaved, after warm-ups.

    A loader with fewer batches than `steps` starts a new epoch; the start counts as loading.

    Parameters
    ----------
    loader : iterable
        A DataLoader, or anything that can be iterated over repeatedly and yields batches.
    step : callable
        Called with a batch as `call` does, in all about 2 × `rounds` × `steps` times.
    steps : int
        Batches in one timed run, rounded up to whole periods of the workers, see `whole_periods`.
    rounds : int
        Timed runs of loading, of compute and of the loop.

    Raises WorkerDied if a worker is killed or exits.
    """
    workers = getattr(loader, "num_workers", 0) or 0
    steps = loaders.whole_periods(loader, steps)
    with loaders.batches(loader) as batches:
        kept = next(batches)
    loading, compute, both = interleaved(
        {
            "loading alone": lambda: loop(loader, lambda *batch: None, steps),
            "compute alone": lambda: loop([kept], step, steps),
            "the loop": lambda: loop(loader, step, steps),
        },
        rounds,
    ).timings.values()
    return TwoClocks(loading, compute, both, workers, _host_ms(step, kept, steps))


def _host_ms(step: loaders.Step, batch: object, steps: int) -> float | None:
    if not torch.cuda.is_initialized():
        return None

    def when_idle() -> Iterator[object]:
        while True:
            synchronize()
            yield batch

    timed_steps = timed(when_idle(), step, steps, longest_of("run"))
    return statistics.median(each.duration - each.wait for each in timed_steps) * 1e3
