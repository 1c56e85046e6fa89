"""The loader of a loop, and how the items of its dataset are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepscope import thresholds
from stepscope.facts.hazards import Growth

# Parts of an item's work, in this order, and the part that is in none of them.
PARTS = ("opening", "reading", "resizing", "decoding", "collating", "transforming")
REST = "the rest of the dataset"
# Extra keys of `Items.lines`.
ANY, WAITING, IRREGULAR = "any part", "waiting", "irregular"


@dataclass(frozen=True)
class Irregular:
    """Items that take far longer than most whenever they are loaded; by default none."""

    count: int = 0
    share: float = 0.0  # of the time of all items: the time beyond the usual
    waiting: float = 0.0  # the part of this share spent waiting
    usual_ms: float = 0.0  # median of all items
    slowest_ms: float = 0.0
    slowest: str | None = None  # index of the slowest item in the dataset; None for an iterable dataset


@dataclass(frozen=True)
class Items:
    """How items are loaded. Time in which other processes had the cores is excluded where the
    system reports it."""

    count: int  # items loaded with the stopwatch
    ms: float  # of an item
    cpu_ms: float  # CPU time of an item, the rest is waiting; the same as `ms` if the dataset starts programs that work
    batch: int  # items of a batch
    parts: dict[str, float]  # share of the time of each of `PARTS` and of `REST`
    opened: float  # files, for each item
    file_bytes: float | None  # read for each file opened; None where the system does not report it
    slowest: str  # the function that by itself took most time
    waits: dict[str, float] = field(default_factory=dict)  # the waiting within each share in `parts`
    irregular: Irregular = Irregular()
    # The user's line that takes most time, for parts, `WAITING` and `IRREGULAR`; where known
    lines: dict[str, str] = field(default_factory=dict)
    together: bool = False  # whether the dataset loads a whole batch at once

    @property
    def tiny(self) -> bool:
        """Whether calling the dataset for each item takes most of the time."""
        tiny = self.ms < thresholds.TINY_ITEM_MS and self.working(REST) >= thresholds.MOST_OF_AN_ITEM
        return not self.together and tiny

    @property
    def batch_ms(self) -> float:
        """Time in which one process makes a batch."""
        return self.ms * self.batch

    @property
    def batch_cpu_ms(self) -> float:
        """CPU time of a batch."""
        return self.cpu_ms * self.batch

    @property
    def reading(self) -> float:
        """The share of the time that goes to opening and reading files."""
        return self.parts["opening"] + self.parts["reading"]

    @property
    def small_files(self) -> bool:
        """Whether the files that the items open are small."""
        return self.opened > 0 and (self.file_bytes is None or self.file_bytes <= thresholds.SMALL_FILE_BYTES)

    @property
    def waiting(self) -> float:
        """The share of the time in which no core works, without irregular items and reading."""
        waits = [share for part, share in self.waits.items() if part not in ("opening", "reading")]
        return sum(waits) - self.irregular.waiting

    def working(self, part: str) -> float:
        """Return the share of the time in which a core works on this part, without irregular items."""
        share = self.parts[part] - self.waits.get(part, 0.0)
        return share - (self.irregular.share - self.irregular.waiting) if part == REST else share

    def with_the_other(self, part: str) -> float:
        """Return the share of reading or of the rest; both shares, if one line causes them and the other is less."""
        shares = {"reading": self.reading, REST: self.working(REST)}
        other = REST if part == "reading" else "reading"
        together = self.line(part) and self.line(part) == self.line(other) and shares[other] < shares[part]
        return shares[part] + shares[other] if together else shares[part]

    def line(self, name: str) -> str:
        """Return the user's line for a part, or for another key of `lines`; "" if unknown.

        No sampled line may belong to a part: compiled code that Python calls has no line.
        """
        most = self.parts.get(name, 0) >= thresholds.MOST_OF_AN_ITEM
        return self.lines.get(name, self.lines.get(ANY, "") if most else "")


@dataclass(frozen=True)
class Settings:
    """Arguments of a DataLoader, and the type of its dataset."""

    dataset: str
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool


@dataclass(frozen=True)
class Loader:
    """The loader that gives the training batches."""

    kind: str  # its type; "" if there is no loader
    settings: Settings | None = None  # None if it is no DataLoader
    items: Items | None = None
    unknown: str = ""  # why `items` is None, as the end of a sentence
    generators: tuple[str, ...] = ()  # places of random generators of which each of several workers has an equal copy
    growth: Growth | None = None  # of the workers' memory
