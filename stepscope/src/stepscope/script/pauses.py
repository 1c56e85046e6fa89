"""What a script does between two epochs, such as to evaluate and to save: how long it takes, and at which line."""

from __future__ import annotations

from contextlib import suppress

from stepscope.diagnosis import stacks

INTERVAL = 0.01  # s, between two looks at the line: between epochs there is time
MOST = 3_000  # samples of a pause: a script may do other things after its last epoch, for hours


class Pauses:
    """The pauses of a training loop, each from the end of an epoch's last step to the begin of the next epoch.

    An epoch ends where its loader has no more batches; or where the loader is begun anew, if the loop was left. A pass
    over the loader in which no weights change is part of the pause. Epochs of one step have none: what is done there is
    done for each step. Moments are in s, of ``time.perf_counter()``.

    Attributes
    ----------
    steps : int
        Steps of this epoch so far.
    lengths, seconds : list
        Of each pause that is over, the steps of the epoch before it and its duration.
    single : bool
        Whether the latest epoch that ended had one step.
    since, until : float or None
        Begin of the pause that is not yet over, and its end as far as it is known.
    """

    def __init__(self):
        self.steps, self.lengths, self.seconds, self.single = 0, [], [], False
        self.since: float | None = None
        self.until: float | None = None
        self._updated: float | None = None  # when the weights changed last,
        self._pass: int | None = None  # and of which pass over a loader the batch was
        self._before: int | None = None  # that of the epoch before the latest pause
        self._sampler: stacks.Sampler | None = None
        self._samples: list[stacks.Sample] = []

    def ended(self, now: float) -> None:
        """Note that a loader to train with has no more batches."""
        if self.steps > 1 and self.since is None:
            self.since = now
            sampler = stacks.Sampler(INTERVAL, rest=Pauses.ended.__code__, most=MOST)
            with suppress(RuntimeError, OSError):  # no more threads, or files: then no line is known
                self._sampler = sampler.__enter__()

    def begun(self, now: float, trains: bool | None, unfinished: int) -> None:
        """Note that a loader is begun.

        `trains` says whether it is the one to train with, None where that is not known of any; `unfinished` is 1 if the
        weights changed in a step that has not ended, otherwise 0.
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
        """Note that the weights changed, after a batch of the pass over a loader with this number."""
        if self.until is not None and number == self._pass:  # it goes on: the other pass was in its epoch
            self.since = self.until = None
        elif self.until is not None:
            self.lengths.append(self.steps)
            self.seconds.append(self.until - self.since)
            self.look_away()
            self.steps, self.single, self.since, self.until, self._before = 0, False, None, None, self._pass
        elif self.lengths and number == self._before:  # it goes on after all
            self.steps += self.lengths.pop()
            self.seconds.pop()
            self._before = None
        elif self.since is not None:  # the batches are fetched ahead: this is the epoch's last step
            self.since = now
        self._updated, self._pass = now, number

    def look_away(self) -> None:
        """Look no longer at what is done in this pause."""
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
        """What the pauses take for each step of the epochs before them, in s."""
        return sum(self.seconds) / max(1, sum(self.lengths))

    @property
    def line(self) -> str:
        """The reader's line at which most of the time goes, as text; "" if it is unknown."""
        return stacks.hottest((sample.path, sample.seconds) for sample in self._samples)
