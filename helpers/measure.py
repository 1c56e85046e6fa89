"""The stopwatch: throughput without the profiler, variants timed in turn, the phases of a step.

The profile explains, the stopwatch decides: all the course's figures of speed come from here.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import psutil
import torch
from torch import nn
from tqdm import tqdm

from helpers import config, training


_LEAST = 2  # steps, rounds and calls, however long they take


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


@dataclass(frozen=True)
class Comparison:
    """Variants timed in turn (A B A B …): one `Timing` a round for each. The first variant is what it is about.

    Spread is always the lowest and the highest of the rounds. A ratio is taken within each round, so that a machine
    that is slower for a while slows both of its sides.
    """

    timings: Mapping[str, tuple[Timing, ...]]

    @property
    def names(self) -> list[str]:
        """The variants, in the order they were given."""
        return list(self.timings)

    def median(self, name: str) -> Timing:
        """Return the run of variant `name` with the median throughput (of an even number, the lower middle one)."""
        ordered = sorted(self.timings[name], key=lambda timing: timing.images_per_second)
        return ordered[(len(ordered) - 1) // 2]

    def throughputs(self, name: str) -> list[float]:
        """Return the images per second of every round of variant `name`."""
        return [timing.images_per_second for timing in self.timings[name]]

    def ratios(self, name: str, to: str | None = None) -> list[float]:
        """Return, round by round, the throughput of variant `name` over that of variant `to`, the first by default."""
        base = self.throughputs(to or self.names[0])
        return [mine / other for mine, other in zip(self.throughputs(name), base, strict=True)]

    def table(self) -> pd.DataFrame:
        """Return medians, ratios to the first variant and their spread, one variant a row."""
        rows = {}
        for name in self.names:
            rates, ratios = self.throughputs(name), self.ratios(name)
            median = self.median(name)
            rows[name] = {
                "images/s": f"{statistics.median(rates):,.0f}",
                "lowest – highest": f"{min(rates):,.0f} – {max(rates):,.0f}",
                "ms a step": f"{median.step_ms:.1f}",
                "waiting for data": f"{median.loading_share:.0%}",
                "ratio": f"{statistics.median(ratios):.2f}×" if name != self.names[0] else "1×",
                "its spread": f"{min(ratios):.2f} – {max(ratios):.2f}" if name != self.names[0] else "",
            }
        return pd.DataFrame.from_dict(rows, orient="index")

    def verdict(self, name: str, to: str | None = None) -> str:
        """Say in one sentence what variant `name` gained over variant `to`, the first by default."""
        to = to or self.names[0]
        ratios = self.ratios(name, to)
        ratio, spread = statistics.median(ratios), f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
        if no_effect(min(ratios), max(ratios)):
            return f"{name} against {to}: no measurable effect here ({ratio:.2f}×; {spread})."
        word = "faster" if ratio > 1 else "slower"
        return f"{name} against {to}: {ratio:.2f}× the throughput, {word} in every round ({spread})."


@dataclass(frozen=True)
class TwoClocks:
    """Loading alone and compute alone, what they predict for the loop of both, and the loop, all timed in turn.

    Attributes
    ----------
    loading, compute, loop : tuple of Timing
        One a round.
    workers : int
        Worker processes of the loader; with some it loads in the background.
    host_ms : float or None
        On a GPU, the time in milliseconds that a step keeps this process while the GPU has nothing else to do: it
        launches the GPU's work, and goes on. None without a GPU, where a step keeps this process all the time.
    """

    loading: tuple[Timing, ...]
    compute: tuple[Timing, ...]
    loop: tuple[Timing, ...]
    workers: int
    host_ms: float | None = None

    @property
    def loading_ms(self) -> float:
        """Median time of loading a mini-batch, in milliseconds."""
        return statistics.median(timing.step_ms for timing in self.loading)

    @property
    def compute_ms(self) -> float:
        """Median time of a step on a mini-batch that is there already, in milliseconds."""
        return statistics.median(timing.step_ms for timing in self.compute)

    @property
    def loop_ms(self) -> float:
        """Median time of a mini-batch in the loop of both, in milliseconds."""
        return statistics.median(timing.step_ms for timing in self.loop)

    @property
    def predictions(self) -> list[float]:
        """What the two clocks of each round predict for the loop, in milliseconds a mini-batch.

        With workers the larger of the two: loading goes on during a step. Without, their sum; but a GPU computes while
        this process loads the next mini-batch, so there it is compute, or else loading and what a step keeps the host.
        """
        rounds = zip((timing.step_ms for timing in self.loading), (timing.step_ms for timing in self.compute), strict=True)
        if self.workers:
            return [max(loading, compute) for loading, compute in rounds]
        return [max(loading + (self.host_ms or compute), compute) for loading, compute in rounds]

    @property
    def predicted_ms(self) -> float:
        """Median of the predictions, in milliseconds."""
        return statistics.median(self.predictions)

    @property
    def errors(self) -> list[float]:
        """By how much each round's loop took longer than predicted, as a share of the prediction; below 0 if shorter."""
        return [timing.step_ms / predicted - 1 for timing, predicted in zip(self.loop, self.predictions, strict=True)]

    @property
    def error(self) -> float:
        """Median of the errors."""
        return statistics.median(self.errors)

    @property
    def ceiling(self) -> float:
        """How many times as fast the loop would be if loading cost nothing; median of the rounds."""
        return statistics.median(
            loop.step_ms / compute.step_ms for loop, compute in zip(self.loop, self.compute, strict=True)
        )

    def table(self) -> pd.DataFrame:
        """Return the clocks, the prediction and the loop, a row each, with their spread over the rounds."""
        rows = {
            "loading alone": [timing.step_ms for timing in self.loading],
            "compute alone": [timing.step_ms for timing in self.compute],
            "the loop, predicted": self.predictions,
            "the loop, measured": [timing.step_ms for timing in self.loop],
        }
        columns = {name: [f"{statistics.median(ms):.1f}", f"{min(ms):.1f} – {max(ms):.1f}"] for name, ms in rows.items()}
        return pd.DataFrame.from_dict(columns, orient="index", columns=["ms a mini-batch", "lowest – highest"])

    def verdict(self) -> str:
        """Say in one sentence what the two clocks predicted, and by how much the loop was longer (+) or shorter (-)."""
        same = no_effect(1 + min(self.errors), 1 + max(self.errors))
        return (
            f"{self.predicted_ms:.1f} ms predicted, {self.loop_ms:.1f} ms measured: {self.error:+.0%} "
            f"({min(self.errors):+.0%} to {max(self.errors):+.0%}){', no measurable difference' * same}."
        )


def no_effect(lowest: float, highest: float) -> bool:
    """Whether the spread of a ratio reaches 1, within the 1 % that two runs of the same loop differ by anyway."""
    return lowest <= 1.01 and highest >= 0.99


def warmup_steps(loader: Iterable) -> int:
    """Steps until a loader runs evenly: its workers are up and what they had prefetched at the start is used up."""
    workers = getattr(loader, "num_workers", 0)
    return 2 + workers * (getattr(loader, "prefetch_factor", None) or 0)


def loop(
    loader: Iterable, step: training.Step, steps: int, warmup: int | None = None, longest: float | None = None
) -> Timing:
    """Time training steps after a warm-up; the loader starts anew when an epoch ends.

    Parameters
    ----------
    loader : iterable
        A DataLoader, or anything that yields mini-batches; see `training.batch_size` for what counts as images.
    step : callable
        Called with a mini-batch as `training.call` does: with images and labels, if it is a pair of them.
    steps : int
        Steps to time, at most.
    warmup : int, optional
        Steps before that, at most; `warmup_steps` by default.
    longest : float, optional
        Seconds after which no further step begins, once two are timed, and no further one of the warm-up; by default
        ``longest_run`` of the preset.
    """
    longest = config.preset().longest_run if longest is None else longest
    with training.batches(loader) as batches:
        begin = time.perf_counter()
        for _ in range(warmup_steps(loader) if warmup is None else warmup):
            training.call(step, next(batches))
            if time.perf_counter() - begin >= longest:
                break
        _synchronize()
        images, waits, durations = 0, [], []
        begin = now = time.perf_counter()
        for _ in range(steps):
            start = now
            batch = next(batches)
            waits.append(time.perf_counter() - start)
            training.call(step, batch)
            images += training.batch_size(batch)
            del batch  # to free a mini-batch of photos takes a millisecond, which is no waiting
            now = time.perf_counter()
            durations.append(now - start)
            if now - begin >= longest and len(durations) >= _LEAST:
                break
        _synchronize()
        seconds = time.perf_counter() - begin
    return Timing(images, seconds, tuple(waits), tuple(durations), begin)


def loading(loader: Iterable, seconds: float) -> Timing:
    """Time loading alone, for so many `seconds`, after a warm-up no longer; the loader starts anew when an epoch ends.

    For loaders that need less than a millisecond for a mini-batch: some steps of them would be too short to time.
    """
    with training.batches(loader) as batches:
        begin = time.perf_counter()
        for _ in range(warmup_steps(loader)):
            next(batches)
            if time.perf_counter() - begin >= seconds:
                break
        images, waits = 0, []
        begin = now = time.perf_counter()
        while now - begin < seconds:
            start = now
            images += training.batch_size(next(batches))
            now = time.perf_counter()
            waits.append(now - start)
    return Timing(images, now - begin, tuple(waits), tuple(waits), begin)


def two_clocks(loader: Iterable, step: training.Step, steps: int, rounds: int) -> TwoClocks:
    """Time loading alone, compute alone, and the loop of both, in turn; each after a warm-up.

    Compute alone is `step` on one mini-batch that is kept; loading alone takes mini-batches and does nothing with them.
    A loader with fewer mini-batches than `steps` starts anew; that belongs to its loading.

    Parameters
    ----------
    loader : iterable
        A DataLoader, or anything that yields mini-batches each time it is gone through.
    step : callable
        Called with a mini-batch as `training.call` does. It trains: in all, about 2 × `rounds` × `steps` times.
    steps : int
        Mini-batches in one timed run; rounded up to a multiple of the workers, which deliver theirs in bursts.
    rounds : int
        How often each is timed.

    Raises
    ------
    training.WorkerDied
        If a worker is killed or exits. What a worker or `step` raises is raised here; no worker is left then.
    """
    workers = getattr(loader, "num_workers", 0)
    steps = -(-steps // max(workers, 1)) * max(workers, 1)
    with training.batches(loader) as batches:
        kept = next(batches)
    clocks = in_turn(
        {
            "loading alone": lambda: loop(loader, lambda *batch: None, steps),
            "compute alone": lambda: loop([kept], step, steps),
            "the loop": lambda: loop(loader, step, steps),
        },
        rounds,
    ).timings
    return TwoClocks(*clocks.values(), workers, _host_ms(step, kept, steps))


def in_turn(
    variants: Mapping[str, Callable[[], Timing]], rounds: int, longest: float | None = None
) -> Comparison:
    """Time variants in turn, A B A B …: what else the machine does meanwhile then meets all of them alike.

    Parameters
    ----------
    variants : mapping of str to callable
        Each times one run, such as a `loop`.
    rounds : int
        How often to go through them, at most.
    longest : float, optional
        Seconds after which no further round begins, once there are two; by default ``longest_comparison`` of the
        preset. If rounds are left out, that is printed.
    """
    longest = config.preset().longest_comparison if longest is None else longest
    timings, begin = {name: [] for name in variants}, time.perf_counter()
    with tqdm(total=rounds * len(variants), desc="timing in turn", unit="run", file=sys.stdout) as bar:
        for done in range(rounds):
            if done >= _LEAST and time.perf_counter() - begin >= longest:
                break
            for name, run in variants.items():
                bar.set_postfix_str(name)
                timings[name].append(run())
                bar.update()
        else:
            done = rounds
    if done < rounds:
        print(f"{done} rounds instead of {rounds}: they are slow here, and {longest:g} s were up.")
    return Comparison({name: tuple(runs) for name, runs in timings.items()})


def phases(loader: Iterable, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, float]:
    """Split a training step: mean milliseconds for loading, copy, forward, backward and optimizer.

    The device is waited for between the phases, since otherwise a GPU would do the work of one in the time of the
    next. That costs a little: the phases together are no throughput. Of slow steps fewer are taken, as in `loop`.
    """
    device, longest = training.device_of(model), config.preset().longest_run
    batches, rows = training.endless(loader), []

    def step() -> list[float]:
        marks = [_mark()]
        images, labels = next(batches)
        marks.append(_mark())
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        marks.append(_mark())
        loss = nn.functional.cross_entropy(model(images), labels)
        marks.append(_mark())
        loss.backward()
        marks.append(_mark())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(_mark())
        return [(end - start) * 1e3 for start, end in zip(marks, marks[1:], strict=False)]

    begin = time.perf_counter()
    for _ in range(warmup_steps(loader)):
        step()
        if time.perf_counter() - begin >= longest:
            break
    begin = time.perf_counter()
    for _ in range(steps):
        rows.append(step())
        if len(rows) >= _LEAST and time.perf_counter() - begin >= longest:
            break
    batches.close()
    names = ("loading", "copy", "forward", "backward", "optimizer")
    return {name: statistics.mean(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def stages(functions: Mapping[str, Callable], items: Iterable) -> dict[str, float]:
    """Split what is done to an item: mean microseconds of each function, called with what the one before returned.

    Parameters
    ----------
    functions : mapping of str to callable
        The stages in their order; the first is called with an item.
    items : iterable
        Such as the paths of images. They are gone through twice, and timed the second time: files are read from
        the page cache then, as in every epoch but the first, where the memory is large enough. Of slow ones only the
        first are taken, as in `loop`.
    """
    items, longest = list(items), config.preset().longest_run
    for _ in range(2):
        spent, begin = dict.fromkeys(functions, 0.0), time.perf_counter()
        for done, item in enumerate(items, 1):
            for name, function in functions.items():
                start = time.perf_counter()
                item = function(item)
                spent[name] += time.perf_counter() - start
            if done >= _LEAST and time.perf_counter() - begin >= longest:
                items = items[:done]
                break
    return {name: seconds / len(items) * 1e6 for name, seconds in spent.items()}


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
    while len(times) < repeats and (len(times) < _LEAST or sum(times) < longest * 1e3):
        start = _mark()
        function()
        times.append((_mark() - start) * 1e3)
    return times


def system_calls(function: Callable[[], object]) -> pd.Series:
    """Count what this thread asks of the operating system while `function` runs.

    Returns
    -------
    Series of int
        Its name says who counted: ``"strace"``, where that is installed and may watch this process (Linux): calls by
        their name. Otherwise ``"psutil"``: ``read`` and ``write`` alone, together of all threads (Linux, Windows); or
        nothing (macOS).
    """
    if (counted := _by_strace(function)) is not None:
        return pd.Series(counted, name="strace", dtype=int)
    process = psutil.Process()
    if not hasattr(process, "io_counters"):
        function()
        return pd.Series(dtype=int, name="psutil")
    before = process.io_counters()
    function()
    after = process.io_counters()
    reads, writes = after.read_count - before.read_count, after.write_count - before.write_count
    return pd.Series({"read": reads, "write": writes}, name="psutil")


def onednn(function: Callable[[], object]) -> pd.DataFrame:
    """Count what oneDNN, PyTorch's library for networks on the CPU, does while `function` runs, by its own log.

    The profiler shows a convolution as one operator. The log also shows what the library does inside it: above all
    ``reorder``, which writes a tensor anew in the order that the library computes in.

    Returns
    -------
    DataFrame
        Index `primitive`, such as ``"convolution"``; columns `calls`, int, and `ms`, all of them together. Empty where
        PyTorch has no oneDNN.
    """
    level = torch.backends.mkldnn.VERBOSE_ON
    with tempfile.TemporaryFile() as log:
        sys.stdout.flush()
        terminal = os.dup(1)  # the library writes to the file descriptor, past Python
        os.dup2(log.fileno(), 1)
        try:
            with torch.backends.mkldnn.verbose(level) if torch.backends.mkldnn.is_available() else nullcontext():
                function()
        finally:
            os.dup2(terminal, 1)
            os.close(terminal)
        log.seek(0)
        lines = [line.decode(errors="replace").strip().split(",") for line in log]
    # onednn_verbose,v1,primitive,exec,cpu,reorder,…,milliseconds
    calls = [(line[5], float(line[-1])) for line in lines if line[0] == "onednn_verbose" and line[2:4] == ["primitive", "exec"]]
    table = pd.DataFrame(calls, columns=["primitive", "ms"]).groupby("primitive")["ms"].agg(["size", "sum"])
    return table.set_axis(["calls", "ms"], axis=1)


def read_from_disk_mb(function: Callable[[], object]) -> float | None:
    """Megabytes (10⁶ bytes) that the disk delivers to this process while `function` runs; the page cache does not count.

    None where the system does not tell: it does on Linux.
    """
    if sys.platform != "linux":
        return None
    before = psutil.Process().io_counters().read_bytes
    function()
    return (psutil.Process().io_counters().read_bytes - before) / 1e6


def worker_memory_mb() -> list[float]:
    """Memory of each worker that runs now, in MB (10⁶ bytes).

    Pages that several processes share are charged to each in equal parts (PSS) where the system tells, on Linux;
    elsewhere only the pages that a process has alone count (USS).
    """
    return [getattr(info, "pss", info.uss) / 1e6 for info in _workers()]


def worker_growth_mb(dataset: torch.utils.data.Dataset) -> float:
    """Memory that one forked worker gains in a pass over `dataset`, in MB (10⁶ bytes).

    Counts the pages that the worker has for itself alone (USS), from its first mini-batch of 1,000 items to the end
    of the pass. For Linux: elsewhere processes cannot be forked safely, or not at all.
    """
    loader = torch.utils.data.DataLoader(
        dataset, 1_000, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    before = max(info.uss for info in _workers())
    for _ in batches:
        pass
    return (max(info.uss for info in _workers()) - before) / 1e6


def _by_strace(function: Callable[[], object]) -> dict[str, int] | None:
    """Let strace watch this thread meanwhile; None if it cannot."""
    if not shutil.which("strace"):
        return None
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "calls")
        command = ["strace", "-c", "-o", str(table), "-p", str(threading.get_native_id())]
        strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        if "attached" not in strace.stderr.readline():
            strace.kill()
            strace.communicate()
            return None
        try:
            function()
        finally:
            strace.send_signal(signal.SIGINT)  # lets go of us and writes the table
            strace.communicate()
        # % time, seconds, µs a call, calls, errors if any, name; between two rulers
        _, rows, _ = re.split(r"\n?[- ]*-{6}[- ]*\n", table.read_text())
        calls = {row[-1]: int(row[3]) for row in map(str.split, rows.splitlines())}
        return {name: count for name, count in calls.items() if name not in ("kill", "wait4")}  # those end strace


def _workers() -> list:
    # Only what multiprocessing started here: other children, such as TensorBoard, are no workers.
    return [psutil.Process(child.pid).memory_full_info() for child in multiprocessing.active_children()]


def _host_ms(step: training.Step, batch: object, steps: int) -> float | None:
    if not torch.cuda.is_initialized():
        return None
    times = []
    for _ in range(steps):
        start = _mark()
        training.call(step, batch)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _mark() -> float:
    _synchronize()
    return time.perf_counter()


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
