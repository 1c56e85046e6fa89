"""Checks of notebooks 00 to 03: rates, shares and comparisons. From 01 on the times are simulated."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import Dataset

from helpers.lessons.checks.answering import answered, expect, expect_number, expect_written, slip
from stepscope.base.wording import counted, milliseconds

CLOCKS_AGREE = 0.5  # a share; two clocks around the same work differ by the code between them, more on a busy machine
GPU_SHARE = 1 / 4  # of a step by the host's clock, as long as it is by the GPU's


class _SlowDataset(Dataset):
    """Items that take a while."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.reads: list[int] = []

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index >= len(self):
            raise IndexError(f"Item {index} of a dataset of {len(self)}")
        time.sleep(self.seconds)
        self.reads.append(index)
        return torch.zeros(3), torch.tensor(0)


@answered
def items_per_second(written: Callable[[Dataset, int], float]) -> str:
    """Notebook 00: ``written(dataset, count)`` reads `count` items and returns the items per second."""
    dataset = _SlowDataset(0.004)
    start, start_cpu = time.perf_counter(), time.process_time()
    found = written(dataset, 50)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    expect(len(dataset.reads) == 50, "50 items to be read", counted(len(dataset.reads), "item"))
    expect(len(set(dataset.reads)) == 50, "50 different items", f"{len(set(dataset.reads))} of them, read repeatedly")
    expect(isinstance(found, (int, float)), "a number", repr(found), "items/s")
    hint = f"50 items took {seconds:.2f} s."
    if _agree(found, seconds / 50):
        hint = "That is the seconds of one item: invert it."
    elif _agree(found, seconds):
        hint = "That is the seconds of all items: divide their number by it."
    elif cpu_seconds and _agree(found, 50 / cpu_seconds):
        hint = "time.process_time stops while the code waits: take time.perf_counter."
    expect(_agree(found, 50 / seconds), f"{50 / seconds:.4g}", f"{found:.4g}", "items/s", hint)
    return f"{found:.0f} items/s from a dataset that takes {milliseconds(4)} or more per item."


def _agree(found: float, expected: float) -> bool:
    return abs(found - expected) <= CLOCKS_AGREE * expected


@answered
def share_of_waiting(written: Callable[[list[dict]], float]) -> str:
    """Notebook 01: ``written(events)`` returns the share of the steps, 0 to 1, in which the loop waits for data."""
    for case, waits, steps, gpu in (
        ("a trace of two steps", [8_000, 2_000], [10_000, 6_000], False),
        ("the trace of a GPU", [300, 500, 100], [2_000, 3_000, 1_000], True),
        ("a trace without waiting", [0.0, 0.0], [5_000, 5_000], False),
    ):
        hint = f"Its steps take {sum(steps):,} µs in all, and the loop waits for {sum(waits):,} µs of them."
        found, slips = written(_events(waits, steps, gpu)), _slips(waits, steps)
        mean_wait, mean_step = sum(waits) / (len(waits) + 1), sum(steps) / len(steps)
        slips["A step may have more than one wait: divide sums, not means."] = mean_wait / mean_step
        if gpu:
            said = "A GPU's trace has each step twice, by the host's clock and by the GPU's: take the host's."
            slips[said] = sum(waits) / ((1 + GPU_SHARE) * sum(steps))
        expect_number(found, sum(waits) / sum(steps), f"the share of {case}", hint, slips)
    return "three traces, one of them of a GPU, give the expected shares."


def _slips(waits: Sequence[float], steps: Sequence[float]) -> dict[str, float]:
    """Return the wrong shares that common mistakes give."""
    waiting, stepping = sum(waits), sum(steps)
    shares = [wait / step for wait, step in zip(waits, steps, strict=True)]
    return {
        "That is in percent; a share goes from 0 to 1.": 100 * waiting / stepping,
        "That is the mean of the steps' shares; add up all times, and divide once.": sum(shares) / len(shares),
        "A step's time already includes its wait.": waiting / (waiting + stepping),
    }


def _events(waits: Sequence[float], steps: Sequence[float], gpu: bool) -> list[dict]:
    """Return a trace's events in the format of `torch.profiler`: a step waits for a batch, the first one for two."""
    events, now = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0, "args": {"name": "python"}}], 0.0
    loading = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    for number, (wait, length) in enumerate(zip(waits, steps, strict=True), 4):
        each = wait / 2 if number == 4 else wait
        mark = {"ph": "X", "name": f"ProfilerStep#{number}", "ts": now, "dur": length}
        events += [
            *(
                {"ph": "X", "cat": "user_annotation", "name": loading, "pid": 1, "tid": 1, "ts": start, "dur": each}
                for start in ([now, now + each] if number == 4 else [now])
            ),
            {"ph": "X", "cat": "cpu_op", "name": "aten::conv2d", "pid": 1, "tid": 1, "ts": now + wait, "dur": 90.0},
            mark | {"cat": "user_annotation", "pid": 1, "tid": 1},
            *([mark | {"cat": "gpu_user_annotation", "pid": 0, "tid": 7, "dur": GPU_SHARE * length}] if gpu else []),
        ]
        now += length
    return [*events, {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": now}]


class _Clock:
    """A simulated clock: only simulated work advances it, so no answer depends on this machine's speed."""

    def __init__(self) -> None:
        self.now, self.readings = 0.0, 0

    def __call__(self) -> float:
        self.readings += 1
        return self.now

    def expect_read(self) -> None:
        expect(self.readings > 0, "times from the clock that was given", "no call of it")


@answered
def host_waits(written: Callable) -> str:
    """Notebook 02: ``written(loader, step, clock)`` runs the loop, and returns the share of time that it waits."""
    clock, waits, steps, labels_seen = _Clock(), [900, 4, 4, 40, 4, 4, 40, 4], [200, 20, 20, 20, 40, 20, 20, 20], []

    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for number, wait in enumerate(waits):
            clock.now += wait / 1e3
            yield torch.full((4, 3), float(number)), torch.full((4,), number)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        labels_seen.append(int(labels[0]))
        clock.now += steps[len(labels_seen) - 1] / 1e3

    found = written(loader(), step, clock)
    expect(labels_seen == list(range(len(waits))), f"a step with each of {len(waits)} batches", labels_seen)
    clock.expect_read()
    waiting, stepping = sum(waits[1:]), sum(steps[1:])
    hint = f"After the first step the loop waited for {waiting} ms and stepped for {stepping} ms."
    turns = list(map(sum, zip(waits, steps, strict=True)))
    said = {"That includes the start: leave out the first step and its wait.": sum(waits) / sum(turns)}
    said |= {"The loop's time is its waits plus its steps.": waiting / stepping} | _slips(waits[1:], turns[1:])
    expect_number(found, waiting / sum(turns[1:]), "the share", hint, said)
    return f"the host waits for {found:.0%} of the time, once the loop is running."


class _Machine:
    """A machine on which a loop takes known times, while the machine's other load changes.

    `ms` is the mean duration of a step, for each number of workers: workers deliver at the same moment, so with w
    workers one step in w waits. Because of others' work the waits for batches `slower`, numbered over all loaders, are
    three times as long, and those of the fifth loader with `hit` workers twice as long.
    """

    START, STEP, AHEAD = 0.3, 1.0, 2  # seconds to start a worker; ms of a step; batches ready per worker

    def __init__(self, ms: dict[int, float], slower: range = range(0), hit: int | None = None):
        self.ms, self.slower, self.hit, self.clock = ms, slower, hit, _Clock()
        self.batches: list[int] = []  # for each batch, its loader's workers
        self.loaders: list[int] = []  # for each loader, its workers
        self.steps, self.filled_again = 0, False  # whether a queue filled while others were timed

    def ms_of_ten(self, workers: int) -> float:
        """Return the duration of ten steps that begin with a wait."""
        period = max(workers, 1)
        return 10 * self.STEP + math.ceil(10 / period) * period * (self.ms[workers] - self.STEP)

    def new_loader(self, workers: int) -> _SimulatedLoader:
        self.loaders.append(workers)
        return _SimulatedLoader(self, workers)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.steps += 1
        self.clock.now += self.STEP / 1e3


class _SimulatedLoader:
    def __init__(self, machine: _Machine, workers: int):
        self.machine, self.num_workers = machine, workers
        self.hit = workers == machine.hit and machine.loaders.count(workers) == 5

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        machine, workers, ready = self.machine, self.num_workers, 0
        period = max(workers, 1)
        for number in range(len(self)):
            again = number > 0 and machine.batches[-1] != workers
            machine.filled_again |= again
            if again or number == 1:
                ready = machine.AHEAD * workers
            wait = 0.0
            if ready == 0:
                wait = period * (machine.ms[workers] - machine.STEP) / 1e3
                ready = period
            ready -= 1
            wait *= 3 if len(machine.batches) in machine.slower else 2 if self.hit else 1
            machine.clock.now += wait + (machine.START * workers if number == 0 else 0)
            machine.batches.append(workers)
            yield torch.zeros(4, 3), torch.zeros(4)


@answered
def best_workers(written: Callable) -> str:
    """Notebook 03: ``written(new_loader, step, candidates, clock)`` returns the best number of workers."""
    for case, machine in (
        ("a machine on which others work in one round", _Machine({0: 32.0, 1: 40.0, 2: 16.0, 3: 19.5, 4: 20.0}, hit=2)),
        ("a machine on which others begin to work meanwhile",
            _Machine({0: 16.0, 1: 20.0, 2: 8.0, 3: 12.0, 4: 14.0}, range(140, 1_000_000))),
        ("a machine on which others end their work meanwhile",
            _Machine({0: 20.0, 1: 8.0, 2: 12.0, 4: 15.0}, range(100))),
        ("an idle machine, on which 4 workers are a little faster than 2", _Machine({1: 12.0, 2: 10.0, 4: 9.0})),
    ):  # fmt: skip
        candidates = list(machine.ms)
        found = written(machine.new_loader, machine.step, candidates, machine.clock)
        if not machine.clock.readings:
            expect_written(found)
        machine.clock.expect_read()
        rarest = min(candidates, key=machine.batches.count)
        batches = f"{machine.batches.count(rarest)} batches for {counted(rarest, 'worker')}"
        expect(machine.batches.count(rarest) >= 50, "5 rounds of 10 batches for each number", batches)
        stepped = f"{machine.steps} for {len(machine.batches)} batches"
        expect(2 * machine.steps >= len(machine.batches), "a step with each batch", stepped)
        turns = [workers for workers, _ in itertools.groupby(machine.batches)]
        expect(
            len(turns) >= 3 * len(candidates),
            "rounds, each with all numbers of workers",
            f"the order {', '.join(map(str, turns[:8]))}{', …' if len(turns) > 8 else ''}",
            hint="Other work on the machine then affects one number and not the next.",
        )
        expect(found in candidates, f"one of the candidates {candidates}", repr(found))
        when = "after others were timed" if machine.filled_again else "at first"
        slips = {
            f"Its first batch comes soonest, because each worker takes {machine.START} s to start.": min(candidates),
            f"It has the most batches ready {when}, {machine.AHEAD} per worker.": max(candidates),
            "10 batches of 4 workers hold 3 long waits, as 12 do: time whole periods, and divide by their batches.":
                min(candidates, key=machine.ms_of_ten),
            "Its batches take longest.": max(candidates, key=lambda workers: machine.ms[workers]),
        }  # fmt: skip
        best = min(candidates, key=lambda workers: machine.ms[workers])
        otherwise = "Do all rounds count, and whole periods of the waits?"
        expect(found == best, best, found, case, slip(found, slips, otherwise))
    return "the best number on four machines, also while others begin or end their work there."
