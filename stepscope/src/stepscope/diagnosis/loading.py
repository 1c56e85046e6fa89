"""Why a loop waits for its batches: by the settings of its DataLoader, and by how long its items take.

`Loading` holds the facts, `RULES` is the table of findings. A new finding is a row of the table, and two tests: facts
of a loop with just this fault, and of one without it (see tests/diagnosis/test_diagnosis.py, `of_loading`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from stepscope.base.wording import counted, milliseconds, percent
from stepscope.diagnosis.items import IRREGULAR, REST, WAITING, Items
from stepscope.diagnosis.result import WORTH, Rule

# As many as can work at once are useful. Up to twice as many made no difference that could be measured on two cores,
# sixteen a third of the throughput at a start of five seconds.
TOO_MANY = 2
MOST_PER_CORE = 4  # workers that are advised: more were not tried. Each takes memory
# Of a step's time that loading in the loop itself would have to save: the same loop timed twice differs by as much.
MARGIN = 0.1
# ms. A batch that a worker has ready took 1.7 to 3 ms to arrive in a loop on two cores, of 1 image or of 128.
ARRIVAL = 1.0
# Bytes. A fast disk delivers so many, at 500 MB/s, in the 2 ms that an open takes on a shared file system (simulate).
SMALL_FILE = 1_000_000
# Of the mean wait: where the median is less, a few steps wait for long and the others hardly.
USUAL = 0.5


@dataclass(frozen=True)
class Loading:
    """A loop that loads, in numbers; times in ms."""

    step: float  # restarts left out, as of the two below
    wait: float  # of a step, for its batch
    usual_wait: float  # median
    workers: int
    cores: int
    restart: float  # added to a step, on average, by starting the workers of each epoch; 0 if they persist
    items: Items | None  # how they are loaded, if that could be tried
    transfer: float = 0.0  # from asking for a batch that a worker has ready to having it
    queued: float = 0.0  # for each batch, how long its worker was ready to work while others had the cores

    @property
    def work(self) -> float:
        """What is left of a step that does not wait."""
        return self.step - self.wait

    @property
    def whole(self) -> float:
        """A step with its part of the restarts."""
        return self.step + self.restart

    @property
    def fast_enough(self) -> bool:
        """Whether the workers can make batches faster than the steps take them, if they have the cores."""
        return self.pace(self.workers) < self.work * (1 - MARGIN)

    @property
    def unexplained(self) -> float:
        """What the loop waits for workers that are fast enough, and not for the transfer from them."""
        return max(0.0, self.wait - self.transfer) if self.items and self.workers and self.fast_enough else 0.0

    @property
    def useful(self) -> int:
        """Workers that can work at once: those that wait for storage need no core."""
        return round(self.cores * min(max(1.0, self.items.ms / max(self.items.cpu_ms, 1e-6)), MOST_PER_CORE))

    @property
    def slower(self) -> float:
        """How many times as long as by itself a batch takes in a loop without workers: others use the machine, too."""
        return 1.0 if self.workers else max(1.0, self.wait / max(self.items.batch_ms, 1e-6))

    def pace(self, workers: int) -> float:
        """The time in which so many workers can make a batch at best, given the cores, and as busy as they are."""
        return self.slower * max(self.items.batch_ms / workers, self.items.batch * self.items.cpu_ms / self.cores)

    def gained(self, step: float) -> float:
        """Return the share of a step that it gains to have steps of `step` ms: no more than the waiting."""
        return max(0.0, min(self.step - step, self.wait) / self.whole)

    def of_items(self, share: float) -> float:
        """Return the share of a step that it gains if `share` of the items' time vanishes: no more than the waiting."""
        paced = self.step if self.workers else self.wait  # the time that loading sets
        return min(self.wait, share * paced) / self.whole

    @property
    def waits(self) -> bool:
        """Whether the loop waits long enough for its batch to ask why."""
        return self.items is not None and self.wait / self.whole >= WORTH

    @property
    def too_many(self) -> bool:
        """Whether there are far more workers than can work at once."""
        return self.items is not None and self.workers > TOO_MANY * self.useful

    @property
    def better(self) -> int:
        """The number of workers that makes batches as fast as the steps take them, as far as it is useful."""
        return min(max(1, math.ceil(self.items.batch_ms / max(self.work, 1e-3))), self.useful)

    @cached_property
    def more(self) -> float:
        """The gain of more workers; 0 where that of none is larger."""
        if not self.waits:
            return 0.0
        gain = self.gained(max(self.work, self.pace(self.better))) if self.better > self.workers else 0.0
        least = 0.0 if self.workers else ARRIVAL / self.whole  # to get a batch from a first worker takes as long
        return gain if gain >= max(self._without, WORTH, least) else 0.0

    @cached_property
    def none(self) -> float:
        """The gain of loading without workers; 0 where that of more is larger."""
        return self._without if self.waits and not self.more and self._without >= WORTH else 0.0

    @property
    def _without(self) -> float:
        if not self.workers:
            return 0.0
        waits = min(self.wait, self.transfer)  # what is waited for something else, would be without workers, too
        made = self.items.batch_ms
        return self.gained(self.step - waits + made + MARGIN * (self.work + made))

    @property
    def by_items(self) -> Items | None:
        """The items, if how long they take is why the loop waits."""
        slow = self.waits and (self.more or self.none or not self.workers or not self.fast_enough)
        return self.items if slow else None

    @property
    def in_spite(self) -> bool:
        """Whether the loop waits though its workers are fast enough on average."""
        return self.waits and self.by_items is None and not self.too_many

    @property
    def slow_items(self) -> tuple[float, float]:
        """What slow items take, of the time of all, and what of that they wait."""
        slow = self.items.irregular
        return (slow.share, slow.waiting) if slow else (0.0, 0.0)

    def share(self, part: str) -> float:
        """Return the share of the items' time in which a processor works on this part, slow items left out."""
        share = self.items.parts[part] - self.items.waits.get(part, 0.0)
        irregular, waiting = self.slow_items
        return share - (irregular - waiting) if part == REST else share

    @property
    def waiting(self) -> float:
        """The share of the items' time in which they wait, slow items and reading left out."""
        return sum(self.items.waits.get(part, 0.0) for part in PARTS) - self.slow_items[1]

    @property
    def reading(self) -> float:
        """The share of the items' time that goes to opening and reading files."""
        return self.items.parts["opening"] + self.items.parts["reading"]

    @property
    def small_files(self) -> bool:
        """Whether the files that the items open are small."""
        return self.items.opened > 0 and not self.items.file_bytes > SMALL_FILE


# What each part of an item's work is called as a finding, what to change, and what to read about.
PARTS = {
    "decoding": (
        "decoding at every read",
        "# store smaller images, resized once, ahead of time; or decoded ones",
        "preprocessing ahead of time",
    ),
    "resizing": (
        "resizing at every read",
        "# resize once, ahead of time, and read the copies",
        "preprocessing ahead of time",
    ),
    "transforming": (
        "transforms of each image",
        "transforms.PILToTensor()  # only; the first layer of the network normalizes",
        "normalization on the device",
    ),
    "collating": (
        "collating item by item",
        "def __getitems__(self, indices): …  # a whole batch at once",
        "loading whole batches",
    ),
    REST: (
        "the dataset's own work",
        "def __getitem__(self, index): …  # do once, ahead of time, what is the same in every epoch",
        "preprocessing ahead of time",
    ),
}


def _part(part: str, name: str, change: str, topic: str) -> Rule:
    """Return the row for a part of the items' work: it could at most vanish."""

    def evidence(loading: Loading) -> str:
        items = loading.items
        share, where = percent(loading.share(part)), _mostly(items, part)
        where = where or (f"; most in {items.slowest}" if part == REST else "")
        return f"{share} of the {milliseconds(items.ms)} that an item takes goes to {part}{where}."

    return Rule(
        name, "loading", topic,
        lambda loading: loading.of_items(loading.share(part)) if loading.by_items else None, evidence, change,
    )  # fmt: skip


def _reading(name: str, small: bool) -> Rule:
    """Return the row for reading files that are small, or large."""

    def evidence(loading: Loading) -> str:
        items = loading.items
        files = "a file once" if items.opened == 1 else f"files {items.opened:.2g} times"
        size = "" if math.isnan(items.file_bytes) else f", {items.file_bytes / 1e3:,.0f} kB each time"
        return (
            f"{percent(loading.reading)} of the {milliseconds(items.ms)} that an item takes goes to opening and "
            f"reading; each opens {files}{size}{_mostly(items, 'reading')}."
        )

    return Rule(
        name, "loading", "packed formats",
        lambda loading: (
            loading.of_items(loading.reading) if loading.by_items and loading.small_files is small else None
        ),
        evidence, "# pack the images into one large file; or read a copy on a disk of this machine",
    )  # fmt: skip


def _irregularly(loading: Loading) -> float | None:
    """Return what is waited for other reasons than a busy machine, if a few steps wait for long, the others hardly."""
    irregular = loading.in_spite and loading.usual_wait < USUAL * loading.wait
    return max(0.0, loading.wait - loading.queued) / loading.whole if irregular else None


def _slowly(loading: Loading) -> float | None:
    """Return what the transfer of batches that are ready takes, if the waits are no irregular ones."""
    if not loading.in_spite or (_irregularly(loading) or 0.0) >= WORTH:
        return None
    return min(loading.wait, loading.transfer) / loading.whole


RULES = (
    Rule(
        "workers restarted every epoch", "loading", "persistent workers",
        lambda loading: loading.restart / loading.whole,
        lambda loading: (
            f"Each epoch ends its workers and starts others: {milliseconds(loading.restart)} more a step on average."
        ),
        "DataLoader(…, persistent_workers=True)",
    ),
    Rule(
        "loading too slowly", "loading", "more workers",
        lambda loading: loading.wait / loading.whole if loading.items is None else None,
        lambda loading: f"The loop waits {milliseconds(loading.wait)} of a step for its batch.",
        "DataLoader(…, num_workers=…)  # more, or less work for each item",
    ),
    Rule(
        "too many workers", "loading", "number of workers",
        lambda loading: (
            loading.gained(max(loading.work, loading.pace(loading.useful))) if loading.too_many else None
        ),
        lambda loading: (
            f"{loading.workers} workers, but {counted(loading.cores, 'core')} keep {loading.useful} busy; the others "
            "take memory, and the longer to start."
        ),
        lambda loading: f"DataLoader(…, num_workers={loading.useful})",
        least=0.0,
    ),
    *(
        Rule(
            name, "loading", "more workers",
            lambda loading, some=some: loading.more if bool(loading.workers) is some else None,
            lambda loading: _speed(loading),
            lambda loading: f"DataLoader(…, num_workers={loading.better})",
        )
        for name, some in (("too few workers", True), ("loading in the loop itself", False))
    ),
    Rule(
        "workers slower than none", "loading", "loading without workers",
        lambda loading: loading.none,
        lambda loading: (
            f"{_speed(loading)} From a worker that has it ready, it arrives in {milliseconds(loading.transfer)}."
        ),
        "DataLoader(…, num_workers=0)",
    ),
    Rule(
        "irregular items", "loading", "prefetching",
        lambda loading: loading.of_items(loading.slow_items[0]) if loading.by_items else None,
        lambda loading: _slow(loading.items),
        "# look at what these items do; a larger prefetch_factor bridges them, if they are rare",
    ),
    Rule(
        "items that wait", "loading", "more workers",
        lambda loading: loading.of_items(loading.waiting) if loading.by_items else None,
        lambda loading: (
            f"In {percent(loading.waiting)} of the {milliseconds(loading.items.ms)} that an item takes no core works "
            f"on it: it waits{_mostly(loading.items, WAITING)}."
        ),
        "# ask for a whole batch at once, and keep connections open; or let more workers wait side by side",
    ),
    *(_part(part, *row) for part, row in PARTS.items()),
    _reading("many small files", True),
    _reading("slow reading", False),
    Rule(
        "irregular loading", "loading", "prefetching", _irregularly,
        lambda loading: (
            f"{_speed(loading)} They are fast enough, but the loop waits {milliseconds(loading.wait)} a step; half of "
            f"the time no more than {milliseconds(loading.usual_wait)}. {_slow(loading.items)}"
        ).strip(),
        "DataLoader(…, prefetch_factor=8)",
    ),
    Rule(
        "transfer from the workers", "loading", "normalization on the device", _slowly,
        lambda loading: (
            f"{_speed(loading)} They are fast enough, but the loop waits {milliseconds(loading.wait)} a step. A batch "
            f"that a worker has ready arrives in {milliseconds(loading.transfer)}."
        ),
        "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the device",
    ),
)  # fmt: skip


def doubt(loading: Loading) -> str | None:
    """Return why to find nothing does not mean that nothing is wrong, or None."""
    if loading.unexplained / loading.whole < WORTH:
        return None
    if loading.queued >= loading.unexplained / 2:
        why = f"for each batch they were ready to work for {milliseconds(loading.queued)} while others had the cores"
    else:
        why = "what they wait for is not known here"
    return (
        f"The loop waits {milliseconds(loading.wait)} a step, though its workers are fast enough by themselves and a "
        f"batch that is ready arrives in {milliseconds(loading.transfer)}: {why}. Diagnose again on a quiet machine; "
        "if that changes nothing, leave a core to the workers: torch.set_num_threads(…)."
    )


def _slow(items: Items) -> str:
    """Say which items take far longer than most, if some do."""
    slow = items.irregular
    if slow is None:
        return ""
    which = "" if slow.slowest is None else f", item {slow.slowest},"
    return (
        f"{slow.count} of {counted(items.count, 'item')} take {percent(slow.share)} of the time: the slowest{which} "
        f"{milliseconds(slow.slowest_ms)}, most {milliseconds(slow.usual_ms)}{_mostly(items, IRREGULAR)}."
    )


def _mostly(items: Items, name: str) -> str:
    """Return the reader's own line to look at, as the end of a sentence; "" if it is unknown."""
    return f", mostly at {items.lines[name]}" if name in items.lines else ""


def _speed(loading: Loading) -> str:
    items, workers = loading.items, loading.workers
    there = {0: "are no workers", 1: "is 1 worker"}.get(workers, f"are {workers} workers")
    return (
        f"One process makes a batch of {items.batch} in {milliseconds(items.batch_ms)}, the rest of the step "
        f"takes {milliseconds(loading.work)}; there {there} on {counted(loading.cores, 'core')}."
    )
