"""Why a loop waits for its batches: by the settings of its DataLoader, and by how long its items take.

`Items` and `Loading` hold the facts, `RULES` is the table of findings. A new finding is a row of the table, and two
tests: facts of a loop with just this fault, and of one without it (see tests/diagnosis/test_loading_facts.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from stepscope.base.wording import counted, milliseconds, percent
from stepscope.diagnosis.profile import Profile
from stepscope.diagnosis.result import WORTH, Rule

# As many as can work at once are useful. Up to twice as many made no difference that could be measured on two cores,
# sixteen a third of the throughput at a start of five seconds.
TOO_MANY = 2
DOMINANT = 0.75  # of an item's time: a part that takes so much counts as all of it, since profilers say it roughly
SLOWER = 5  # times that it may take to make a batch in a loop on a busy machine
MOST_PER_CORE = 4  # workers that are advised: more were not tried. Each takes memory
# Of a step's time that loading in the loop itself would have to save: the same loop timed twice differs by as much.
MARGIN = 0.1
# ms. A batch that a worker has ready took 1.7 to 3 ms to arrive in a loop on two cores, of 1 image or of 128.
ARRIVAL = 1.0
# ms, and a share of a step: to wait for less than both is no fault where no worker loads: a batch has to be made, too
SLIGHT_MS, SLIGHT = 2.0, 0.15
# Bytes. A fast disk delivers so many, at 500 MB/s, in the 2 ms that an open takes on a shared file system (simulate).
SMALL_FILE = 1_000_000
# ms: to wait for less than this and SLIGHT of a step is no fault of workers that are fast enough, see ARRIVAL
ARRIVED = 3.0
APART = 0.25  # of the time, between epochs: less is usual, to evaluate after each
FULL = 0.9  # of the time of all cores, that a step and its workers work: then these slow the step
MANY_TENSORS = 16  # of a batch: a worker shares each by itself, which took 0.2 to 0.4 ms
# ms, of an item that takes less than its calls cost, some tens of them in Python
TINY = 0.03
PICKLED = 100_000  # bytes of a batch in NumPy arrays that count: less takes a worker under 1 ms
# Of the mean wait: where the median is less, a few steps wait for long and the others hardly.
USUAL = 0.5

REST = "the rest of the dataset"  # the part of an item's work that is none of `items.PARTS`
# Beside the parts, what a line of the reader's is named for
ANY, WAITING, IRREGULAR = "any part", "waiting", "irregular"
MOSTLY = 0.5  # of an item's time, that a part takes so that the line that takes most is that of the part


@dataclass(frozen=True)
class Irregular:
    """Items that take far longer than most, whenever they are loaded; none as it stands."""

    count: int = 0  # of those loaded
    share: float = 0.0  # what they take longer than most, of the time of all items
    waiting: float = 0.0  # what of this share they wait
    usual_ms: float = 0.0  # median of all items
    slowest_ms: float = 0.0
    slowest: object = None  # index of that one in the dataset; None for an iterable dataset


@dataclass(frozen=True)
class Items:
    """How items are loaded. Where the system reports how long others had the cores meanwhile, that is left out."""

    count: int  # loaded with the stopwatch
    ms: float  # of an item
    cpu_ms: float  # what of it a processor worked; the rest is waiting. All, if the dataset starts programs that work
    batch: int  # items of a batch
    parts: dict[str, float]  # share of the time of each of `items.PARTS` and of `REST`
    opened: float  # files, for each item
    file_bytes: float  # read for each file opened; NaN where the system does not report it
    slowest: str  # the function that by itself took most time
    waits: dict[str, float] = field(default_factory=dict)  # what of the shares in `parts` is waiting
    irregular: Irregular = Irregular()
    # The line of the reader's own that takes most time, for parts, `WAITING` and `IRREGULAR`; where known
    lines: dict[str, str] = field(default_factory=dict)
    together: bool = False  # whether the dataset loads a whole batch at once

    @property
    def tiny(self) -> bool:
        """Whether calling the dataset for each item takes most of the time."""
        return not self.together and self.ms < TINY and self.working(REST) >= MOSTLY

    @property
    def batch_ms(self) -> float:
        """Time of a batch that one process makes."""
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
        """The share of the time in which no core works, irregular items and reading left out."""
        waits = [share for part, share in self.waits.items() if part not in ("opening", "reading")]
        return sum(waits) - self.irregular.waiting

    def working(self, part: str) -> float:
        """Return the share of the time in which a core works on this part, irregular items left out."""
        share = self.parts[part] - self.waits.get(part, 0.0)
        return share - (self.irregular.share - self.irregular.waiting) if part == REST else share

    def with_the_other(self, part: str) -> float:
        """Return the share of reading, or of the rest; with that of the other if it is less, at the same line."""
        shares = {"reading": self.reading, REST: self.working(REST)}
        other = REST if part == "reading" else "reading"
        together = self.line(part) and self.line(part) == self.line(other) and shares[other] < shares[part]
        return shares[part] + shares[other] if together else shares[part]

    def line(self, name: str) -> str:
        """Return the reader's own line to look at for a part, or for what else is in `lines`; "" if it is unknown.

        A part may be none of a line's that was seen: compiled code that Python calls has no line.
        """
        return self.lines.get(name, self.lines.get(ANY, "") if self.parts.get(name, 0) >= MOSTLY else "")

    def mostly(self, name: str) -> str:
        """Return that line as the end of a sentence."""
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
    """A loop that loads, in numbers; times in ms. What of them other processes had the cores is left out."""

    step: float  # mean, without the first steps of epochs as the two below
    wait: float  # what of it the loop waits for its batch; with a GPU what the GPU waits, too
    usual_wait: float  # median
    workers: int | None = None  # None if unknown
    cores: int = 1
    start: float = 0.0  # between two epochs, to start workers and to end them, with the first batch; 0 if they persist
    epoch: int | None = None  # steps; None if unknown
    pauses: int = 0  # between two epochs that were seen,
    between: float = 0.0  # how long one takes on average,
    apart: float = 0.0  # and what that is for each step
    busy: str = ""  # the reader's line at which it does that; "" if it is unknown
    transfer: float = 0.0  # from asking for a batch that a worker has ready to having it
    pickled: float = 0.0  # bytes of a batch that workers send through a pipe: only tensors go through shared memory
    cpu: float = 0.0  # for which cores work in a step, all threads of this process together; 0 if unknown
    queued: float = 0.0  # for each batch, how long its worker was ready to work while others had the cores
    items: Items | None = None  # how they are loaded, if that could be tried
    least: float = 0.0  # the fastest step without its wait
    only_first: bool = False  # whether each batch is the first of an iterator that has more, and workers start for it
    line: str = ""  # of the reader's own, that gets a batch; "" if it is unknown
    tensors: int = 0  # of a batch
    timed: tuple[tuple[float, float], ...] = ()  # of each step its wait, and its duration with that, all in

    @property
    def works(self) -> list[float]:
        """What each timed step took but for its wait."""
        return [duration - wait for wait, duration in self.timed]

    @property
    def work(self) -> float:
        """What is left of a step that does not wait."""
        return self.step - self.wait

    @property
    def restart(self) -> float:
        """What starting the workers of each epoch adds to a step, on average."""
        if not (self.workers and self.items and self.epoch):
            return 0.0
        return max(0.0, self.start - self.items.batch_ms) / self.epoch

    @property
    def whole(self) -> float:
        """A step with its part of the restarts, and of what is between the epochs."""
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
        """The number of workers that makes batches as fast as the steps take them, as far as it is useful."""
        if self.items is None:
            return 2
        return min(max(1, math.ceil(self.items.batch_ms / max(self.work, 1e-3))), self.useful)

    @property
    def made(self) -> float:
        """What of the waiting without workers goes to making the batch: it may take longer than by itself, if others
        use the machine, too.
        """
        return min(self.wait, SLOWER * self.items.batch_ms)

    def pace(self, workers: int) -> float:
        """The time in which so many workers can make a batch at best, given the cores, and as busy as they are."""
        slower = 1.0 if self.workers else max(1.0, self.made / max(self.items.batch_ms, 1e-6))
        return slower * max(self.items.batch_ms / workers, self.items.batch * self.items.cpu_ms / self.cores)

    @property
    def crowded(self) -> float:
        """The least time of a step in which the cores can do all its work, with that of its workers."""
        loading = self.items.batch * self.items.cpu_ms if self.items and self.workers else 0.0  # else it is in `cpu`
        return (self.cpu + loading) / self.cores

    def gained(self, step: float) -> float:
        """Return the share of a step that it gains to have steps of `step` ms: no more than the waiting."""
        return max(0.0, min(self.step - step, self.wait) / self.whole)

    @cached_property
    def more(self) -> float:
        """The gain of more workers; 0 where that of none is larger."""
        if self.items is None:  # without them it is unknown what workers gain: all the waiting at most
            return self.wait / self.whole if self.workers == 0 else 0.0
        if self.better <= self.workers or self.slight:
            return 0.0
        gain = self.gained(max(self.work, self.pace(self.better), self.crowded))
        least = 0.0 if self.workers else ARRIVAL / self.whole  # to get a batch from a first worker takes as long
        return gain if gain >= max(self._without, WORTH, least) else 0.0

    @cached_property
    def none(self) -> float:
        """The gain of loading without workers; 0 where that of more is larger."""
        return self._without if not self.more and self._without >= WORTH else 0.0

    @property
    def _without(self) -> float:
        if not self.workers or self.items is None:
            return 0.0
        waits = min(self.wait, self.transfer)  # what is waited for something else, would be without workers, too
        made = self.items.batch_ms
        return self.gained(self.step - waits + made + MARGIN * (self.work + made))

    @property
    def fast_enough(self) -> bool:
        """Whether there are workers that can make batches faster than the steps take them, if they have the cores."""
        return bool(self.items and self.workers) and self.pace(self.workers) < self.work * (1 - MARGIN)

    @property
    def slight(self) -> bool:
        """Whether there are no workers, and hardly anything for them to do."""
        return not self.workers and self.wait < min(SLIGHT_MS, SLIGHT * self.whole)

    @property
    def arrives(self) -> bool:
        """Whether the loop waits no longer than a batch takes that a worker has ready."""
        return bool(self.workers) and self.wait < min(ARRIVED, SLIGHT * self.whole)

    @property
    def by_items(self) -> bool:
        """Whether how long the items take is why the loop waits."""
        slow = self.more or self.none or not (self.fast_enough or self.slight)
        return self.items is not None and bool(slow)

    @property
    def in_spite(self) -> bool:
        """Whether the loop waits though its workers are fast enough on average."""
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
            f"{f', which need {milliseconds(self.crowded)} for all that a step computes' if crowded else ''}."
        )

    @property
    def shared(self) -> float:
        """What the work of the workers adds to a step that does not wait for it, but for the cores that do it."""
        if not (self.items and self.workers and self.cpu) or self.by_items or self.crowded < FULL * self.step:
            return 0.0
        return self.items.batch * self.items.cpu_ms / self.cores

    def gain_of(self, share: Callable[[Items], float]) -> float | None:
        """Return what it gains if a share of the items' time vanishes; None if the loop does not wait because of it.

        It is a share of the step, and no more than the waiting.
        """
        if not self.by_items:
            return None
        paced = self.step if self.workers else self.made  # the time that loading sets
        if self.none:  # then most of it is the transfer
            paced = min(paced, self.items.batch_ms)
        part = share(self.items)
        part = 1.0 if part >= DOMINANT else part
        return min(self.wait, part * paced) / self.whole


def of_profile(profile: Profile) -> Loading:
    """Return what a profile alone says of loading."""
    wait = profile.loading * profile.step_ms
    return Loading(profile.step_ms, wait, wait, workers=0 if profile.in_process else None)


def _line(name: str) -> Callable[[Loading], str]:
    return lambda loading: loading.items.line(name)


def _part(part: str, name: str, topic: str, change: str) -> Rule:
    """Return the row for a part of the items' work: it could at most vanish."""

    def evidence(loading: Loading) -> str:
        items = loading.items
        where = items.mostly(part) or (f"; most in {items.slowest}" if part == REST else "")
        beside = " The workers do it on the cores that the step needs." if loading.shared else ""
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
    """Return the row for reading files that are small, or large."""

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
        "# open a file once, and keep it open; pack small ones into a large one; or read from a disk of this machine",
        line=_line("reading"),
    )  # fmt: skip


def _irregularly(loading: Loading) -> float | None:
    """Return what is waited for other reasons than a busy machine, if a few steps wait for long, the others hardly."""
    irregular = loading.in_spite and loading.irregular and not loading.pickled
    return max(0.0, loading.wait - loading.queued) / loading.whole if irregular else None


def _slowly(loading: Loading) -> float | None:
    """Return what the transfer of batches that are ready takes, if the waits are no irregular ones."""
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
            f"Each batch is the first one of a new iterator over the loader, whose workers start for it: "
            f"{milliseconds(loading.restart)} a step{f'. Mostly at {loading.line}' if loading.line else '.'}"
        ),
        "for batch in loader: …  # not next(iter(loader)), which begins again each time",
        line=lambda loading: loading.line,
    ),
    Rule(
        "workers restarted every epoch", "loading", "persistent workers",
        lambda loading: None if loading.only_first else loading.restart / loading.whole,
        "Each epoch ends its workers and starts others: {restart:ms} more a step on average.",
        "DataLoader(…, persistent_workers=True)",
    ),
    Rule(
        "work between the epochs", "host", "work between the operators",
        lambda loading: loading.apart / loading.whole,
        lambda loading: (
            f"After an epoch of {counted(loading.epoch, 'step')} the script does something else for "
            f"{milliseconds(loading.between)}, such as to evaluate or to save "
            f"(mean of {counted(loading.pauses, 'pause')})"
            f"{f', mostly at {loading.busy}' if loading.busy else ''}: {milliseconds(loading.apart)} a step on average."
        ),
        "# evaluate less often, or on a part of the images, in larger batches; save in a thread",
        least=APART,
        line=lambda loading: loading.busy,
    ),
    Rule(
        "loading too slowly", "loading", "more workers",
        lambda loading: loading.wait / loading.whole if loading.items is None and loading.workers != 0 else None,
        "{speed}",
        "DataLoader(…, num_workers=…)  # more, or less work for each item",
    ),
    Rule(
        "too many workers", "loading", "number of workers",
        lambda loading: (
            loading.gained(max(loading.work, loading.pace(loading.useful))) if loading.too_many else None
        ),
        "{workers} workers, but {cores:core} keep {useful} busy; the others take memory, and the longer to start.",
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
        "{speed} From a worker that has it ready, it arrives in {transfer:ms}.",
        "DataLoader(…, num_workers=0)",
    ),
    Rule(
        "irregular items", "loading", "prefetching",
        lambda loading: loading.gain_of(lambda items: items.irregular.share),
        "{items.slow_ones}",
        "# look at what these items do; a larger prefetch_factor bridges them, if they are rare",
        line=_line(IRREGULAR),
    ),
    Rule(
        "items that wait", "loading", "more workers",
        lambda loading: loading.gain_of(lambda items: items.waiting),
        lambda loading: (
            f"In {percent(loading.items.waiting)} of the {milliseconds(loading.items.ms)} that an item takes no core "
            f"works on it: it waits{loading.items.mostly(WAITING)}."
        ),
        "# ask for a whole batch at once, and keep connections open; or let more workers wait side by side",
        line=_line(WAITING),
    ),
    _part(
        "decoding", "decoding at every read", "preprocessing ahead of time",
        "# store smaller images, resized once, ahead of time; or decoded ones",
    ),
    _part(
        "resizing", "resizing at every read", "preprocessing ahead of time",
        "# resize once, ahead of time, and read the copies",
    ),
    _part(
        "transforming", "transforms of each image", "normalization on the device",
        "transforms.PILToTensor()  # only; the first layer of the network normalizes",
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
            f"An item takes {milliseconds(loading.items.ms)}, which is about what it costs to ask for it and to put "
            f"it into a batch of {loading.items.batch}{loading.items.mostly(REST)}."
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
        "{speed} They are fast enough, but the loop waits {wait:ms} a step; half of the time no more than "
        "{usual_wait:ms}. {items.slow_ones}",
        "DataLoader(…, prefetch_factor=8)",
    ),
    Rule(
        "batches through a pipe", "loading", "loading whole batches",
        lambda loading: (
            (loading.wait if loading.in_spite else min(loading.wait, loading.transfer)) / loading.whole
            if loading.pickled else None
        ),
        lambda loading: (
            f"{loading.speed} {loading.pickled / 1e6:.2g} MB of a batch are NumPy arrays: these are pickled and sent "
            f"through a pipe, tensors are in shared memory. One that is ready arrives in "
            f"{milliseconds(loading.transfer)}."
        ),
        "collate_fn: torch.from_numpy(…)  # tensors, as the default makes them",
    ),
    Rule(
        "many tensors in a batch", "loading", "loading whole batches",
        lambda loading: (
            min(loading.wait, loading.transfer) / loading.whole
            if loading.workers and loading.tensors >= MANY_TENSORS else None
        ),
        "A batch has {tensors:tensor}, each of which a worker shares by itself: one that is ready arrives in "
        "{transfer:ms}.",
        "collate_fn: torch.stack(…)  # one tensor of all items, as the default makes it",
    ),
    Rule(
        "transfer from the workers", "loading", "normalization on the device", _slowly,
        "{speed} They are fast enough, but the loop waits {wait:ms} a step. A batch that a worker has ready arrives in "
        "{transfer:ms}.",
        "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the device",
    ),
)  # fmt: skip


def doubt(loading: Loading) -> str | None:
    """Return why to find nothing does not mean that nothing is wrong, or None."""
    if loading.workers == 0 and loading.items and loading.wait - loading.made >= WORTH * loading.whole:
        return (
            f"The loop waits {milliseconds(loading.wait)} a step, though a batch is made in "
            f"{milliseconds(loading.items.batch_ms)}: what it waits for is not known here."
        )
    unexplained = loading.wait - loading.transfer  # by a transfer from workers that are fast enough
    if not loading.fast_enough or unexplained / loading.whole < WORTH:
        return None
    why = "what they wait for is not known here"
    if loading.queued >= unexplained / 2:
        why = f"for each batch they were ready to work for {milliseconds(loading.queued)} while others had the cores"
    return (
        f"The loop waits {milliseconds(loading.wait)} a step, though its workers are fast enough by themselves and a "
        f"batch that is ready arrives in {milliseconds(loading.transfer)}: {why}. Diagnose again on a quiet machine; "
        "if that changes nothing, leave a core to the workers: torch.set_num_threads(…)."
    )
