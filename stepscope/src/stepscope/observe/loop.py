"""Runs and examines a loop of a loader and a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils.data import DataLoader

from stepscope import thresholds, timing
from stepscope.base import terminal
from stepscope.base.wording import counted
from stepscope.facts import Facts
from stepscope.observe import circumstances, examination, hooks, trials
from stepscope.observe.recorder import Recorder


def observe(loader: Iterable[Any], step: timing.Step, count: int, folder: Path) -> Facts:
    """Run a loop and return its facts, timing `count` steps; see `stepscope.diagnosis.diagnose`.

    All workers of the loader have ended when the function returns or raises.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise RuntimeError(
            f"{distributed.get_world_size()} processes train together: each would take another number of steps, and "
            "the job would hang. Diagnose the whole script instead: stepscope run torchrun … train.py."
        )
    hooks.give_way()
    if torch.autograd._profiler_enabled():
        raise RuntimeError("A profiler is already running here. Leave its `with` block before you call diagnose.")
    step = _noted(step)
    recorder = LoopRecorder(loader)
    examined = examination.Examination(recorder, count, folder)
    with (
        terminal.bar("diagnosing", "step", delay=10) as bar,
        hooks.watching(recorder),
        timing.batches(recorder) as batches,
        trials.double_weights() as double,
        closing(examined.phases()) as phases,
    ):
        examined.draw = lambda: recorder.draw(batches)
        recorder.examine(phases)
        found = None
        while found is None:
            found = recorder.take_step(batches, step)
            bar.total = max(bar.n + 1, examined.steps_needed)
            bar.update()
    facts, batch = found
    facts = circumstances.with_items(facts, recorder.dataloader)
    if facts.loop is not None and facts.loop.work_ms >= thresholds.LEAST_SAMPLED_MS:
        tried = trials.run(step, batch, threads=_threads(facts), double=bool(double))
        facts = replace(facts, trials=tried)
    return facts


def _threads(facts: Facts) -> int | None:
    """Return the number of threads to try: the cores that no worker keeps busy; None if a GPU computes."""
    loop, machine = facts.loop, facts.machine
    if facts.device is not None or loop is None or machine is None:
        return None
    items = facts.loader.items if facts.loader else None
    busy = items.batch_cpu_ms / (loop.work_ms + loop.wait_ms) if loop.workers and items else 0.0
    return max(1, machine.cores - round(min(busy, loop.workers or 0)))


def _noted(step: timing.Step) -> timing.Step:
    """Return a wrapper of the step that adds a note on the step's arguments to its errors."""

    def noted(*batch: object) -> None:
        try:
            step(*batch)
        except Exception as error:
            error.add_note(
                f"The step was called with {counted(len(batch), 'argument')}: a batch that is a tuple or list "
                "is unpacked, step(*batch); any other batch is passed whole, step(batch)."
            )
            raise

    return noted


class LoopRecorder(Recorder):
    """Records a loop of a loader and a step. The loader is a DataLoader, a wrapper of one, or any other iterable."""

    def __init__(self, loader: Iterable[Any]):
        super().__init__()
        self.loader = loader
        self.dataloader = loader if isinstance(loader, DataLoader) else None
        self.wraps = self.dataloader is None  # whether the loader may wrap a DataLoader
        self.asks = False  # whether the loop is asking for a batch; otherwise the step uses a DataLoader
        self.length: int | None = None
        self.taken = 0  # batches of the epoch so far
        with suppress(TypeError, NotImplementedError):  # an iterable dataset without a length
            self.length = len(loader)  # type: ignore[arg-type]

    def epoch_steps(self) -> int | None:
        return self.length

    def steps_of_epoch(self) -> int:
        return self.taken

    @property
    def source(self) -> object:
        return self.loader if self.dataloader is None else self.dataloader

    def begin(self, loader: DataLoader[Any], begin: Callable[[DataLoader[Any]], Iterator[Any]]) -> Iterator[Any]:
        if self.asks and self.wraps:
            self.loader_changed |= self.dataloader not in (None, loader)
            self.dataloader = loader
        return super().begin(loader, begin)

    def batch(self, iterator: Iterator[Any], get_next: Callable[[Iterator[Any]], object]) -> object:
        return self.request(iterator, get_next) if self.asks and self.wraps else get_next(iterator)

    def began_epoch(self, seconds: float) -> None:
        super().began_epoch(seconds)
        self.length, self.taken = self.taken or self.length, 0

    def __iter__(self) -> Iterator[Any]:
        return _Epoch(self)

    def draw(self, batches: Iterator[Any]) -> object:
        """Return the next batch."""
        self.asks = True
        try:
            batch = next(batches)
        finally:
            self.asks = False
        self.taken += 1
        return batch

    def take_step(self, batches: Iterator[Any], step: timing.Step) -> Any:
        """Take a step; return the result of the examination after its last step, otherwise None."""
        self.start, self.last_queued = time.perf_counter(), self.queued()
        batch = self.get(lambda: self.draw(batches))
        self.call(step, batch)
        del batch  # before the clock is read: freeing a batch of photos takes a millisecond
        return self.end_step()

    @staticmethod
    def call(step: timing.Step, batch: object) -> None:
        """Call the step with a batch."""
        timing.call(step, batch)

    getting, stepping = Recorder.get.__code__, call.__wrapped__.__code__  # type: ignore[attr-defined]


class _Epoch:
    """One pass over a loader; `timing.batches` finds and ends its workers as those of a DataLoader's own iterator."""

    def __init__(self, recorder: LoopRecorder):
        self.recorder, self.count, self.began = recorder, 0, time.perf_counter()
        self.iterator = iter(recorder.loader)
        if not recorder.wraps:
            recorder.iterator = self.iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        recorder, asked = self.recorder, time.perf_counter()
        wraps = recorder.wraps and recorder.dataloader is not None  # then the DataLoader's epochs count
        try:
            batch = next(self.iterator)
        except StopIteration:
            if self.count and not wraps:
                recorder.length = self.count
                recorder.ends.append(time.perf_counter() - asked)
            raise
        # The first batch may have revealed the DataLoader of a wrapper
        if not self.count and not (recorder.wraps and recorder.dataloader is not None):
            recorder.began_epoch(time.perf_counter() - self.began)
        self.count += 1
        return batch

    @property
    def _workers(self) -> list[Any]:
        return getattr(self.recorder.iterator, "_workers", [])

    def _shutdown_workers(self) -> None:
        getattr(self.recorder.iterator, "_shutdown_workers", lambda: None)()
        if self.recorder.dataloader is not None:
            self.recorder.dataloader._iterator = None  # persistent workers have ended: start new workers next time
