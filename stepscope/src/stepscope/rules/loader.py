"""Why a loop waits for its batches: because of the DataLoader's settings, or because of the time that items take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepscope import thresholds
from stepscope.base.wording import counted, milliseconds, percent, printable
from stepscope.facts import Facts
from stepscope.facts.loader import IRREGULAR, PARTS, REST, WAITING, Items, Sampling
from stepscope.facts.loop import Loop
from stepscope.facts.profile import Profile
from stepscope.report.findings import Finding
from stepscope.rules.rule import Gain, Rule, mostly

NOT_LOADED = Items(0, 0.0, 0.0, 0, dict.fromkeys([*PARTS, REST], 0.0), 0.0, None, "")


@dataclass(frozen=True)
class Loading:
    """A view of a loop's loading. A gain is a share of the whole step, and at most the wait."""

    loop: Loop
    items: Items
    loaded: bool  # whether `items` is known
    cores: int
    # Mean times of a step, without the first steps of epochs
    step_ms: float
    wait_ms: float  # wait for the batch; with a GPU, only while the GPU waits as well
    usual_wait_ms: float  # median wait
    work_ms: float  # the step without the wait
    sampling_ms: float  # work of the sampler, with its work at the start of each epoch divided by the steps of an epoch
    restart_ms: float  # time to start workers in each epoch, divided by the steps of an epoch
    begin_ms: float  # time to begin an epoch, with `restart_ms`, divided by the steps of an epoch
    whole_ms: float  # the step with `begin_ms`, the work between epochs, and the work of long steps
    crowded_ms: float  # shortest time in which the cores can do the work of the step and of its workers
    lacks_cores: bool  # whether `crowded_ms` limits the gain of more workers
    # Workers
    workers: int  # 0 if unknown
    useful_workers: int  # workers that can work at once; a worker that waits for storage needs no core
    better_workers: int  # workers that keep up with the steps, at most `useful_workers`
    too_many: bool  # whether there are far more workers than can work at once
    fast_enough: bool  # whether the workers, given free cores, make batches faster than the steps use them
    # Gains; 0 or None if they do not apply
    of_more_workers: float
    of_no_workers: float
    of_fewer_workers: Gain | None
    of_even_batches: float | None  # gain without the long waits of a few steps, unless a busy machine causes them
    of_the_transfer: float | None  # gain if ready batches arrive at once; None if the waits are irregular
    # Why the loop waits
    by_items: bool  # because of the time that items take
    in_spite: bool  # although its workers are fast enough on average
    made_ms: float  # part of a step in which making batches sets the pace
    pace_ms: float  # shortest time per batch with these workers; 0 without workers, or if unknown
    contended: Gain  # share of the step that is lost to CPU contention with workers

    def gain_of(
        self, share: Callable[[Items], float], name: str, working: Callable[[Items], float] | None = None
    ) -> Gain | None:
        """Return the gain of a change in the function that takes a share of the items' time, or only a part of it.

        `working` is the part of the share in which a core works, and counts if workers take the cores that the step
        needs. None if the loop is not slower because of items.
        """
        inside, lost = self.items.function_share(name), Gain(0.0, 0.0, 0.0)
        if working is not None:
            lost = Gain(*(working(self.items) * each for each in self.contended))
        if not self.by_items:
            return Gain(inside * lost.about, inside * lost.least, lost.most) if lost.most else None

        def gain(share: float) -> float:
            share = 1.0 if share >= thresholds.DOMINANT_PART else share
            return min(self.wait_ms, share * self.made_ms) / self.whole_ms

        most, part = gain(share(self.items)), gain(share(self.items) * inside)
        return Gain(part + inside * lost.about, part + inside * lost.least, most + lost.most)

    @property
    def pickles(self) -> bool:
        """Whether workers send much of a batch through a pipe."""
        return self.loop.pickled_bytes >= thresholds.PICKLED_BYTES

    @property
    def speed(self) -> str:
        """How fast batches are made, in sentences."""
        if not self.loaded:
            waits, step = milliseconds(self.wait_ms), milliseconds(self.step_ms)
            return f"The loop waits {waits} of a step of {step} for its batch."
        needs = f", which need {milliseconds(self.crowded_ms)} for all work of a step" if self.lacks_cores else ""
        return (
            f"One process makes a batch of {counted(self.items.batch, 'item')} in {milliseconds(self.items.batch_ms)}, "
            f"and the rest of the step takes {milliseconds(self.work_ms)}. The loop has "
            f"{counted(self.workers, 'worker')} on {counted(self.cores, 'core')}{needs}."
        )


def loading(
    loop: Loop, step_ms: float, wait_ms: float, usual_wait_ms: float, items: Items | None = None, cores: int = 1
) -> Loading:
    """Return the view of a loop with these mean times of a step; `items` is None if no items were timed."""
    loaded, workers, work_ms = items is not None, loop.workers or 0, step_ms - wait_ms
    items = items or NOT_LOADED
    batch_ms, batch_cpu_ms = items.batch_ms, items.batch_cpu_ms
    begin_ms = restart_ms = 0.0
    sampling_ms = min(wait_ms, items.sampling.batch_ms)
    if loaded and loop.epoch_steps:
        longer_ms = max(0.0, loop.start_ms - (batch_ms if workers else wait_ms))  # than the time for a batch
        begins_ms = min(longer_ms, items.sampling.start_ms) / loop.epoch_steps
        if workers and not loop.persistent:
            restart_ms = longer_ms / loop.epoch_steps - begins_ms
        begin_ms = begins_ms + restart_ms
        sampling_ms += begins_ms
    whole_ms = step_ms + begin_ms + loop.pauses.ms_per_step + loop.long.ms_per_step * loop.long.distinct
    slight_ms = thresholds.SLIGHT_WAIT * whole_ms
    slight = not workers and wait_ms < min(thresholds.SLIGHT_WAIT_MS, slight_ms)
    arrives = workers > 0 and wait_ms < min(thresholds.ARRIVED_MS, slight_ms)
    useful = round(cores * min(max(1.0, items.ms / max(items.cpu_ms, 1e-6)), thresholds.MOST_WORKERS_PER_CORE))
    too_many = loaded and workers > thresholds.TOO_MANY_WORKERS * useful
    better = min(max(1, math.ceil(batch_ms / max(work_ms, 1e-3))), useful) if loaded else 2
    # On a busy machine, the loop itself may take longer to make a batch than `items` says
    made_ms = min(wait_ms, thresholds.SLOWED_BATCH * batch_ms)
    slower = 1.0 if workers else max(1.0, made_ms / max(batch_ms, 1e-6))
    # Without workers the step's own CPU time includes loading
    crowded_ms = (loop.cpu_ms + (batch_cpu_ms if workers else 0.0)) / cores

    def pace_ms(workers: int) -> float:
        """Return the shortest time per batch with this number of workers, limited by the cores, in ms."""
        return slower * max(batch_ms / workers, batch_cpu_ms / cores)

    def gained(shorter_ms: float) -> float:
        return max(0.0, min(step_ms - shorter_ms, wait_ms) / whole_ms)

    without = 0.0  # gain of loading without workers
    if workers and loaded:  # without workers, waits for reasons other than the transfer would stay
        margin_ms = thresholds.NO_WORKERS_MARGIN * (work_ms + batch_ms)
        without = gained(step_ms - min(wait_ms, loop.transfer_ms) + batch_ms + margin_ms)
    more = 0.0
    if not loaded:  # the gain of more workers is unknown: at most the whole wait
        more = wait_ms / whole_ms if loop.workers == 0 else 0.0
    elif better > workers and not slight:
        more = gained(max(work_ms, pace_ms(better), crowded_ms))
        arrival = 0.0 if workers else thresholds.ARRIVAL_MS / whole_ms  # a batch from a first worker arrives later
        more = more if more >= max(without, thresholds.WORTH, arrival) else 0.0
    none = without if not more and without >= thresholds.WORTH else 0.0
    fast_enough = loaded and workers > 0 and pace_ms(workers) < work_ms * (1 - thresholds.NO_WORKERS_MARGIN)
    by_items = loaded and bool(more or none or not (fast_enough or slight))
    in_spite = loaded and not by_items and not too_many
    pickles = loop.pickled_bytes >= thresholds.PICKLED_BYTES
    even = transfer = None
    if in_spite and not pickles and usual_wait_ms < thresholds.USUAL_WAIT * wait_ms:
        even = max(0.0, wait_ms - loop.queued_ms) / whole_ms
    many_tensors = loop.tensors >= thresholds.MANY_TENSORS
    if in_spite and not (pickles or many_tensors or arrives or (even or 0.0) >= thresholds.WORTH):
        transfer = min(wait_ms, loop.transfer_ms) / whole_ms
    contended = Gain(0.0, 0.0, 0.0)
    contends = crowded_ms >= thresholds.ALL_CORES_BUSY * step_ms
    if not loop.asynchronous:  # a GPU computes while workers are queued
        contends |= loop.queued_ms >= thresholds.QUEUED_WORKERS * batch_cpu_ms
    if loaded and workers and loop.cpu_ms and contends:
        # All threads of a step wait for the thread whose core a worker has, while the step does not wait for a batch
        lost = (batch_cpu_ms, batch_cpu_ms / cores, batch_cpu_ms + loop.queued_ms)
        contended = Gain(*(min(1.0, each / step_ms) * work_ms / whole_ms for each in lost))
    fewer = None
    if too_many:
        saved = gained(max(work_ms, pace_ms(useful))) + (1 - useful / workers) * restart_ms / whole_ms
        fewer = Gain(saved + contended.about, saved, min(1.0, saved + contended.most))
    paced_ms = step_ms if workers else made_ms
    if none:  # most of the step's time is then the transfer
        paced_ms = min(paced_ms, batch_ms)
    return Loading(
        loop, items, loaded, cores,
        step_ms, wait_ms, usual_wait_ms, work_ms, sampling_ms, restart_ms, begin_ms, whole_ms,
        crowded_ms, crowded_ms > max(work_ms, pace_ms(better)),
        workers, useful, better, too_many, fast_enough,
        more, none, fewer, even, transfer,
        by_items, in_spite, paced_ms, pace_ms(workers) if workers and loaded else 0.0, contended,
    )  # fmt: skip


def view(facts: Facts, profile: Profile | None) -> Loading:
    """Return the view of a loop's loading; from a trace alone, of the profile's loading. One of both is known."""
    if facts.loop is None:
        assert profile is not None
        wait = profile.loading * profile.step_ms
        return loading(Loop((), 0.0, workers=0 if profile.in_process else None), profile.step_ms, wait, wait)
    loop = facts.loop
    wait, usual, step = loop.wait_ms, loop.usual_wait_ms, loop.work_ms + loop.wait_ms
    if profile is not None and profile.on_device:  # only waits during which the GPU waits as well can be saved
        wait = min(wait, profile.loading * step)
        usual = min(wait, usual)
    items = facts.loader.items if facts.loader else None
    cores = facts.machine.cores if facts.machine else 1
    found = loading(loop, step, wait, usual, items, cores)
    if loop.epoch_steps == 1:  # each wait includes a start of the workers
        restart = min(found.restart_ms, wait)
        found = with_times(found, step - restart, wait - restart, min(wait - restart, usual))
    return found


def with_times(known: Loading, step_ms: float, wait_ms: float, usual_wait_ms: float) -> Loading:
    """Return the view of the same loop with other times."""
    items = known.items if known.loaded else None
    return loading(known.loop, step_ms, wait_ms, usual_wait_ms, items, known.cores)


def then_limited(finding: Finding, loading: Loading) -> Finding:
    """Return a finding with no more than the gain that is possible until loading becomes the limit of the step.

    If loading is the limit already, the finding stays, since only both changes together gain time.
    """
    limit = 1 - loading.pace_ms / loading.whole_ms
    of_loading = finding.key.startswith(("loader.", "items.")) and finding.key != "loader.workers-restarted"
    if of_loading or not loading.pace_ms or finding.gain <= limit:
        return finding
    workers = f"{counted(loading.workers, 'worker')} make{'s' * (loading.workers == 1)}"
    text = f"{finding.evidence} Loading is the next limit: {workers} a batch in {milliseconds(loading.pace_ms)}."
    if limit < thresholds.WORTH:
        return replace(finding, evidence=text, range=finding.range and (0.0, finding.range[1]))
    ends = finding.range
    if ends is not None:
        least, most = Gain(limit, limit, limit).range
        ends = min(ends[0], least), min(ends[1], most)
    return replace(finding, gain=limit, range=ends, evidence=text)


def doubt(loading: Loading) -> str | None:
    """Return in a sentence that the wait is longer than loading explains; None if loading explains the wait."""
    waits = f"The loop waits {milliseconds(loading.wait_ms)} a step, although"
    if loading.loop.workers == 0 and loading.loaded:
        made_ms = min(loading.wait_ms, thresholds.SLOWED_BATCH * loading.items.batch_ms)
        made_ms += loading.items.sampling.batch_ms
        if loading.wait_ms - made_ms < thresholds.WORTH * loading.whole_ms:
            return None
        return f"{waits} a batch is made in {milliseconds(loading.items.batch_ms)}: the cause of the wait is not known."
    unexplained = loading.wait_ms - loading.loop.transfer_ms  # by the transfer from fast enough workers
    if not loading.fast_enough or unexplained / loading.whole_ms < thresholds.WORTH:
        return None
    why, queued = "the cause of the wait is not known", milliseconds(loading.loop.queued_ms)
    if loading.loop.queued_ms >= unexplained / 2:
        why = f"for each batch the workers were queued for {queued} while no core was free"
    return (
        f"{waits} its workers are fast enough by themselves and a ready batch arrives in "
        f"{milliseconds(loading.loop.transfer_ms)}: {why}. Diagnose again on an idle machine. "
        "If the wait stays, leave a core to the workers: torch.set_num_threads(…)."
    )


def at(line: str) -> str:
    return f", mostly at {line}" if line else ""


def _line(name: str) -> Callable[[Loading], str]:
    return lambda loading: loading.items.line(name)


def _sampler(loading: Loading, sampling: Sampling) -> str:
    """Return how long the sampler takes, as sentences."""
    epoch = counted(loading.loop.epoch_steps or 0, "step")
    return (
        f"{sampling.name} takes {milliseconds(sampling.start_ms)} to begin an epoch of {epoch}, and "
        f"{milliseconds(sampling.batch_ms)} for each further batch{at(sampling.line)}: "
        f"{milliseconds(loading.sampling_ms)} a step on average. The loop waits meanwhile, even if it has workers."
    )


def _slow_items(items: Items) -> str:
    """Return a sentence on items that take far longer than most items; "" if there are none."""
    slow = items.irregular
    if not slow.count:
        return ""
    which = "" if slow.slowest is None else f" (index {slow.slowest})"
    return (
        f"{slow.count} of {counted(items.count, 'item')} take {percent(slow.share)} of the time: the slowest item"
        f"{which} takes {milliseconds(slow.slowest_ms)}, the median item {milliseconds(slow.usual_ms)}"
        f"{at(items.line(IRREGULAR))}."
    )


def _fitting(change: str, other: str | None = None) -> Callable[[Loading], str]:
    """Return the change for items made from images, and `other` for other items: without it, to keep results."""

    def fitting(loading: Loading) -> str:
        used = loading.items.libraries or {}
        if loading.items.images:
            return change
        return (
            "monai.data.CacheDataset(…)  # keeps results up to the first random transform"
            if "monai" in used
            else (other or "# do work that is not random once, ahead of time, and keep its results")
        )

    return fitting


def _of_the_dataset(loading: Loading) -> str:
    """Return the change for the dataset's own code."""
    used = loading.items.libraries or {}
    if used.get("pandas", 0.0) >= thresholds.LIBRARY:
        return "def __init__(self, …): …  # convert the table to arrays or tensors once, and index these in __getitem__"
    return _fitting(PRECOMPUTE, PRECOMPUTE)(loading)


def _of_hdf5(loading: Loading) -> str:
    """Return the change for reading; from HDF5, where an item reads it."""
    reads = loading.items.hdf5_reads
    if loading.items.opened_again:
        return ONCE
    if reads >= thresholds.MANY_READS:
        return "dataset[...]  # or a slice of it, in one read: an array, from which to make the tensor"
    if reads:
        return "file[name][:]  # once into memory; or slices, since HDF5 selects each index of a list by itself"
    return READ


def _warnings(items: Items, share: float) -> str:
    """Return PyTorch's warnings as sentences, for a part with this share; "" if another part takes longer."""
    if share < max(items.reading, *map(items.working, (*PARTS, REST))):
        return ""
    return "".join(f" PyTorch warns: {printable(text)}" for text in items.warnings[:2])


TOGETHER = "def __getitems__(self, indices): …  # loads a whole batch at once"
PRECOMPUTE = "def __getitem__(self, index): …  # precompute work that is the same in every epoch"
DECODED = "# store resized, smaller images ahead of time; or store decoded images"
ONCE = "# open, read and decode a file once for an item, and pass the result on"
READ = "# open a file once, and keep it open; pack small files into a large file; or read from a local disk"
PIL_TO_TENSOR = "transforms.PILToTensor()  # only this transform; the first layer of the network normalizes"
AS_BYTES = "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the device"


def _calls(items: Items) -> float:
    """Return the share of the calls that request and collate a tiny item."""
    return items.working(REST) + items.working("collating")


def _again(items: Items) -> str:
    """Return a sentence on files that an item opens again; "" if it opens each file once."""
    if not items.opened_again:
        return ""
    return f" {percent(items.opened_again)} of the files that an item opens are files that it has opened already."


def _beside(loading: Loading) -> str:
    """Return a sentence if the loop does not wait for items, but for cores."""
    return " The workers use the cores that the step needs." if loading.contended.most else ""


def _part(
    key: str, part: str, name: str, topic: str, means: str, change: str, fit: Callable[[Loading], str] | None = None
) -> Rule[Loading]:
    """Return the row for a part of the items' work; the gain assumes that the part is removed.

    `fit` returns the change for the items at hand: by default `change`.
    """

    def evidence(loading: Loading) -> str:
        items, work = loading.items, "the dataset's own code" if part == REST else part
        where = at(items.line(part)) or (f"; mostly in {items.slowest}" if part == REST else "")
        took = percent(items.working(part))
        return (
            f"An item takes {milliseconds(items.ms)}, and {took} of this time goes to {work}{where}."
            f"{_again(items) * (part == 'decoding')}{_beside(loading)}"
            f"{_warnings(items, items.working(part))}"
        )

    def share(items: Items) -> float:
        if items.tiny and part in (REST, "collating"):
            return 0.0
        return items.working(part)

    return Rule(
        key, name, "loading", topic, means, lambda loading: loading.gain_of(share, part, share), evidence,
        fit or _fitting(change), line=_line(part), example=change,
    )  # fmt: skip


def _reading(key: str, name: str, means: str, small: bool) -> Rule[Loading]:
    """Return the row for reading small files, or for reading large files."""

    def evidence(loading: Loading) -> str:
        items = loading.items
        files = "a file once" if items.opened == 1 else f"files {items.opened:.2g} times"
        size = "" if items.file_bytes is None else f", and reads {items.file_bytes / 1e3:,.0f} kB each time"
        opens = f"; an item opens {files}{size}" if items.opened else ""
        opens += f"; an item reads HDF5 {items.hdf5_reads:.2g} times" if items.hdf5_reads else ""
        return (
            f"An item takes {milliseconds(items.ms)}, and {percent(items.reading)} of this time goes to opening and "
            f"reading{opens}{at(items.line('reading'))}."
            f"{_again(items)}{_beside(loading)}{_warnings(items, items.reading)}"
        )

    def share(items: Items) -> float:
        return items.reading if items.small_files is small else 0.0

    def working(items: Items) -> float:
        return items.working("opening") + items.working("reading") if items.small_files is small else 0.0

    return Rule(
        key, name, "loading", "packed formats", means, lambda loading: loading.gain_of(share, "reading", working),
        evidence, _of_hdf5, line=_line("reading"), example=READ,
    )  # fmt: skip


RULES: tuple[Rule[Loading], ...] = (
    Rule(
        "loader.iterator-for-each-batch", "a new iterator for each batch", "loading", "persistent workers",
        "Each batch is the first of a new iterator over the loader, and each iterator starts new workers.",
        lambda loading: (
            (loading.wait_ms + loading.restart_ms) / loading.whole_ms if loading.loop.only_first else None
        ),
        lambda loading: (
            "Each batch is the first of a new iterator over the loader, and each iterator starts new workers: "
            f"{milliseconds(loading.restart_ms)} a step.{mostly(loading.loop.line)}"
        ),
        "for batch in loader: …  # not next(iter(loader)), which starts new workers each time",
        line=lambda loading: loading.loop.line,
    ),
    Rule(
        "loader.workers-restarted", "workers restarted every epoch", "loading", "persistent workers",
        "Each epoch ends its workers and starts new workers.",
        lambda loading: None if loading.loop.only_first else loading.restart_ms / loading.whole_ms,
        "Each epoch ends its workers and starts new workers, which adds {restart_ms:ms} to a step on average.",
        lambda loading: (
            f"DataLoader(…, persistent_workers=True"
            f"{f', num_workers={loading.useful_workers}' if loading.too_many else ''})"
            f"{'  # make it once, before the loop over the epochs' if loading.loop.loader_changed else ''}"
        ),
        example="DataLoader(…, persistent_workers=True)",
    ),
    Rule(
        "loader.sampler", "a slow sampler", "loading", "loading whole batches",
        "The sampler takes long to choose the indices of the items, at the start of each epoch or for each batch.",
        lambda loading: loading.sampling_ms / loading.whole_ms,
        lambda loading: _sampler(loading, loading.items.sampling),
        lambda loading: (
            "WeightedRandomSampler(…, replacement=True)  # without replacement, all weights are sorted"
            if loading.items.sampling.name == "WeightedRandomSampler"
            else "# choose all indices of an epoch at once, with NumPy or PyTorch; or once for several epochs"
        ),
        line=lambda loading: loading.items.sampling.line,
        example="# choose all indices of an epoch at once, with NumPy or PyTorch; or once for several epochs",
    ),
    Rule(
        "loader.too-slow", "slow loading", "loading", "more workers",
        "The loop waits for its batches; a trace alone does not show why.",
        lambda loading: (
            loading.wait_ms / loading.whole_ms if not loading.loaded and loading.loop.workers != 0 else None
        ),
        "{speed}",
        "DataLoader(…, num_workers=…)  # more workers, or less work for each item",
    ),
    Rule(
        "loader.too-many-workers", "too many workers", "loading", "number of workers",
        "There are far more workers than the cores can keep busy.",
        lambda loading: loading.of_fewer_workers,
        "{cores:core} can keep {useful_workers} of {workers} workers busy; the rest take memory and time to start.",
        "DataLoader(…, num_workers={useful_workers})",
        least=0.0,
    ),
    Rule(
        "loader.too-few-workers", "too few workers", "loading", "more workers",
        "The workers make batches more slowly than the steps use them, and there are cores for more workers.",
        lambda loading: loading.of_more_workers if loading.workers else None,
        "{speed}",
        "DataLoader(…, num_workers={better_workers})",
    ),
    Rule(
        "loader.no-workers", "loading in the loop itself", "loading", "more workers",
        "The loop makes its batches itself, and cannot train meanwhile.",
        lambda loading: None if loading.workers or loading.loop.on_gpu else loading.of_more_workers,
        "{speed}",
        lambda loading: (
            f"DataLoader(…, num_workers={loading.better_workers})"
            f"{'' if loading.loaded else '  # try more, up to the number of cores'}"
        ),
        example="DataLoader(…, num_workers=…)",
    ),
    Rule(
        "loader.items-on-gpu", "items that are on the GPU already", "loading", "loading whole batches",
        "The loop itself makes its batches on the GPU, and it is not known how long an item takes.",
        lambda loading: (
            loading.wait_ms / loading.whole_ms
            if loading.loop.on_gpu and not loading.workers and not loading.loaded
            else None
        ),
        "The loop waits {wait_ms:ms} a step for batches that it makes on the GPU itself. Workers are processes, and "
        "most cannot use its tensors there.",
        "batch = images[indices], labels[indices]  # whole batches, if the data are on the GPU\n"
        "# otherwise load on the host, with workers, and copy a whole batch",
    ),
    Rule(
        "loader.workers-slower-than-none", "workers slower than none", "loading", "loading without workers",
        "A batch takes longer to arrive from a worker than to be made in the loop.",
        lambda loading: loading.of_no_workers,
        "{speed} A ready batch takes {loop.transfer_ms:ms} to arrive from a worker.",
        "DataLoader(…, num_workers=0)",
    ),
    Rule(
        "items.irregular", "irregular items", "loading", "prefetching",
        "A few items take far longer than most items, each time they are loaded.",
        lambda loading: loading.gain_of(lambda items: items.irregular.share, IRREGULAR),
        lambda loading: _slow_items(loading.items),
        "# examine these items; if they are rare, a larger prefetch_factor or in_order=False hides their time",
        line=_line(IRREGULAR),
    ),
    Rule(
        "items.waiting", "items that wait", "loading", "more workers",
        "An item waits for much of its time, for storage or a server, and uses no core meanwhile.",
        lambda loading: loading.gain_of(lambda items: items.waiting, WAITING),
        lambda loading: (
            f"An item takes {milliseconds(loading.items.ms)}, and waits for {percent(loading.items.waiting)} of this "
            f"time without using a core{at(loading.items.line(WAITING))}."
        ),
        "# request a whole batch at once, and keep connections open; or let more workers wait in parallel",
        line=_line(WAITING),
    ),
    _part(
        "items.decoding", "decoding", "decoding at every read", "preprocessing ahead of time",
        "Decoding takes much of an item's time, again in every epoch.",
        DECODED,
        lambda loading: (
            ONCE
            if loading.items.opened_again
            else _fitting(DECODED, "# decode once, ahead of time, and store the results")(loading)
        ),
    ),
    _part(
        "items.resizing", "resizing", "resizing at every read", "preprocessing ahead of time",
        "Resizing takes much of an item's time, again in every epoch.",
        "# resize images once, ahead of time, and read the copies; keep only random crops",
    ),
    _part(
        "items.transforms", "transforming", "transforms of each image", "normalization on the device",
        "Transforms take much of an item's time.",
        PIL_TO_TENSOR,
    ),
    _part(
        "items.collating", "collating", "collating item by item", "loading whole batches",
        "Collating items into a batch takes much of their time.",
        TOGETHER, lambda loading: TOGETHER,
    ),
    Rule(
        "items.one-by-one", "items loaded one by one", "loading", "loading whole batches",
        "An item takes no longer than the calls that request and collate it.",
        lambda loading: loading.gain_of(_calls, "", _calls) if loading.loaded and loading.items.tiny else None,
        lambda loading: (
            f"An item takes {milliseconds(loading.items.ms)}, about as long as the calls that request and collate it "
            f"in a batch of {counted(loading.items.batch, 'item')}{at(loading.items.line(REST))}."
        ),
        TOGETHER,
        line=_line(REST),
    ),
    _part(
        "items.dataset", REST, "the dataset's own work", "preprocessing ahead of time",
        "The dataset's own code takes much of an item's time.",
        PRECOMPUTE, _of_the_dataset,
    ),
    _reading(
        "items.small-files", "many small files", "Opening and reading small files takes much of an item's time.", True
    ),
    _reading("items.reading", "slow reading", "Reading takes much of an item's time.", False),
    Rule(
        "loader.irregular", "irregular loading", "loading", "prefetching",
        "The workers are fast enough on average, but a few steps wait for a long time.",
        lambda loading: loading.of_even_batches,
        lambda loading: (
            f"{loading.speed} The workers are fast enough, but steps wait: {milliseconds(loading.wait_ms)} on average, "
            f"with a median of {milliseconds(loading.usual_wait_ms)}. {_slow_items(loading.items)}"
        ),
        "DataLoader(…, prefetch_factor=8)  # or in_order=False, if any order will do",
    ),
    Rule(
        "loader.pickled-batches", "batches through a pipe", "loading", "loading whole batches",
        "Workers pickle NumPy arrays and send them through a pipe; tensors would use shared memory.",
        lambda loading: (
            (loading.wait_ms if loading.in_spite else min(loading.wait_ms, loading.loop.transfer_ms)) / loading.whole_ms
            if loading.pickles else None
        ),
        lambda loading: (
            f"{loading.speed} {loading.loop.pickled_bytes / 1e6:.2g} MB of a batch are NumPy arrays, which workers "
            "pickle and send through a pipe; tensors would use shared memory. A ready batch takes "
            f"{milliseconds(loading.loop.transfer_ms)} to arrive."
        ),
        "collate_fn: torch.from_numpy(…)  # returns tensors, like the default collate_fn",
    ),
    Rule(
        "loader.many-tensors", "many tensors in a batch", "loading", "loading whole batches",
        "A batch has many tensors, and a worker shares each tensor separately.",
        lambda loading: (
            min(loading.wait_ms, loading.loop.transfer_ms) / loading.whole_ms
            if loading.workers and loading.loop.tensors >= thresholds.MANY_TENSORS else None
        ),
        "A batch has {loop.tensors:tensor}, and a worker shares each tensor separately: a ready batch takes "
        "{loop.transfer_ms:ms} to arrive.",
        "collate_fn: torch.stack(…)  # one tensor of all items, like the default collate_fn",
    ),
    Rule(
        "loader.transfer", "transfer from the workers", "loading", "normalization on the device",
        "The workers are fast enough, but a ready batch takes long to arrive.",
        lambda loading: loading.of_the_transfer,
        "{speed} The workers are fast enough, but the loop waits {wait_ms:ms} a step. A ready batch takes "
        "{loop.transfer_ms:ms} to arrive from a worker.",
        lambda loading: AS_BYTES if loading.items.images else "# a smaller data type, converted on the device",
        example=AS_BYTES,
    ),
)  # fmt: skip
