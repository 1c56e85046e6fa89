"""Loads some items in this process, to see how long one takes and where: no trace of the main process shows it."""

from __future__ import annotations

import copy
import cProfile
import itertools
import math
import operator
import os
import pstats
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stepscope import timing
from stepscope.base.confidence import without_hiccup
from stepscope.diagnosis import stacks
from stepscope.diagnosis.loading import ANY, IRREGULAR, REST, WAITING, Irregular, Items

SECONDS = 1.0  # of loading with the stopwatch; then as many items again with cProfile, twice if they wait
STARTED = 0.01  # of the items' time: with this much CPU time in programs that the dataset starts, they count as working
WAITS = 0.1  # of the time of an item: from this share of waiting on, the waiting parts are measured
LONGER = 3  # times as long, to see more items if some take long
SAMPLE = 0.002  # seconds between samples
LEAST_ITEMS = 2
THIRDS = 3
GROUP_SECONDS = 0.1  # of items at a time: collating a single item costs more per item than collating a batch
# An item is slow if it takes so many times as long as most, and longer than most batches; the smallest share of the
# time that slow items take, and the largest share of the items that they are.
SLOW, SLOW_TIME, SLOW_ITEMS = 10, 0.1, 0.1

# What a function does, by its file and name, or by its name alone if it is not Python: the first match counts. A
# function without a match counts to its callers. Collected by running cProfile on Pillow, torchvision, NumPy, h5py,
# LMDB and zipfile; the names of OpenCV, audio and augmentation libraries are from their documentation.
PARTS = {
    "opening": r"(io|posix|nt|builtins)\.open\b|posix\.(stat|lstat)|method '__exit__' of '_io|h5py/_hl/files|lmdb\.open"
    r"|zipfile\.py:(open|__init__)|tarfile\.py:(open|next)",
    "reading": r"method '(read\w*|recv\w*)' of|posix\.p?read|:_?read(_bytes|_text|_file|_item)?$|read_file|fromfile"
    r"|h5py/_hl/(dataset|group)|'(get|getmulti)' of '(lmdb\.)?(Transaction|Cursor)'|urlopen",
    "resizing": r"resize|upsample|interpolate|'reduce' of 'ImagingCore|thumbnail|grid_sample",
    "decoding": r"^(?!.*(/json/|of 'bytes'|codecs)).*(decode|decompress)|ImagePlugin\.py|PIL/ImageFile\.py"
    r"|PIL/Image\.py:(open|convert|load|draft)|'(convert|convert2)' of 'ImagingCore|imread|torchaudio|soundfile"
    r"|librosa",
    "collating": r"collate|method stack of|torch\.stack",
    "transforming": r"transforms/|albumentations|kornia|imgaug",
}

OPENS = r"(io|builtins)\.open\b|h5py/_hl/files\.py:__init__|lmdb\.open"  # opens a file, also outside of Python


def load(loader: DataLoader, longer: bool = False) -> Items:
    """Load items of a loader's dataset here, as a worker would: with one thread, and in the loader's order.

    Items come from a shallow copy of the dataset, so that the user's dataset keeps no files open. `longer` loads more
    items, for datasets in which some take long. Errors of the dataset are raised.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        return _measured(_Source(loader), SECONDS * (LONGER if longer else 1))
    finally:
        torch.set_num_threads(threads)


def _measured(source: _Source, seconds: float) -> Items:
    alone = min(_seconds(source.take, 1) for _ in range(2))  # the first item imports, and opens files, once
    group, count = max(1, min(source.batch, int(GROUP_SECONDS / alone))), 0
    source.taken, source.collated = [], []
    with stacks.Sampler(SAMPLE, _Source.take.__code__) as sampler:
        marks = [_Mark.now(0, sampler)]
        while count < LEAST_ITEMS or time.perf_counter() - marks[0].moment < seconds:
            if len(marks) == 1 and time.perf_counter() - marks[0].moment > seconds / 2:
                marks.append(_Mark.now(count, sampler))
            count += source.take(group)
        marks.append(_Mark.now(count, sampler))
    first, collated, source.taken = [_Taken(*each) for each in source.taken], source.collated, None
    _, elapsed, worked, started, queued, _ = map(operator.sub, marks[-1], marks[0])
    taken = _again(source, first)
    # The machine may have stalled once, or because others had the cores: then not always in the items
    spent = min(_total(first) + sum(collated), elapsed - queued, _total(taken) + sum(without_hiccup(collated)))
    worked = spent if started >= STARTED * spent else min(max(worked - sampler.worked, 0.0), spent)
    slow = [] if source.together else _slow(taken, source.batch)
    spent = min(spent, worked + _recurring(marks, sampler.worked, slow))
    ms, cpu_ms = spent / count * 1e3, worked / count * 1e3
    held = queued if source.stream else 0.0  # perhaps all in a stream's slow items; elsewhere they exclude it
    irregular = _irregular(taken, slow, held, spent, 1 - cpu_ms / ms)
    slow = slow if irregular.count else []
    before = _bytes_read()
    parts, opened, opens, slowest = _profiled(source, group, count)
    file_bytes = (_bytes_read() - before) / opens if opens else math.nan
    waits = {}
    if cpu_ms < ms * (1 - WAITS):
        working, *_ = _profiled(source, group, count, time.process_time)
        waits = {part: max(0.0, seconds - working[part]) for part, seconds in parts.items()}
        scale = (1 - cpu_ms / ms) / (sum(waits.values()) or 1.0)
        waits = {part: seconds * scale for part, seconds in waits.items()}
    total = sum(parts.values()) or 1.0
    parts = {part: seconds / total for part, seconds in parts.items()}
    waits = {part: min(share, parts[part]) for part, share in waits.items()}
    lines = _lines(sampler.samples, slow)
    return Items(
        count, ms, cpu_ms, source.batch, parts, opened, file_bytes, slowest, waits, irregular, lines, source.together
    )


def _profiled(source: _Source, group: int, count: int, *timer: object) -> tuple[dict[str, float], float, int, str]:
    """Load `count` items or a few more with cProfile; return the seconds of each part and the files opened per item,
    all files opened, and the function that takes most by itself. The seconds are the median of thirds, in case the
    machine stalls once.
    """
    thirds, loaded, opened = [], 0, 0
    for _ in range(THIRDS):
        profile, items = cProfile.Profile(*timer), 0
        while items * THIRDS < count:
            items += profile.runcall(source.take, group)
        spent, opens, slowest = _parts(pstats.Stats(profile).stats)
        thirds.append({part: seconds / items for part, seconds in spent.items()})
        loaded, opened = loaded + items, opened + opens
    medians = {part: statistics.median(third[part] for third in thirds) for part in spent}
    return medians, opened / loaded, opened, slowest


def _again(source: _Source, taken: list[_Taken]) -> list[_Taken]:
    """Load the slowest items once more, and return all with the shorter time of both: the machine may have stalled.

    The second time excludes time in which others had the cores. A stream gives no item twice: its only slow item counts
    as a usual one.
    """
    usual = statistics.median(each.seconds for each in taken)
    least = min(SLOW * usual, usual + SLOW_TIME * _total(taken))
    slow = [number for number, each in enumerate(taken) if each.seconds > least]
    if source.stream and len(slow) > 1:
        return taken
    slow.sort(key=lambda number: -taken[number].seconds)
    slow = set(slow[: max(1, int(SLOW_ITEMS * len(taken)))])  # loading more of them again takes too long

    def settled(each: _Taken) -> _Taken:
        if source.stream:
            return each._replace(seconds=usual)
        before = stacks.queued()
        seconds = _seconds(source.load, each.index)
        seconds -= min(seconds, stacks.queued() - before)
        return each._replace(seconds=min(each.seconds, seconds))

    return [settled(each) if number in slow else each for number, each in enumerate(taken)]


def _slow(taken: list[_Taken], batch: int) -> list[_Taken]:
    """Return the items that take far longer than most items, and longer than most batches; none if there are many."""
    usual = statistics.median(each.seconds for each in taken)
    slow = [each for each in taken if each.seconds > max(SLOW, batch) * usual]
    return slow if len(slow) <= SLOW_ITEMS * len(taken) else []


def _irregular(taken: list[_Taken], slow: list[_Taken], held: float, spent: float, waiting: float) -> Irregular:
    """Return the facts about slow items, if they take enough of `spent`; others had the cores for `held` seconds."""
    usual = statistics.median(each.seconds for each in taken)
    share = min((_total(slow) - usual * len(slow) - held) / spent, 1.0)
    if not slow or share < SLOW_TIME:
        return Irregular()
    slowest = max(slow, key=lambda each: each.seconds)
    return Irregular(len(slow), share, min(share, waiting), usual * 1e3, slowest.seconds * 1e3, slowest.index)


def _recurring(marks: list[_Mark], sampling: float, slow: list[_Taken]) -> float:
    """Return the seconds that items waited: all the time of slow items, and for the others the rate of the better half.

    In one half the machine may have stalled. A sampler worked for `sampling` seconds meanwhile. Where others had the
    cores when it was ready to, the items may have waited for it to take the GIL, and then for its work.
    """
    waits = []
    for before, after in itertools.pairwise(marks):
        count, spent, worked, _, queued, late = map(operator.sub, after, before)
        spent -= _total(each for each in slow if before.moment <= each.begin < after.moment)
        own = sampling * count / marks[-1].count
        waits.append(max(0.0, spent - (worked - own) - queued - late - min(own, late)) / count)
    return min(waits) * marks[-1].count + _total(slow)


def _lines(samples: list[stacks.Sample], slow: list[_Taken]) -> dict[str, str]:
    """Return the user's line that takes most time, for each part of the work (opening counts to reading), for any part,
    for waiting, and for slow items.
    """
    weights = {}
    for each in samples:
        part = next(filter(None, (_part((frame.file, 0, frame.name)) for frame in each.frames)), REST)
        for name in ("reading" if part == "opening" else part, ANY):
            weights.setdefault(name, []).append((each.own, each.seconds - each.waited))
        weights.setdefault(WAITING, []).append((each.own, each.waited))
        if any(item.begin < each.end <= item.begin + item.seconds for item in slow):
            weights.setdefault(IRREGULAR, []).append((each.own, each.seconds))
    return {name: line for name, of_lines in weights.items() if (line := stacks.place(of_lines))}


class _Taken(NamedTuple):
    """A loaded item, or batch: its index, or indices, and when loading began and how long it took, in s."""

    index: object
    begin: float
    seconds: float


class _Mark(NamedTuple):
    """A moment of loading, and until then: the number of loaded items, and, in s, the CPU time of this process, the CPU
    time of programs that it had started, and how long this thread, and the sampler's, was ready to work while others
    had the cores.
    """

    count: int
    moment: float
    worked: float
    started: float
    queued: float
    late: float

    @classmethod
    def now(cls, count: int, sampler: stacks.Sampler) -> _Mark:
        queued = stacks.queued(), stacks.queued(sampler.task)
        return cls(count, time.perf_counter(), time.process_time(), _started(), *queued)


def _total(taken: Iterable[_Taken]) -> float:
    return sum(each.seconds for each in taken)


def _seconds(call: Callable, argument: object) -> float:
    begin = time.perf_counter()
    call(argument)
    return time.perf_counter() - begin


def _copy(dataset: Dataset) -> Dataset:
    """Return a shallow copy of a dataset, whose end does not clean up what the dataset uses."""
    if isinstance(dataset, (np.ndarray, torch.Tensor)):  # copying it would read a mapped file into memory
        return dataset
    copied = copy.copy(dataset)
    kind = type(copied)
    if hasattr(kind, "__del__"):
        copied.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__del__": lambda self: None})
    return copied


class _Source:
    """The items of a loader's dataset, a few at a time."""

    def __init__(self, loader: DataLoader):
        self.dataset, self.collate_fn = _copy(loader.dataset), loader.collate_fn
        self.stream, self.batched = isinstance(self.dataset, IterableDataset), loader.batch_sampler is not None
        self.together = not self.stream and self.batched and hasattr(self.dataset, "__getitems__")
        self.taken: list[tuple] | None = None  # items, or batches, like `_Taken`; None if they are not timed
        self.collated: list[float] = []  # seconds of each call of `take`
        self.batch = loader.batch_size or 1
        if self.stream:
            items = timing.endless(self.dataset)
            self.indices, self.load = itertools.repeat(None), lambda _: next(items)
            return
        self.indices = timing.endless(loader.batch_sampler if self.batched else loader.sampler)
        self.load = self.dataset.__getitems__ if self.together else self.dataset.__getitem__
        if self.batched:
            self.batch = len(next(self.indices))
            if not self.together:
                self.indices = itertools.chain.from_iterable(self.indices)

    def take(self, count: int) -> int:
        """Load `count` items as a batch, or a whole batch if the dataset loads only batches; return how many."""
        indices = list(itertools.islice(self.indices, 1 if self.together else count))
        items = self._timed(indices)
        begin = time.perf_counter()
        for batch in items if self.together or not self.batched else [items]:
            self.collate(batch)
        self.collated.append(time.perf_counter() - begin)
        return len(indices[0]) if self.together else count

    def collate(self, batch: object) -> None:
        """Collate a batch; because of this name, the time of the user's function counts to collating."""
        self.collate_fn(batch)

    def _timed(self, indices: Iterable) -> list:
        if self.taken is None:
            return list(map(self.load, indices))
        loaded = []
        for index in indices:
            begin = time.perf_counter()
            loaded.append(self.load(index))
            self.taken.append((index, begin, time.perf_counter() - begin))  # a `_Taken` costs more than some items
        return loaded


def _parts(stats: dict) -> tuple[dict[str, float], int, str]:
    """Return the seconds of each part, how many files were opened, and the slowest function."""
    own = {function: _part(function) for function in stats}
    shares = {function: {part: 1.0} for function, part in own.items() if part}
    spent = dict.fromkeys([*PARTS, REST], 0.0)
    opens = 0
    for function, (_, calls, seconds, _, _) in stats.items():
        for part, share in _attributed(function, stats, shares, frozenset()).items():
            spent[part] += seconds * share
        if re.search(OPENS, _text(function)):
            opens += calls
    file, line, name = max(stats, key=lambda function: stats[function][2])
    slowest = name.strip("<>").removeprefix("built-in method ") if file == "~" else f"{name} ({Path(file).name}:{line})"
    return spent, opens, slowest


def _attributed(function: tuple, stats: dict, shares: dict, above: frozenset) -> dict[str, float]:
    """Return the parts that a function's own time belongs to: its part, or its callers' parts by their time."""
    if function in shares:
        return shares[function]
    callers = {caller: times[2] for caller, times in stats[function][4].items() if caller not in above | {function}}
    total, parts = sum(callers.values()), Counter()
    for caller, seconds in callers.items():
        if total:
            for part, share in _attributed(caller, stats, shares, above | {function}).items():
                parts[part] += share * seconds / total
    shares[function] = dict(parts) or {REST: 1.0}
    return shares[function]


def _part(function: tuple[str, int, str]) -> str | None:
    return next((part for part, pattern in PARTS.items() if re.search(pattern, _text(function))), None)


def _text(function: tuple[str, int, str]) -> str:
    file, _, name = function
    return name if file == "~" else f"{file}:{name}".replace("\\", "/")


def _started() -> float:
    """Return the CPU time of ended child processes, in s."""
    return sum(os.times()[2:4])


def _bytes_read() -> float:
    """Return the bytes that this process has read so far, from files or the page cache; NaN if unknown."""
    try:
        counters = psutil.Process().io_counters()
    except (AttributeError, psutil.Error):  # macOS does not report it
        return math.nan
    return getattr(counters, "read_chars", counters.read_bytes)
