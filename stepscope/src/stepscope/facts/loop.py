"""A loop as the stopwatch sees it, without the profiler, and the machine that it ran on."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from stepscope import thresholds
from stepscope.base.confidence import without_hiccup


@dataclass(frozen=True)
class Machine:
    """Where a loop ran, and how busy the machine was."""

    device: str  # the GPU's name, or "CPU"
    processor: str  # its name, "" if unknown
    cores: int  # that the process may use
    torch: str  # version, as the next one
    python: str
    cuda: bool = False  # whether PyTorch can use a GPU
    held_share: float = 0.0  # of the time, in which other processes had the cores


@dataclass(frozen=True)
class Step:
    """A timed step; times in ms. Of both queued times the part that the loop's own workers caused is excluded."""

    wait_ms: float  # for its batch
    duration_ms: float  # with the wait
    queued_wait_ms: float = 0.0  # the part of the wait in which other processes had the cores
    queued_work_ms: float = 0.0  # the same of the rest
    first: bool = False  # of an epoch


@dataclass(frozen=True)
class Pauses:
    """Work between two epochs, such as evaluating and saving."""

    count: int = 0
    mean_ms: float = 0.0
    ms_per_step: float = 0.0  # all pauses, divided by the steps of the epochs before them
    line: str = ""  # the user's line that takes most of the time; "" if unknown


@dataclass(frozen=True)
class Loop:
    """Timed steps, and how their batches arrive. The derived numbers exclude time in which other processes had the
    cores, and the first steps of epochs, unless each epoch has only one.
    """

    steps: tuple[Step, ...]
    total_ms: float  # of all steps, until a GPU has finished its work
    asynchronous: bool = False  # whether a GPU may compute beside the host
    workers: int | None = None  # None if unknown
    start_ms: float = 0.0  # between two epochs, to end and start workers, with the first batch; 0 if they persist
    epoch_steps: int | None = None  # None if unknown
    only_first: bool = False  # whether each batch is the first of an iterator that has more, and workers start for it
    transfer_ms: float = 0.0  # from asking for a batch that a worker has ready to having it
    queued_ms: float = 0.0  # for each batch, how long its worker was ready, while other processes had the cores
    cpu_ms: float = 0.0  # CPU time of a step, all threads of this process together; 0 if unknown
    pickled_bytes: float = 0.0  # of a batch that workers send through a pipe: only tensors go through shared memory
    tensors: int = 0  # in a batch
    line: str = ""  # the user's line that gets a batch; "" if unknown
    pauses: Pauses = Pauses()

    @cached_property
    def usual(self) -> tuple[Step, ...]:
        """The steps that count: without the first steps of epochs."""
        return tuple(step for step in self.steps if not step.first) or self.steps

    @cached_property
    def waits_ms(self) -> list[float]:
        """The wait of each step that counts; a single stall counts as the next longest wait."""
        return without_hiccup([step.wait_ms - min(step.wait_ms, step.queued_wait_ms) for step in self.usual])

    @property
    def wait_ms(self) -> float:
        """Mean wait for a batch."""
        return statistics.mean(self.waits_ms)

    @property
    def usual_wait_ms(self) -> float:
        """Median wait for a batch."""
        return statistics.median(self.waits_ms)

    @cached_property
    def work_ms(self) -> float:
        """Mean time of a step without its wait."""
        if self.asynchronous:  # most steps only launch kernels, and one waits for the kernels of all
            firsts = sum(step.duration_ms for step in self.steps) - sum(step.duration_ms for step in self.usual)
            return (self.total_ms - firsts - sum(step.wait_ms for step in self.usual)) / len(self.usual)
        works = ((step.duration_ms - step.wait_ms, step.queued_work_ms) for step in self.usual)
        return statistics.mean(without_hiccup([work - min(work, queued) for work, queued in works]))

    @property
    def least_ms(self) -> float:
        """The fastest step without its wait; 0 if it is unknown, as beside a GPU."""
        lefts = (step.duration_ms - step.wait_ms - step.queued_work_ms for step in self.usual)
        return 0.0 if self.asynchronous else min((left for left in lefts if left > 0), default=0.0)

    @property
    def hiccup_ms(self) -> float:
        """A step far longer than the next longest, as which it counts; 0 if there is none."""
        longest = sorted(step.duration_ms for step in self.usual)[-2:]
        return longest[-1] if not self.asynchronous and longest[-1] > thresholds.STALL * longest[0] else 0.0
