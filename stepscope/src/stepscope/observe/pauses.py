"""Measures the work between two epochs, such as evaluating and saving: how long it takes, and at which line."""

from __future__ import annotations

from contextlib import suppress

from stepscope import thresholds
from stepscope.observe.sampler import Sample, Sampler, hottest


class PauseRecorder:
    """The pauses of a training loop, each from the end of an epoch's last step to the beginning of the next epoch.

    An epoch ends when its loader has no more batches, or when the loader starts anew after the loop was left. A pass
    over the loader that changes no weights is part of the pause. Epochs of one step have no pauses: work between them
    belongs to each step. Moments are in s of ``time.perf_counter()``.
    """

    def __init__(self) -> None:
        self.steps = 0  # of this epoch so far
        self.single = False  # whether the latest epoch that ended had one step
        self.lengths: list[int] = []  # steps of the epoch before each pause that is over,
        self.seconds: list[float] = []  # and the duration of the pause
        self.since: float | None = None  # the beginning of the current pause,
        self.until: float | None = None  # and its end as far as it is known
        self._updated: float | None = None  # when the weights changed last,
        self._pass: int | None = None  # and the number of the pass that gave the batch
        self._before: int | None = None  # the pass of the epoch before the latest pause
        self._sampler: Sampler | None = None
        self._samples: list[Sample] = []

    def ended(self, now: float) -> None:
        """Note that the training loader has no more batches."""
        if self.steps > 1 and self.since is None:
            self.look_away()
            self.since = now
            sampler = Sampler(
                thresholds.PAUSE_SAMPLE_S, rest=PauseRecorder.ended.__code__, most=thresholds.MOST_PAUSE_SAMPLES
            )
            with suppress(RuntimeError, OSError):  # no more threads or files: then no line is known
                self._sampler = sampler.__enter__()

    def begun(self, now: float, trains: bool | None, unfinished: int) -> None:
        """Note that an iteration over a loader begins.

        `trains` says whether it is the training loader, None while that is unknown; `unfinished` is 1 if the weights
        changed in a step that has not ended, otherwise 0.
        """
        if self.since is None and trains is not False:
            length = self.steps + unfinished
            if trains and length > 1:
                self.since = self._updated  # the loop was left before its loader's end
            else:
                self.single = bool(trains and length)
                self.steps = -unfinished
        if self.since is not None:
            self.until = now

    def updated(self, now: float, number: int | None) -> None:
        """Note that the weights changed, after a batch of the pass with this number."""
        if self.since is not None and self.until is not None:
            if number != self._pass:  # otherwise the epoch goes on: the other pass was within it
                self.lengths.append(self.steps)
                self.seconds.append(self.until - self.since)
                self.look_away()
                self.steps, self.single, self._before = 0, False, self._pass
            self.since = self.until = None
        elif self.lengths and number == self._before:  # the epoch goes on after all
            self.steps += self.lengths.pop()
            self.seconds.pop()
            self._before = None
        elif self.since is not None:  # the batches are fetched ahead: this is the epoch's last step
            self.since = now
        self._updated, self._pass = now, number

    def look_away(self) -> None:
        """Stop sampling this pause."""
        if self._sampler is not None:
            self._sampler.__exit__()
            begin, end = self.since or 0.0, self.until or 0.0
            self._samples += [each for each in self._sampler.samples if begin <= each.begin and each.end <= end]
            self._sampler = None

    @property
    def length(self) -> int | None:
        """Steps of an epoch on average; None if none has ended."""
        if self.single:
            return 1
        return round(sum(self.lengths) / len(self.lengths)) if self.lengths else None

    @property
    def apart(self) -> float:
        """The time of the pauses per step of the epochs before them, in s."""
        return sum(self.seconds) / max(1, sum(self.lengths))

    @property
    def line(self) -> str:
        """The user's line that takes most of the time, as text; "" if unknown."""
        return hottest((sample.path, sample.seconds) for sample in self._samples)
