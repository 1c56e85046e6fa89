"""Why a loop waits for its batches: by the settings of its DataLoader, and by how long its items take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from helpers.diagnosis.items import IRREGULAR, REST, WAITING, Items
from helpers.diagnosis.result import WORTH, Finding
from helpers.wording import counted, milliseconds, percent

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
    """A loop that loads, in numbers; times in ms.

    Attributes
    ----------
    step, wait, usual_wait : float
        Of a step, of waiting for its batch, and the median of that; restarts left out.
    workers, cores : int
    restart : float
        Added to a step, on average, by starting the workers of each epoch; 0 if they persist.
    items : Items or None
        How items are loaded, if that could be tried.
    transfer : float
        From asking for a batch that a worker has ready to having it.
    queued : float
        For each batch, how long its worker was ready to work while others had the cores.
    """

    step: float
    wait: float
    usual_wait: float
    workers: int
    cores: int
    restart: float
    items: Items | None
    transfer: float = 0.0
    queued: float = 0.0

    @property
    def work(self) -> float:
        """What is left of a step that does not wait."""
        return self.step - self.wait

    @property
    def whole(self) -> float:
        """A step with its part of the restarts."""
        return self.step + self.restart

    @property
    def irregular(self) -> bool:
        """Whether a few steps wait for long, and the others hardly."""
        return self.usual_wait < USUAL * self.wait

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


def findings(loading: Loading) -> Iterator[Finding]:
    """Yield what costs time in loading, or holds workers for nothing."""
    if loading.restart / loading.whole >= WORTH:
        yield Finding(
            "workers restarted every epoch", "loading", loading.restart / loading.whole,
            f"Each epoch ends its workers and starts others: {milliseconds(loading.restart)} more a step on average.",
            "DataLoader(…, persistent_workers=True)", "persistent workers",
        )  # fmt: skip
    if loading.items is None:
        if loading.wait / loading.whole >= WORTH:
            yield _unexplained(loading)
        return
    too_many = list(_too_many(loading))
    yield from too_many
    if loading.wait / loading.whole < WORTH:
        return
    workers = list(_workers(loading))
    if workers or not loading.workers or not loading.fast_enough:
        yield from workers
        yield from _work(loading)
    elif not too_many:
        yield from _in_spite(loading)


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


def _unexplained(loading: Loading) -> Finding:
    return Finding(
        "loading too slowly", "loading", loading.wait / loading.whole,
        f"The loop waits {milliseconds(loading.wait)} of a step for its batch.",
        "DataLoader(…, num_workers=…)  # more, or less work for each item", "more workers",
    )  # fmt: skip


def _too_many(loading: Loading) -> Iterator[Finding]:
    if loading.workers <= TOO_MANY * loading.useful:
        return
    best = max(loading.work, loading.pace(loading.useful))
    yield Finding(
        "too many workers", "loading", _gain(loading, best),
        f"{loading.workers} workers, but {_cores(loading)} keep {loading.useful} busy; the others take memory, and the "
        "longer to start.",
        f"DataLoader(…, num_workers={loading.useful})", "number of workers",
    )  # fmt: skip


def _workers(loading: Loading) -> Iterator[Finding]:
    """More workers, or none, whichever is better."""
    items, workers = loading.items, loading.workers
    needed = max(1, math.ceil(items.batch_ms / max(loading.work, 1e-3)))
    better = min(needed, loading.useful)
    more = _gain(loading, max(loading.work, loading.pace(better)) if better > workers else loading.step)
    if not workers and more * loading.whole < ARRIVAL:  # to get it from a worker would take longer
        more = 0.0
    none = 0.0
    if workers:
        waits = min(loading.wait, loading.transfer)  # what is waited for something else, would be without workers, too
        none = _gain(loading, loading.step - waits + items.batch_ms + MARGIN * (loading.work + items.batch_ms))
    if more >= max(none, WORTH):
        yield Finding(
            "too few workers" if workers else "loading in the loop itself", "loading", more, _speed(loading),
            f"DataLoader(…, num_workers={better})", "more workers",
        )  # fmt: skip
    elif none >= WORTH:
        yield Finding(
            "workers slower than none", "loading", none,
            f"{_speed(loading)} From a worker that has it ready, it arrives in {milliseconds(loading.transfer)}.",
            "DataLoader(…, num_workers=0)", "loading without workers",
        )  # fmt: skip


def _gain(loading: Loading, step: float) -> float:
    """Return the share of a step that it gains to have steps of `step` ms: no more than the waiting."""
    return max(0.0, min(loading.step - step, loading.wait) / loading.whole)


def _in_spite(loading: Loading) -> Iterator[Finding]:
    """Workers that are fast enough on average, and a loop that waits all the same."""
    evidence = f"{_speed(loading)} They are fast enough, but the loop waits {milliseconds(loading.wait)} a step"
    irregular = max(0.0, loading.wait - loading.queued) / loading.whole
    transfer = min(loading.wait, loading.transfer) / loading.whole
    if loading.irregular and irregular >= WORTH:
        usual = f"half of the time no more than {milliseconds(loading.usual_wait)}."
        yield Finding(
            "irregular loading", "loading", irregular, f"{evidence}; {usual} {_slow(loading.items)}".strip(),
            "DataLoader(…, prefetch_factor=8)", "prefetching",
        )  # fmt: skip
    elif transfer >= WORTH:
        yield Finding(
            "transfer from the workers", "loading", transfer,
            f"{evidence}. A batch that a worker has ready arrives in {milliseconds(loading.transfer)}.",
            "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the device",
            "normalization on the device",
        )  # fmt: skip


# What each part of an item's work is called as a finding, what to change, and what to read about.
_PARTS = {
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


def _work(loading: Loading) -> Iterator[Finding]:
    """What an item's time goes to: each could at most vanish, and no more than the waiting for batches with it."""
    items = loading.items
    paced = loading.step if loading.workers else loading.wait  # the time that loading sets

    def gained(share: float) -> float:
        return min(loading.wait, share * paced) / loading.whole

    irregular, seldom = 0.0, 0.0  # what items take that are slow, and what of that they wait
    if items.irregular:
        irregular, seldom = items.irregular.share, items.irregular.waiting
        if gained(irregular) >= WORTH:
            yield Finding(
                "irregular items", "loading", gained(irregular), _slow(items),
                "# look at what these items do; a larger prefetch_factor bridges them, if they are rare",
                "prefetching",
            )  # fmt: skip
    waiting = sum(items.waits.get(part, 0.0) for part in _PARTS) - seldom
    if gained(waiting) >= WORTH:
        yield Finding(
            "items that wait", "loading", gained(waiting),
            f"In {percent(waiting)} of the {milliseconds(items.ms)} that an item takes no core works on it: it waits"
            f"{_mostly(items, WAITING)}.",
            "# ask for a whole batch at once, and keep connections open; or let more workers wait side by side",
            "more workers",
        )  # fmt: skip
    for part, (name, change, topic) in _PARTS.items():
        share = items.parts[part] - items.waits.get(part, 0.0)
        if part == REST:
            share -= irregular - seldom
        if gained(share) >= WORTH:
            where = f"goes to {part}{_mostly(items, part)}"
            if part == REST:
                where = f"is spent in the dataset itself{_mostly(items, part) or f'; most in {items.slowest}'}"
            evidence = f"{percent(share)} of the {milliseconds(items.ms)} that an item takes {where}."
            yield Finding(name, "loading", gained(share), evidence, change, topic)
    share = items.parts["opening"] + items.parts["reading"]
    if gained(share) >= WORTH:
        small = items.opened > 0 and not items.file_bytes > SMALL_FILE
        files = "a file once" if items.opened == 1 else f"files {items.opened:.2g} times"
        size = "" if math.isnan(items.file_bytes) else f", {items.file_bytes / 1e3:,.0f} kB each time"
        yield Finding(
            "many small files" if small else "slow reading", "loading", gained(share),
            f"{percent(share)} of the {milliseconds(items.ms)} that an item takes goes to opening and reading; each "
            f"opens {files}{size}{_mostly(items, 'reading')}.",
            "# pack the images into one large file; or read a copy on a disk of this machine",
            "packed formats",
        )  # fmt: skip


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
        f"takes {milliseconds(loading.work)}; there {there} on {_cores(loading)}."
    )


def _cores(loading: Loading) -> str:
    return counted(loading.cores, "core")
