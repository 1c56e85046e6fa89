"""A loop timed by the stopwatch, without the profiler, and the machine on which the loop ran."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cached_property

from stepscope import thresholds
from stepscope.base.confidence import without_hiccup


@dataclass(frozen=True)
class GpuMemory:
    """The memory of the GPU on which a loop trains, as PyTorch's allocator counts it."""

    total_bytes: int  # of the GPU
    free_bytes: int  # that this process can have: what no process uses, and what its own allocator keeps
    allocated_bytes: int  # at most, since the process began
    reserved_bytes: int  # at most, since the process began, with what the allocator keeps for later
    retries: int  # calls that found no memory, freed what the allocator kept, and tried again: each waits for the GPU


@dataclass(frozen=True)
class Card:
    """The state of a GPU while a loop trains on it."""

    clock_mhz: float  # of the multiprocessors
    most_mhz: float  # the highest clock that the GPU has
    power_w: float  # 0 if unknown
    limit_w: float  # of the power; 0 if unknown
    limits: tuple[str, ...] = ()  # why the clock is not higher, such as "its power limit"
    others: int = 0  # number of other processes that compute on it


@dataclass(frozen=True)
class Machine:
    """Where a loop ran, and how busy the machine was."""

    device: str  # the GPU's name, or "CPU"
    processor: str  # the processor's name; "" if unknown
    cores: int  # number of cores that the process may use
    torch: str  # version of PyTorch
    python: str  # version of Python
    cuda: bool = False  # whether PyTorch can use a GPU
    held_share: float = 0.0  # share of the time in which the loop was queued for a core because of other processes
    memory: GpuMemory | None = None  # None without a GPU, or if unknown
    card: Card | None = None  # None without a GPU, or if unknown


@dataclass(frozen=True)
class Step:
    """A timed step. Queueing for a core that the loop's own workers caused is excluded from both queued times."""

    wait_ms: float  # wait for the batch
    duration_ms: float  # duration of the step, with the wait
    queued_wait_ms: float = 0.0  # part of the wait in which other processes used the cores
    queued_work_ms: float = 0.0  # part of the work in which other processes used the cores
    first: bool = False  # whether the step is the first of an epoch


@dataclass(frozen=True)
class Pauses:
    """Work between two epochs, such as evaluating and saving."""

    count: int = 0  # number of pauses
    mean_ms: float = 0.0  # mean duration of a pause
    ms_per_step: float = 0.0  # total duration of the pauses, divided by the steps of the epochs before them
    line: str = ""  # the user's line that takes most of the time; "" if unknown
    of_workers: float = 0.0  # share of the pauses in which workers of another loader start or end


@dataclass(frozen=True)
class LongSteps:
    """Steps that take far longer than most steps, such as every tenth step, which evaluates."""

    count: int = 0  # number of long steps that were sampled; 0 if long steps were not seen, or not again
    every: float = 0.0  # mean number of steps from one long step to the next
    usual_ms: float = 0.0  # median time of a step without its wait
    least_ms: float = 0.0  # shortest long step, without its wait
    mean_ms: float = 0.0  # mean time of a long step without its wait
    other: float = 0.0  # share of the additional time that goes to work which the usual steps do not do
    line: str = ""  # the user's line that takes most of this work; "" if unknown
    training: float = 0.0  # share of this work in backward passes and optimizers

    @property
    def distinct(self) -> bool:
        """Whether several long steps do other work, instead of more of the same work."""
        return self.count > 1 and self.every >= 2 and self.other >= thresholds.OTHER_WORK and not self.trains

    @property
    def once(self) -> bool:
        """Whether one long step does other work: it is not known whether it is the only one."""
        return self.count == 1 and self.every >= 2 and self.other >= thresholds.OTHER_WORK and not self.trains

    @property
    def trains(self) -> bool:
        """Whether the long steps train more, such as a second network in every n-th step."""
        return self.training >= thresholds.TRAINS

    @property
    def ms_per_step(self) -> float:
        """Additional time of the long steps, divided by all steps, in ms."""
        return (self.mean_ms - self.usual_ms) / self.every if self.count else 0.0


@dataclass(frozen=True)
class Trend:
    """What grows from one step to the next; by default nothing does for certain."""

    longer_ms: float = 0.0  # how much longer a step takes than the step before it
    steps: float = 0.0  # number of steps from the first step to the mean timed step
    line: str = ""  # the user's line whose time grows most; "" if unknown
    grown_bytes: float = 0.0  # growth of the process's own memory in a step
    grown_gpu_bytes: float = 0.0  # growth of the memory of tensors on the GPU in a step
    kept: str = ""  # the user's line that keeps tensors or arrays of each step; "" if unknown


@dataclass(frozen=True)
class Loop:
    """Timed steps, and how their batches arrive. The properties exclude time in which other processes used the cores,
    the first step of each epoch, unless every epoch has only one step, and long steps that do other work.
    """

    steps: tuple[Step, ...]
    total_ms: float  # duration of all steps, until a GPU has finished its work
    asynchronous: bool = False  # whether a GPU may compute while the host continues
    workers: int | None = None  # number of workers; None if unknown
    start_ms: float = 0.0  # time between epochs: to end and start workers, until the first batch arrives
    persistent: bool = False  # whether the same workers serve all epochs
    epoch_steps: int | None = None  # number of steps in an epoch; None if unknown
    loader_changed: bool = False  # whether later epochs used another DataLoader than earlier epochs
    only_first: bool = False  # whether each batch is the first of several in a new iterator, which starts workers
    transfer_ms: float = 0.0  # time from the request for a ready batch until the batch arrives from its worker
    queued_ms: float = 0.0  # time per batch in which the workers were queued for a core
    cpu_ms: float = 0.0  # CPU time of a step, all threads of this process together; 0 if unknown
    pickled_bytes: float = 0.0  # NumPy arrays in a batch: workers pickle them, while tensors go through shared memory
    tensors: int = 0  # number of tensors in a batch
    on_gpu: bool = False  # whether the loader itself makes batches on a GPU
    line: str = ""  # the user's line that fetches a batch; "" if unknown
    tracers: tuple[str, ...] = ()  # profilers and tracers of the script, such as "cProfile", that slowed the steps
    pauses: Pauses = Pauses()
    long: LongSteps = LongSteps()
    trend: Trend = Trend()

    @cached_property
    def usual(self) -> tuple[Step, ...]:
        """The steps without the first step of each epoch, unless each is the first, and without distinct long steps."""
        return self._not_long(tuple(step for step in self.steps if not step.first) or self.steps)

    def _not_long(self, steps: tuple[Step, ...]) -> tuple[Step, ...]:
        if not self.long.distinct:
            return steps
        return tuple(step for step in steps if step.duration_ms - step.wait_ms < self.long.least_ms) or steps

    @cached_property
    def waits_ms(self) -> list[float]:
        """The waits of the usual steps in ms, without queueing; a single stall counts as the next longest wait."""
        return without_hiccup([step.wait_ms - min(step.wait_ms, step.queued_wait_ms) for step in self.usual])

    @property
    def wait_ms(self) -> float:
        """Mean wait for a batch in ms."""
        return statistics.mean(self.waits_ms)

    @property
    def usual_wait_ms(self) -> float:
        """Median wait for a batch in ms."""
        return statistics.median(self.waits_ms)

    @cached_property
    def work_ms(self) -> float:
        """Mean time of a step without its wait, in ms."""
        if self.asynchronous:  # most steps only launch kernels; a few steps wait for the kernels of all steps
            counted = self._not_long(self.steps)  # the first steps, too, whose kernels take as long
            others = sum(step.duration_ms for step in self.steps) - sum(step.duration_ms for step in counted)
            return (self.total_ms - others - sum(step.wait_ms for step in counted)) / len(counted)
        works = ((step.duration_ms - step.wait_ms, step.queued_work_ms) for step in self.usual)
        return statistics.mean(without_hiccup([work - min(work, queued) for work, queued in works]))

    @property
    def least_ms(self) -> float:
        """Time of the fastest step without its wait, in ms; 0 if unknown, as with a GPU."""
        lefts = (step.duration_ms - step.wait_ms - step.queued_work_ms for step in self.usual)
        return 0.0 if self.asynchronous else min((left for left in lefts if left > 0), default=0.0)

    @property
    def hiccup_ms(self) -> float:
        """Duration in ms of a single step that is far longer than the next longest step; 0 if there is none."""
        longest = sorted(step.duration_ms for step in self.usual)[-2:]
        return longest[-1] if not self.asynchronous and longest[-1] > thresholds.STALL * longest[0] else 0.0
