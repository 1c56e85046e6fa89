"""Looks for problems that no share of a step shows: functions that are compiled again and again, workers that draw the
same random numbers, workers whose memory grows as they read, and profilers that slow every step.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader

from stepscope import thresholds
from stepscope.facts.hazards import Compilation, Growth, Objects
from stepscope.facts.trials import Modes

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_DEPTH, _VISITED = 4, 1_000  # limits of the search for objects within a dataset
_NESTED, _MEMBERS = 3, 100  # collections within collections, and members of each, of which objects are counted
_RESUMED = "torch_dynamo_resume_in_"  # prefix of the names of functions that follow a graph break


def tracers() -> tuple[str, ...]:
    """Return the names of the profilers and tracers that slow this thread."""
    tools, allocations = getattr(sys, "monitoring", None), sys.modules.get("tracemalloc")
    by_number = {tools.get_tool(number) for number in range(6)} - {None} if tools else set()
    calls, lines = sys.getprofile(), sys.gettrace()
    found = {
        "PyTorch's profiler": torch.autograd._profiler_enabled(),
        "cProfile": "cProfile" in by_number or type(calls).__module__ == "cProfile",
        "sys.setprofile": calls is not None and type(calls).__module__ != "cProfile",
        "sys.settrace, as of a debugger or of coverage": lines is not None or by_number & {"coverage", "debugger"},
        "tracemalloc": allocations is not None and allocations.is_tracing(),
        "each kernel to its end (CUDA_LAUNCH_BLOCKING)": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
        and torch.cuda.is_initialized(),
    }
    return tuple(name for name, active in found.items() if active)


def modes() -> Modes:
    """Return how PyTorch is set."""
    modes = torch.is_anomaly_enabled(), torch.are_deterministic_algorithms_enabled()
    return Modes(torch.get_num_threads(), psutil.cpu_count(logical=False) or 0, *modes)


def stop_tracing() -> None:
    """Stop the profilers and tracers of Python in this thread, a fork of the script's."""
    sys.setprofile(None)
    sys.settrace(None)
    if tools := getattr(sys, "monitoring", None):  # Python 3.12
        for number in range(6):
            if tools.get_tool(number):
                tools.set_events(number, 0)
                tools.free_tool_id(number)


def compiled() -> Compilation:
    """Return which functions torch.compile compiled again in this process, and where graphs break.

    PyTorch keeps a record of the last 64 compilations.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    metrics = [each for each in dynamo.get_compilation_metrics() if each.co_name] if dynamo else []
    breaks = dict.fromkeys(_place(each) for each in metrics if each.co_name.startswith(_RESUMED))
    again = [each for each in metrics if getattr(each, "recompile_reason", each.cache_size)]  # 2.6 has no reasons
    if not again:
        return Compilation(graph_breaks=tuple(breaks))
    (at, why), _ = Counter((_place(each), _failed_guard(each)) for each in again).most_common(1)[0]
    seconds, config = sum(each.entire_frame_compile_time_s or 0.0 for each in again), torch._dynamo.config
    limit = config.recompile_limit if hasattr(config, "recompile_limit") else config.cache_size_limit  # in 2.6
    return Compilation(len(again), seconds, at, why, limit, tuple(breaks))


def _failed_guard(metrics: Any) -> str:
    """Return the first condition that failed, without the number of the compilation and the source line."""
    reason = str(getattr(metrics, "recompile_reason", ""))
    return reason.partition("\n")[0].partition(": ")[2].partition("#")[0].strip()


def _place(metrics: Any) -> str:
    return f"{Path(metrics.co_filename).name}:{metrics.co_firstlineno}"


def copied_generators(loader: DataLoader[Any] | None) -> tuple[str, ...]:
    """Return the places of random generators in a dataset that are duplicated in every worker."""
    if loader is None or loader.num_workers < 2 or loader.worker_init_fn is not None:
        return ()
    return tuple(place for place, value in _within(loader.dataset) if isinstance(value, _GENERATORS))


def of_workers(workers: Iterable[Any]) -> dict[int, int]:
    """Return each worker's unshared memory in bytes, by process id: a fork shares all other memory with its parent."""
    if sys.platform != "linux":
        return {}
    found = {}
    for worker in workers:
        with suppress(psutil.Error):  # it has ended
            found[worker.pid] = psutil.Process(worker.pid).memory_full_info().uss
    return found


def growth(
    loader: DataLoader[Any] | None, before: Mapping[int, int], after: Mapping[int, int], steps: int
) -> Growth | None:
    """Return the growth of the workers' memory in `steps` steps, with the objects that may cause it; None if slight."""
    both = before.keys() & after.keys()
    if loader is None or not both or (loader.multiprocessing_context or multiprocessing).get_start_method() != "fork":
        return None
    grown = sum(after[worker] - before[worker] for worker in both)
    least = max(thresholds.MANY_OBJECTS, grown / len(both) / thresholds.PAGE_BYTES)
    large = list[Objects]()
    for place, value in _within(loader.dataset):
        known = any(
            place.startswith((f"{each.place}[", f"{each.place}.")) for each in large
        )  # within a collection that is named already
        if not known and (count := _objects(value)) >= least:
            large.append(Objects(place, count))
    return Growth(grown, steps, tuple(large)) if large and grown >= thresholds.GROWTH_BYTES * len(both) else None


def _objects(value: object, depth: int = 0) -> int:
    """Return the number of Python objects in a collection, also in collections within it, by a sample of them.

    Arrays of objects count, and the columns of tables that are such arrays.
    """
    pandas: Any = sys.modules.get("pandas")
    if pandas and isinstance(value, pandas.DataFrame):
        return sum(_objects(column, depth) for _, column in value.items())
    if pandas and isinstance(value, pandas.Series | pandas.Index):
        value = getattr(value.array, "_ndarray", None)  # None if the values are in Arrow's format
    if isinstance(value, np.ndarray) and value.dtype == object:
        value = value.reshape(-1)
    elif not isinstance(value, list | tuple | dict | set | frozenset | deque):
        return 0
    if depth == _NESTED or not len(value):
        return len(value)
    inside = value.values() if isinstance(value, dict) else value
    sample = [*itertools.islice(inside, _MEMBERS)]
    within = sum(_objects(each, depth + 1) for each in sample)
    return len(value) + within * len(value) // len(sample)


def _within(dataset: object) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a dataset and of the objects in it, with their places, such as "Subset.dataset.names"."""
    left, seen = deque([(type(dataset).__name__, dataset, 0)]), set[int]()
    while left and len(seen) < _VISITED:
        place, owner, depth = left.popleft()
        if id(owner) in seen:
            continue
        seen.add(id(owner))
        if isinstance(owner, list | tuple):
            inside = [(f"{place}[{index}]", value) for index, value in enumerate(owner)]
        elif isinstance(owner, dict):
            inside = [(f"{place}[{key!r}]", value) for key, value in owner.items() if isinstance(key, str | int)]
        else:
            inside = [(f"{place}.{name}", value) for name, value in getattr(owner, "__dict__", {}).items()]
        yield from inside
        for where, value in inside if depth < _DEPTH else []:
            holds = hasattr(value, "__dict__") or (isinstance(value, list | tuple | dict) and len(value) <= _MEMBERS)
            if holds and not isinstance(value, type | ModuleType | torch.Tensor):
                left.append((where, value, depth + 1))
