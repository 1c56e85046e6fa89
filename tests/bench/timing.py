"""Times ways to load batches, interleaved and on one core, and prints what each of them reaches."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from helpers import config

BATCH = 128
ROUNDS, SECONDS = 7, 0.3  # of one variant in a round
UNTIMED_BATCHES = 4  # more than a library has ready from the time when it was not its turn: DALI 2

Rates = dict[str, list[float]]


@dataclass(frozen=True)
class Variant:
    """A way to load batches.

    Attributes
    ----------
    loader : iterable, or callable that returns one
        An epoch of tuples that begin with the images.
    delivers : str
        What the images are: ``"uint8"``, ``"float32"`` for normalized ones, or ``"0 to 1"``, float32 as well.
    beside : str, optional
        For the loader of another library: which of ours does the same.
    limit : str, optional
        The variant that this one cannot surpass, if it is not the last of all.
    """

    loader: Iterable | Callable[[], Iterable]
    delivers: str = "uint8"
    beside: str | None = None
    limit: str | None = None

    @cached_property
    def stream(self) -> Iterator[tuple]:
        """Batches, epoch after epoch."""
        return self._epochs()

    def _epochs(self) -> Iterator[tuple]:
        while True:
            yield from self.loader() if callable(self.loader) else self.loader


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and those that it begins, on one core. macOS and Windows cannot."""
    if not hasattr(os, "sched_setaffinity"):
        print("This system cannot keep a process on one core: libraries that begin threads may use several.")
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def interleaved(variants: dict[str, Variant]) -> Rates:
    """Images a second of every variant in every round; the first round is a warm-up, which checks npy's blocks.

    Epochs go on from round to round, so that beginning one counts as often as it does in training. A loader of
    another library that fails is named, and left out.
    """
    rates = {name: [] for name in variants}
    gc.collect()
    gc.freeze()  # or the collector looks through all that the libraries have imported
    for number in range(ROUNDS + 1):
        for name in list(rates):
            try:
                rate = measured(variants[name].stream)
            except Exception as error:
                if not variants[name].beside:
                    raise
                print(failure(name, error))
                del rates[name]
                continue
            if number:
                rates[name].append(rate)
            rest()
    gc.unfreeze()
    return rates


def measured(stream: Iterator[tuple]) -> float:
    """Images a second, for `SECONDS`."""
    for _ in range(UNTIMED_BATCHES):
        batch = next(stream)
    count, seconds = 0, 0.0
    while seconds < SECONDS:
        begin = time.perf_counter()
        batch = next(stream)
        seconds += time.perf_counter() - begin
        count += len(batch[0])
    return count / seconds


def rest() -> None:
    """Wait until the threads that a library has begun are done: `streaming` has up to a second's work for them left."""
    for _ in range(250):
        before = time.process_time()
        time.sleep(0.02)
        if time.process_time() - before < 0.002:
            return


def failure(name: str, error: Exception) -> str:
    """Return one line about a library that failed."""
    return f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def report(rates: Rates, variants: dict[str, Variant]) -> None:
    """Print images a second, their spread, microseconds a batch, and the ratios to naive and to the limit.

    The first of `rates` is naive, the last is the limit of those that name no other.
    """
    naive, *_, limit = rates
    title, columns = f"medians of {ROUNDS} interleaved rounds", f"{'µs/batch':>8} {'naive':>8} {'limit':>6}"
    print(f"\n{title:38} {'delivers':8} {'images/s':>10} {'lowest – highest':>23} {columns}")
    for name, mine in rates.items():
        median, spread = statistics.median(mine), f"{min(mine):,.0f} – {max(mine):,.0f}"
        others = naive, variants[name].limit or limit
        to_naive, to_limit = (statistics.median(ratios(rates, name, other)) for other in others)
        print(
            f"{name:38} {variants[name].delivers:8} {median:10,.0f} {spread:>23} {BATCH / median * 1e6:8,.0f}"
            f" {to_naive:7.1f}× {to_limit:6.3f}"
        )


def report_beside(rates: Rates, variants: dict[str, Variant]) -> None:
    """Print how much faster ours is than each loader of another library, with the spread over the rounds."""
    print(f"\n{'images/s, and how many times as fast ours is':46} {'theirs':>9}   {'ours':32} {'ours':>9} {'ratio':>7}")
    for name in rates:
        if ours := variants[name].beside:
            times = ratios(rates, ours, name)
            print(
                f"{name:46} {statistics.median(rates[name]):9,.0f}   {ours:32} {statistics.median(rates[ours]):9,.0f}"
                f" {statistics.median(times):6.1f}× ({min(times):.1f} – {max(times):.1f})"
            )


def ratios(rates: Rates, name: str, other: str) -> list[float]:
    """The rate of one variant over that of another, in each round."""
    return [a / b for a, b in zip(rates[name], rates[other], strict=True)]


def provenance(packages: Sequence[str]) -> str:
    """Return a line that says what was measured with: date, processor, Python and the versions of `packages`."""
    versions = [f"{package} {importlib.metadata.version(package)}" for package in packages]
    machine = f"{datetime.date.today()}, {_processor()}, {config.cores()} cores, Python {platform.python_version()}"
    return ", ".join([machine, *versions])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:  # macOS and Windows
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
