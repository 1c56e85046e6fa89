"""The engine: measures the steps of one loop, whoever runs it, and sends each finished step to an examination.

`watched` defines a step by the events of an unedited script; `loop` runs a loop itself. All else is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from stepscope import thresholds
from stepscope.facts.loop import Pauses
from stepscope.observe import contention
from stepscope.timing.loaders import processes


class StepRecord(NamedTuple):
    """A finished step; times in s. (A tuple, because a dataclass takes three times as long to make.)"""

    begin: float  # when the loop asked for the batch, of ``time.perf_counter()``
    wait: float  # until the batch arrived
    duration: float  # with the wait
    queued_wait: float  # of the wait, in which other processes had the cores
    queued_work: float  # the same of the rest
    first: bool  # of an epoch


class Pass(NamedTuple):
    """One pass over a DataLoader."""

    loader: DataLoader[Any]
    number: int  # of all passes over any loader
    began: float | None  # when it began; None after its first batch of a training step
    start: float | None = None  # seconds until its first batch, if that was got before its loader was known to train


Phases = Generator[None, StepRecord, Any]  # an examination: receives each finished step, and returns its result


class Recorder:
    """The steps of a loop, and the epochs of its DataLoader.

    Attributes
    ----------
    over : bool
        Whether the examination is over: then nothing is recorded any more.
    dataloader : DataLoader or None
        The DataLoader that makes the training batches, as far as it is known.
    """

    getting: CodeType  # code that runs within this function gets a batch
    stepping: CodeType  # code that runs within this function is the step,
    rest = False  # or, if this is true, all other code is

    def __init__(self) -> None:
        self.over = False
        self.dataloader: DataLoader[Any] | None = None
        self.remade = False  # whether the DataLoader changed
        self.iterator: object = None  # of the latest training batch
        self.keeps = False  # whether to keep the next batch,
        self.kept: object = None  # and that batch
        self.starts: list[float] = []  # seconds from the start of each epoch to its first batch
        self.ends: list[float] = []  # seconds from asking for a batch after the last one to the end of the epoch
        self.received: list[float] = []  # moments at which steps got their first batch
        self.queued = contention.queue_clock()
        self.ready = 0.0  # `queued()` at the latest event, in s
        self.start = time.perf_counter()  # of the step
        self.wait = self.queued_wait = 0.0  # of the step so far
        self.first = False  # whether the step began an epoch
        self.batches = self.passes = self.made = 0  # batches of the step, passes over any loader, batches of the epoch
        self.workers_queued = 0.0  # seconds that the workers had been queued at the epoch's first batch
        self.phases: Phases | None = None

    @property
    def source(self) -> object:
        """The object that makes the batches."""
        return self.dataloader

    @property
    def num_workers(self) -> int:
        """Workers of the source; 0 if that is unknown."""
        return getattr(self.source, "num_workers", 0) or 0

    def epoch_steps(self) -> int | None:
        """Return the steps of an epoch; None if they are unknown."""
        return None

    def steps_of_epoch(self) -> int:
        """Return the steps of the current epoch so far."""
        return 0

    def pauses(self) -> Pauses:
        """Return the work between two epochs, which is in no step."""
        return Pauses()

    def examine(self, phases: Phases) -> None:
        """Begin an examination."""
        self.phases = phases
        next(phases)

    # Events that `hooks` reports

    def begin(self, loader: DataLoader[Any], begin: Callable[[DataLoader[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Begin an epoch of any DataLoader, whose iterator `begin` returns."""
        began, iterator = time.perf_counter(), begin(loader)
        self.passes += 1
        with suppress(AttributeError):  # a loader of its own kind
            iterator._stepscope = Pass(loader, self.passes, began)  # type: ignore[attr-defined]
        return iterator

    def batch(self, iterator: Iterator[Any], following: Callable[[Iterator[Any]], object]) -> object:
        """Return the next batch of any DataLoader, which `following` gets."""
        raise NotImplementedError

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has changed the weights."""

    def request(self, iterator: Iterator[Any], following: Callable[[Iterator[Any]], object]) -> object:
        """Return the next training batch, and note whether an epoch begins or ends with it."""
        asked = time.perf_counter()
        try:
            batch = following(iterator)
        except StopIteration:
            self.ends.append(time.perf_counter() - asked)
            raise
        self.iterator, its_pass = iterator, vars(iterator).get("_stepscope")
        if its_pass is not None and its_pass.began is not None:
            self.began_epoch(time.perf_counter() - its_pass.began if its_pass.start is None else its_pass.start)
            iterator._stepscope = its_pass._replace(began=None)  # type: ignore[attr-defined]
        return batch

    # Steps

    def get(self, following: Callable[[], object]) -> object:
        """Return the next training batch, which `following` gets. All code outside of it belongs to the step."""
        asked, before = time.perf_counter(), self.ready
        try:
            batch = following()
        finally:
            now = time.perf_counter()
            self.ready = before if now - asked < thresholds.SHORT_WAIT_S else self.queued()
            self.wait, self.queued_wait = self.wait + now - asked, self.queued_wait + self.ready - before
        if not self.batches:
            self.received.append(now)
        self.batches += 1
        self.made += 1
        if self.keeps:
            self.kept = batch
        return batch

    def began_epoch(self, seconds: float) -> None:
        """Note that the batch is the first of an epoch, which took so long to start."""
        self.starts.append(seconds)
        self.first, self.made, self.workers_queued = True, 0, self._workers_queued()

    def end_step(self, ended: float | None = None) -> Any:
        """End a step, now or at an earlier moment; return the result of the examination when this was its last step."""
        now, queued = time.perf_counter(), self.queued()
        work = max(0.0, queued - self.ready) if ended is None else 0.0  # how long it was queued earlier is unknown
        record = StepRecord(
            self.start, self.wait, (now if ended is None else ended) - self.start, self.queued_wait, work, self.first
        )
        self.wait, self.queued_wait, self.first, self.batches = 0.0, 0.0, False, 0
        found = None
        try:
            if self.phases is not None:
                self.phases.send(record)
        except StopIteration as end:
            self.over, found = True, end.value
        self.start = time.perf_counter()
        self.ready = queued if self.start - now < thresholds.SHORT_WAIT_S else self.queued()
        return found

    def worker_queued(self) -> float:
        """Return for how many seconds a worker was ready while other processes had the cores, for each batch."""
        return max(0.0, self._workers_queued() - self.workers_queued) / max(1, self.made - 1)

    def _workers_queued(self) -> float:
        return sum((contention.queued(worker.pid or "none") for worker in processes(self.iterator)), 0.0)
