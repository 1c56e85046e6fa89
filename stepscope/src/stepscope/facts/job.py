"""All ranks of a job together: the cost of communication, and the rank that delays the job."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope import thresholds

LATE_IN = ("loading", "computing", "other")  # the work in which a late rank takes longer than the others


@dataclass(frozen=True)
class Rank:
    """Communication of a rank in a step, in ms."""

    name: str
    exposed_ms: float
    waiting_ms: float  # the part of it in which another rank was not ready
    overlapped_ms: float
    transfer_ms: float  # the part of the exposed time in which data moved
    operations: float
    megabytes: float | None
    efficiency: float  # share of a step without exposed communication


@dataclass(frozen=True)
class Exchanges:
    """Some of the operations that exchange data."""

    per_step: float = 0.0
    ms: float = 0.0  # a step, from the moment at which the last rank began each
    kinds: tuple[str, ...] = ()  # names of operations, the most frequent first
    total_bytes: float = 0.0  # a step
    median_bytes: float | None = None
    largest_bytes: float | None = None


@dataclass(frozen=True)
class Job:
    """All ranks of a job."""

    ranks: tuple[Rank, ...]
    steps: int  # of each rank
    step_ms: float  # mean
    recorded: bool  # whether the traces hold operations that exchange data, in the steps or outside of them
    all: Exchanges = Exchanges()
    gradients: Exchanges = Exchanges()  # without broadcasts
    buffers: Exchanges = Exchanges()  # broadcasts, if every step has some
    small: Exchanges = Exchanges()  # gradients' operations of few bytes, if a step has many
    sharded: bool = False  # whether the operations gather or scatter weights
    sizes_known: bool = True
    unequal: tuple[str, ...] = ()  # sentences on operations in which not all ranks took part
    straggler: str | None = None  # the rank that is late
    late_ms: float = 0.0  # by which it is late in a step
    late_in: str = ""  # "loading", "computing" or "other"
    late_longer_ms: float = 0.0  # by which that takes longer than on the other ranks

    @property
    def efficiency(self) -> float:
        """Mean share of a step without exposed communication."""
        return sum(rank.efficiency for rank in self.ranks) / len(self.ranks)

    @property
    def least_transfer_ms(self) -> float:
        """Exposed transfer of the rank with the least: on the other ranks, it has further causes."""
        return min(rank.transfer_ms for rank in self.ranks)

    @property
    def broadcasting_ms(self) -> float:
        """Exposed transfer of buffers."""
        return min(self.buffers.ms, self.least_transfer_ms)

    @property
    def latency_ms(self) -> float:
        """Exposed transfer of small operations; 0 if it is slight."""
        if not (self.small.per_step and self.gradients.ms):
            return 0.0
        latency = (self.least_transfer_ms - self.broadcasting_ms) * self.small.ms / self.gradients.ms
        return latency if latency >= thresholds.WORTH * self.step_ms else 0.0

    @property
    def transfer_ms(self) -> float:
        """Exposed transfer of the rest."""
        return self.least_transfer_ms - self.broadcasting_ms - self.latency_ms

    @property
    def overlapped(self) -> float:
        """Share of the communication that overlaps with computation."""
        overlapped = sum(rank.overlapped_ms for rank in self.ranks) / len(self.ranks)
        return overlapped / max(overlapped + self.transfer_ms, 1e-6)
