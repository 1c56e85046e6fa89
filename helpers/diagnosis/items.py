"""Loads some items in this process, and sees how long one takes and where: what no trace of the main process shows."""

from __future__ import annotations

import copy
import cProfile
import itertools
import math
import pstats
import re
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

from helpers import timing

SECONDS = 1.0  # of loading with the stopwatch; then as many items again with cProfile
LEAST_ITEMS = 2
GROUP_SECONDS = 0.1  # of items at a time: collating one alone would count for more than it does in a batch

# What a function does, by its file and name, or by its name alone if it is no Python: the first that matches. What
# matches none of them counts to the functions that call it. Collected by running cProfile on Pillow, torchvision,
# NumPy, h5py, LMDB and zipfile; the names of OpenCV, audio and augmentation libraries are from their documentation.
PARTS = {
    "opening": r"(io|posix|nt|builtins)\.open\b|posix\.(stat|lstat)|method '__exit__' of '_io|h5py/_hl/files|lmdb\.open"
    r"|zipfile\.py:(open|__init__)|tarfile\.py:(open|next)",
    "reading": r"method '(read\w*|recv\w*)' of|posix\.p?read|:_?read(_bytes|_text|_file|_item)?$|read_file|fromfile"
    r"|h5py/_hl/(dataset|group)|'(get|getmulti)' of '(lmdb\.)?(Transaction|Cursor)'|urlopen",
    "resizing": r"resize|upsample|interpolate|'reduce' of 'ImagingCore|thumbnail|grid_sample",
    "decoding": r"decode|decompress|ImagePlugin\.py|PIL/ImageFile\.py|PIL/Image\.py:(open|convert|load|draft)"
    r"|'(convert|convert2)' of 'ImagingCore|imread|torchaudio|soundfile|librosa",
    "collating": r"collate|method stack of|torch\.stack",
    "transforming": r"transforms/|albumentations|kornia|imgaug",
}
REST = "the rest of the dataset"


@dataclass(frozen=True)
class Items:
    """How items are loaded.

    Attributes
    ----------
    count : int
        Items that were loaded with the stopwatch.
    ms, cpu_ms : float
        Time of an item, and what of it a processor worked; the rest is waiting, for storage mostly. Where the system
        reports how long others had the cores meanwhile, that is left out.
    batch : int
        Items of a batch.
    parts : dict of str to float
        Share of the time of each of `PARTS` and of `REST`, 0 to 1.
    opened : float
        Files opened for each item.
    file_bytes : float
        Bytes read for each file opened; NaN where the system does not report it.
    slowest : str
        The function that by itself took most time.
    """

    count: int
    ms: float
    cpu_ms: float
    batch: int
    parts: dict[str, float]
    opened: float
    file_bytes: float
    slowest: str

    @property
    def batch_ms(self) -> float:
        """Time of a batch that one process makes."""
        return self.ms * self.batch


def load(loader: DataLoader) -> Items:
    """Load items of a loader's dataset here, as a worker would: with one thread, and in the loader's order.

    The dataset is copied first, not deeply: what it opens is not left open in the reader's own.

    Raises
    ------
    ValueError
        If another profiler is active in this thread.
    Exception
        Whatever the dataset raises.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    try:
        return _measured(_Source(loader))
    finally:
        torch.set_num_threads(threads)


def _measured(source: _Source) -> Items:
    source.take(1)  # imports, and files that are opened once
    start = time.perf_counter()
    group = max(1, min(source.batch, int(GROUP_SECONDS * source.take(1) / (time.perf_counter() - start))))
    count, start, worked, queued = 0, time.perf_counter(), time.process_time(), _queued()
    while count < LEAST_ITEMS or time.perf_counter() - start < SECONDS:
        count += source.take(group)
    ms = (time.perf_counter() - start - (_queued() - queued)) / count * 1e3
    cpu_ms = (time.process_time() - worked) / count * 1e3
    profile, profiled, before = cProfile.Profile(), 0, _bytes_read()
    while profiled < count:
        profiled += profile.runcall(source.take, group)
    parts, opens, slowest = _parts(pstats.Stats(profile).stats)
    file_bytes = (_bytes_read() - before) / opens if opens else math.nan
    return Items(count, ms, min(cpu_ms, ms), source.batch, parts, opens / profiled, file_bytes, slowest)


class _Source:
    """The items of a loader's dataset, a few at a time."""

    def __init__(self, loader: DataLoader):
        self.loader, self.dataset = loader, copy.copy(loader.dataset)
        iterable = isinstance(self.dataset, IterableDataset)
        sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.batch = 1 if loader.batch_size is None else loader.batch_size
        self.items = timing.endless(self.dataset) if iterable else None
        self.indices = timing.endless(sampler)
        if not iterable and loader.batch_sampler is not None:
            self.batch = len(next(self.indices))
        self.together = not iterable and loader.batch_sampler is not None and hasattr(self.dataset, "__getitems__")
        self.batched = loader.batch_size is not None or (not iterable and loader.batch_sampler is not None)
        self.left = []  # indices of a batch that was begun

    def take(self, count: int) -> int:
        """Load `count` items as a batch, or a whole one if the dataset loads only these; return how many."""
        if self.together:
            indices = next(self.indices)
            self.loader.collate_fn(self.dataset.__getitems__(indices))
            return len(indices)
        if self.items is not None:
            items = list(itertools.islice(self.items, count))
        else:
            items = [self.dataset[index] for index in self._next(count)]
        batches = [items] if self.batched else items
        for batch in batches:
            self.loader.collate_fn(batch)
        return count

    def _next(self, count: int) -> list:
        if self.loader.batch_sampler is None:
            return list(itertools.islice(self.indices, count))
        while len(self.left) < count:
            self.left += next(self.indices)
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def _parts(stats: dict) -> tuple[dict[str, float], int, str]:
    """Return the share of the time of each part, how many files were opened, and the slowest function."""
    own = {function: _part(function) for function in stats}
    shares = {function: {part: 1.0} for function, part in own.items() if part}
    spent = dict.fromkeys([*PARTS, REST], 0.0)
    opens = 0
    for function, (_, calls, seconds, _, _) in stats.items():
        for part, share in _attributed(function, stats, shares, frozenset()).items():
            spent[part] += seconds * share
        if re.search(r"(io|builtins)\.open\b", function[2]):
            opens += calls
    total = sum(spent.values()) or 1.0
    file, line, name = max(stats, key=lambda function: stats[function][2])
    slowest = name.strip("<>").removeprefix("built-in method ") if file == "~" else f"{name} ({Path(file).name}:{line})"
    return {part: seconds / total for part, seconds in spent.items()}, opens, slowest


def _attributed(function: tuple, stats: dict, shares: dict, above: frozenset) -> dict[str, float]:
    """Return the parts that a function's own time belongs to: its own one, or those of its callers by their time."""
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
    file, _, name = function
    text = name if file == "~" else f"{file}:{name}".replace("\\", "/")
    return next((part for part, pattern in PARTS.items() if re.search(pattern, text)), None)


def _queued() -> float:
    """Return for how many seconds this thread was ready to work while others had the cores; 0 where it is unknown."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):  # only Linux reports it
        return 0.0


def _bytes_read() -> float:
    """Return the bytes that this process has read so far, from files or the page cache; NaN if it is unknown."""
    try:
        counters = psutil.Process().io_counters()
    except (AttributeError, psutil.Error):  # macOS does not report it
        return math.nan
    return getattr(counters, "read_chars", counters.read_bytes)
