"""Diagnoses a loop by running it: measures it, and collects the facts from which the findings follow."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader

from stepscope import timing, traces
from stepscope.base import machine
from stepscope.base.confidence import without_hiccup
from stepscope.base.wording import counted, milliseconds, percent
from stepscope.diagnosis import device, items, loading, profile, remarks, result, stacks, trials
from stepscope.diagnosis import step as steps
from stepscope.diagnosis.result import Diagnosis, Finding, conclude
from stepscope.timing import profiling
from stepscope.timing.comparison import progress
from stepscope.timing.loaders import processes
from stepscope.timing.stopwatch import TimedStep, timed, warm_up

PROFILED = 8  # steps; or one for each worker if that is more, since one worker may make every n-th step wait
LONGEST_PAUSE = 2.0  # seconds in which the workers prepare the next batches
READY = 3  # batches that are requested after this pause
BUSY = 0.1  # share of the time in which other processes have the cores, from which on the verdict may be wrong,
MOST = 0.6  # unless the first finding takes this share of the step: a busy machine makes findings seem smaller
# Without a fault, the rest of a step takes at least this part of the time that it takes in the fastest step, as in four
# of five loops of the examination: a fault also slows what is around it. And at least this part of its mean time
LESS, FASTEST = 0.72, 0.56


def diagnose(loader: Iterable, step: timing.Step, count: int, folder: Path) -> Diagnosis:
    """Find the bottleneck of a training loop, timing `count` steps; see `stepscope.diagnosis.diagnose`."""
    if count < 1:
        raise ValueError(f"Expected at least one step to time, found steps={count}.")
    contention = stacks.Contention()
    loop, dataloader, batch, double, grown = watch(loader, step, count, folder)
    recorded = profile.read(traces.load(folder))
    sample, unknown = load_items(loader, dataloader, loop.irregular)
    to_sample, sampled = steps.steps_to_sample(recorded, loop.whole, loop.works), None
    if to_sample:
        sampled = steps.sample(Epochs(loader), _noted(step), to_sample, _Epoch.__next__.__code__)
    loop, tried = of_batches(loop, recorded, sample, sampled), trials.Trials()
    if loop.work >= steps.LEAST_MS:
        tried = trials.run(_noted(step), batch, threads=_threads(recorded, loop), double=double)
    rows = [stopwatch(loop), *profile.evidence(recorded), *of_the_loader(dataloader, sample)]
    rows += [*grown, *remarks.compiled(), ("profile", str(folder))]
    return concluded(loop, recorded, sampled, tried, contention.share(), rows, unknown)


def of_batches(
    loop: loading.Loading, recorded: profile.Profile, sample: items.Items | None, sampled: steps.Sampled | None
) -> loading.Loading:
    """Return a loop with how its items are loaded, and only with waits for batches that are being made."""
    if recorded.on_device:  # only waits during which the GPU waits as well can be gained
        wait = min(loop.wait, recorded.loading * loop.step)
        loop = replace(loop, wait=wait, usual_wait=min(wait, loop.usual_wait))
    loop = replace(loop, items=sample, line=sampled.getting() if sampled else "")
    if loop.epoch == 1:  # each wait includes a start of the workers
        restart = min(loop.restart, loop.wait)
        wait = loop.wait - restart
        loop = replace(loop, step=loop.step - restart, wait=wait, usual_wait=min(wait, loop.usual_wait))
    return loop


def concluded(
    loop: loading.Loading,
    recorded: profile.Profile,
    sampled: steps.Sampled | None,
    tried: trials.Trials,
    held: float,
    rows: list[tuple[str, str]],
    unknown: list[str],
) -> Diagnosis:
    """Return the diagnosis of a loop; other processes had the cores for the share `held` of the time.

    `rows` is the evidence, and `unknown` what could not be examined.
    """
    findings, loop = _found(loop, recorded, sampled, tried)
    doubt = traces.lost_kernels(recorded.trace) or None
    if held >= BUSY and not recorded.on_device:
        fastest, _ = _found(replace(loop, step=loop.wait + loop.least), recorded, sampled, tried)
        first, other = conclude(0, (), findings), conclude(0, (), fastest)
        if first.verdict != other.verdict or not first.findings or first.findings[0].gain < MOST:
            doubt = f"Other processes had the cores for {percent(held)} of the time. Diagnose again on a quiet machine."
    if torch.cuda.is_available() and not recorded.on_device:
        unknown.append("what the GPU of this machine does: no kernel ran on it. Is the model on it?")
    unexplained = loading.doubt(loop)
    if findings and unexplained:
        unknown.append(unexplained)
    otherwise = profile.doubt(recorded) or profile.unexplained(recorded) or unexplained
    found = conclude(loop.whole, rows, findings, unknown, doubt, otherwise, loop.timed, loop.apart)
    if found.verdict != result.NOTHING:
        return found
    if not recorded.on_device:
        found = replace(found, reason=f"{found.reason} Not tried: bfloat16 and channels_last.")
    if loop.apart >= result.WORTH * loop.whole:
        apart = f"Work between epochs takes {percent(loop.apart / loop.whole)} of the time."
        found = replace(found, reason=f"{found.reason} {apart}")
    return found


def _found(
    loop: loading.Loading, recorded: profile.Profile, sampled: steps.Sampled | None, tried: trials.Trials
) -> tuple[list[Finding], loading.Loading]:
    """Return the findings of a loop, and the loop without waits for other things than its batches.

    A gain is at most the share of the fault in a step whose rest is as short as possible: a fault may slow the rest as
    well, and two timings of the same loop differ.
    """
    host = steps.read(recorded, loop.work / loop.whole, loop.whole, sampled)
    around = min(loop.wait, host.around.share * loop.whole)  # workers cannot reduce it
    loop = replace(loop, wait=loop.wait - around, usual_wait=max(0.0, loop.usual_wait - around))
    part = loop.step / loop.whole  # the trace's shares are those of a step without what is between epochs
    of_device = (each for each in device.findings(recorded) if each.verdict != result.UNKNOWN)  # the profiler's time
    found = [
        *(replace(each, gain=each.gain * part) for each in of_device),
        *result.findings(steps.RULES, host),
        *result.findings(loading.RULES, loop),
        *result.findings(trials.RULES, replace(tried, work=loop.work / loop.whole)),
    ]
    if not loop.least:  # a GPU computes beside the host
        return found, loop
    rest = max(FASTEST, LESS * min(1.0, loop.least / loop.work))
    bounds = (
        each.gain / (each.gain + (1 - each.gain) * rest) if each.gain >= result.WORTH else each.gain for each in found
    )
    return [replace(each, gain=gain) for each, gain in zip(found, bounds, strict=True)], loop


def _threads(recorded: profile.Profile, loop: loading.Loading) -> int | None:
    """Return the number of cores that no worker keeps busy, as a number of threads; None if a GPU computes."""
    if recorded.on_device:
        return None
    busy = loop.items.batch * loop.items.cpu_ms / loop.step if loop.workers and loop.items else 0.0
    return max(1, loop.cores - round(min(busy, loop.workers or 0)))


def load_items(
    loader: Iterable, dataloader: DataLoader | None, irregular: bool
) -> tuple[items.Items | None, list[str]]:
    """Return how items are loaded; or None, and texts on what is unknown."""
    if dataloader is None:
        kind = "there is no loader" if loader is None else f"the loader is a {type(loader).__name__}"
        return None, [f"how the batches are made: {kind}, and only a DataLoader shows its workers and dataset."]
    try:
        return items.load(dataloader, irregular), []
    except Exception as error:  # the workers could load them, so this is no fault of the loop
        why = f"{type(error).__name__}: {error}"
        return None, [f"how long an item takes: loading some in this process failed. {why}"]


def stopwatch(loop: loading.Loading) -> tuple[str, str]:
    """Return how long a step takes, as evidence."""
    which = f"mean of {len(loop.timed)} timed" + ", without each epoch's first" * (loop.epoch != 1)
    if loop.hiccup:
        which += f"; one of {milliseconds(loop.hiccup)}, far longer, counts as the next longest"
    clock = f"{milliseconds(loop.step)} a step ({which}), {milliseconds(loop.wait)} of it waiting"
    if loop.restart or loop.apart:
        parts = ["ending and starting workers"] * bool(loop.restart) + ["work between epochs"] * bool(loop.apart)
        clock += f"; with {' and '.join(parts)} it is {milliseconds(loop.whole)}, to which the gains refer"
    return "stopwatch", clock


def of_the_loader(loader: DataLoader | None, sample: items.Items | None) -> list[tuple[str, str]]:
    """Return the loader's settings, and the time of an item, as evidence."""
    rows = []
    if loader is not None:
        # a DataLoader that was made with a sampler of batches knows no size
        size = sample.batch if sample and loader.batch_sampler is not None else loader.batch_size
        names = ("num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
        settings = ", ".join([f"batch_size={size}", *(f"{name}={getattr(loader, name)}" for name in names)])
        rows.append(("DataLoader", f"{type(loader.dataset).__name__}, {settings}; {counted(machine.cores(), 'core')}"))
    if sample:
        parts = sorted(sample.parts.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {percent(share)}" for name, share in parts if share >= 0.005)
        took = f"{milliseconds(sample.ms)} in one process, {milliseconds(sample.cpu_ms)} of it on a core"
        rows.append(("an item", f"{took}; {shares} (mean of {sample.count:,} items)"))
    return rows + remarks.equal_numbers(loader)


class _Watched(NamedTuple):
    loop: loading.Loading  # without its items
    dataloader: DataLoader | None  # that makes the batches: the loader, or the DataLoader that it wraps
    batch: object
    double: bool  # whether weights have 64 bits
    grown: list[tuple[str, str]]  # evidence on the workers' memory


def watch(loader: Iterable, step: timing.Step, count: int, folder: Path) -> _Watched:
    """Run the loop: a warm-up and `count` steps with the stopwatch, then a warm-up and a few with the profiler.

    No worker of the loader is left when it returns or raises.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("A profiler is already running here. Leave its `with` block before you call diagnose.")
    epochs = Epochs(loader)
    with progress(None, "diagnosing", "step", delay=10) as bar:
        call = _noted(step, bar.update)
        first, others = [], []  # steps of an epoch, as `Held`
        with timing.batches(epochs) as batches, trials.double_weights() as double:
            if epochs.dataloader is None:
                timing.call(call, next(batches))  # then the number of workers is known
            warm_up(lambda: timing.call(call, next(batches)), timing.warmup_steps(epochs))
            count = max(count, 2 * epochs.num_workers)  # two steps for each worker, which may make a step wait
            active = max(PROFILED, epochs.num_workers)
            bar.total = bar.n + count + 1 + active + timing.warmup_steps(epochs)
            memory = remarks.memory(epochs.workers)
            contention = stacks.Contention()
            begin, cpu, begun = time.perf_counter(), time.process_time(), len(epochs.starts)
            for timed_step in timed(batches, call, count):
                held = epochs.held, stacks.queued() - epochs.ready
                (first if len(epochs.starts) > begun else others).append((timed_step, *held))
                begun = len(epochs.starts)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            first, others = of_others(contention, first, others)
            queued = epochs.latest.queued()
            grown = remarks.growth(epochs.dataloader, memory, remarks.memory(epochs.workers), count)
            transfer = _transfer(batches, epochs, seconds / count)
            batch = next(batches)
        profiling.record(epochs, call, folder, active=active)
    loop = of_steps(epochs, seconds, first, others, batch, transfer, queued, cpu / count)
    return _Watched(loop, epochs.dataloader, batch, bool(double), grown)


def of_others(contention: stacks.Contention, *parts: list[Held]) -> list[list[Held]]:
    """Return a loop's steps with the time in which others had the cores, and not the loop's own workers.

    `contention` began with the first step.
    """
    share = contention.part(sum(wait + work for part in parts for _, wait, work in part))
    return [[(step, wait * share, work * share) for step, wait, work in part] for part in parts]


def of_steps(
    epochs: Epochs,
    seconds: float,
    first: list[Held],
    others: list[Held],
    batch: object,
    transfer: float,
    queued: float,
    cpu: float,
) -> loading.Loading:
    """Return the loop, without its items, that these steps show; `first` are the first steps of epochs.

    The steps took `seconds` in all. A ready batch takes `transfer` seconds to arrive, a worker waits `queued` seconds
    for a core for each batch, and this process uses `cpu` seconds of CPU time for each step.
    """
    computes = torch.cuda.is_available()  # beside the host
    longest = sorted(each.duration for each, *_ in others or first)[-2:]
    waits = without_hiccup([each.wait - min(each.wait, held) for each, held, _ in others or first])
    work, wait = _work(seconds, first, others), statistics.mean(waits)
    start = 0.0
    if not epochs.persistent:
        start = sum(statistics.median_low(each) for each in (epochs.starts, epochs.ends) if each)
    return loading.Loading(
        step=(work + wait) * 1e3,
        wait=wait * 1e3,
        usual_wait=statistics.median(waits) * 1e3,
        workers=getattr(epochs.source, "num_workers", None),
        cores=machine.cores(),
        start=start * 1e3,
        epoch=epochs.length,
        transfer=transfer * 1e3,
        queued=queued * 1e3,
        cpu=cpu * 1e3,
        pickled=_pickled(batch) if epochs.num_workers else 0.0,
        tensors=sum(isinstance(leaf, torch.Tensor) for leaf in tree_iter(batch)),
        hiccup=longest[-1] * 1e3 if not computes and longest[-1] > profile.STALL * longest[0] else 0.0,
        least=0.0 if computes else _least(others or first) * 1e3,
        only_first=epochs.length == 1 and epochs.loader is not epochs.dataloader and _has_more(epochs.dataloader),
        timed=tuple((step.wait * 1e3, step.duration * 1e3) for step, *_ in sorted([*first, *others])),
    )


def _has_more(dataloader: DataLoader | None) -> bool:
    """Return whether a loader has workers, and several batches in an epoch; False if that is unknown."""
    with suppress(TypeError, NotImplementedError):
        return dataloader is not None and dataloader.num_workers > 0 and len(dataloader) > 1
    return False


def _work(seconds: float, first: list[Held], others: list[Held]) -> float:
    """Return the mean time of a step without its wait, in s; the steps took `seconds` in all."""
    if not others:  # each epoch has one step
        first, others = [], first
    if torch.cuda.is_available():  # most steps only launch kernels, and one waits for the kernels of all
        waits = sum(each.wait for each, *_ in others)
        return (seconds - sum(each.duration for each, *_ in first) - waits) / len(others)
    works = ((each.duration - each.wait, held) for each, _, held in others)
    return statistics.mean(without_hiccup([work - min(work, held) for work, held in works]))


def _pickled(batch: object) -> float:
    """Return the bytes of a batch's NumPy arrays; 0 if fewer than `loading.PICKLED`."""
    size = sum(leaf.nbytes for leaf in tree_iter(batch) if isinstance(leaf, np.ndarray))
    return size if size >= loading.PICKLED else 0.0


def _least(steps: list[Held]) -> float:
    """Return the time of the fastest step without its wait, in s; 0 if others had the cores all the time."""
    lefts = (each.duration - each.wait - held for each, _, held in steps)
    return min((left for left in lefts if left > 0), default=0.0)


def _transfer(batches: Iterator, epochs: Epochs, step: float) -> float:
    """Return how long a ready batch takes to arrive from a worker, in s; a step takes `step` seconds."""
    if not epochs.num_workers:
        return 0.0
    time.sleep(min(LONGEST_PAUSE, 2 * epochs.num_workers * step))  # in each step, at least one batch is made
    took = []
    for _ in range(READY):
        begin = time.perf_counter()
        next(batches)
        took.append(time.perf_counter() - begin)
    return min(took)


class Epochs:
    """A loader, and what was observed of its epochs while iterating over this."""

    def __init__(self, loader: Iterable):
        self.loader, self.latest = loader, None
        self.dataloader: DataLoader | None = loader if isinstance(loader, DataLoader) else None  # that makes batches
        self.begun = 0  # how often a wrapper began a DataLoader
        self.remade = False  # whether that was another DataLoader than before
        self.starts: list[float] = []  # seconds from starting each epoch to its first batch
        self.ends: list[float] = []  # seconds from asking for a batch after the last one to the end of the epoch
        self.ready = 0.0  # `stacks.queued()` when the latest batch arrived, in s
        self.held = 0.0  # seconds of the latest wait for which this thread was ready, but others had the cores
        self.length: int | None = None  # batches of an epoch; None if unknown
        with suppress(TypeError, NotImplementedError):  # an iterable dataset without a length
            self.length = len(loader)

    def __iter__(self) -> _Epoch:
        self.latest = _Epoch(self)
        return self.latest

    @property
    def num_workers(self) -> int:
        """Workers of what makes the batches; 0 if unknown."""
        return getattr(self.source, "num_workers", 0) or 0

    @property
    def workers(self) -> list:
        """The processes of the latest epoch."""
        return self.latest._workers if self.latest else []

    @property
    def prefetch_factor(self) -> int:
        """Batches that each worker makes ahead."""
        return getattr(self.source, "prefetch_factor", 0)

    @property
    def source(self) -> Iterable:
        """The DataLoader that makes the batches, otherwise the loader."""
        return self.loader if self.dataloader is None else self.dataloader

    @property
    def persistent(self) -> bool:
        """Whether the workers outlive their epoch."""
        return getattr(self.dataloader, "persistent_workers", False) and not self.remade


class _Epoch:
    """One pass over a loader; `timing.batches` can see and end its workers as with a DataLoader's own iterator."""

    def __init__(self, epochs: Epochs):
        self.epochs, self.count, self.begin = epochs, 0, time.perf_counter()
        self.before = 0.0  # how long the workers had waited for cores at the first batch, in s
        self.making = None  # the iterator of the DataLoader that a wrapper uses
        with self._noticing():
            self.iterator = iter(epochs.loader)
        self.making = self.iterator if self.making is None else self.making

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        epochs, begun = self.epochs, self.epochs.begun
        before, asked = stacks.queued(), time.perf_counter()
        try:
            with self._noticing():
                batch = next(self.iterator)
        except StopIteration:
            if self.count:
                epochs.length = self.count
                epochs.ends.append(time.perf_counter() - asked)
            raise
        epochs.held = stacks.queued() - before
        if not self.count:
            epochs.starts.append(time.perf_counter() - self.begin)
            self.before = self._queued()
        elif epochs.begun > begun:  # a new epoch of the DataLoader in an endless wrapper
            epochs.starts.append(time.perf_counter() - asked)
            epochs.length = self.count
            self.count = 0
        self.count += 1
        epochs.ready = stacks.queued()
        return batch

    @contextmanager
    def _noticing(self) -> Iterator:
        """Notice whether a DataLoader's iteration begins within the block, which asks for a batch."""
        original, epochs = DataLoader.__iter__, self.epochs

        def begin(dataloader: DataLoader) -> Iterator:
            iterator = original(dataloader)
            if epochs.dataloader is not epochs.loader:
                epochs.begun += 1
                epochs.remade |= epochs.dataloader not in (None, dataloader)
                epochs.dataloader, self.making = dataloader, iterator
            return iterator

        DataLoader.__iter__ = begin
        try:
            yield
        finally:
            DataLoader.__iter__ = original

    @property
    def _workers(self) -> list:
        return processes(self.making)

    def queued(self) -> float:
        """Return for how many seconds a worker was ready while others had the cores, per batch after the first."""
        return max(0.0, self._queued() - self.before) / max(1, self.count - 1)

    def _queued(self) -> float:
        return sum(stacks.queued(worker.pid) for worker in self._workers)

    def _shutdown_workers(self) -> None:
        getattr(self.making, "_shutdown_workers", lambda: None)()
        if self.epochs.dataloader is not None:
            self.epochs.dataloader._iterator = None  # persistent workers have ended: the next epoch starts new ones


Held = tuple[TimedStep, float, float]  # a step; seconds in which others had the cores, of its wait and of its rest


def _noted(step: timing.Step, done: Callable[[], object] = lambda: None) -> timing.Step:
    """Return a step that calls this one, notes in its errors how it was called, and calls `done` afterwards."""

    def noted(*batch: object) -> None:
        try:
            step(*batch)
        except Exception as error:
            error.add_note(
                f"The step was called with {counted(len(batch), 'argument')}: a tuple or list as batch is unpacked, "
                "step(*batch); any other batch is not, step(batch)."
            )
            raise
        done()

    return noted
