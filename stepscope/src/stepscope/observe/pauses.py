"""Measures the work between two epochs, such as evaluating and saving: its duration, and the line that takes most."""

from __future__ import annotations

import itertools
from contextlib import suppress

from stepscope import thresholds
from stepscope.observe.sampler import Sample, Sampler, Site, any_of, hottest

_WORKERS = r"[/\\]torch[/\\]utils[/\\]data[/\\]dataloader\.py:(_get_iterator|_shutdown_workers)$"


class PauseRecorder:
    """Records pauses of a training loop, each from the end of an epoch's last step to the beginning of the next epoch.

    An epoch ends when its loader has no more batches, or when the loader starts anew after a ``break``. A pass
    over the loader that changes no weights is part of the pause. Epochs of one step have no pauses: work between them
    belongs to each step. Moments are in s of ``time.perf_counter()``.
    """

    def __init__(self) -> None:
        self.steps = 0  # of this epoch so far
        self.single = False  # whether the latest epoch that ended had one step
        self.lengths: list[int] = []  # steps of the epoch before each finished pause
        self.seconds: list[float] = []  # duration of each finished pause
        self.since: float | None = None  # begin of the current pause
        self.until: float | None = None  # latest begin of an iteration in the current pause, perhaps its end
        self._updated: float | None = None  # when the weights changed last
        self._pass: int | None = None  # number of the pass that gave the batch for this update
        self._before: int | None = None  # number of the pass before the latest pause
        self._sampler: Sampler | None = None
        self._samples: list[Sample] = []

    def ended(self, now: float) -> None:
        """Note that the training loader has no more batches."""
        if self.steps > 1 and self.since is None:
            self.stop_sampling()
            self.since = now
            sampler = Sampler(
                thresholds.PAUSE_SAMPLE_S, default=PauseRecorder.ended.__code__, most=thresholds.MOST_PAUSE_SAMPLES
            )
            with suppress(RuntimeError, OSError):  # no more threads or files: `line` stays unknown
                self._sampler = sampler.__enter__()

    def begun(self, now: float, trains: bool | None, unfinished: int) -> None:
        """Note that an iteration over a loader begins.

        `trains` says whether the loader is the training loader, None if unknown; `unfinished` is 1 if the weights
        changed in a step that has not ended, otherwise 0.
        """
        if self.since is None and trains is not False:
            length = self.steps + unfinished
            if trains and length > 1:
                self.since = self._updated  # a `break` left the loop before its loader's end
            else:
                self.single = bool(trains and length)
                self.steps = -unfinished
        if self.since is not None:
            self.until = now

    def updated(self, now: float, number: int | None) -> None:
        """Note that the weights changed after a batch of the pass `number`."""
        if self.since is not None and self.until is not None:
            if number != self._pass:  # otherwise the epoch goes on: the new pass was within the epoch
                self.lengths.append(self.steps)
                self.seconds.append(self.until - self.since)
                self.stop_sampling()
                self.steps, self.single, self._before = 0, False, self._pass
            self.since = self.until = None
        elif self.lengths and number == self._before:  # the pass before the pause goes on after all
            self.steps += self.lengths.pop()
            self.seconds.pop()
            self._before = None
        elif self.since is not None:  # batches are fetched ahead: this update is the epoch's last step
            self.since = now
        self._updated, self._pass = now, number

    def stop_sampling(self) -> None:
        """Stop sampling this pause."""
        if self._sampler is not None:
            self._sampler.__exit__()
            begin, end = self.since or 0.0, self.until or 0.0
            self._samples += [each for each in self._sampler.samples if begin <= each.begin and each.end <= end]
            self._sampler = None

    @property
    def length(self) -> int | None:
        """Mean number of steps in an epoch; None if no epoch has ended."""
        if self.single:
            return 1
        return round(sum(self.lengths) / len(self.lengths)) if self.lengths else None

    @property
    def seconds_per_step(self) -> float:
        """The time of all pauses, divided by the steps of the epochs before them, in s."""
        return sum(self.seconds) / max(1, sum(self.lengths))

    def line(self, site: Site) -> str:
        """Return the user's line that takes most of the time in pauses, as text; "" if unknown."""
        return hottest((site.changeable(sample.path), sample.seconds) for sample in self._samples)

    @property
    def of_workers(self) -> float:
        """The share of the pauses in which workers start or end."""
        places = (any_of(_WORKERS, sample.frames) for sample in self._samples)
        seconds = [sample.seconds for sample in self._samples]
        return sum(itertools.compress(seconds, places)) / (sum(seconds) or 1.0)
