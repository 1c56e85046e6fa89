"""The stopwatch: a training loop, a loader alone, and single calls, timed without the profiler.

The profile explains, the stopwatch decides: all the course's figures of speed come from here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from helpers import config
from helpers.timing import loaders

LEAST = 2  # steps, rounds and calls, however long they take


@dataclass(frozen=True)
class Timing:
    """One timed run of a training loop.

    Attributes
    ----------
    images : int
        Images that went through, all steps together.
    seconds : float
        Wall-clock time of all steps; the device had finished its work before either end was read.
    waits, durations : tuple of float
        For each step, in seconds: the time that the loop waited for its mini-batch, and the whole step with it. On
        a GPU a step's own duration is the host's: the device may still be at work when the next one begins.
    begin : float
        When the first of these steps began, in seconds of ``time.perf_counter()``.
    """

    images: int
    seconds: float
    waits: tuple[float, ...]
    durations: tuple[float, ...]
    begin: float = 0.0

    @property
    def images_per_second(self) -> float:
        """Throughput."""
        return self.images / self.seconds

    @property
    def step_ms(self) -> float:
        """Mean wall-clock time of a step, in milliseconds."""
        return self.seconds / len(self.durations) * 1e3

    @property
    def loading_share(self) -> float:
        """Share of the wall-clock time that the loop waited for mini-batches, 0 to 1."""
        return sum(self.waits) / self.seconds


def warmup_steps(loader: Iterable) -> int:
    """Steps until a loader runs evenly: its workers are up and what they had prefetched at the start is used up."""
    workers = getattr(loader, "num_workers", 0)
    return 2 + workers * (getattr(loader, "prefetch_factor", None) or 0)


def loop(
    loader: Iterable, step: loaders.Step, steps: int, warmup: int | None = None, longest: float | None = None
) -> Timing:
    """Time training steps after a warm-up; the loader starts anew when an epoch ends.

    Parameters
    ----------
    loader : iterable
        A DataLoader, or anything that yields mini-batches; see `loaders.batch_size` for what counts as images.
    step : callable
        Called with a mini-batch as `loaders.call` does: with images and labels, if it is a pair of them.
    steps : int
        Steps to time, at most.
    warmup : int, optional
        Steps before that, at most; `warmup_steps` by default.
    longest : float, optional
        Seconds after which no further step begins, once two are timed, and no further one of the warm-up; by default
        ``longest_run`` of the preset.
    """
    longest = config.preset().longest_run if longest is None else longest
    with loaders.batches(loader) as batches:
        begin = time.perf_counter()
        for _ in range(warmup_steps(loader) if warmup is None else warmup):
            loaders.call(step, next(batches))
            if time.perf_counter() - begin >= longest:
                break
        synchronize()
        images, waits, durations = 0, [], []
        begin = now = time.perf_counter()
        for _ in range(steps):
            start = now
            batch = next(batches)
            waits.append(time.perf_counter() - start)
            loaders.call(step, batch)
            images += loaders.batch_size(batch)
            del batch  # to free a mini-batch of photos takes a millisecond, which is no waiting
            now = time.perf_counter()
            durations.append(now - start)
            if now - begin >= longest and len(durations) >= LEAST:
                break
        synchronize()
        seconds = time.perf_counter() - begin
    return Timing(images, seconds, tuple(waits), tuple(durations), begin)


def loading(loader: Iterable, seconds: float) -> Timing:
    """Time loading alone, for so many `seconds`, after a warm-up no longer; the loader starts anew when an epoch ends.

    For loaders that need less than a millisecond for a mini-batch: some steps of them would be too short to time.
    """
    with loaders.batches(loader) as batches:
        begin = time.perf_counter()
        for _ in range(warmup_steps(loader)):
            next(batches)
            if time.perf_counter() - begin >= seconds:
                break
        images, waits = 0, []
        begin = now = time.perf_counter()
        while now - begin < seconds:
            start = now
            images += loaders.batch_size(next(batches))
            now = time.perf_counter()
            waits.append(now - start)
    return Timing(images, now - begin, tuple(waits), tuple(waits), begin)


def call_ms(function: Callable[[], object], repeats: int = 20, warmup: int = 1) -> float:
    """Median milliseconds of one call, the device's work included; see `each_call_ms`."""
    return statistics.median(each_call_ms(function, repeats, warmup))


def each_call_ms(
    function: Callable[[], object], repeats: int = 20, warmup: int = 1, longest: float | None = None
) -> list[float]:
    """Milliseconds of each call, the device's work included, after some calls as warm-up.

    Of slow calls there are fewer than `repeats`: none begins after `longest` seconds, once two are timed; by default
    that is ``longest_run`` of the preset.
    """
    longest = config.preset().longest_run if longest is None else longest
    for _ in range(warmup):
        function()
    times = []
    while len(times) < repeats and (len(times) < LEAST or sum(times) < longest * 1e3):
        start = mark()
        function()
        times.append((mark() - start) * 1e3)
    return times


def mark() -> float:
    synchronize()
    return time.perf_counter()


def synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
