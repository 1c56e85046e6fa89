"""Diagnoses a loop that is there to run.

The path: `watch` runs the loop with the stopwatch and the profiler, `items.load` loads some items, and `_loading` puts
the facts together, from which the findings follow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from stepscope import timing, traces
from stepscope.base import machine
from stepscope.base.confidence import without_hiccup
from stepscope.base.wording import counted, milliseconds, percent
from stepscope.diagnosis import gpu, host, items, loading, recorded, result, stacks
from stepscope.diagnosis.result import Diagnosis, Finding, conclude
from stepscope.timing import profiling
from stepscope.timing.comparison import progress
from stepscope.timing.stopwatch import timed, warm_up

PROFILED = 8  # steps; or as many as there are workers, of which one may make every n-th step wait
LONGEST_PAUSE = 2.0  # seconds, in which the workers make batches that are then asked for
READY = 3  # batches that are asked for then


def diagnose(loader: Iterable, step: Callable, count: int, folder: Path) -> Diagnosis:
    """Find the bottleneck of a training loop of which `count` steps are timed; see `stepscope.diagnosis.diagnose`."""
    count = max(count, 2 * getattr(loader, "num_workers", 0))  # each of the workers may make a step wait, twice
    watched = watch(loader, step, count, folder)
    record = recorded.read(traces.load(folder))
    sample, unknown = _items(loader, watched.usual_wait < loading.USUAL * watched.wait)
    facts = _loading(loader, watched, record, sample)
    found = [*gpu.findings(record), *_of_the_step(loader, step, facts, record), *result.findings(loading.RULES, facts)]
    if torch.cuda.is_available() and not record.on_device:
        unknown.append("what the GPU of this machine does: no kernel ran on it. Is the model on it?")
    which = f"mean of {count} without each epoch's first"
    clock = f"{milliseconds(watched.step)} a step ({which}), {milliseconds(watched.wait)} of it waiting"
    if facts.restart:
        clock += f"; ending and starting workers adds {milliseconds(facts.restart)}"
    if milliseconds(facts.whole) != milliseconds(watched.step):
        clock += f"; gains are of a step of {milliseconds(facts.whole)}"
    rows = [("stopwatch", clock), *recorded.evidence(record), *_of_the_loader(loader, sample), ("profile", str(folder))]
    unexplained = loading.doubt(facts)
    if found and unexplained:
        unknown.append(unexplained)
    otherwise = recorded.doubt(record) or recorded.unexplained(record) or unexplained
    return conclude(facts.whole, rows, found, unknown, otherwise=otherwise)


def _of_the_step(
    loader: Iterable, step: Callable, facts: loading.Loading, record: recorded.Recorded
) -> Iterator[Finding]:
    """Return what the step asks of the host; steps are sampled if operators do not explain it, or are called often."""
    seen = host.Host(record, facts.work / facts.whole)
    if facts.work >= host.LEAST_MS and (record.shares["Other"] >= host.SHARE or seen.often):
        seen = replace(seen, sampled=host.sample(_Epochs(loader), _Call(step), seen.worth_sampling(facts.whole)))
    return host.findings(seen)


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


def _loading(
    loader: Iterable, watched: Watched, record: recorded.Recorded, sample: items.Items | None
) -> loading.Loading:
    """Put together what is known of loading."""
    workers = getattr(loader, "num_workers", 0)
    restart = 0.0
    if workers and watched.epoch and sample and not getattr(loader, "persistent_workers", False):
        restart = max(0.0, watched.start - sample.batch_ms) / watched.epoch
    wait = watched.wait
    if record.on_device:  # only what the GPU waits, too, can be gained
        wait = min(wait, record.loading * watched.step)
    usual = min(wait, watched.usual_wait)
    cores = machine.cores()
    return loading.Loading(watched.step, wait, usual, workers, cores, restart, sample, watched.transfer, watched.queued)


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


@dataclass(frozen=True)
class Watched:
    """What the stopwatch saw of a loop, in ms; without the first steps of epochs, if there are others."""

    step: float  # mean
    wait: float  # of that for its batch; what others had the cores meanwhile is left out of both
    usual_wait: float  # median
    transfer: float  # from asking for a batch that a worker has ready to having it, the fastest of some; 0 without
    queued: float  # for each batch, how long its worker was ready to work while others had the cores
    start: float  # between two epochs: until the first batch, and from the last one until the workers have ended
    epoch: int | None  # batches, or None if it has not ended and the loader has no length


def watch(loader: Iterable, step: timing.Step, steps: int, folder: Path) -> Watched:
    """Run the loop: a warm-up and `steps` steps with the stopwatch, then a warm-up and a few with the profiler.

    No worker of the loader is left when it returns or raises.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("A profiler is running here already. Leave its `with` block, and call diagnose then.")
    epochs = _Epochs(loader)
    active = max(PROFILED, epochs.num_workers)
    count = steps + 1 + active + 2 * timing.warmup_steps(loader)
    with progress(count, "diagnosing", "step", delay=10) as bar:
        call = _Call(step, bar.update)
        times = _time(epochs, call, steps)
        profiling.record(epochs, call, folder, active=active)
    start = sum(statistics.median_low(each) for each in (epochs.starts, epochs.ends) if each)
    return Watched(*times, start * 1e3, epochs.length)


def _time(epochs: _Epochs, call: _Call, steps: int) -> tuple[float, ...]:
    """Return the first five of `Watched`."""
    first, others = [], []  # steps of an epoch, and what of their wait others had the cores
    with timing.batches(epochs) as batches:
        warm_up(lambda: timing.call(call, next(batches)), timing.warmup_steps(epochs))
        begin, begun = time.perf_counter(), len(epochs.starts)
        for taken in timed(batches, call, steps):
            (first if len(epochs.starts) > begun else others).append((taken, min(taken.wait, epochs.held)))
            begun = len(epochs.starts)
        seconds = time.perf_counter() - begin
        queued = epochs.latest.queued()
        transfer = _transfer(batches, epochs, seconds / (len(first) + len(others)))
    if not others:  # each epoch has one step
        first, others = [], first
    works = [taken.duration - taken.wait for taken, _ in others]
    work = (seconds - sum(taken.duration for taken, _ in first) - sum(taken.wait for taken, _ in others)) / len(others)
    if not torch.cuda.is_available():  # with a GPU most steps only launch, and one waits for what all have launched
        work -= statistics.mean(works) - statistics.mean(without_hiccup(works))
    waits = without_hiccup([taken.wait - held for taken, held in others])
    wait = statistics.mean(waits)
    return tuple(each * 1e3 for each in (work + wait, wait, statistics.median(waits), transfer, queued))


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
        self.num_workers, self.prefetch_factor = (
            getattr(loader, each, 0) for each in ("num_workers", "prefetch_factor")
        )
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


@dataclass(frozen=True)
class _Call:
    """Calls the step, adds to what it raises how it was called, and reports when it is done."""

    step: timing.Step
    done: Callable[[], object] = lambda: None

    def __call__(self, *batch: object) -> None:
        try:
            self.step(*batch)
        except Exception as error:
            error.add_note(
                f"The step was called with {counted(len(batch), 'argument')}: a batch that is a tuple or a list is "
                "unpacked, step(*batch), any other is not, step(batch)."
            )
            raise
        self.done()
