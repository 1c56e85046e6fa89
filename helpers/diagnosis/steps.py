"""What a step does beside its operators: sampled line by line, while the profiler says when an operator runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from helpers.diagnosis import sampling
from helpers.diagnosis.result import Finding
from helpers.timing import profiling
from helpers.wording import percent

SAMPLE = 0.001  # seconds from one look at the line that runs to the next
SECONDS, MOST_STEPS = 0.5, 50  # of sampling, or so many steps
MOST_OPERATORS = 20_000  # of all steps: reading so many takes a second
LEAST_STEPS = 3
LEAST_MS = 1.0  # of a step: a shorter one is mostly calls, and samples say little of it
# Seconds without an operator that count: from one operator to the next, PyTorch's own code takes some 10 µs.
GAP = 1e-4
SHARE = 0.1  # of a step, of one function: with 200 samples it is 8 to 12%

STEP = "helpers.diagnosis.step"  # what the profiler calls a step
# What a line may call so that it counts to the training itself: between the operators this is PyTorch's own work.
_TRAINING = (
    r"[/\\]torch[/\\](nn|optim|autograd|amp|distributed|compiler|_dynamo|_inductor|_functorch|_tensor\.py.*backward)"
)


@dataclass(frozen=True)
class Outside:
    """What a function of the reader's does in steps while no operator runs.

    Attributes
    ----------
    share, waited : float
        Share of the steps' time, 0 to 1, and what of that the function waits.
    line : str
        The line that takes most of it.
    """

    share: float
    waited: float
    line: str


@dataclass(frozen=True)
class Sampled:
    """Steps that were sampled.

    Attributes
    ----------
    samples : list of Sample
        Those within steps.
    operators : array of float, shape (operators, 2)
        Begin and end of each operator of the thread that no other one calls, in s as those of the samples, in order.
    names : list of str
        Their names.
    """

    samples: list[sampling.Sample]
    operators: np.ndarray
    names: list[str]

    def outside(self, often: frozenset[str]) -> list[Outside]:
        """Return what each function of the reader's does while no operator runs, the longest first.

        What is between two operators of those that are called `often` is no such time: it belongs to calling them.
        """
        operators, found = self._merged(often), {}
        total = sum(each.end - each.begin for each in self.samples)
        for each in self.samples:
            seconds, own = _outside(operators, each.begin, each.end), each.own
            if own is not None and seconds > 0 and not _trains(each):
                waited = each.waited * seconds / (each.end - each.begin)
                found.setdefault((own.file, own.name, own.first), []).append((own, seconds, waited))
        sums = [
            Outside(
                sum(seconds for _, seconds, _ in each) / total,
                sum(waited for _, _, waited in each) / total,
                sampling.place((own, seconds) for own, seconds, _ in each),
            )
            for each in found.values()
        ]
        return sorted((each for each in sums if each.line), key=lambda each: -each.share)

    def line_of(self, names: frozenset[str]) -> str:
        """Return the reader's own line that calls most of the operators with these names; "" if it is unknown.

        If that is in a ``forward``, the line that calls the network is named, too.
        """
        starts = np.array([begin for (begin, _), name in zip(self.operators, self.names, strict=True) if name in names])
        counts = [float(np.diff(np.searchsorted(starts, [each.begin, each.end]))[0]) for each in self.samples]
        line = sampling.place(zip((each.own for each in self.samples), counts, strict=True))
        caller = sampling.place(zip((each.caller for each in self.samples), counts, strict=True))
        return line if caller in ("", line) else f"{line}, called at {caller}"

    def _merged(self, names: frozenset[str]) -> np.ndarray:
        """Return the operators' begins and ends, with those of these names that follow each other as one."""
        chosen = np.array([name in names for name in self.names], bool)
        first = np.flatnonzero(~(chosen & np.roll(chosen, 1)) | (np.arange(len(chosen)) == 0))
        ends = self.operators[np.append(first[1:], len(chosen))[: len(first)] - 1, 1]
        return np.stack([self.operators[first, 0], ends], axis=1)


def _outside(operators: np.ndarray, begin: float, end: float) -> float:
    """Return for how many seconds of an interval no operator runs, short gaps left out."""
    first, last = np.searchsorted(operators[:, 1], begin), np.searchsorted(operators[:, 0], end)
    before = operators[first - 1, 1] if first > 0 else -np.inf
    after = operators[last, 0] if last < len(operators) else np.inf
    gaps = np.concatenate([[before], operators[first:last].ravel(), [after]]).reshape(-1, 2)
    gaps = gaps[gaps[:, 1] - gaps[:, 0] > GAP].clip(begin, end)
    return float((gaps[:, 1] - gaps[:, 0]).sum())


def most(operators: float) -> int:
    """Return how many steps to sample at most, of which each has so many operators."""
    return max(LEAST_STEPS, min(MOST_STEPS, int(MOST_OPERATORS / max(operators, 1))))


def sample(batches: Iterator, take: Callable[[object], object], within: Callable, steps: int) -> Sampled:
    """Take steps with the sampler and the profiler on, until there are so many or the time is up.

    One more comes before them and does not count: before its first operator the profiler makes itself ready, which
    took 6 ms on a quiet machine.

    Parameters
    ----------
    batches : iterator
    take : callable
        Takes a step with a batch.
    within : callable
        The function of Python that `take` calls for the step alone.
    steps : int
        Steps at most.
    """
    begun, spent = [], 0.0
    sampler = sampling.Sampler(within.__code__, SAMPLE)
    with torch.profiler.profile(activities=profiling.activities()) as profiler, sampler:
        while len(begun) <= steps and (len(begun) <= LEAST_STEPS or spent < SECONDS):
            batch = next(batches)
            with torch.profiler.record_function(STEP):
                begun.append(time.perf_counter())
                take(batch)
            spent += time.perf_counter() - begun[-1] if len(begun) > 1 else 0.0
            del batch
    samples = [each for each in sampler.samples if each.frames and each.begin >= begun[1]]
    operators, names = _operators(profiler, begun)
    return Sampled(samples, operators, names)


def _operators(profiler: torch.profiler.profile, begun: list[float]) -> tuple[np.ndarray, list[str]]:
    """Return the outermost operators of the thread that takes the steps, by the clock of `begun`, and their names."""
    events = [each for each in profiler.events() if each.device_type == torch.autograd.DeviceType.CPU]
    marks = sorted((each for each in events if each.name == STEP), key=lambda each: each.time_range.start)
    shift = np.median([begin - mark.time_range.start / 1e6 for begin, mark in zip(begun, marks, strict=True)])
    found, names, until = [], [], -np.inf
    for each in sorted(events, key=lambda each: (each.time_range.start, -each.time_range.end)):
        ours = each.thread == marks[0].thread and not each.is_user_annotation
        if ours and each.time_range.start >= until:
            until = each.time_range.end
            found.append((each.time_range.start / 1e6 + shift, until / 1e6 + shift))
            names.append(each.name)
    return np.array(found).reshape(-1, 2), names


def _trains(each: sampling.Sample) -> bool:
    """Whether the reader's own line calls the network, the backward pass or the optimizer."""
    inside = each.inside
    return bool(inside) and bool(re.search(_TRAINING, f"{inside[-1].file}:{inside[-1].name}"))


def findings(sampled: Sampled, often: frozenset[str], work: float, limit: float) -> Iterator[Finding]:
    """Yield the functions in which a step does something else than to run operators.

    Parameters
    ----------
    sampled : Sampled
    often : set of str
        Operators for which it was found that they are called too often.
    work : float
        What is left of a step that does not wait for its batch: a share of the step.
    limit : float
        The share of the step that this can gain at most.
    """
    for each in sampled.outside(often):
        gain = min(each.share * work, limit)
        if gain >= SHARE:
            waits = ", and waits" if each.waited >= each.share / 2 else ""
            yield Finding(
                "the step does something else", "host", gain,
                f"In {percent(gain)} of the time no operator runs, but a function of yours{waits}: mostly at "
                f"{each.line}",
                "# move it out of the step, or do it every n-th step", "work between the operators",
            )  # fmt: skip
