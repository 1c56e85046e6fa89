"""Two clocks: loading alone and compute alone predict the loop of both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from helpers import config
from helpers.timing import loaders
from helpers.timing.comparison import interleaved, no_effect
from helpers.timing.stopwatch import Timing, loop, synchronize, timed

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TwoClocks:
    """Loading alone and compute alone, what they predict for the loop of both, and the loop, all timed interleaved.

    Attributes
    ----------
    loading, compute, loop : tuple of Timing
        One a round.
    workers : int
        Worker processes of the loader; with some it loads in the background.
    host_ms : float or None
        On a GPU, the time in milliseconds that a step keeps this process while the GPU has nothing else to do: it
        launches the GPU's work, and goes on. None without a GPU, where a step keeps this process all the time.
    """

    loading: tuple[Timing, ...]
    compute: tuple[Timing, ...]
    loop: tuple[Timing, ...]
    workers: int
    host_ms: float | None = None

    @property
    def loading_ms(self) -> float:
        """Median time of loading a batch, in milliseconds."""
        return statistics.median(timing.step_ms for timing in self.loading)

    @property
    def compute_ms(self) -> float:
        """Median time of a step on a batch that is there already, in milliseconds."""
        return statistics.median(timing.step_ms for timing in self.compute)

    @property
    def loop_ms(self) -> float:
        """Median time of a batch in the loop of both, in milliseconds."""
        return statistics.median(timing.step_ms for timing in self.loop)

    @property
    def predictions(self) -> list[float]:
        """What the two clocks of each round predict for the loop, in milliseconds a batch.

        With workers the larger of the two: loading goes on during a step. Without, their sum; but a GPU computes while
        this process loads the next batch, so there it is compute, or else loading and what a step keeps the host.
        """
        loading, compute = ([timing.step_ms for timing in clock] for clock in (self.loading, self.compute))
        rounds = zip(loading, compute, strict=True)
        if self.workers:
            return [max(loading, compute) for loading, compute in rounds]
        return [max(loading + (self.host_ms or compute), compute) for loading, compute in rounds]

    @property
    def predicted_ms(self) -> float:
        """Median of the predictions, in milliseconds."""
        return statistics.median(self.predictions)

    @property
    def errors(self) -> list[float]:
        """By how much each round's loop took longer than predicted, as a share of that; below 0 if shorter."""
        return [timing.step_ms / predicted - 1 for timing, predicted in zip(self.loop, self.predictions, strict=True)]

    @property
    def error(self) -> float:
        """Median of the errors."""
        return statistics.median(self.errors)

    @property
    def ceiling(self) -> float:
        """How many times as fast the loop would be if loading cost nothing; median of the rounds."""
        return statistics.median(
            loop.step_ms / compute.step_ms for loop, compute in zip(self.loop, self.compute, strict=True)
        )

    def table(self) -> pd.DataFrame:
        """Return the clocks, the prediction and the loop, a row each, with their spread over the rounds."""
        import pandas as pd

        rows = {
            "loading alone": [timing.step_ms for timing in self.loading],
            "compute alone": [timing.step_ms for timing in self.compute],
            "the loop, predicted": self.predictions,
            "the loop, measured": [timing.step_ms for timing in self.loop],
        }
        columns = {
            name: [f"{statistics.median(ms):.1f}", f"{min(ms):.1f} – {max(ms):.1f}"] for name, ms in rows.items()
        }
        return pd.DataFrame.from_dict(columns, orient="index", columns=["ms a batch", "lowest – highest"])

    def verdict(self) -> str:
        """Say in one sentence what the two clocks predicted, and by how much the loop was longer (+) or shorter (-)."""
        lowest, highest = min(self.errors), max(self.errors)
        same = ", no measurable difference" if no_effect(1 + lowest, 1 + highest) else ""
        return (
            f"{self.predicted_ms:.1f} ms predicted, {self.loop_ms:.1f} ms measured: {self.error:+.0%} "
            f"({lowest:+.0%} to {highest:+.0%}){same}."
        )


def two_clocks(loader: Iterable, step: loaders.Step, steps: int, rounds: int) -> TwoClocks:
    """Time loading alone, compute alone, and the loop of both, interleaved; each after a warm-up.

    Compute alone is `step` on one batch that is kept; loading alone takes batches and does nothing with them.
    A loader with fewer batches than `steps` starts anew; that belongs to its loading.

    Parameters
    ----------
    loader : iterable
        A DataLoader, or anything that yields batches each time it is gone through.
    step : callable
        Called with a batch as `loaders.call` does. It trains: in all, about 2 × `rounds` × `steps` times.
    steps : int
        Batches in one timed run; rounded up to a multiple of the workers, which deliver theirs in bursts.
    rounds : int
        How often each is timed.

    Raises
    ------
    loaders.WorkerDied
        If a worker is killed or exits. What a worker or `step` raises is raised here; no worker is left then.
    """
    workers = getattr(loader, "num_workers", 0)
    burst = max(workers, 1)
    steps = math.ceil(steps / burst) * burst
    with loaders.batches(loader) as batches:
        kept = next(batches)
    clocks = interleaved(
        {
            "loading alone": lambda: loop(loader, lambda *batch: None, steps),
            "compute alone": lambda: loop([kept], step, steps),
            "the loop": lambda: loop(loader, step, steps),
        },
        rounds,
    ).timings
    return TwoClocks(*clocks.values(), workers, _host_ms(step, kept, steps))


def _host_ms(step: loaders.Step, batch: object, steps: int) -> float | None:
    if not torch.cuda.is_initialized():
        return None

    def when_idle() -> Iterator:
        while True:
            synchronize()
            yield batch

    taken = timed(when_idle(), step, steps, config.preset().longest_run)
    return statistics.median(each.duration - each.wait for each in taken) * 1e3
