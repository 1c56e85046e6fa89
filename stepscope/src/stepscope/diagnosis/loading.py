"""Why a loop waits for its batches: because of the DataLoader's settings, or because of how long items take.

`Items` and `Loading` hold the facts, `RULES` is the table of findings. A new finding is a row of the table, and two
tests: facts of a loop with only this fault, and of one without it (see tests/diagnosis/test_loading_facts.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from stepscope.base.wording import counted, milliseconds, percent
from stepscope.diagnosis.profile import Profile
from stepscope.diagnosis.result import WORTH, Rule

# Times the number of workers that can work at once. Up to twice that number made no measurable difference on two cores;
# sixteen workers gave a third of the throughput, with a start of five seconds.
TOO_MANY = 2
DOMINANT = 0.75  # of an item's time: a part that takes this share counts as all of it, since profilers are inexact
SLOWER = 5  # times as long that a batch may take in a loop on a busy machine
MOST_PER_CORE = 4  # recommended workers: more were not tried. Each takes memory
# Of a step's time that loading in the loop itself would have to save: two timings of one loop differ by as much.
MARGIN = 0.1
# ms. A ready batch took 1.7 to 3 ms to arrive from a worker on two cores, whether of 1 image or of 128.
ARRIVAL = 1.0
# ms, and share of a step: without workers, a shorter wait than both is no fault, since making a batch takes time
SLIGHT_MS, SLIGHT = 2.0, 0.15
# Bytes. A fast disk, at 500 MB/s, delivers these in the 2 ms that an open takes on a shared file system (simulate).
SMALL_FILE = 1_000_000
# ms: with fast enough workers, a shorter wait than this and than SLIGHT of a step is no fault, see ARRIVAL
ARRIVED = 3.0
APART = 0.25  # of the time, between epochs: less is usual, for an evaluation after each epoch
FULL = 0.9  # of the time of all cores: if a step and its workers use as much, the workers slow the step
MANY_TENSORS = 16  # in a batch: a worker shares each separately, which took 0.2 to 0.4 ms
# ms: an item that takes less costs less than the calls that load it, some tens of them in Python
TINY = 0.03
PICKLED = 100_000  # bytes of NumPy arrays in a batch that count: fewer take a worker under 1 ms
# Of the mean wait: if the median is less, a few steps wait for long and the others hardly.
USUAL = 0.5

REST = "the rest of the dataset"  # the part of an item's work that is not in `items.PARTS`
# Beside the parts, what `Items.lines` holds a line for
ANY, WAITING, IRREGULAR = "any part", "waiting", "irregular"
MOSTLY = 0.5  # of an item's time: for a part with at least this share, the item's slowest line counts as its line


@dataclass(frozen=True)
class Irregular:
    """Items that take far longer than most whenever they are loaded; by default none."""

    count: int = 0
    share: float = 0.0  # of the time of all items: the time beyond the usual
    waiting: float = 0.0  # the part of this share spent waiting
    usual_ms: float = 0.0  # median of all items
    slowest_ms: float = 0.0
    slowest: object = None  # index of the slowest item in the dataset; None for an iterable dataset


@dataclass(frozen=True)
class Items:
    """How items are loaded. Time in which others had the cores is excluded where the system reports it."""

    count: int  # items loaded with the stopwatch
    ms: float  # of an item
    cpu_ms: float  # CPU time of an item, the rest is waiting; the same as `ms` if the dataset starts programs that work
    batch: int  # items of a batch
    parts: dict[str, float]  # share of the time of each of `items.PARTS` and of `REST`
    opened: float  # files, for each item
    file_bytes: float  # read for each file opened; NaN where the system does not report it
    slowest: str  # the function that by itself took most time
    waits: dict[str, float] = field(default_factory=dict)  # the waiting within each share in `parts`
    irregular: Irregular = Irregular()
    # The user's line that takes most time, for parts, `WAITING` and `IRREGULAR`; where known
    lines: dict[str, str] = field(default_factory=dict)
    together: bool = False  # whether the dataset loads a whole batch at once

    @property
    def tiny(self) -> bool:
        """Whether calling the dataset for each item takes most of the time."""
        return not self.together and self.ms < TINY and self.working(REST) >= MOSTLY

    @property
    def batch_ms(self) -> float:
        """Time in which one process makes a batch."""
        return self.ms * self.batch

    @property
    def reading(self) -> float:
        """The share of the time that goes to opening and reading files."""
        return self.parts["opening"] + self.parts["reading"]

    @property
    def small_files(self) -> bool:
        """Whether the files that the items open are small."""
        return self.opened > 0 and not self.file_bytes > SMALL_FILE

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
        """Return the share of reading or of the rest; plus the other's share if that is less and at the same line."""
        shares = {"reading": self.reading, REST: self.working(REST)}
        other = REST if part == "reading" else "reading"
        together = self.line(part) and self.line(part) == self.line(other) and shares[other] < shares[part]
        return shares[part] + shares[other] if together else shares[part]

    def line(self, name: str) -> str:
        """Return the user's line for a part, or for another key of `lines`; "" if unknown.

        No sampled line may belong to a part: compiled code that Python calls has no line.
        """
        return self.lines.get(name, self.lines.get(ANY, "") if self.parts.get(name, 0) >= MOSTLY else "")

    def mostly(self, name: str) -> str:
        line = self.line(name)
        return f", mostly at {line}" if line else ""

    @property
    def slow_ones(self) -> str:
        """Which items take far longer than most, as a sentence; "" if none do."""
        slow = self.irregular
        if not slow.count:
            return ""
        which = "" if slow.slowest is None else f", item {slow.slowest},"
        return (
            f"{slow.count} of {counted(self.count, 'item')} take {percent(slow.share)} of the time: the slowest{which} "
            f"{milliseconds(slow.slowest_ms)}, most {milliseconds(slow.usual_ms)}{self.mostly(IRREGULAR)}."
        )


@dataclass(frozen=True)
class Loading:
    """The numbers of a loop that loads; times in ms, excluding time in which other processes had the cores."""

    step: float  # mean, without the first steps of epochs, like the next two
    wait: float  # mean wait for a batch in a step; with a GPU, only while the GPU waits as well
    usual_wait: float  # median
    workers: int | None = None  # None if unknown
    cores: int = 1
    start: float = 0.0  # between two epochs, to end and start workers, with the first batch; 0 if they persist
    epoch: int | None = None  # steps; None if unknown
    pauses: int = 0  # observed between two epochs,
    between: float = 0.0  # their mean length,
    apart: float = 0.0  # and that divided by the steps of an epoch
    busy: str = ""  # the user's line that runs in the pauses; "" if unknown
    transfer: float = 0.0  # from asking for a batch that a worker has ready to having it
    pickled: float = 0.0  # bytes of a batch that workers send through a pipe: only tensors go through shared memory
    cpu: float = 0.0  # CPU time of a step, all threads of this process together; 0 if unknown
    queued: float = 0.0  # for each batch, how long its worker was ready to work while others had the cores
    items: Items | None = None  # None if loading them could not be tried
    least: float = 0.0  # the fastest step without its wait
    hiccup: float = 0.0  # a step far longer than all others, which counts as the next longest; 0 if there is none
    only_first: bool = False  # whether each batch is the first of an iterator that has more, and workers start for it
    line: str = ""  # the user's line that gets a batch; "" if unknown
    tensors: int = 0  # in a batch
    timed: tuple[tuple[float, float], ...] = ()  # for each step its wait and its whole duration, nothing excluded

    @property
    def works(self) -> list[float]:
        """The time of each timed step without its wait."""
        return [duration - wait for wait, duration in self.timed]

    @property
    def work(self) -> float:
        """The mean time of a step without its wait."""
        return self.step - self.wait

    @property
    def restart(self) -> float:
        """The mean time that starting workers for each epoch adds to a step."""
        if not (self.workers and self.items and self.epoch):
            return 0.0
        return max(0.0, self.start - self.items.batch_ms) / self.epoch

    @property
    def whole(self) -> float:
        """A step with its part of the restarts and of the work between epochs."""
        return self.step + self.restart + self.apart

    @property
    def irregular(self) -> bool:
        """Whether a few steps wait for long, and the others hardly."""
        return self.usual_wait < USUAL * self.wait

    @property
    def useful(self) -> int:
        """Workers that can work at once: those that wait for storage need no core."""
        return round(self.cores * min(max(1.0, self.items.ms / max(self.items.cpu_ms, 1e-6)), MOST_PER_CORE))

    @property
    def too_many(self) -> bool:
        """Whether there are far more workers than can work at once."""
        return self.items is not None and self.workers > TOO_MANY * self.useful

    @property
    def better(self) -> int:
        """The number of workers that makes batches as fast as the steps take them, at most `useful`."""
        if self.items is None:
            return 2
        return min(max(1, math.ceil(self.items.batch_ms / max(self.work, 1e-3))), self.useful)

    @property
    def made(self) -> float:
        """Without workers, the part of the wait that makes the batch: this may be longer than `items` says, if others
        use the machine.
        """
        return min(self.wait, SLOWER * self.items.batch_ms)

    def pace(self, workers: int) -> float:
        """The least time in which so many workers make a batch, given the cores and how busy they are."""
        slower = 1.0 if self.workers else max(1.0, self.made / max(self.items.batch_ms, 1e-6))
        return slower * max(self.items.batch_ms / workers, self.items.batch * self.items.cpu_ms / self.cores)

    @property
    def crowded(self) -> float:
        """The least time of a step in which the cores can do its work and that of its workers."""
        loading = self.items.batch * self.items.cpu_ms if self.items and self.workers else 0.0  # else it is in `cpu`
        return (self.cpu + loading) / self.cores

    def gained(self, step: float) -> float:
        """Return the share of a step that steps of `step` ms would gain: no more than the wait."""
        return max(0.0, min(self.step - step, self.wait) / self.whole)

    @cached_property
    def more(self) -> float:
        """The gain of more workers; 0 if loading without workers gains more."""
        if self.items is None:  # then the gain of workers is unknown: at most the whole wait
            return self.wait / self.whole if self.workers == 0 else 0.0
        if self.better <= self.workers or self.slight:
            return 0.0
        gain = self.gained(max(self.work, self.pace(self.better), self.crowded))
        least = 0.0 if self.workers else ARRIVAL / self.whole  # a batch takes this long to arrive from a first worker
        return gain if gain >= max(self._without, WORTH, least) else 0.0

    @cached_property
    def none(self) -> float:
        """The gain of loading without workers; 0 if more workers gain more."""
        return self._without if not self.more and self._without >= WORTH else 0.0

    @property
    def _without(self) -> float:
        if not self.workers or self.items is None:
            return 0.0
        waits = min(self.wait, self.transfer)  # waits for other reasons would stay without workers
        made = self.items.batch_ms
        return self.gained(self.step - waits + made + MARGIN * (self.work + made))

    @property
    def fast_enough(self) -> bool:
        """Whether workers can make batches faster than the steps take them, if they have the cores."""
        return bool(self.items and self.workers) and self.pace(self.workers) < self.work * (1 - MARGIN)

    @property
    def slight(self) -> bool:
        """Whether there are no workers, and workers would have hardly anything to do."""
        return not self.workers and self.wait < min(SLIGHT_MS, SLIGHT * self.whole)

    @property
    def arrives(self) -> bool:
        """Whether the loop waits no longer than a ready batch takes to arrive from a worker."""
        return bool(self.workers) and self.wait < min(ARRIVED, SLIGHT * self.whole)

    @property
    def by_items(self) -> bool:
        """Whether the loop waits because of the time that items take."""
        slow = self.more or self.none or not (self.fast_enough or self.slight)
        return self.items is not None and bool(slow)

    @property
    def in_spite(self) -> bool:
        """Whether the loop waits although its workers are fast enough on average."""
        return self.items is not None and not self.by_items and not self.too_many

    @property
    def speed(self) -> str:
        """How fast batches are made, as a sentence."""
        if self.items is None:
            return f"The loop waits {milliseconds(self.wait)} of a step of {milliseconds(self.step)} for its batch."
        crowded = self.crowded > max(self.work, self.pace(self.better))
        return (
            f"One process makes a batch of {self.items.batch} in {milliseconds(self.items.batch_ms)}, the rest of the "
            f"step takes {milliseconds(self.work)}; {counted(self.workers, 'worker')} on {counted(self.cores, 'core')}"
            f"{f', which need {milliseconds(self.crowded)} for all the work of a step' if crowded else ''}."
        )

    @property
    def shared(self) -> float:
        """The time that the workers' work adds to a step that waits for their cores instead of their batches."""
        if not (self.items and self.workers and self.cpu) or self.by_items or self.crowded < FULL * self.step:
            return 0.0
        return self.items.batch * self.items.cpu_ms / self.cores

    def gain_of(self, share: Callable[[Items], float]) -> float | None:
        """Return the gain if a share of the items' time vanishes; None if the loop does not wait because of items.

        The gain is a share of the step, and no more than the wait.
        """
        if not self.by_items:
            return None
        paced = self.step if self.workers else self.made  # the time that loading determines
        if self.none:  # then most of that time is the transfer
            paced = min(paced, self.items.batch_ms)
        part = share(self.items)
        part = 1.0 if part >= DOMINANT else part
        return min(self.wait, part * paced) / self.whole


def of_profile(profile: Profile) -> Loading:
    """Return what a profile alone shows of loading."""
    wait = profile.loading * profile.step_ms
    return Loading(profile.step_ms, wait, wait, workers=0 if profile.in_process else None)


def _line(name: str) -> Callable[[Loading], str]:
    return lambda loading: loading.items.line(name)


def _part(part: str, name: str, topic: str, change: str) -> Rule:
    """Return the row for a part of the items' work; its gain is that of removing the part."""

    def evidence(loading: Loading) -> str:
        items = loading.items
        where = items.mostly(part) or (f"; most in {items.slowest}" if part == REST else "")
        beside = " The workers use the cores that the step needs." if loading.shared else ""
        took = f"{percent(items.working(part))} of the {milliseconds(items.ms)} that an item takes"
        return f"{took} goes to {part}{where}.{beside}"

    def share(items: Items) -> float:
        if items.tiny and part in (REST, "collating"):
            return 0.0
        return items.with_the_other(part) if part == REST else items.working(part)

    def gain(loading: Loading) -> float | None:
        return share(loading.items) * loading.shared / loading.whole if loading.shared else loading.gain_of(share)

    return Rule(name, "loading", topic, gain, evidence, change, line=_line(part))


def _reading(name: str, small: bool) -> Rule:
    """Return the row for reading small files, or large ones."""

    def evidence(loading: Loading) -> str:
        items = loading.items
        files = "a file once" if items.opened == 1 else f"files {items.opened:.2g} times"
        size = "" if math.isnan(items.file_bytes) else f", {items.file_bytes / 1e3:,.0f} kB each time"
        opens = f"; each opens {files}{size}" if items.opened else ""
        return (
            f"{percent(items.reading)} of the {milliseconds(items.ms)} that an item takes goes to opening and "
            f"reading{opens}{items.mostly('reading')}."
        )

    return Rule(
        name, "loading", "packed formats",
        lambda loading: loading.gain_of(
            lambda items: items.with_the_other("reading") if items.small_files is small else 0.0
        ),
        evidence,
        "# open a file once, and keep it open; pack small files into a large one; or read from a local disk",
        line=_line("reading"),
    )  # fmt: skip


def _irregularly(loading: Loading) -> float | None:
    """Return the share of waits not caused by a busy machine, if a few steps wait for long and the others hardly."""
    irregular = loading.in_spite and loading.irregular and not loading.pickled
    return max(0.0, loading.wait - loading.queued) / loading.whole if irregular else None


def _slowly(loading: Loading) -> float | None:
    """Return the share that the transfer of ready batches takes, if the waits are not irregular."""
    if (
        not loading.in_spite
        or loading.pickled
        or loading.tensors >= MANY_TENSORS
        or loading.arrives
        or (_irregularly(loading) or 0.0) >= WORTH
    ):
        return None
    return min(loading.wait, loading.transfer) / loading.whole


RULES = (
    Rule(
        "a new iterator for each batch", "loading", "persistent workers",
        lambda loading: (loading.wait + loading.restart) / loading.whole if loading.only_first else None,
        lambda loading: (
            f"Each batch is the first of a new iterator over the loader, which starts its workers each time: "
            f"{milliseconds(loading.restart)} a step{f'. Mostly at {loading.line}' if loading.line else '.'}"
        ),
        "for batch in loader: …  # not next(iter(loader)), which starts again each time",
        line=lambda loading: loading.line,
    ),
    Rule(
        "workers restarted every epoch", "loading", "persistent workers",
        lambda loading: None if loading.only_first else loading.restart / loading.whole,
        "Each epoch ends its workers and starts new ones: on average {restart:ms} more a step.",
        lambda loading: (
            f"DataLoader(…, persistent_workers=True{f', num_workers={loading.useful}' if loading.too_many else ''})"
        ),
    ),
    Rule(
        "work between the epochs", "host", "work between the operators",
        lambda loading: loading.apart / loading.whole,
        lambda loading: (
            f"After an epoch of {counted(loading.epoch, 'step')} the script does other work for "
            f"{milliseconds(loading.between)}, such as evaluating or saving "
            f"(mean of {counted(loading.pauses, 'pause')})"
            f"{f', mostly at {loading.busy}' if loading.busy else ''}: {milliseconds(loading.apart)} a step on average."
        ),
        "# evaluate less often, on fewer images, or in larger batches; save in a thread",
        least=APART,
        line=lambda loading: loading.busy,
    ),
    Rule(
        "loading too slowly", "loading", "more workers",
        lambda loading: loading.wait / loading.whole if loading.items is None and loading.workers != 0 else None,
        "{speed}",
        "DataLoader(…, num_workers=…)  # more workers, or less work for each item",
    ),
    Rule(
        "too many workers", "loading", "number of workers",
        lambda loading: (
            loading.gained(max(loading.work, loading.pace(loading.useful)))
            + (1 - loading.useful / loading.workers) * loading.restart / loading.whole
            if loading.too_many
            else None
        ),
        "{cores:core} keep {useful} of {workers} workers busy; the others take memory, and more time to start.",
        "DataLoader(…, num_workers={useful})",
        least=0.0,
    ),
    Rule(
        "too few workers", "loading", "more workers",
        lambda loading: loading.more if loading.workers else None,
        "{speed}",
        "DataLoader(…, num_workers={better})",
    ),
    Rule(
        "loading in the loop itself", "loading", "more workers",
        lambda loading: None if loading.workers else loading.more,
        "{speed}",
        lambda loading: (
            f"DataLoader(…, num_workers={loading.better})"
            f"{'' if loading.items else '  # try more, up to your cores'}"
        ),
    ),
    Rule(
        "workers slower than none", "loading", "loading without workers",
        lambda loading: loading.none,
        "{speed} A ready batch arrives from a worker in {transfer:ms}.",
        "DataLoader(…, num_workers=0)",
    ),
    Rule(
        "irregular items", "loading", "prefetching",
        lambda loading: loading.gain_of(lambda items: items.irregular.share),
        "{items.slow_ones}",
        "# find out what these items do; if they are rare, a larger prefetch_factor or in_order=False bridges them",
        line=_line(IRREGULAR),
    ),
    Rule(
        "items that wait", "loading", "more workers",
        lambda loading: loading.gain_of(lambda items: items.waiting),
        lambda loading: (
            f"For {percent(loading.items.waiting)} of the {milliseconds(loading.items.ms)} that an item takes no core "
            f"works on it: it waits{loading.items.mostly(WAITING)}."
        ),
        "# request a whole batch at once, and keep connections open; or let more workers wait in parallel",
        line=_line(WAITING),
    ),
    _part(
        "decoding", "decoding at every read", "preprocessing ahead of time",
        "# store smaller images, resized once, ahead of time; or decoded images",
    ),
    _part(
        "resizing", "resizing at every read", "preprocessing ahead of time",
        "# resize once, ahead of time, and read the copies; only random crops stay",
    ),
    _part(
        "transforming", "transforms of each image", "normalization on the device",
        "transforms.PILToTensor()  # only this; the first layer of the network normalizes",
    ),
    _part(
        "collating", "collating item by item", "loading whole batches",
        "def __getitems__(self, indices): …  # a whole batch at once",
    ),
    Rule(
        "items one by one", "loading", "loading whole batches",
        lambda loading: loading.gain_of(lambda items: items.working(REST) + items.working("collating"))
        if loading.items and loading.items.tiny else None,
        lambda loading: (
            f"An item takes {milliseconds(loading.items.ms)}, about as long as the calls that request it and put it "
            f"into a batch of {loading.items.batch}{loading.items.mostly(REST)}."
        ),
        "def __getitems__(self, indices): …  # a whole batch at once",
        line=_line(REST),
    ),
    _part(
        REST, "the dataset's own work", "preprocessing ahead of time",
        "def __getitem__(self, index): …  # do once, ahead of time, what is the same in every epoch",
    ),
    _reading("many small files", True),
    _reading("slow reading", False),
    Rule(
        "irregular loading", "loading", "prefetching", _irregularly,
        "{speed} They are fast enough, but the loop waits {wait:ms} a step on average, and at most {usual_wait:ms} in "
        "half of the steps. {items.slow_ones}",
        "DataLoader(…, prefetch_factor=8)  # or in_order=False, if any order will do",
    ),
    Rule(
        "batches through a pipe", "loading", "loading whole batches",
        lambda loading: (
            (loading.wait if loading.in_spite else min(loading.wait, loading.transfer)) / loading.whole
            if loading.pickled else None
        ),
        lambda loading: (
            f"{loading.speed} {loading.pickled / 1e6:.2g} MB of a batch are NumPy arrays: these are pickled and sent "
            f"through a pipe, while tensors are in shared memory. A ready batch arrives in "
            f"{milliseconds(loading.transfer)}."
        ),
        "collate_fn: torch.from_numpy(…)  # tensors, as the default collate_fn makes them",
    ),
    Rule(
        "many tensors in a batch", "loading", "loading whole batches",
        lambda loading: (
            min(loading.wait, loading.transfer) / loading.whole
            if loading.workers and loading.tensors >= MANY_TENSORS else None
        ),
        "A batch has {tensors:tensor}, each of which a worker shares separately: a ready batch arrives in "
        "{transfer:ms}.",
        "collate_fn: torch.stack(…)  # one tensor of all items, as the default collate_fn makes it",
    ),
    Rule(
        "transfer from the workers", "loading", "normalization on the device", _slowly,
        "{speed} They are fast enough, but the loop waits {wait:ms} a step. A ready batch arrives from a worker in "
        "{transfer:ms}.",
        "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the device",
    ),
)  # fmt: skip


def doubt(loading: Loading) -> str | None:
    """Return why something may be wrong even if nothing is found, or None."""
    if loading.workers == 0 and loading.items and loading.wait - loading.made >= WORTH * loading.whole:
        return (
            f"The loop waits {milliseconds(loading.wait)} a step, although a batch is made in "
            f"{milliseconds(loading.items.batch_ms)}: the cause of the wait is not known."
        )
    unexplained = loading.wait - loading.transfer  # by the transfer from fast enough workers
    if not loading.fast_enough or unexplained / loading.whole < WORTH:
        return None
    why = "the cause of the wait is not known"
    if loading.queued >= unexplained / 2:
        why = f"for each batch they were ready to work for {milliseconds(loading.queued)} while others had the cores"
    return (
        f"The loop waits {milliseconds(loading.wait)} a step, although its workers are fast enough by themselves and a "
        f"ready batch arrives in {milliseconds(loading.transfer)}: {why}. Diagnose again on a quiet machine; "
        "if that changes nothing, leave a core to the workers: torch.set_num_threads(…)."
    )
