"""The loader of a loop, and how the items of its dataset are loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepscope import thresholds
from stepscope.facts.hazards import Growth

# Parts of the work on an item, and the name of the remaining work.
PARTS = ("opening", "reading", "resizing", "decoding", "collating", "transforming")
REST = "the rest of the dataset"
IMAGES = {"PIL", "cv2", "torchvision", "imageio", "skimage"}  # packages that decode or change images
# Extra keys of `Items.lines`.
ANY, WAITING, IRREGULAR = "any part", "waiting", "irregular"


@dataclass(frozen=True)
class Irregular:
    """Items that take far longer than most items, each time they are loaded; by default none."""

    count: int = 0
    share: float = 0.0  # share of the time of all items, counting only time beyond the median
    waiting: float = 0.0  # the part of `share` spent waiting
    usual_ms: float = 0.0  # median time of all items
    slowest_ms: float = 0.0  # time of the slowest item
    slowest: str | None = None  # index of the slowest item in the dataset; None for an iterable dataset


@dataclass(frozen=True)
class Sampling:
    """How long the sampler, or the batch sampler, takes to choose indices; by default unknown."""

    name: str = ""  # its type, such as "WeightedRandomSampler"
    start_ms: float = 0.0  # time from the start of an epoch until its first indices
    batch_ms: float = 0.0  # mean time until the indices of each further batch
    line: str = ""  # the user's line that takes most of this time; "" if unknown


@dataclass(frozen=True)
class Items:
    """How items are loaded. Time in which other processes used the cores is excluded if the system reports it."""

    count: int  # number of timed items
    ms: float  # mean time of an item in one process
    cpu_ms: float  # mean CPU time of an item; equal to `ms` if the dataset starts programs that use the CPU
    batch: int  # items in a batch
    parts: dict[str, float]  # share of the time for each of `PARTS` and for `REST`
    opened: float  # number of files opened for an item
    file_bytes: float | None  # bytes read per opened file; None if the system does not report them
    slowest: str  # the function with the longest own time
    waits: dict[str, float] = field(default_factory=dict)  # share of the time spent waiting in each part
    irregular: Irregular = Irregular()
    # The user's line that takes most time, for parts, `ANY`, `WAITING` and `IRREGULAR`; where known
    lines: dict[str, str] = field(default_factory=dict)
    # For each of `lines`, the share of the function with this line in the same time
    function_shares: dict[str, float] = field(default_factory=dict)
    together: bool = False  # whether the dataset loads a whole batch at once, by `__getitems__`
    sampling: Sampling = Sampling()
    # Share of the time in functions of each installed package, other than PyTorch and NumPy; None if unknown
    libraries: dict[str, float] | None = None
    hdf5_reads: float = 0.0  # number of reads from datasets of h5py for an item
    warnings: tuple[str, ...] = ()  # PyTorch's warnings while items are loaded
    opened_again: float = 0.0  # part of the opened files that the same item has opened already

    @property
    def images(self) -> bool:
        """Whether items are made from images, as far as is known."""
        return self.libraries is None or not IMAGES.isdisjoint(self.libraries)

    @property
    def tiny(self) -> bool:
        """Whether most of the time goes to calling the dataset for each item."""
        tiny = self.ms < thresholds.TINY_ITEM_MS and self.working(REST) >= thresholds.MOST_OF_AN_ITEM
        return not self.together and tiny

    @property
    def batch_ms(self) -> float:
        """Time in which one process makes a batch, in ms."""
        return self.ms * self.batch

    @property
    def batch_cpu_ms(self) -> float:
        """CPU time of a batch, in ms."""
        return self.cpu_ms * self.batch

    @property
    def reading(self) -> float:
        """Share of the time for opening and reading files."""
        return self.parts["opening"] + self.parts["reading"]

    @property
    def small_files(self) -> bool:
        """Whether the items open files, and the files are small."""
        return self.opened > 0 and (self.file_bytes is None or self.file_bytes <= thresholds.SMALL_FILE_BYTES)

    @property
    def waiting(self) -> float:
        """Share of the time in which no core works, without irregular items and reading."""
        waits = [share for part, share in self.waits.items() if part not in ("opening", "reading")]
        return sum(waits) - self.irregular.waiting

    def working(self, part: str) -> float:
        """Return the share of the time in which a core works on this part, without irregular items."""
        share = self.parts[part] - self.waits.get(part, 0.0)
        return share - (self.irregular.share - self.irregular.waiting) if part == REST else share

    def line(self, name: str) -> str:
        """Return the user's line for a part, or for another key of `lines`; "" if unknown.

        Compiled code has no sampled line: a part that takes most of the time then gets the line of `ANY` part.
        """
        most = self.parts.get(name, 0) >= thresholds.MOST_OF_AN_ITEM
        return self.lines.get(name, self.lines.get(ANY, "") if most else "")

    def function_share(self, name: str) -> float:
        """Return the share of a part's time in the function with the part's line; 1 if unknown."""
        return self.function_shares.get(name, 1.0)


@dataclass(frozen=True)
class Settings:
    """Arguments of a DataLoader, and the type of its dataset."""

    dataset: str  # name of the type
    batch_size: int | None
    num_workers: int
    prefetch_factor: int | None
    persistent_workers: bool
    pin_memory: bool


@dataclass(frozen=True)
class Loader:
    """The loader that gives the training batches."""

    kind: str  # type of the loader; "" if there is no loader
    settings: Settings | None = None  # None if the loader is no DataLoader
    items: Items | None = None
    unknown: str = ""  # why `items` is None, as the end of a sentence
    generators: tuple[str, ...] = ()  # places of random generators that are duplicated in every worker
    growth: Growth | None = None  # growth of the workers' memory; None if slight or unknown
    yielded: int = 1  # times that an epoch has each item, because all workers of an iterable dataset yield it
