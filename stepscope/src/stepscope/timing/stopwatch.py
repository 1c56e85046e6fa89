"""The stopwatch: a training loop, a loader alone, and single calls, timed without the profiler."""

from __future__ import annotations

import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from stepscope.timing import loaders

if TYPE_CHECKING:
    import pandas as pd

Item = TypeVar("Item")
_limits = {"run": math.inf, "comparison": math.inf}  # in seconds, for calls without their own limit: see `limit`
LEAST = 2  # the fewest steps, rounds or calls, whatever the limit
_LONG_ENOUGH = 5.0  # milliseconds: launching, waiting and reading the clock add some tens of microseconds
_MOST_CALLS = 1024  # in a row, of very short calls


@dataclass(frozen=True)
class Timing:
    """One timed run of a training loop."""

    images: int  #: Images of all steps together
    seconds: float  #: Wall-clock time of all steps; the device had finished its work at both ends
    #: For each step, in seconds: the time that the loop waited for its batch, and the whole step including the wait.
    #: With a GPU a step's duration is the host's: the device may still work when the next step begins.
    waits: tuple[float, ...]
    durations: tuple[float, ...]
    begin: float = 0.0  #: When the first step began, in seconds of ``time.perf_counter()``

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
        """Share of the wall-clock time that the loop waited for batches, 0 to 1."""
        return sum(self.waits) / self.seconds


class TimedStep(NamedTuple):
    """One step of a timed loop; times in seconds. (A tuple, because a dataclass takes three times as long to make.)"""

    begin: float  # when the loop asked for the batch, in seconds of ``time.perf_counter()``
    wait: float  # from `begin` until the batch arrived
    duration: float  # from `begin` until the step returned and the batch was freed
    images: int  # as `loaders.batch_size` counts them


def limit(run: float = math.inf, comparison: float = math.inf) -> None:
    """Limit all timing in this process from now on, unless a call has its own limit; without arguments, remove limits.

    Parameters
    ----------
    run, comparison : float
        Seconds after which a timed run takes no further step, and a comparison no further round.
    """
    _limits.update(run=run, comparison=comparison)


def longest_of(what: str) -> float:
    """Return the limit of a ``"run"`` or a ``"comparison"`` in seconds; see `limit`."""
    return _limits[what]


def warmup_steps(loader: Iterable[object] | None) -> int:
    """Steps until a loader runs evenly: the workers have started, and their first prefetched batches are used up."""
    workers = getattr(loader, "num_workers", 0) or 0
    return 2 + workers * (getattr(loader, "prefetch_factor", None) or 0)


def limited(items: Iterable[Item], longest: float, least: int = LEAST, period: int = 1) -> Iterator[Item]:
    """Yield items until there are no more or `longest` seconds have passed, but at least `least` items.

    From the first whole `period` on, end only after whole periods: a period begins if its last item would begin in
    time, to judge by the mean of the items so far.
    """
    begin = time.perf_counter()
    for done, item in enumerate(items):
        if done >= least and (done < period or done % period == 0):
            rest_of_period = (period - 1) / done if done >= period else 0.0
            if (time.perf_counter() - begin) * (1 + rest_of_period) >= longest:
                return
        yield item


def warm_up(take_step: Callable[[], object], steps: int, longest: float = math.inf) -> None:
    """Take `steps` untimed steps, or fewer if they take `longest` seconds; the device finishes them."""
    for _ in limited(range(steps), longest, least=1):
        take_step()
    synchronize()


def timed(
    batches: Iterator[object], step: loaders.Step, steps: int, longest: float = math.inf, period: int = 1
) -> Iterator[TimedStep]:
    """Run a training loop on endless batches, and yield the time of each step, without the caller's work between steps.

    `longest` and `period` apply as in `limited`. The device has finished its work before the first step, and at the end
    of the iteration.
    """
    synchronize()
    for _ in limited(range(steps), longest, period=period):
        begin = time.perf_counter()
        batch = next(batches)
        wait = time.perf_counter() - begin
        loaders.call(step, batch)
        images = loaders.batch_size(batch)
        del batch  # before the clock is read: freeing a batch of photos takes a millisecond, which is not waiting
        yield TimedStep(begin, wait, time.perf_counter() - begin, images)
    synchronize()


def loop(
    loader: Iterable[object], step: loaders.Step, steps: int, warmup: int | None = None, longest: float | None = None
) -> Timing:
    """Time training steps after a warm-up; the loader starts a new epoch when one ends.

    Parameters
    ----------
    loader : iterable
        A DataLoader, or anything that yields batches; the length of the first tensor in a batch counts as its images.
    step : callable
        Called with a batch as `call` does: with images and labels, if the batch is a pair of them.
    steps : int
        Maximum number of timed steps, rounded up to whole periods of the workers, see `whole_periods`.
    warmup : int, optional
        Maximum number of untimed steps before; `warmup_steps` by default.
    longest : float, optional
        Seconds after which no further step begins, once two are timed; also limits the warm-up. A run ends between two
        periods, unless the seconds are over within the first period: then its mean depends on where the run began. The
        default is the limit set by `limit`, if any.
    """
    if steps < 1:
        raise ValueError(f"Expected at least one step to time, found steps={steps}.")
    longest = longest_of("run") if longest is None else longest
    warmup = warmup_steps(loader) if warmup is None else warmup
    with loaders.batches(loader) as batches:
        warm_up(lambda: loaders.call(step, next(batches)), warmup, longest)
        steps = loaders.whole_periods(loader, steps)
        timed_steps = list(timed(batches, step, steps, longest, loaders.period(loader)))
        end = time.perf_counter()
    begins, waits, durations, images = zip(*timed_steps, strict=True)
    return Timing(sum(images), end - begins[0], waits, durations, begins[0])


def loading(loader: Iterable[object], seconds: float) -> Timing:
    """Time loading alone for about `seconds`, after a warm-up of at most as long; epochs follow one another.

    For loaders that take less than a millisecond for a batch: a few steps would be too short to time.
    """
    return loop(loader, lambda *batch: None, sys.maxsize, longest=seconds)


def call_ms(function: Callable[[], object], repeats: int = 20, warmup: int = 1) -> float:
    """Median milliseconds of one call, including the device's work; see `each_call_ms`."""
    return statistics.median(each_call_ms(function, repeats, warmup))


def each_call_ms(function: Callable[[], object], repeats: int = 20, warmup: int = 1) -> list[float]:
    """Milliseconds of a call, including the device's work, measured `repeats` times after `warmup` calls.

    A short function is called many times in a row, and the mean is taken: launching a kernel, waiting for it and
    reading the clock takes longer than a short kernel. After the seconds of `limit` no further measurement begins.
    """
    if repeats < 1:
        raise ValueError(f"Expected at least one call to time, found repeats={repeats}.")
    warm_up(function, warmup)
    times, calls = [], 1
    for _ in limited(range(repeats), longest_of("run")):
        ms = _in_a_row_ms(function, calls)
        while ms < _LONG_ENOUGH and calls < _MOST_CALLS:
            calls *= 2
            ms = _in_a_row_ms(function, calls)
        times.append(ms / calls)
    return times


def _in_a_row_ms(function: Callable[[], object], calls: int) -> float:
    """Milliseconds of `calls` calls until the device has finished them; on a GPU by the GPU's clock."""
    synchronize()
    begin, start = _now(), time.perf_counter()
    for _ in range(calls):
        function()
    end, ms = _now(), (time.perf_counter() - start) * 1e3
    synchronize()
    return begin.elapsed_time(end) if begin and end else ms


def run_ahead(step: loaders.Step, batch: object, steps: int = 20) -> pd.DataFrame:
    """Measure how far the host runs ahead of a GPU: when each step returned, and when the GPU had finished it.

    `step` is called with `batch` as `call` does, with three more calls as a warm-up.

    Returns
    -------
    DataFrame
        A row a step; columns ``host`` and ``device``, in ms since the first step began. Without a GPU they are equal:
        the host does the work itself.
    """
    import pandas as pd

    warm_up(lambda: loaders.call(step, batch), 3)
    begin, rows = _now(), []
    start = time.perf_counter()
    for _ in range(steps):
        loaders.call(step, batch)
        rows.append(((time.perf_counter() - start) * 1e3, _now()))
    synchronize()
    table = [(host, begin.elapsed_time(end) if begin and end else host) for host, end in rows]
    return pd.DataFrame(table, columns=["host", "device"])


def _now() -> torch.cuda.Event | None:
    """Let the GPU record the time when it has finished all work launched so far; None without a GPU."""
    if not _uses_gpu():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def synchronize(gpu: torch.device | None = None) -> None:
    """Wait until a GPU, the current one by default, has finished its work, if this process uses one."""
    if _uses_gpu():
        torch.cuda.synchronize(gpu)


def has_gpu() -> bool:
    """Return whether PyTorch can use a GPU; a process that has not used one stays as it is.

    Unlike `is_available`, the count asks NVML first: a forked process can still use the GPU. It warns where NVML has no
    driver, as in a container without a GPU.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cuda.is_initialized() or torch.cuda.device_count() > 0


def _uses_gpu() -> bool:
    # In this order, because the second call takes 2 µs
    return torch.cuda.is_initialized() and torch.cuda.is_available()
