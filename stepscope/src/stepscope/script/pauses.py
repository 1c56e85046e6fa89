"""What a script does between two epochs, such as to evaluate and to save: how long it takes, and at which line."""

from __future__ import annotations

import statistics

from stepscope.diagnosis import stacks

INTERVAL = 0.01  # s, between two looks at the line: between epochs there is time


class Pauses:
    """The pauses of a training loop, each from the end of an epoch's last step to the begin of the next epoch.

    An epoch ends where its loader has no more batches; or where the loader is begun anew, if the loop was left. A pass
    over the loader in which no weights change is part of the pause. Epochs of one step have none: what is done there is
    done for each step. Moments are in s, of ``time.perf_counter()``.

    Attributes
    ----------
    steps : int
        Steps of this epoch so far.
    lengths : list of int
        Steps of each epoch before this one.
    seconds : list of float
        Durations of the pauses that are over.
    since, until : float or None
        Begin of the pause that is not yet over, and its end as far as it is known.
    """

    def __init__(self):
        self.steps, self.lengths, self.seconds = 0, [], []
        self.since: float | None = None
        self.until: float | None = None
        self._updated: float | None = None  # when the weights changed last
        self._sampler: stacks.Sampler | None = None
        self._samples: list[stacks.Sample] = []

    def ended(self, now: float) -> None:
        """Note that a loader to train with has no more batches."""
        if self.steps > 1 and self.since is None:
            self.since = now
            self._sampler = stacks.Sampler(INTERVAL, rest=Pauses.ended.__code__)
            self._sampler.__enter__()

    def begun(self, now: float, trains: bool, unfinished: int) -> None:
        """Note that a loader is begun.

        `trains` says whether it is the one to train with; `unfinished` is 1 if the weights changed in a step that has
        not ended, otherwise 0.
        """
        if trains and self.since is None:
            if (length := self.steps + unfinished) > 1:
                self.since = self._updated  # the loop was left before its loader's end
            else:
                self.lengths += [1] * length
                self.steps = -unfinished
        if self.since is not None:
            self.until = now
        if trains:
            self._look_away()

    def updated(self, now: float) -> None:
        """Note that the weights changed."""
        self._updated = now
        if self.until is not None:
            self.lengths.append(self.steps)
            self.seconds.append(self.until - self.since)
            self.steps, self.since, self.until = 0, None, None
            self._look_away()
        elif self.since is not None:  # the batches are fetched ahead: this is the epoch's last step
            self.since = now

    def close(self) -> None:
        """Look no longer at what is done."""
        self._look_away()

    @property
    def usual(self) -> float:
        """Median duration in s; 0 if none is over."""
        return statistics.median_low(self.seconds) if self.seconds else 0.0

    @property
    def line(self) -> str:
        """The reader's line at which most of the time goes, as text; "" if it is unknown."""
        return stacks.hottest((sample.path, sample.seconds) for sample in self._samples)

    def _look_away(self) -> None:
        if self._sampler is not None:
            self._sampler.__exit__()
            self._samples += self._sampler.samples
            self._sampler = None
