"""What a loop does that costs no share of its steps and is wrong all the same: rows of the evidence.

`torch.compile` that compiles again and again, workers that draw the same random numbers, and workers whose memory grows
as they read.
"""

import multiprocessing
import random
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

from stepscope.base.wording import counted

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_MANY = 10_000  # elements of a list or dict, each a Python object whose counter of references changes as it is read
_PAGE = 4_096  # bytes; the most that is copied to read an object
_LEAST = 2e6  # bytes that a worker grows by: less is the allocator's
_DEPTH, _VISITED = 4, 1_000  # of the objects within a dataset
_RESUMED = "torch_dynamo_resume_in_"  # begin of the name of what follows a graph break


def compiled() -> list[tuple[str, str]]:
    """Return what torch.compile has compiled again in this process, and where graphs break; none if it has not run.

    PyTorch keeps the last 64 compilations.
    """
    dynamo = sys.modules.get("torch._dynamo.utils")
    metrics = [each for each in dynamo.get_compilation_metrics() if each.co_name] if dynamo else []
    rows = []
    again = [each for each in metrics if each.recompile_reason]
    if again:
        lines = Counter(
            (Path(each.co_filename).name, each.co_firstlineno, _first(each.recompile_reason)) for each in again
        )
        ((file, line, why), _) = lines.most_common(1)[0]
        seconds = sum(each.entire_frame_compile_time_s or 0.0 for each in again)
        limit = torch._dynamo.config.recompile_limit
        rows.append((
            "compiled again",
            f"{counted(len(again), 'time')}, {seconds:.1f} s in all, mostly the function at {file}:{line}, because of "
            f"{why}. After {limit} times PyTorch runs a function as it is. For sizes that change: "
            "torch._dynamo.mark_dynamic(inputs, 0) before the first call, or drop_last=True.",
        ))  # fmt: skip
    breaks = Counter(
        f"{Path(each.co_filename).name}:{each.co_firstlineno}" for each in metrics if each.co_name.startswith(_RESUMED)
    )
    if breaks:
        rows.append((
            "graph breaks",
            f"at {', '.join(breaks)}. Each ends a graph, so that less is fused. fullgraph=True makes an error of a "
            "break, and says why.",
        ))  # fmt: skip
    return rows


def _first(reason: str) -> str:
    """Return the condition that failed first, without the number of the compilation and the source line."""
    return reason.splitlines()[0].partition(": ")[2].partition("#")[0].strip()


def equal_numbers(loader: DataLoader | None) -> list[tuple[str, str]]:
    """Return which random generators of a dataset each of several workers has a copy of."""
    if loader is None or loader.num_workers < 2 or loader.worker_init_fn is not None:
        return []
    found = [place for place, value in _within(loader.dataset) if isinstance(value, _GENERATORS)]
    if not found:
        return []
    return [(
        "random numbers",
        f"Each of the {loader.num_workers} workers has a copy of {', '.join(found)}: all of them draw the same "
        "numbers, unless an item seeds it. Make it in worker_init_fn, as np.random.default_rng(torch.initial_seed()).",
    )]  # fmt: skip


def memory(workers: Iterable) -> dict[int, int]:
    """Return the bytes that only this worker has, for each of these processes, where a fork shares the others."""
    if sys.platform != "linux":
        return {}
    found = {}
    for worker in workers:
        with suppress(psutil.Error):  # it has ended
            found[worker.pid] = psutil.Process(worker.pid).memory_full_info().uss
    return found


def growth(loader: DataLoader | None, before: Mapping[int, int], after: Mapping[int, int], steps: int) -> list:
    """Return whether the memory of the workers that are in both has grown in so many steps, and by which objects."""
    both = before.keys() & after.keys()
    if loader is None or not both or (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
        return []
    grown = sum(after[worker] - before[worker] for worker in both)
    large = [
        f"{place} ({len(value):,} objects)"
        for place, value in _within(loader.dataset)
        if isinstance(value, list | tuple | dict | set) and len(value) >= max(_MANY, grown / len(both) / _PAGE)
    ]
    if grown < _LEAST * len(both) or not large:
        return []
    return [(
        "workers' memory",
        f"grew by {grown / 1e6:.0f} MB in {counted(steps, 'step')}, probably by reading {', '.join(large)}: a page "
        "that a fork shares is copied when a counter of references in it changes. An array has no such counters.",
    )]  # fmt: skip


def _within(dataset: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a dataset and of the objects in it, with their places, such as "Subset.dataset.names"."""
    left, seen = deque([(type(dataset).__name__, dataset, 0)]), set()
    while left and len(seen) < _VISITED:
        place, owner, depth = left.popleft()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        inside = enumerate(owner) if isinstance(owner, list | tuple) else getattr(owner, "__dict__", {}).items()
        for name, value in inside:
            where = f"{place}[{name}]" if isinstance(name, int) else f"{place}.{name}"
            yield where, value
            short = isinstance(value, list | tuple) and len(value) <= 100
            if (
                depth < _DEPTH
                and (short or hasattr(value, "__dict__"))
                and not isinstance(value, type | ModuleType | torch.Tensor)
            ):
                left.append((where, value, depth + 1))
