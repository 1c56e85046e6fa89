"""Diagnoses a loop that is there to run: measures it, and puts the facts together, from which the findings follow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from stepscope import timing, traces
from stepscope.base import machine
from stepscope.base.confidence import without_hiccup
from stepscope.base.wording import counted, milliseconds, percent
from stepscope.diagnosis import device, items, loading, profile, result, stacks
from stepscope.diagnosis import step as steps
from stepscope.diagnosis.result import Diagnosis, conclude
from stepscope.timing import profiling
from stepscope.timing.comparison import progress
from stepscope.timing.stopwatch import TimedStep, timed, warm_up

PROFILED = 8  # steps; or as many as there are workers, of which one may make every n-th step wait
LONGEST_PAUSE = 2.0  # seconds, in which the workers make batches that are then asked for
READY = 3  # batches that are asked for then


def diagnose(loader: Iterable, step: timing.Step, count: int, folder: Path) -> Diagnosis:
    """Find the bottleneck of a training loop of which `count` steps are timed; see `stepscope.diagnosis.diagnose`."""
    count = max(count, 2 * getattr(loader, "num_workers", 0))  # each of the workers may make a step wait, twice
    loop = watch(loader, step, count, folder)
    recorded = profile.read(traces.load(folder))
    sample, unknown = _items(loader, loop.irregular)
    if recorded.on_device:  # only what the GPU waits, too, can be gained
        wait = min(loop.wait, recorded.loading * loop.step)
        loop = replace(loop, wait=wait, usual_wait=min(wait, loop.usual_wait))
    loop = replace(loop, items=sample)
    work = loop.work / loop.whole
    to_sample = steps.steps_to_sample(recorded, loop.whole, work)
    host = steps.read(recorded, work, steps.sample(_Epochs(loader), _noted(step), to_sample) if to_sample else None)
    findings = [*device.findings(recorded), *steps.findings(host), *result.findings(loading.RULES, loop)]
    if torch.cuda.is_available() and not recorded.on_device:
        unknown.append("what the GPU of this machine does: no kernel ran on it. Is the model on it?")
    unexplained = loading.doubt(loop)
    if findings and unexplained:
        unknown.append(unexplained)
    rows = [_stopwatch(loop, count), *profile.evidence(recorded), *_of_the_loader(loader, sample)]
    otherwise = profile.doubt(recorded) or profile.unexplained(recorded) or unexplained
    return conclude(loop.whole, [*rows, ("profile", str(folder))], findings, unknown, otherwise=otherwise)


def _items(loader: Iterable, irregular: bool) -> tuple[items.Items | None, list[str]]:
    """Return how items are loaded, or what is unknown without that."""
    if not isinstance(loader, DataLoader):
        kind = f"the loader is a {type(loader).__name__}"
        return None, [f"how the batches are made: {kind}, and only of a DataLoader are workers and dataset known."]
    try:
        return items.load(loader, irregular), []
    except Exception as error:  # the workers could load them, so that it is no fault of the loop
        why = f"{type(error).__name__}: {error}"
        return None, [f"how long an item takes: loading some in this process failed. {why}"]


def _stopwatch(loop: loading.Loading, count: int) -> tuple[str, str]:
    """Return how long a step takes, as evidence."""
    which = f"mean of {count} without each epoch's first"
    clock = f"{milliseconds(loop.step)} a step ({which}), {milliseconds(loop.wait)} of it waiting"
    if loop.restart:
        clock += f"; with ending and starting workers {milliseconds(loop.whole)}, of which gains are"
    return "stopwatch", clock


def _of_the_loader(loader: Iterable, sample: items.Items | None) -> list[tuple[str, str]]:
    """Return the loader's settings, and how it loads, as evidence."""
    rows = []
    if isinstance(loader, DataLoader):
        names = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
        settings = ", ".join(f"{name}={getattr(loader, name)}" for name in names)
        rows.append(("DataLoader", f"{type(loader.dataset).__name__}, {settings}; {counted(machine.cores(), 'core')}"))
    if sample:
        parts = sorted(sample.parts.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {percent(share)}" for name, share in parts if share >= 0.005)
        took = f"{milliseconds(sample.ms)} in one process, {milliseconds(sample.cpu_ms)} of it on a core"
        rows.append(("an item", f"{took}; {shares} (mean of {sample.count})"))
    return rows


def watch(loader: Iterable, step: timing.Step, count: int, folder: Path) -> loading.Loading:
    """Run the loop: a warm-up and `count` steps with the stopwatch, then a warm-up and a few with the profiler.

    No worker of the loader is left when it returns or raises. How items are loaded is left out of what it returns.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("A profiler is running here already. Leave its `with` block, and call diagnose then.")
    epochs = _Epochs(loader)
    active = max(PROFILED, epochs.num_workers)
    total = count + 1 + active + 2 * timing.warmup_steps(loader)
    with progress(total, "diagnosing", "step", delay=10) as bar:
        call = _noted(step, bar.update)
        first, others = [], []  # steps of an epoch, each with what of its wait others had the cores
        with timing.batches(epochs) as batches:
            warm_up(lambda: timing.call(call, next(batches)), timing.warmup_steps(epochs))
            begin, begun = time.perf_counter(), len(epochs.starts)
            for timed_step in timed(batches, call, count):
                (first if len(epochs.starts) > begun else others).append((timed_step, epochs.held))
                begun = len(epochs.starts)
            seconds = time.perf_counter() - begin
            queued = epochs.latest.queued()
            transfer = _transfer(batches, epochs, seconds / count)
        profiling.record(epochs, call, folder, active=active)
    waits = without_hiccup([each.wait - min(each.wait, held) for each, held in others or first])
    work, wait = _work(seconds, [each for each, _ in first], [each for each, _ in others]), statistics.mean(waits)
    start = 0.0
    if not getattr(loader, "persistent_workers", False):
        start = sum(statistics.median_low(each) for each in (epochs.starts, epochs.ends) if each)
    return loading.Loading(
        step=(work + wait) * 1e3,
        wait=wait * 1e3,
        usual_wait=statistics.median(waits) * 1e3,
        workers=getattr(loader, "num_workers", None),
        cores=machine.cores(),
        start=start * 1e3,
        epoch=epochs.length,
        transfer=transfer * 1e3,
        queued=queued * 1e3,
    )


def _work(seconds: float, first: list[TimedStep], others: list[TimedStep]) -> float:
    """Return the mean time of a step but for its wait, of steps that took so many seconds in all."""
    if not others:  # each epoch has one step
        first, others = [], first
    if torch.cuda.is_available():  # most steps only launch, and one waits for what all have launched
        return (seconds - sum(each.duration for each in first) - sum(each.wait for each in others)) / len(others)
    return statistics.mean(without_hiccup([each.duration - each.wait for each in others]))


def _transfer(batches: Iterator, epochs: _Epochs, step: float) -> float:
    """Return how long it takes to get a batch that a worker has ready, in s; a step takes `step` seconds."""
    if not epochs.num_workers:
        return 0.0
    time.sleep(min(LONGEST_PAUSE, 2 * epochs.num_workers * step))  # in a step, one of them makes a batch at least
    took = []
    for _ in range(READY):
        begin = time.perf_counter()
        next(batches)
        took.append(time.perf_counter() - begin)
    return min(took)


class _Epochs:
    """A loader, and what was seen of its epochs."""

    def __init__(self, loader: Iterable):
        self.loader, self.latest = loader, None
        self.num_workers = getattr(loader, "num_workers", 0)
        self.prefetch_factor = getattr(loader, "prefetch_factor", 0)
        self.starts: list[float] = []  # seconds from starting each epoch to its first batch
        self.ends: list[float] = []  # seconds from asking for a batch after the last one to the end of the epoch
        self.held = 0.0  # seconds that this thread was ready to go on while others had the cores, of the latest wait
        self.length: int | None = None  # batches of an epoch, as far as it is known
        with suppress(TypeError, NotImplementedError):  # an iterable dataset without a length
            self.length = len(loader)

    def __iter__(self) -> _Epoch:
        self.latest = _Epoch(self)
        return self.latest


class _Epoch:
    """One pass over a loader, of which `timing.batches` can see and end the workers as of the loader's own."""

    def __init__(self, epochs: _Epochs):
        self.epochs, self.count, self.begin = epochs, 0, time.perf_counter()
        self.before = 0.0  # what the workers had queued at the first batch, in s
        self.iterator = iter(epochs.loader)
        self._workers = getattr(self.iterator, "_workers", [])

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        before, asked = stacks.queued(), time.perf_counter()
        try:
            batch = next(self.iterator)
        except StopIteration:
            if self.count:
                self.epochs.length = self.count
                self.epochs.ends.append(time.perf_counter() - asked)
            raise
        self.epochs.held = stacks.queued() - before
        if not self.count:
            self.epochs.starts.append(time.perf_counter() - self.begin)
            self.before = self._queued()
        self.count += 1
        return batch

    def queued(self) -> float:
        """Return for how many seconds a worker was ready to work while others had the cores, for each batch since."""
        return max(0.0, self._queued() - self.before) / max(1, self.count - 1)

    def _queued(self) -> float:
        return sum(stacks.queued(worker.pid) for worker in self._workers)

    def _shutdown_workers(self) -> None:
        getattr(self.iterator, "_shutdown_workers", lambda: None)()
        if isinstance(self.epochs.loader, DataLoader):
            self.epochs.loader._iterator = None  # persistent workers have ended, too: the next epoch starts new ones


def _noted(step: timing.Step, done: Callable[[], object] = lambda: None) -> timing.Step:
    """Return a step that calls this one, adds to what it raises how it was called, and reports when it is done."""

    def noted(*batch: object) -> None:
        try:
            step(*batch)
        except Exception as error:
            error.add_note(
                f"The step was called with {counted(len(batch), 'argument')}: a batch that is a tuple or a list is "
                "unpacked, step(*batch), any other is not, step(batch)."
            )
            raise
        done()

    return noted
