"""All ranks of a job together: the cost of communication, and the rank that delays the job."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope import thresholds

LATE_IN = ("loading", "computing", "other")  # kinds of work in which a late rank may take longer than the other ranks


@dataclass(frozen=True)
class Rank:
    """Mean communication of one rank in a step."""

    name: str
    exposed_ms: float  # communication while the rank does nothing else
    waiting_ms: float  # the part of `exposed_ms` before the last rank began the operation
    overlapped_ms: float  # communication while the rank does other work
    transfer_ms: float  # the part of `exposed_ms` after the last rank began the operation
    operations: float  # number of operations
    megabytes: float | None  # input of the operations, in 1e6 bytes
    efficiency: float  # share of a step without exposed communication


@dataclass(frozen=True)
class Exchanges:
    """A group of operations that exchange data between ranks."""

    per_step: float = 0.0  # number of operations in a step
    ms: float = 0.0  # time in a step; each operation counts from the moment at which the last rank began it
    kinds: tuple[str, ...] = ()  # names of the operations, the most frequent first
    total_bytes: float = 0.0  # bytes in a step
    median_bytes: float | None = None  # median size of an operation
    largest_bytes: float | None = None  # size of the largest operation


@dataclass(frozen=True)
class Kind:
    """Mean cost in a step of a rank of the operations with one name in one process group."""

    operation: str  # such as "all_reduce"
    group: str  # name of the process group and its ranks; "" if unknown
    per_step: float  # number of operations
    megabytes: float | None  # input of the operations, in 1e6 bytes
    ms: float  # time in which at least one of the operations lasts
    exposed_ms: float  # the part of `ms` in which the rank does nothing else


@dataclass(frozen=True)
class Job:
    """All ranks of a job."""

    ranks: tuple[Rank, ...]
    steps: int  # number of recorded steps of each rank
    step_ms: float  # mean duration of a step
    recorded: bool  # whether the traces contain operations that exchange data, within or outside of the steps
    all: Exchanges = Exchanges()  # all operations within steps
    gradients: Exchanges = Exchanges()  # all operations except broadcasts
    buffers: Exchanges = Exchanges()  # broadcasts, if every step has broadcasts
    small: Exchanges = Exchanges()  # operations in `gradients` with few bytes, if a step has many of them
    by_kind: tuple[Kind, ...] = ()  # all operations within steps; the largest exposed time first
    sharded: bool = False  # whether there are all_gather or reduce_scatter operations, as with sharded weights
    sizes_known: bool = True  # whether the traces contain sizes of operations
    unequal: tuple[str, ...] = ()  # sentences on operations in which not all ranks took part
    straggler: str | None = None  # name of the late rank; None if no rank is late
    late_ms: float = 0.0  # how late the straggler is in a step
    late_in: str = ""  # work in which the straggler takes longer: "loading", "computing" or "other"
    late_longer_ms: float = 0.0  # how much longer the straggler takes for this work than the median of the other ranks
    exchanging_passes: float = 0.0  # number of backward passes before an update in which DDP exchanges gradients
    exchanging_ms: float = 0.0  # time in a step for these exchanges; on the CPU also while other operators run
    backward: str = ""  # the user's line that takes most of the time in backward passes; "" if unknown

    @property
    def repeats(self) -> bool:
        """Whether gradients are exchanged in several backward passes before one update."""
        return self.exchanging_passes >= 2

    @property
    def efficiency(self) -> float:
        """Mean share of a step without exposed communication."""
        return sum(rank.efficiency for rank in self.ranks) / len(self.ranks)

    @property
    def least_transfer_ms(self) -> float:
        """Shortest exposed transfer of a rank in ms: on the other ranks, further transfers have other causes."""
        return min(rank.transfer_ms for rank in self.ranks)

    @property
    def broadcasting_ms(self) -> float:
        """Exposed transfer of buffers, in ms per step."""
        return min(self.buffers.ms, self.least_transfer_ms)

    @property
    def latency_ms(self) -> float:
        """Exposed transfer of small operations, in ms per step; 0 if it is slight."""
        if not (self.small.per_step and self.gradients.ms):
            return 0.0
        latency = (self.least_transfer_ms - self.broadcasting_ms) * self.small.ms / self.gradients.ms
        return latency if latency >= thresholds.WORTH * self.step_ms else 0.0

    @property
    def transfer_ms(self) -> float:
        """Exposed transfer without buffers and small operations, in ms per step."""
        return self.least_transfer_ms - self.broadcasting_ms - self.latency_ms

    @property
    def overlapped(self) -> float:
        """Share of the communication that overlaps with computation."""
        overlapped = sum(rank.overlapped_ms for rank in self.ranks) / len(self.ranks)
        return overlapped / max(overlapped + self.transfer_ms, 1e-6)
