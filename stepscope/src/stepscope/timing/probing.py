"""Measures the phases of a step, the stages of an item and the memory of workers; empties and fills the page cache."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import psutil
import torch
from torch import nn

from stepscope.timing import loaders
from stepscope.timing.stopwatch import limited, longest_of, synchronize, warm_up, warmup_steps


def phases(
    loader: Iterable[Sequence[torch.Tensor]], model: nn.Module, optimizer: torch.optim.Optimizer, steps: int
) -> dict[str, float]:
    """Split a training step: mean milliseconds for loading, copy, forward, backward and optimizer.

    Host and device synchronize between phases; otherwise a GPU would do the work of one phase in the time of the next.
    This takes time, so do not compute a throughput from the phases. `steps` are rounded up, and `limit` applies, as in
    `loop`.
    """
    device, longest = next(model.parameters()).device, longest_of("run")

    def now() -> float:
        synchronize()
        return time.perf_counter()

    def step() -> dict[str, float]:
        marks = {"begin": now()}
        images, labels = next(batches)
        marks["loading"] = now()
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        marks["copy"] = now()
        loss = nn.functional.cross_entropy(model(images), labels)
        marks["forward"] = now()
        loss.backward()
        marks["backward"] = now()
        optimizer.step()
        optimizer.zero_grad()
        marks["optimizer"] = now()
        return {name: (marks[name] - marks[before]) * 1e3 for before, name in pairwise(marks)}

    with loaders.batches(loader) as batches:
        warm_up(step, warmup_steps(loader), longest)
        steps = loaders.whole_periods(loader, steps)
        rows = [step() for _ in limited(range(steps), longest, period=loaders.period(loader))]
    return {name: statistics.mean(row[name] for row in rows) for name in rows[0]}


def stages(functions: Mapping[str, Callable[..., object]], items: Iterable[object]) -> dict[str, float]:
    """Split the work for an item: mean microseconds of each function, called with the result of the previous function.

    Parameters
    ----------
    functions : mapping of str to callable
        The stages in their order; the first is called with an item.
    items : iterable
        Such as the paths of images. Two passes run over the items; the second is timed, with files in the page cache.
        `limit` applies: of slow items, only the first are taken.
    """
    items, longest = list(items), longest_of("run")
    for _ in range(2):
        spent, done = dict.fromkeys(functions, 0.0), 0
        for item in limited(items, longest):
            for name, function in functions.items():
                start = time.perf_counter()
                item = function(item)
                spent[name] += time.perf_counter() - start
            done += 1
        items = items[:done]
    return {name: seconds / len(items) * 1e6 for name, seconds in spent.items()}


def forget(folder: Path) -> bool:
    """Ask the system to drop the files in `folder` from its page cache, so that they are read from the disk again.

    Pages that a process has mapped stay, and so does the disk's own cache. Returns whether the system supports this:
    Linux does, without special rights.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    os.sync()  # pages not yet written to the disk would stay
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def warm(folder: Path) -> None:
    """Read all files in `folder` once, so that they are in the page cache, as far as they fit in memory."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 20):
                    pass


def worker_memory_mb() -> list[float]:
    """Memory that each running worker shares with no other process (USS), in MB (10⁶ bytes)."""
    return [own / 1e6 for own in _own_bytes()]


def worker_growth_mb(dataset: torch.utils.data.Dataset[object]) -> float:
    """Memory that one forked worker gains in a pass over `dataset`, in MB (10⁶ bytes).

    Counts the pages that only the worker has (USS), from its first batch of 1,000 items to the end of the pass. Only
    for Linux: other systems cannot fork processes safely, or not at all.
    """
    loader = torch.utils.data.DataLoader(
        dataset, 1_000, num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    batches = iter(loader)
    next(batches)
    before = max(_own_bytes())
    for _ in batches:
        pass
    return (max(_own_bytes()) - before) / 1e6


def _own_bytes() -> list[int]:
    # Only processes that multiprocessing started here: other children, such as TensorBoard, are not workers.
    return [psutil.Process(child.pid).memory_full_info().uss for child in multiprocessing.active_children()]
