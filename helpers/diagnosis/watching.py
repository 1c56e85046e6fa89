"""Runs a training loop twice: with the stopwatch, then with the profiler."""

from __future__ import annotations

import errno
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from helpers import config, staging, timing
from helpers.diagnosis import queueing
from helpers.diagnosis import steps as sampling
from helpers.timing import profiling
from helpers.timing.progress import progress
from helpers.timing.stopwatch import timed, warm_up
from helpers.wording import counted

RUN = "diagnosis"  # the folder of the profile, below COURSE_RUNS
PROFILED = 8  # steps; or as many as there are workers, of which one may make every n-th step wait
LONGEST_PAUSE = 2.0  # seconds, in which the workers make batches that are then asked for
READY = 3  # batches that are asked for then


class LoaderFailed(RuntimeError):
    """The loader, or the dataset in one of its workers, raised an error."""


class StepFailed(RuntimeError):
    """The step raised an error."""


class TooFewBatches(ValueError):
    """The loader yields no batches, or none when it is started again."""


class ProfilerRunning(RuntimeError):
    """A profiler is running already."""


@dataclass(frozen=True)
class Watched:
    """What was seen of a training loop. Times are in milliseconds.

    Attributes
    ----------
    step, wait : float
        Mean duration of a step by the stopwatch, and what of it the loop waited for its batch; without the first
        steps of epochs, if there are others.
    held : float
        What of this wait the thread was ready to go on, and others had the cores; 0 where it is unknown.
    usual_wait : float
        The median of these waits, without that.
    transfer : float
        From asking for a batch that a worker has ready to having it, the fastest of some; 0 without workers.
    queued : float
        For each batch, how long its worker was ready to work while others had the cores; 0 where it is unknown.
    start : float
        What comes between two epochs: from starting one to its first batch, and, with workers, from its last batch to
        its end, when they have ended; medians of those seen.
    epoch : int or None
        Batches of an epoch, or None if it has not ended and the loader has no length.
    profile : Path
        Folder of the profile.
    """

    step: float
    wait: float
    held: float
    usual_wait: float
    transfer: float
    queued: float
    start: float
    epoch: int | None
    profile: Path


def watch(loader: Iterable, step: timing.Step, steps: int) -> Watched:
    """Run the loop: a warm-up and `steps` steps with the stopwatch, then a warm-up and a few with the profiler.

    No worker of the loader is left when it returns or raises.

    Raises
    ------
    LoaderFailed, StepFailed, TooFewBatches, ProfilerRunning
    timing.WorkerDied
        If a worker is killed or exits.
    """
    if torch.autograd._profiler_enabled():
        raise ProfilerRunning("A profiler is running here already. Leave its `with` block, and call diagnose then.")
    epochs, active = _Epochs(loader), max(PROFILED, getattr(loader, "num_workers", 0))
    count = steps + 1 + active + 2 * timing.warmup_steps(loader)
    folder = _folder()
    with progress(count, "diagnosing", "step", delay=10) as bar:
        call = _Call(step, bar.update)
        times = _time(epochs, call, steps)
        profiling.record(epochs, call, folder, active=active)
    start = sum(statistics.median(each) for each in (epochs.starts, epochs.ends) if each)
    return Watched(*times, start * 1e3, epochs.length, folder)


def sample(loader: Iterable, step: timing.Step, most: int) -> sampling.Sampled:
    """Run at most so many steps of the loop, and see which lines run in a step while no operator does.

    No worker of the loader is left when it returns or raises.

    Raises
    ------
    LoaderFailed, StepFailed, TooFewBatches
    timing.WorkerDied
        If a worker is killed or exits.
    """
    call = _Call(step, lambda: None)
    with timing.batches(_Epochs(loader)) as batches:
        return sampling.sample(batches, lambda batch: timing.call(call, batch), _Call.__call__, most)


def _folder() -> Path:
    """Return the folder for the profile: below the runs', or a temporary one if nothing can be written there."""
    folder = config.runs_dir() / RUN
    try:
        with staging.scratch(folder):
            if folder.exists() and not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            return folder
    except OSError as error:
        elsewhere = Path(tempfile.mkdtemp(prefix="diagnosis-"), RUN)
        print(
            f"The profile goes to {elsewhere}: {folder.parent} cannot be written ({error}). Set COURSE_RUNS to a "
            "folder that can be, to keep profiles there.",
            flush=True,
        )
        return elsewhere


def _time(epochs: _Epochs, call: _Call, steps: int) -> tuple[float, ...]:
    """Return the first six of `Watched`, in ms."""
    first, others = [], []  # steps of an epoch
    with timing.batches(epochs) as batches:
        warm_up(lambda: timing.call(call, next(batches)), timing.warmup_steps(epochs))
        begin, begun = time.perf_counter(), len(epochs.starts)
        for taken in timed(batches, call, steps):
            (first if len(epochs.starts) > begun else others).append((taken, min(taken.wait, epochs.queued)))
            begun = len(epochs.starts)
        seconds = time.perf_counter() - begin
        queued = epochs.latest.queued()
        transfer = _transfer(batches, epochs, seconds / (len(first) + len(others)))
    if not others:  # each epoch has one step
        first, others = [], first
    step = (seconds - sum(taken.duration for taken, _ in first)) / len(others)  # the device has finished the last one
    wait, held = (statistics.mean(each) for each in zip(*((taken.wait, held) for taken, held in others), strict=True))
    usual = statistics.median(taken.wait - held for taken, held in others)
    return tuple(each * 1e3 for each in (step, wait, held, usual, transfer, queued))


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


@dataclass
class _Epochs:
    """A loader, and what was seen of its epochs.

    Attributes
    ----------
    loader : iterable
    starts : list of float
        Seconds from starting each epoch to its first batch.
    ends : list of float
        Seconds from asking for a batch after the last one to the end of the epoch.
    length : int or None
        Batches of an epoch, as far as it is known.
    latest : _Epoch or None
        The epoch that was started last.
    queued : float
        Seconds that this thread was ready to work while others had the cores, when it was last asked for a batch.
    """

    loader: Iterable
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    length: int | None = None
    latest: _Epoch | None = None
    queued: float = 0.0

    def __post_init__(self):
        with suppress(TypeError, NotImplementedError):  # an iterable dataset without a length
            self.length = len(self.loader)

    @property
    def num_workers(self) -> int:
        """Workers of the loader."""
        return getattr(self.loader, "num_workers", 0)

    @property
    def prefetch_factor(self) -> int | None:
        """Batches that each worker prepares ahead."""
        return getattr(self.loader, "prefetch_factor", None)

    def __iter__(self) -> _Epoch:
        self.latest = _Epoch(self)
        return self.latest


class _Epoch:
    """One pass over a loader, of which `timing.batches` can see and end the workers as of the loader's own."""

    def __init__(self, epochs: _Epochs):
        self.epochs, self.count, self.begin, self.iterator = epochs, 0, time.perf_counter(), None
        self.before = 0.0  # what the workers had queued at the first batch, in s
        try:
            self.iterator = iter(epochs.loader)
        except Exception as error:
            raise _loader_failed(error) from error

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        before, asked = queueing.of_this_thread(), time.perf_counter()
        try:
            batch = next(self.iterator)
        except StopIteration:
            if not self.count:
                raise _too_few(self.epochs) from None
            self.epochs.length = self.count
            self.epochs.ends.append(time.perf_counter() - asked)
            raise
        except Exception as error:
            raise _loader_failed(error) from error
        self.epochs.queued = queueing.of_this_thread() - before
        if not self.count:
            self.epochs.starts.append(time.perf_counter() - self.begin)
            self.before = self._queued()
        self.count += 1
        return batch

    def queued(self) -> float:
        """Return for how many seconds a worker was ready to work while others had the cores, for each batch since."""
        return max(0.0, self._queued() - self.before) / max(1, self.count - 1)

    def _queued(self) -> float:
        return queueing.of_processes(worker.pid for worker in self._workers)

    @property
    def _workers(self) -> list:
        return getattr(self.iterator, "_workers", [])

    def _shutdown_workers(self) -> None:
        for name in ("_shutdown_workers", "close"):
            getattr(self.iterator, name, lambda: None)()
        if isinstance(self.epochs.loader, DataLoader):
            self.epochs.loader._iterator = None  # persistent workers have ended, too: the next epoch starts new ones


@dataclass(frozen=True)
class _Call:
    """Calls the step, names what it raises, and reports when it is done."""

    step: timing.Step
    done: Callable[[], object]

    def __call__(self, *batch: object) -> None:
        try:
            self.step(*batch)
        except Exception as error:
            if str(error).startswith("DataLoader worker"):  # PyTorch may interrupt a step by it; it is named elsewhere
                raise
            raise StepFailed(
                f"The step failed: {type(error).__name__}: {error}\nIt was called with "
                f"{counted(len(batch), 'argument')}: a batch that is a tuple or a list is unpacked, step(*batch), any "
                "other is not, step(batch). Fix the step, and diagnose again."
            ) from error
        self.done()


def _loader_failed(error: Exception) -> LoaderFailed:
    return LoaderFailed(
        f"The loader failed: {type(error).__name__}: {error}\n"
        "Fix the dataset (with num_workers=0 a debugger reaches it), and diagnose again."
    )


def _too_few(epochs: _Epochs) -> TooFewBatches:
    if not epochs.starts:
        return TooFewBatches("The loader yields no batch. Is the dataset smaller than one (drop_last)?")
    return TooFewBatches(
        f"The loader yielded {epochs.length} batches, and none when it was started again. Give diagnose the "
        "DataLoader itself, not iter(loader) or a generator: it takes more than one epoch of so few."
    )
