"""Variants timed interleaved by all ranks of a job, and the file that brings the result back to a notebook."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from stepscope.base import staging
from stepscope.timing.comparison import Comparison, shuffled
from stepscope.timing.stopwatch import Timing, synchronize, warm_up


def interleaved_ranks(
    variants: Mapping[str, Callable[[], object]],
    rounds: int,
    steps: int,
    images: int = 1,
    warmup: int = 2,
    path: str | Path | None = None,
) -> Comparison:
    """Time variants in rounds of one run each, on all ranks of a job at the same time.

    All ranks must call this with the same variants. The order within a round is random, and the same on all ranks. A
    run begins when all ranks are ready, and takes as long as on the slowest one. What the ranks send each other for
    that is not timed. No limit of `timing.limit` holds, since one rank alone must not stop.

    Parameters
    ----------
    variants : mapping of str to callable
        One call is one step, such as forward, backward and optimizer.
    rounds, steps : int
        How often to go through the variants, and steps of a run.
    images : int
        Images of a step, on all ranks together.
    warmup : int
        Steps before a variant's first run that are not timed: DDP has its final buckets from the third step on. Before
        each later run it is one, if it is any.
    path : str or Path, optional
        Where rank 0 writes the result as JSON, for `read_comparison`.

    Returns
    -------
    Comparison
        The same on all ranks. Of each timing, `durations` are the longest of all ranks for each step, `waits` are 0
        since loading is part of the step, and `begin` is 0 since ranks may have different clocks.

    Raises
    ------
    RuntimeError
        If the process is no rank of a job.
    ValueError
        If ranks were called differently.

    Examples
    --------
    >>> dist.init_process_group()
    >>> timing.interleaved_ranks({"25 MB": step, "1 MB": other}, rounds=5, steps=10, path="runs/buckets.json")
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "Expected a rank of a job, found no process group: start the script by torchrun, and call "
            "torch.distributed.init_process_group first. For a single process there is timing.interleaved."
        )
    call = {"variants": list(variants), "rounds": rounds, "steps": steps, "images": images, "warmup": warmup}
    for rank, other in enumerate(_of_all_ranks(call)):
        if other != call:
            raise ValueError(f"Expected the same call on all ranks, found {call} here, and {other} on rank {rank}.")
    timings = {name: [] for name in variants}
    for number, order in enumerate(shuffled(variants, rounds)):
        for name in order:
            timings[name].append(_run(variants[name], steps, images, min(warmup, 1) if number else warmup))
    result = Comparison({name: tuple(runs) for name, runs in timings.items()})
    if path is not None and dist.get_rank() == 0:
        runs = {name: [asdict(run) for run in runs] for name, runs in result.timings.items()}
        staging.write(path, json.dumps({"timings": runs}, indent=1))
    return result


def read_comparison(path: str | Path) -> Comparison:
    """Return what `interleaved_ranks` has written.

    Raises
    ------
    ValueError
        If the file is another one.
    """
    path = Path(path)
    try:
        timings = json.loads(path.read_text(encoding="utf-8"))["timings"].items()
        return Comparison({name: tuple(_timing(**run) for run in runs) for name, runs in timings})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: expected a file of timing.interleaved_ranks, found another one ({error!r})."
        ) from None


def _timing(waits: list[float], durations: list[float], **numbers: float) -> Timing:
    return Timing(waits=tuple(waits), durations=tuple(durations), **numbers)


def _run(step: Callable[[], object], steps: int, images: int, warmup: int) -> Timing:
    """Time a run on all ranks; return the slowest rank's seconds."""
    warm_up(step, warmup)
    _of_all_ranks(None)  # all are ready
    synchronize()
    ends = [begin := time.perf_counter()]
    for _ in range(steps):
        step()
        ends.append(time.perf_counter())
    synchronize()
    seconds = time.perf_counter() - begin
    durations = [end - start for start, end in itertools.pairwise(ends)]
    all_seconds, all_durations = zip(*_of_all_ranks((seconds, durations)), strict=True)
    return Timing(images * steps, max(all_seconds), (0.0,) * steps, tuple(map(max, zip(*all_durations, strict=True))))


def _of_all_ranks(mine: object) -> list:
    """Return what each rank gave, in the order of ranks; all of them must call this, and wait for each other."""
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered
