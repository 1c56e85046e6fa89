"""The engine: measures the steps of one loop, and sends each finished step to an examination.

`watched` defines a step by the events of an unedited script; `loop` runs a loop itself. Both share this module.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from stepscope import thresholds
from stepscope.facts.host import Optimizer
from stepscope.facts.loop import Pauses
from stepscope.observe import batches, contention
from stepscope.observe.gradients import GradientWatcher
from stepscope.observe.sampler import Site, here
from stepscope.timing.loaders import processes
from stepscope.timing.stopwatch import synchronize


class StepRecord(NamedTuple):
    """A finished step; times in s. (A tuple, because a dataclass takes three times as long to create.)"""

    begin: float  # when the loop asked for the batch, by ``time.perf_counter()``
    wait: float  # until the batch arrived
    duration: float  # of the step, with the wait
    queued_wait: float  # part of the wait in which the thread was queued for a core
    queued_work: float  # queued part of the work
    first: bool  # whether the step is the first of its epoch


class Pass(NamedTuple):
    """One pass over a DataLoader."""

    loader: DataLoader[Any]
    number: int  # of all passes over any loader
    began: float | None  # when it began; None after its first batch of a training step
    start: float | None = None  # seconds until its first batch, if the batch came before the loader was known to train


class LoopEnded(Exception):
    """The loop ends before its examination: the examination returns its facts, if they suffice."""


Phases = Generator[None, StepRecord, Any]  # an examination: receives each finished step, and returns its result


class Recorder:
    """Records the steps of a loop, and the epochs of its DataLoader.

    Attributes
    ----------
    over : bool
        Whether the examination is over, and nothing more is recorded.
    dataloader : DataLoader or None
        The DataLoader that makes the training batches; None as long as it is unknown.
    """

    getting: CodeType  # the function in which a batch is fetched
    stepping: CodeType  # the function of the step
    rest_is_step = False  # whether all code outside of `getting` counts to `stepping`

    def __init__(self) -> None:
        self.over = False
        self.dataloader: DataLoader[Any] | None = None
        self.loader_changed = False  # whether another DataLoader became the training loader
        self.iterator: object = None  # of the latest training batch
        self.keeps = False  # whether to keep the next batch in `kept`
        self.kept: object = None
        self.digests: list[int | None] | None = None  # of the batches, while this is a list
        self.starts: list[float] = []  # seconds from the start of each epoch to its first batch
        self.ends: list[float] = []  # seconds from the request after the last batch to the end of each epoch
        self.received: list[float] = []  # when each step had its first batch
        self.queued = contention.queue_clock()
        self.last_queued = 0.0  # `queued()` at the latest event, in s
        self.start = time.perf_counter()  # begin of the step
        self.wait = self.queued_wait = 0.0  # of the step so far
        self.first = False  # whether the step began an epoch
        self.batches = self.epoch_batches = 0  # of the step and of the epoch so far
        self.passes = 0  # over any loader
        self.drained = 0.0  # seconds of waiting for a GPU at the ends of epochs
        self.workers_queued = 0.0  # seconds that the workers had been queued before the epoch's first batch arrived
        self.site = Site()  # of the loop
        self.notes_site = False  # whether to note in `site` where the weights change next
        self.optimizer: Optimizer | None = None  # facts about the first optimizer that changed weights
        self.gpu: torch.device | None = None  # where its weights are; None if on no GPU
        self.gradients: GradientWatcher | None = None  # follows the gradients meanwhile
        self.synchronizes = False  # whether a step ends only when the GPU has finished its work
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
        """Return the number of steps in an epoch; None if unknown."""
        return None

    def steps_of_epoch(self) -> int:
        """Return the number of steps in the current epoch so far."""
        return 0

    def pauses(self) -> Pauses:
        """Return the work between two epochs, which belongs to no step."""
        return Pauses()

    def examine(self, phases: Phases) -> None:
        """Begin an examination."""
        self.phases = phases
        next(phases)

    # Events that `hooks` reports

    def begin(self, loader: DataLoader[Any], begin: Callable[[DataLoader[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Begin an epoch of any DataLoader; `begin` returns its iterator."""
        began, iterator = time.perf_counter(), begin(loader)
        self.passes += 1
        with suppress(AttributeError):  # an iterator that takes no attributes
            iterator._stepscope = Pass(loader, self.passes, began)  # type: ignore[attr-defined]
        return iterator

    def batch(self, iterator: Iterator[Any], get_next: Callable[[Iterator[Any]], object]) -> object:
        """Return the next batch of any DataLoader from `get_next`."""
        raise NotImplementedError

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has changed the weights."""
        if self.optimizer is None:
            self.optimizer, self.gpu = _facts_of(optimizer), _gpu_of(optimizer)
        if self.gradients is not None:
            with suppress(Exception):  # weights may be tensors of any kind
                self.gradients.updated(optimizer)
        if self.notes_site:
            self.site, self.notes_site = replace(self.site, updates=here(self.stepping)), False

    def failed(self, error: BaseException) -> None:
        """Raise an error of this recorder, unless the loop must go on without it."""
        raise error

    def give_way(self) -> None:
        """Stop a profiler that records for this recorder: another one is about to start in the same thread."""

    def request(self, iterator: Iterator[Any], get_next: Callable[[Iterator[Any]], object]) -> object:
        """Return the next training batch, and note whether an epoch begins or ends here."""
        asked = time.perf_counter()
        try:
            batch = get_next(iterator)
        except StopIteration:
            self.ends.append(time.perf_counter() - asked)
            raise
        self.iterator, its_pass = iterator, vars(iterator).get("_stepscope")
        if its_pass is not None and its_pass.began is not None:
            self.began_epoch(time.perf_counter() - its_pass.began if its_pass.start is None else its_pass.start)
            iterator._stepscope = its_pass._replace(began=None)  # type: ignore[attr-defined]
        return batch

    # Steps

    def get(self, get_next: Callable[[], object]) -> object:
        """Return the next training batch from `get_next`, and add the wait for the batch to the step."""
        asked, before = time.perf_counter(), self.last_queued
        try:
            batch = get_next()
        finally:
            now = time.perf_counter()
            self.last_queued = before if now - asked < thresholds.SHORT_WAIT_S else self.queued()
            self.wait, self.queued_wait = self.wait + now - asked, self.queued_wait + self.last_queued - before
        if not self.batches:
            self.received.append(now)
        self.batches += 1
        self.epoch_batches += 1
        if self.keeps:
            self.kept = batch
        if self.digests is not None:
            self.digests.append(_digest(batch))
        return batch

    def began_epoch(self, seconds: float) -> None:
        """Note that the latest batch is the first of an epoch that took `seconds` to start."""
        self.starts.append(seconds)
        self.first, self.epoch_batches, self.workers_queued = True, 0, self._workers_queued()

    def end_step(self, ended: float | None = None) -> Any:
        """End a step now or at the earlier moment `ended`; return the result of the examination after its last step."""
        if self.synchronizes:
            synchronize(self.gpu)
        now, queued = time.perf_counter(), self.queued()
        work = max(0.0, queued - self.last_queued) if ended is None else 0.0  # unknown for an earlier moment
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
        self.last_queued = queued if self.start - now < thresholds.SHORT_WAIT_S else self.queued()
        return found

    def worker_queued(self) -> float:
        """Return for how many seconds per batch the workers were queued for a core, since the epoch's first batch."""
        return max(0.0, self._workers_queued() - self.workers_queued) / max(1, self.epoch_batches - 1)

    def _workers_queued(self) -> float:
        return sum((contention.queued(worker.pid or "none") for worker in processes(self.iterator)), 0.0)


def _digest(batch: object) -> int | None:
    with suppress(Exception):  # a batch may hold objects of any kind
        return batches.digest(batch)
    return None


def _facts_of(optimizer: torch.optim.Optimizer) -> Optimizer:
    groups = optimizer.param_groups
    weights = [weight for group in groups for weight in group["params"]]
    numbers = [weight.numel() for weight in weights]
    device, dtype = (weights[0].device.type, str(weights[0].dtype).removeprefix("torch.")) if weights else ("", "")
    largest = max(numbers, default=0) / max(1, sum(numbers))
    options = faster(optimizer, device)
    return Optimizer(type(optimizer).__name__, len(groups), len(weights), options, device, dtype, largest)


def _gpu_of(optimizer: torch.optim.Optimizer) -> torch.device | None:
    """Return the GPU of CUDA on which an optimizer's first weight is; it need not be the process's current one."""
    first = next((weight for group in optimizer.param_groups for weight in group["params"]), None)
    return first.device if first is not None and first.is_cuda else None


def faster(optimizer: torch.optim.Optimizer, device: str) -> tuple[str, ...]:
    """Return the options by which the optimizer would update all weights at once; none if it does so already."""
    known = inspect.signature(type(optimizer)).parameters
    used = {name: [group.get(name) for group in optimizer.param_groups] for name in ("fused", "foreach")}
    if any(used["fused"]):  # the two exclude each other
        return ()
    by_default = device == "cuda" and False not in used["foreach"]  # then foreach is in use if it is not named
    return tuple(
        name for name in used if name in known and not any(used[name]) and not (name == "foreach" and by_default)
    )
