"""Loads items in this process, to time an item and its parts: a trace of the main process cannot show the workers."""

from __future__ import annotations

import builtins
import copy
import cProfile
import io
import itertools
import os
import re
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stepscope import thresholds, timing
from stepscope.base.confidence import without_hiccup
from stepscope.base.wording import without_paths
from stepscope.facts.loader import ANY, IRREGULAR, REST, WAITING, Irregular, Items, Sampling
from stepscope.observe import contention
from stepscope.observe.sampler import Sample, Sampler, called_at, package, place

THIRDS = 3

_Function = tuple[str, int, str]  # file, line and name, as cProfile gives them
_Stats = Mapping[_Function, tuple[int, int, float, float, Mapping[_Function, tuple[int, int, float, float]]]]

# Parts of the work, by a function's file and name, or by its name alone if it is not Python: the first match counts. A
# function without a match belongs to its callers. Collected by running cProfile on Pillow, torchvision, NumPy, h5py,
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

OPENS = r"(io|builtins)\.open\b|h5py/_hl/files\.py:make_fid|lmdb\.open"  # functions that open a file, in Python or C
READS_HDF5 = r"h5py/_hl/dataset\.py:__getitem__"
_EVERYWHERE = {"", "torch", "numpy", "stepscope"}  # packages that say nothing about the items


def load(loader: DataLoader[Any], longer: bool = False) -> Items:
    """Load items of a loader's dataset here, as a worker would: with one thread, and in the loader's order.

    Items come from a shallow copy of the dataset, so that the user's dataset keeps no files open. `longer` loads more
    items, for datasets in which some items take long. Errors of the dataset are raised.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        measured = _Measurement(_Source(loader), thresholds.ITEMS_S * (thresholds.LONGER_ITEMS if longer else 1))
        return replace(_items(measured), sampling=_sampling(loader))
    finally:
        torch.set_num_threads(threads)


def _items(measured: _Measurement) -> Items:
    """Return the facts about items: the time of an item, and of its parts."""
    source, count, (spent, worked) = measured.source, measured.count, measured.times()
    ms, cpu_ms, waiting = spent / count * 1e3, worked / count * 1e3, 1 - worked / spent
    irregular = measured.irregular(spent, waiting)
    lines, function_shares = measured.lines(irregular.count > 0)
    found = _profiled(measured, cProfile.Profile)
    parts, opened, file_bytes, slowest = found.parts, found.opened, found.file_bytes, found.slowest
    waits, total = dict[str, float](), sum(parts.values()) or 1.0
    if waiting > thresholds.WAITING_ITEMS:
        working = _profiled(measured, lambda: cProfile.Profile(time.process_time)).parts
        waits = {part: max(0.0, seconds - working[part]) for part, seconds in parts.items()}
        scale = waiting / (sum(waits.values()) or 1.0)
        waits = {part: min(seconds * scale, parts[part] / total) for part, seconds in waits.items()}
    parts = {part: seconds / total for part, seconds in parts.items()}
    return Items(
        count, ms, cpu_ms, source.batch, parts, opened, file_bytes, slowest, waits, irregular, lines, function_shares,
        source.together, libraries=found.libraries, hdf5_reads=found.hdf5_reads, warnings=measured.warnings,
        opened_again=_opened_again(measured),
    )  # fmt: skip


class _Source:
    """Loads the items of a loader's dataset, a few at a time."""

    def __init__(self, loader: DataLoader[Any]):
        dataset: Any = _copy(loader.dataset)
        self.collate_fn = loader.collate_fn
        self.stream, self.batched = isinstance(dataset, IterableDataset), loader.batch_sampler is not None
        self.together = not self.stream and self.batched and hasattr(dataset, "__getitems__")
        self.collated: list[float] = []  # seconds of each call of `take`
        self.batch = loader.batch_size or 1
        self.indices: Iterator[Any] = itertools.repeat(None)
        if self.stream:
            items = timing.endless(dataset)
            self.load: Callable[[Any], Any] = lambda _: next(items)
            return
        self.load = dataset.__getitems__ if self.together else dataset.__getitem__
        self.indices = timing.endless(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        if self.batched:
            self.batch = len(next(self.indices))
            if not self.together:
                self.indices = itertools.chain.from_iterable(self.indices)

    def take(self, count: int) -> int:
        """Load `count` items as a batch, or a whole batch if the dataset loads only batches; return the item count."""
        indices = list(itertools.islice(self.indices, 1 if self.together else count))
        items = list(map(self.load, indices))
        begin = time.perf_counter()
        for batch in items if self.together or not self.batched else [items]:
            self.collate(batch)
        self.collated.append(time.perf_counter() - begin)
        return len(indices[0]) if self.together else count

    def collate(self, batch: Any) -> None:
        """Collate a batch; the name of this method makes the time of the user's function count as collating."""
        self.collate_fn(batch)


def _copy(dataset: Dataset[Any]) -> Dataset[Any]:
    """Return a shallow copy of a dataset, without ``__del__``: only the dataset itself may clean up."""
    if isinstance(dataset, (np.ndarray, torch.Tensor)):  # copying it would read a mapped file into memory
        return dataset
    copied = copy.copy(dataset)
    kind = type(copied)
    if hasattr(kind, "__del__"):
        copied.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__del__": lambda self: None})
    return copied


class _Measurement:
    """Times of loaded items in s, and samples of their lines."""

    def __init__(self, source: _Source, seconds: float):
        """Load items for this time, in s."""
        with _warned() as caught:
            first = [_taken(source) for _ in range(2)]  # the first item imports, and opens files, once
        alone = min(took for took, _ in first)
        self.asleep = min(asleep for _, asleep in first)  # of one item, in s; no sampler can be blamed for it
        self.warnings = _of_pytorch(caught)
        self.group = max(1, min(source.batch, int(thresholds.GROUP_S / alone)))  # items to load at a time
        self.source, self.count = source, 0
        load, loaded = source.load, list[tuple[Any, float, float]]()

        def timed(index: Any) -> Any:
            begin = time.perf_counter()
            item = load(index)
            loaded.append((index, begin, time.perf_counter() - begin))
            return item

        source.load, source.collated = timed, []
        with Sampler(thresholds.ITEM_SAMPLE_S, _Source.take.__code__) as sampler:
            begin, marks = time.perf_counter(), [self._clocks(sampler)]
            for until, least in [(seconds / 2, 1), (seconds, thresholds.LEAST_ITEMS)]:
                while self.count < least or time.perf_counter() - begin < until:
                    self.count += source.take(self.group)
                marks.append(self._clocks(sampler))
        source.load, self.collated = load, source.collated.copy()
        halves = np.diff(marks, axis=0)
        halves = halves[halves[:, 0] > 0]  # a single group may take longer than `seconds`
        self.counts, self.elapsed, self.worked, self.programs, self.queued, self.sampler_queued = halves.T
        self.samples, self.sampling = sampler.samples, sampler.worked
        self.indices, begins, took = zip(*loaded, strict=True)  # of items, or of whole batches
        self.begins, self.seconds = np.array(begins), np.array(took)
        self._settle()
        self.usual = float(np.median(self.seconds))
        slow = self.seconds > max(thresholds.SLOW_ITEM, source.batch) * self.usual
        few = not source.together and slow.mean() <= thresholds.MOST_SLOW_ITEMS
        self.slow = np.flatnonzero(slow & few)  # positions of items that take far longer than most items and batches

    def _clocks(self, sampler: Sampler) -> tuple[float, ...]:
        """Return the number of loaded items; and in s: the time, the CPU time of this process and of programs that
        it had started, and how long this thread and the sampler's thread were queued for a core.
        """
        queued, late = contention.queued(), contention.queued(sampler.task)
        return self.count, time.perf_counter(), time.process_time(), sum(os.times()[2:4]), queued, late

    def _settle(self) -> None:
        """Load the slowest items once more, and keep the shorter of both times: the machine may have stalled.

        The second time excludes queueing. Streams cannot be re-read: a single slow item gets the median time.
        """
        usual = np.median(self.seconds)
        least = min(thresholds.SLOW_ITEM * usual, usual + thresholds.SLOW_ITEMS_TIME * self.seconds.sum())
        slow = np.flatnonzero(self.seconds > least)
        if self.source.stream:
            if len(slow) == 1:
                self.seconds[slow] = usual
            return
        slow = slow[np.argsort(-self.seconds[slow])]
        for number in slow[: max(1, int(thresholds.MOST_SLOW_ITEMS * len(self.seconds)))]:  # more would take too long
            begin, before = time.perf_counter(), contention.queued()
            self.source.load(self.indices[number])
            again = time.perf_counter() - begin
            again -= min(again, contention.queued() - before)
            self.seconds[number] = min(self.seconds[number], again)

    def times(self) -> tuple[float, float]:
        """Return the time and the CPU time of loading all items, in s."""
        # The smaller of two estimates: one excludes queueing for a core, the other a single stall of the machine
        collating = sum(without_hiccup(self.collated))
        spent = min(float((self.elapsed - self.queued).sum()), float(self.seconds.sum()) + collating)
        if self.programs.sum() >= thresholds.STARTED_PROGRAMS * spent:
            return spent, spent
        worked = min(max(float(self.worked.sum()) - self.sampling, 0.0), spent)
        return min(spent, worked + self._waited()), worked

    def _waited(self) -> float:
        """Return the seconds that items waited: slow items always, usual items at the lower rate of both halves."""
        in_slow, _ = np.histogram(self.slow, [0, *self.counts.cumsum()], weights=self.seconds[self.slow])
        # In one half the machine may have stalled. While the sampler was queued for a core, the items may have waited
        # until the sampler took the GIL, and then for the sampler's work
        sampling = self.sampling * self.counts / self.count
        for_sampler = self.sampler_queued + np.minimum(sampling, self.sampler_queued)
        waited = self.elapsed - in_slow - (self.worked - sampling) - self.queued - for_sampler
        usual = max(self.asleep, float((waited / self.counts).min()))
        return usual * self.count + float(in_slow.sum())

    def irregular(self, spent: float, waiting: float) -> Irregular:
        """Return the facts about slow items if they take enough of `spent`, in s; `waiting` is the share of waits."""
        # In a stream, all queueing may have been in slow items; otherwise the times of items exclude queueing
        queued = float(self.queued.sum()) if self.source.stream else 0.0
        slow = self.seconds[self.slow]
        share = min((float((slow - self.usual).sum()) - queued) / spent, 1.0)
        if not len(slow) or share < thresholds.SLOW_ITEMS_TIME:
            return Irregular()
        index = None if self.source.stream else without_paths(str(self.indices[self.slow[slow.argmax()]]))
        return Irregular(len(slow), share, min(share, waiting), self.usual * 1e3, float(slow.max()) * 1e3, index)

    def lines(self, irregular: bool) -> tuple[dict[str, str], dict[str, float]]:
        """Return the user's line that takes most time, for each part of the work (opening counts as reading), for any
        part, for waiting, and for slow items if loading is `irregular`; and the share of this line's function. Without
        such a line, a method of a package is named.
        """
        weights = defaultdict[str, list[tuple[Sample, float]]](list)
        begins, ends = self.begins[self.slow], (self.begins + self.seconds)[self.slow]
        for each in self.samples:
            part = next(filter(None, (_part((frame.file, 0, frame.name)) for frame in each.frames)), REST)
            for name in ("reading" if part == "opening" else part, ANY):
                weights[name].append((each, each.seconds - each.waited))
            weights[WAITING].append((each, each.waited))
            if irregular and ((begins < each.end) & (each.end <= ends)).any():
                weights[IRREGULAR].append((each, each.seconds))
        found = {name: _slowest_line(rows) for name, rows in weights.items()}
        found = {name: (line, share) for name, (line, share) in found.items() if line}
        return {name: line for name, (line, _) in found.items()}, {name: share for name, (_, share) in found.items()}


def _slowest_line(rows: list[tuple[Sample, float]]) -> tuple[str, float]:
    """Return the line with most of the weights, "" if unknown, and the share of its function.

    The text also names the method of a package that the line calls, such as a transform, the line that calls the
    function, and the outermost line, which is in the dataset.
    """
    known = [(each, each.own or each.library, weight) for each, weight in rows]
    line = place((frame, weight) for _, frame, weight in known)
    if not line:
        return "", 0.0
    functions = {frame.function for _, frame, _ in known if frame is not None and str(frame) in line}
    inside = [(each, weight) for each, frame, weight in known if frame is not None and frame.function in functions]
    share = sum(weight for _, weight in inside) / (sum(weight for *_, weight in known) or 1.0)
    library = place((each.library, weight) for each, weight in inside if each.own)
    line = f"{line}, in {library}" if library else line
    called = [(each.path, weight) for each, weight in inside if len(each.path) > 1]
    callers = [place((path[number], weight) for path, weight in called) for number in (-2, 0)]
    return called_at([line, *filter(None, callers)]), share


def _sampling(loader: DataLoader[Any]) -> Sampling:
    """Return the facts about a loader's sampler: it begins two epochs, and chooses some batches."""
    if isinstance(loader.dataset, IterableDataset):
        return Sampling()
    chosen: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    starts, spent, count = list[float](), 0.0, 0

    def choose() -> None:
        nonlocal spent, count
        while len(starts) < 2 and sum(starts) < thresholds.ITEMS_S:
            begin = time.perf_counter()
            indices = iter(chosen)
            with suppress(StopIteration):
                next(indices)
                starts.append(time.perf_counter() - begin)
                while spent < thresholds.SAMPLING_S:
                    begin = time.perf_counter()
                    next(indices)
                    spent, count = spent + time.perf_counter() - begin, count + 1

    with Sampler(thresholds.ITEM_SAMPLE_S, choose.__code__) as samples:
        choose()
    kind = type(getattr(chosen, "sampler", chosen)).__name__
    line = place((each.own, each.seconds) for each in samples.samples)
    return Sampling(kind, min(starts, default=0.0) * 1e3, spent / max(1, count) * 1e3, line)


def _taken(source: _Source) -> tuple[float, float]:
    """Load one item, or a batch if the dataset loads whole batches; return its time in s, and how long each item slept.

    An item sleeps while this process neither works nor is ready to work. As the sampler does not run, this is the least
    that an item waits. (While it runs on a busy machine, a wait for the sampler cannot be told from an item's own.)
    """
    begin, working, queued = time.perf_counter(), time.process_time(), contention.queued()
    count = source.take(1)
    took = time.perf_counter() - begin
    ready = time.process_time() - working + contention.queued() - queued
    return took, max(0.0, took - ready) / count


@contextmanager
def _warned() -> Iterator[list[warnings.WarningMessage]]:
    """Record all warnings in the block, also the ones that PyTorch gives once."""
    always = torch.is_warn_always_enabled()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.set_warn_always(True)
        try:
            yield caught
        finally:
            torch.set_warn_always(always)


def _of_pytorch(caught: list[warnings.WarningMessage]) -> tuple[str, ...]:
    """Return the texts of PyTorch's own warnings, without paths."""
    inner = "(Triggered internally"
    texts = ((str(each.message), each.filename) for each in caught)
    own = (text.partition(inner)[0] for text, file in texts if inner in text or package(file) == "torch")
    return tuple(dict.fromkeys(without_paths(" ".join(text.split())) for text in own))


class _Profile(NamedTuple):
    """Items that were loaded with cProfile."""

    parts: dict[str, float]  # seconds of each part per item, the median of thirds, since the machine may stall once
    opened: float  # files per item
    file_bytes: float | None  # bytes read per file
    slowest: str  # function
    libraries: dict[str, float]  # share of the time in functions of each package
    hdf5_reads: float  # per item


def _profiled(measured: _Measurement, profiler: Callable[[], cProfile.Profile]) -> _Profile:
    """Load as many items as `measured` with cProfile."""
    thirds, loaded, opened, hdf5, before = [], 0, 0, 0, _bytes_read()
    for _ in range(THIRDS):
        profile, items = profiler(), 0
        while items * THIRDS < measured.count:
            items += profile.runcall(measured.source.take, measured.group)
        profile.create_stats()
        spent, opens, slowest = _parts(profile.stats)
        hdf5 += sum(times[1] for function, times in profile.stats.items() if re.search(READS_HDF5, _text(function)))
        thirds.append({part: seconds / items for part, seconds in spent.items()})
        loaded, opened = loaded + items, opened + opens
    after = _bytes_read()
    file_bytes = (after - before) / opened if opened and before is not None and after is not None else None
    medians = {part: float(np.median([third[part] for third in thirds])) for part in thirds[0]}
    return _Profile(medians, opened / loaded, file_bytes, slowest, _libraries(profile.stats), hdf5 / loaded)


def _opened_again(measured: _Measurement) -> float:
    """Return the part of the opened files that an item has opened already, in a few items."""
    every = again = 0
    with _noting_files() as opened:
        for _ in range(thresholds.ITEMS_OF_FILES):
            opened.clear()
            measured.source.take(1)
            every, again = every + len(opened), again + len(opened) - len(set(opened))
    return again / (every or 1) if not measured.source.together else 0.0


@contextmanager
def _noting_files() -> Iterator[list[object]]:
    """Note the paths of the files that Python's ``open`` opens in the block."""
    opened, before = list[object](), (builtins.open, io.open)

    def noted(file: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(file, (str, bytes, os.PathLike)):
            opened.append(os.fspath(file))
        return before[0](file, *arguments, **options)

    builtins.open = io.open = noted
    try:
        yield opened
    finally:
        builtins.open, io.open = before


def _libraries(stats: _Stats) -> dict[str, float]:
    """Return the share of the time in functions of each installed package, also functions in C with its name."""
    spent, total = defaultdict[str, float](float), sum(times[2] for times in stats.values()) or 1.0
    for (file, _, name), times in stats.items():
        compiled = re.match(r"<(?:built-in method |method '\w+' of ')(\w+)\.", name) if file == "~" else None
        spent[compiled[1] if compiled else package(file)] += times[2]
    foreign = _EVERYWHERE | sys.stdlib_module_names
    return {name: seconds / total for name, seconds in spent.items() if name not in foreign}


def _parts(stats: _Stats) -> tuple[dict[str, float], int, str]:
    """Return the seconds of each part, how many files were opened, and the slowest function."""
    shares = {function: {part: 1.0} for function in stats if (part := _part(function))}

    def attributed(function: _Function, above: frozenset[_Function]) -> dict[str, float]:
        """Return the parts of a function's own time, as shares: its part, or its callers' parts weighted by time."""
        if function not in shares:
            above |= {function}
            callers = {each: times[2] for each, times in stats[function][4].items() if times[2] and each not in above}
            parts, total = defaultdict[str, float](float), sum(callers.values())
            for caller, seconds in callers.items():
                for part, share in attributed(caller, above).items():
                    parts[part] += share * seconds / total
            shares[function] = parts or {REST: 1.0}
        return shares[function]

    spent, opens = dict.fromkeys([*PARTS, REST], 0.0), 0
    for function, (_, calls, seconds, _, _) in stats.items():
        for part, share in attributed(function, frozenset()).items():
            spent[part] += seconds * share
        if re.search(OPENS, _text(function)):
            opens += calls
    file, line, name = max(stats, key=lambda function: stats[function][2])
    slowest = name.strip("<>").removeprefix("built-in method ") if file == "~" else f"{name} ({Path(file).name}:{line})"
    return spent, opens, slowest


def _part(function: _Function) -> str | None:
    return next((part for part, pattern in PARTS.items() if re.search(pattern, _text(function))), None)


def _text(function: _Function) -> str:
    file, _, name = function
    return name if file == "~" else f"{file}:{name}".replace("\\", "/")


def _bytes_read() -> float | None:
    """Return the bytes that this process has read so far, from files or the page cache; None if unknown."""
    try:
        counters = psutil.Process().io_counters()
    except (AttributeError, psutil.Error):  # macOS does not report this counter
        return None
    return float(getattr(counters, "read_chars", counters.read_bytes))
