"""Runs a training loop twice: with the stopwatch, then with the profiler."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from helpers import timing
from helpers.timing import profiling

RUN = "diagnosis"  # the folder of the profile, below COURSE_RUNS
PROFILED = 8  # steps; or as many as there are workers, of which one may make every n-th step wait


class LoaderFailed(RuntimeError):
    """The loader, or the dataset in one of its workers, raised an error."""


class StepFailed(RuntimeError):
    """The step raised an error."""


class TooFewBatches(ValueError):
    """The loader yields no mini-batches, or none when it is started again."""


class ProfilerRunning(RuntimeError):
    """A profiler is running already."""


@dataclass(frozen=True)
class Watched:
    """What was seen of a training loop. Times are in milliseconds.

    Attributes
    ----------
    step, wait : float
        Mean duration of a step by the stopwatch, and what of it the loop waited for its mini-batch; without the first
        steps of epochs, if there are others.
    usual_wait : float
        The median of these waits.
    start : float
        From starting an epoch to its first mini-batch; the fastest of those seen.
    epoch : int or None
        Mini-batches of an epoch, or None if it has not ended and the loader has no length.
    profile : Path
        Folder of the profile.
    """

    step: float
    wait: float
    usual_wait: float
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
    with tqdm(total=count, desc="diagnosing", unit="step", file=sys.stdout, delay=10, mininterval=1) as bar:
        call = _Call(step, bar)
        timed = _time(epochs, call, steps)
        folder = profiling.record(epochs, call, RUN, active=active)
    return Watched(*timed, min(epochs.starts) * 1e3, epochs.length, folder)


def _time(epochs: _Epochs, call: _Call, steps: int) -> tuple[float, float, float]:
    """Return the mean duration of a step, and of its waiting the mean and the median, in ms."""
    rows = []
    with timing.batches(epochs) as batches:
        for _ in range(timing.warmup_steps(epochs)):
            timing.call(call, next(batches))
        _synchronize()
        now = time.perf_counter()
        for number in range(steps):
            start, begun = now, len(epochs.starts)
            batch = next(batches)
            waited = time.perf_counter() - start
            timing.call(call, batch)
            del batch  # to free a mini-batch of photos takes a millisecond, which is no waiting
            if number == steps - 1:
                _synchronize()
            now = time.perf_counter()
            rows.append((len(epochs.starts) > begun, now - start, waited))
    durations, waits = zip(*[row[1:] for row in rows if not row[0]] or [row[1:] for row in rows], strict=True)
    seconds = statistics.mean(durations), statistics.mean(waits), statistics.median(waits)
    return tuple(each * 1e3 for each in seconds)


@dataclass
class _Epochs:
    """A loader, and what was seen of its epochs.

    Attributes
    ----------
    loader : iterable
    starts : list of float
        Seconds from starting each epoch to its first mini-batch.
    length : int or None
        Mini-batches of an epoch, as far as it is known.
    """

    loader: Iterable
    starts: list[float] = field(default_factory=list)
    length: int | None = None

    def __post_init__(self):
        try:
            self.length = len(self.loader)
        except (TypeError, NotImplementedError):  # an iterable dataset without a length
            pass

    @property
    def num_workers(self) -> int:
        """Workers of the loader."""
        return getattr(self.loader, "num_workers", 0)

    @property
    def prefetch_factor(self) -> int | None:
        """Mini-batches that each worker prepares ahead."""
        return getattr(self.loader, "prefetch_factor", None)

    def __iter__(self) -> _Epoch:
        return _Epoch(self)


class _Epoch:
    """One pass over a loader, of which `timing.batches` can see and end the workers as of the loader's own."""

    def __init__(self, epochs: _Epochs):
        self.epochs, self.count, self.begin, self.iterator = epochs, 0, time.perf_counter(), None
        try:
            self.iterator = iter(epochs.loader)
        except Exception as error:
            raise _loader_failed(error) from error

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> object:
        try:
            batch = next(self.iterator)
        except StopIteration:
            if not self.count:
                raise _too_few(self.epochs) from None
            self.epochs.length = self.count
            raise
        except Exception as error:
            raise _loader_failed(error) from error
        if not self.count:
            self.epochs.starts.append(time.perf_counter() - self.begin)
        self.count += 1
        return batch

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
    """Calls the step, and names what it raises."""

    step: timing.Step
    bar: tqdm  # moves on once a second at most: under 1 µs a step otherwise

    def __call__(self, *batch: object) -> None:
        try:
            self.step(*batch)
        except Exception as error:
            if str(error).startswith("DataLoader worker"):  # PyTorch may interrupt a step by it; it is named elsewhere
                raise
            raise StepFailed(
                f"The step failed: {type(error).__name__}: {error}\nIt was called with {len(batch)} argument"
                f"{'s' * (len(batch) != 1)}: a mini-batch that is a tuple or a list is unpacked, step(*batch), any other "
                "is not, step(batch). Mend the step, and diagnose again."
            ) from error
        self.bar.update()


def _loader_failed(error: Exception) -> LoaderFailed:
    return LoaderFailed(
        f"The loader failed: {type(error).__name__}: {error}\n"
        "Mend the dataset (with num_workers=0 a debugger reaches it), and diagnose again."
    )


def _too_few(epochs: _Epochs) -> TooFewBatches:
    if not epochs.starts:
        return TooFewBatches("The loader yields no mini-batch. Is the dataset smaller than one (drop_last)?")
    return TooFewBatches(
        f"The loader yielded {epochs.length} mini-batches, and none when it was started again. Give diagnose the "
        "DataLoader itself, not iter(loader) or a generator: it takes more than one epoch of so few."
    )


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
