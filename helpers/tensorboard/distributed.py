"""Corrections of the profiler tab's Distributed view: what the ranks exchange, and how long they wait for each other.

The view is made anew of what `exchanges` finds in the trace of each rank. Of its terms two are of all ranks together:

- Data transfer is of each operation the shortest time that any rank took. The last rank to come waits for nobody, and
  all end together. The rest is synchronizing. So the ranks' clocks need not agree.

Each correction is a function of a few lines, with the fault it fixes in its docstring, as in `corrections`, which
applies them.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helpers import traces
from helpers.tensorboard.exchanges import Operation, Recorded, recorded
from helpers.traces import TraceError, files, intervals
from helpers.traces.aligning import BETWEEN_TWO

if TYPE_CHECKING:
    from torch_tb_profiler.profiler.data import DistributedRunProfileData
    from torch_tb_profiler.run import DistributedRunProfile

COLUMNS = [
    "Calls",
    "Total Size (bytes)",
    "Avg Size (bytes)",
    "Total Latency (us)",
    "Avg Latency (us)",
    "Data Transfer Time (us)",
    "Avg Data Transfer Time (us)",
]


@dataclass(frozen=True)
class Rank:
    """The trace of a rank.

    Attributes
    ----------
    worker : str
        The first part of its file's name.
    number, world : int or None
        Its number and that of all ranks, None where they are not recorded.
    in_groups : bool
        Whether the job has groups of fewer ranks.
    recorded : Recorded
    """

    worker: str
    number: int | None
    world: int | None
    in_groups: bool
    recorded: Recorded


def know_what_ranks_exchange() -> None:
    """Distributed: what is exchanged is missing or wrong.

    NCCL's kernels no longer carry the number of the operation that launched them. So they count as computation that
    overlaps them, and where a trace has no copies of annotations on the GPU's time line, an operation takes as long as
    its launch on the host. Unknown are all_to_all, barrier, gather and scatter, and NCCL's `_all_gather_base` and
    `_reduce_scatter_base`, which FSDP calls. With gloo, operators that wait for an exchange, as FSDP's do, count as
    computation that overlaps it. An exchange that ends after its step is shown in a step "null". Sizes of double are
    0. A job that uses both libraries has no view.
    """
    from torch_tb_profiler.profiler.data import RunProfileData

    stock = RunProfileData.parse

    def parse(worker: str, span: str, path: str, cache_dir: str) -> RunProfileData:
        profile = stock(worker, span, path, cache_dir)
        profile.comm_node_list = None
        if profile.distributed_info or profile.has_communication:
            with contextlib.suppress(TraceError):  # what our reader refuses is shown in the other views
                profile.comm_node_list = recorded(traces.load(path).spans[0])
        return profile

    RunProfileData.parse = staticmethod(parse)


def compare_what_ranks_share() -> None:
    """Distributed: the view vanishes if one rank has an operation more, and is wrong if ranks recorded other steps.

    The plugin compares the n-th operation of a recording with the n-th of the others. The trace of one rank alone is
    compared with itself, and waits for nobody. Now operations of one step and group are compared, where the ranks have
    as many; what cannot be compared is left out, and the page says so.
    """
    from torch_tb_profiler.profiler.loader import RunLoader

    RunLoader._process_distributed_profiles = lambda self, profiles, span: view(list(profiles), span)


def keep_ranks_of_one_name_apart() -> None:
    """All views: ranks of several nodes whose files have one name, but for the time, pass for recordings of one rank.

    Put after the correction of the parsing processes: both stand in for `Process`.
    """
    from torch_tb_profiler.profiler import loader

    stock = loader.Process

    def process(target: Callable, args: tuple):
        return stock(target=target, args=with_its_rank(Path(target.__self__.run_dir), *args))

    loader.Process = process


def with_its_rank(folder: Path, worker: str, span: int | None, name: str) -> tuple[str, int | None, str]:
    """Return worker, span and name of a trace file; the worker with its rank if others of its name have another."""
    names = [file.name for file in files.of_run(folder) if files.TRACE_FILE.fullmatch(file.name)["worker"] == worker]
    ranks = [_rank(folder / each) for each in names] if len(names) > 1 else []
    if None in ranks or len(set(ranks)) < 2:
        return worker, span, name
    place = names.index(name)
    return f"{worker}_{ranks[place]}", 1 + ranks[:place].count(ranks[place]), name


@functools.cache
def _rank(file: Path) -> int | None:
    try:
        return (files.read(file, next).get("distributedInfo") or {}).get("rank")
    except TraceError:
        return None


def view(profiles: list[DistributedRunProfileData], span: str) -> DistributedRunProfile | None:
    """Return the Distributed view of a recording, or None if it is not of a job of several ranks.

    What could not be compared is in the "note" of the first chart's metadata, for the page to show.
    """
    from torch_tb_profiler import consts
    from torch_tb_profiler.profiler.run_generator import DistributedRunGenerator
    from torch_tb_profiler.run import DistributedRunProfile

    ranks = [_as_rank(profile) for profile in profiles if profile.comm_node_list is not None]
    ranks.sort(key=lambda rank: (rank.number is None, rank.number or 0, rank.worker))
    if not any(rank.recorded.operations or rank.recorded.without_kernels or (rank.world or 1) > 1 for rank in ranks):
        return None
    transfers, notes = compared(ranks)
    made = DistributedRunProfile(span)
    made.views.append(consts.DISTRIBUTED_VIEW)
    made.gpu_info = DistributedRunGenerator(profiles, span)._generate_gpu_info()
    made.steps_to_overlap = {
        "metadata": {
            "title": "Computation/Communication Overview",
            "legends": ["Computation", "Overlapping", "Communication", "Other"],
            "units": "us",
            "note": "\n".join(notes) or None,
        },
        "data": _by_step({rank.worker: rank.recorded.steps for rank in ranks}),
    }
    made.steps_to_wait = {
        "metadata": {
            "title": "Synchronizing/Communication Overview",
            "legends": ["Data Transfer Time", "Synchronizing Time"],
            "units": "us",
        },
        "data": _by_step({rank.worker: _waits(rank, transfers) for rank in ranks} if transfers else {}),
    }
    made.comm_ops = {
        "metadata": {"title": "Communication Operations Stats"},
        "data": {rank.worker: _table(rank.recorded.operations, transfers) for rank in ranks},
    }
    return made


def _as_rank(profile: DistributedRunProfileData) -> Rank:
    job = profile.distributed_info or {}
    world = job.get("world_size")
    in_groups = any(group.get("pg_size") != world for group in job.get("pg_config") or ())
    return Rank(profile.worker, job.get("rank"), world, in_groups, profile.comm_node_list)


def _between_two(name: str) -> bool:
    return name.partition(":")[2] in BETWEEN_TWO


def compared(ranks: list[Rank]) -> tuple[dict[Operation, float], list[str]]:
    """Return the µs of data transfer of each operation that could be compared, and why others could not."""
    notes = [*_ranks_missing(ranks), *_exchanges_missing(ranks)]
    if len(ranks) == 1:
        return {}, notes
    numbers = [rank.number for rank in ranks if rank.number is not None]
    if len(set(numbers)) < len(numbers):
        return {}, [*notes, _of_several_jobs(ranks)]
    transfers, unequal = {}, []
    shared = _shared_steps(ranks)
    if any(list(rank.recorded.steps) != shared for rank in ranks):
        notes.append(_other_steps(ranks, shared))
    for (step, group, name), calls in _calls(ranks, shared).items():
        if _between_two(name) or (not group and any(rank.in_groups for rank in ranks)):
            continue
        if len({len(each) for each in calls.values()}) > 1:
            counts = ", ".join(f"{worker} {len(each)}" for worker, each in calls.items())
            unequal.append(f"{name} in step {step} ({counts})")
            continue
        for operations in zip(*_in_one_order(list(calls.values())), strict=True):
            shortest = min(each.end - each.start for each in operations)
            transfers |= dict.fromkeys(operations, shortest)
    if unequal:
        notes.append(_unequal(unequal))
    names = {(each.group, each.name) for rank in ranks for each in rank.recorded.operations}
    if between_two := sorted({name for _, name in names if _between_two(name)}):
        notes.append(f"What goes from one rank to another is not compared: {_listed(between_two)}.")
    if any(not group for group, _ in names) and any(rank.in_groups for rank in ranks):
        notes.append(IN_GROUPS)
    return transfers, notes


def _shared_steps(ranks: list[Rank]) -> list[str]:
    return [step for step in ranks[0].recorded.steps if all(step in rank.recorded.steps for rank in ranks)]


def _calls(ranks: list[Rank], steps: list[str]) -> dict[tuple[str, str, str], dict[str, list[Operation]]]:
    """Return by step, group and name the operations of each rank of the group, by its worker."""
    members, found = defaultdict(dict), {}  # dicts in the place of sets, which have no order
    for rank in ranks:
        for each in rank.recorded.operations:
            if each.group:
                members[each.group][rank.worker] = None
            if each.step in steps:
                found.setdefault((each.step, each.group, each.name), defaultdict(list))[rank.worker].append(each)
    everybody = [rank.worker for rank in ranks]
    return {key: {worker: calls[worker] for worker in members.get(key[1], everybody)} for key, calls in found.items()}


def _in_one_order(calls: list[list[Operation]]) -> list[list[Operation]]:
    """Return the operations of each rank so that those of one place belong together.

    They are in the order of their calls. Gloo's start in two threads, and may pass each other: so by size first, where
    all ranks have the same sizes.
    """
    sizes = [sorted(each.size for each in operations if each.size is not None) for operations in calls]
    if len(sizes[0]) < len(calls[0]) or any(each != sizes[0] for each in sizes):
        return calls
    return [sorted(operations, key=lambda each: each.size) for operations in calls]


# ------------------------------------------------------------------------------------------------ what the page shows


def _by_step(tables: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    """Return by step what is given by worker, and as "all" the means of the steps."""
    steps = sorted({step for table in tables.values() for step in table}, key=int)
    means = {
        worker: [sum(column) / len(table) for column in zip(*table.values(), strict=True)]
        for worker, table in tables.items()
        if table
    }
    by_step = {step: {worker: table[step] for worker, table in tables.items() if step in table} for step in steps}
    return {"all": means} | by_step


def _waits(rank: Rank, transfers: dict[Operation, float]) -> dict[str, list[float]]:
    """Return by step the time in which data was transferred, and the rest of the time of the compared operations."""
    steps = defaultdict(list)
    for each in rank.recorded.operations:
        if each in transfers:
            steps[each.step].append((each.start, each.end, each.end - transfers[each]))
    waits = {}
    for step, operations in steps.items():
        exchanging = _length((start, end) for start, end, _ in operations)
        transferring = _length((last, end) for _, end, last in operations)
        waits[step] = [round(transferring, 3), round(exchanging - transferring, 3)]
    return waits


def _length(spans: Iterable[tuple[float, float]]) -> float:
    starts, ends = intervals.union(*np.array(sorted(spans), float).T)
    return float((ends - starts).sum())


def _table(operations: list[Operation], transfers: dict[Operation, float]) -> dict[str, list]:
    columns = [{"type": "string", "name": "Name"}, *({"type": "number", "name": name} for name in COLUMNS)]
    by_name = defaultdict(list)
    for each in operations:
        by_name[each.name].append(each)
    rows = []
    for name, calls in by_name.items():
        sizes = [each.size for each in calls]
        quantities = (
            [] if None in sizes else sizes,
            [each.end - each.start for each in calls],
            [transfers[each] for each in calls if each in transfers],
        )
        rows.append([name, len(calls), *(number for each in quantities for number in _total_and_mean(each))])
    return {"columns": columns, "rows": rows}


def _total_and_mean(amounts: list[float]) -> tuple[float | None, int | None]:
    return (round(sum(amounts), 3), round(sum(amounts) / len(amounts))) if amounts else (None, None)


# ------------------------------------------------------------------------------------- what it says where it is empty


IN_ONE_FOLDER = (
    "Record all ranks into one folder, with the rank in the whole job as name: tensorboard_trace_handler(folder, "
    'worker_name=f"rank_{rank}").'
)
IN_GROUPS = (
    "Gloo does not record between which ranks it exchanges, and this job has groups of fewer ranks. So its operations "
    "are not compared."
)


def _ranks_missing(ranks: list[Rank]) -> list[str]:
    world = max((rank.world or 1 for rank in ranks), default=1)
    if world == len(ranks) == 1 and ranks[0].world:
        return ["The job has one rank, which waits for nobody."]
    if len(ranks) == 1:
        of_all = f" of {world} ranks" if ranks[0].world else ""
        return [f"This is the trace of one{of_all}: how long it waited for others is unknown. {IN_ONE_FOLDER}"]
    if len(ranks) < world:
        return [
            f"These are the traces of {len(ranks)} of {world} ranks: what they waited for the others counts as data "
            f"transfer. {IN_ONE_FOLDER}"
        ]
    return []


def _exchanges_missing(ranks: list[Rank]) -> list[str]:
    notes = []
    if silent := [rank.worker for rank in ranks if rank.recorded.without_kernels]:
        notes.append(
            f"{_listed(silent)} called NCCL, and none of its kernels is recorded. Record with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
        )
    if idle := [r.worker for r in ranks if not r.recorded.operations and not r.recorded.without_kernels]:
        notes.append(
            f"{_listed(idle)} recorded no exchange in any step. Record steps that exchange gradients, all of which "
            "lies before profiler.step()."
        )
    if any(each.size is None for r in ranks if not r.recorded.with_shapes for each in r.recorded.operations):
        notes.append("Sizes are unknown where they are left out. Record with record_shapes=True.")
    return notes


def _of_several_jobs(ranks: list[Rank]) -> str:
    numbers = Counter(rank.number for rank in ranks if rank.number is not None)
    number, _ = numbers.most_common(1)[0]
    workers = _listed([rank.worker for rank in ranks if rank.number == number])
    return (
        f"{workers} say that they are the same rank, {number}: these are traces of several jobs, and not compared. "
        "Move those of each job to a folder of its own."
    )


def _other_steps(ranks: list[Rank], shared: list[str]) -> str:
    recorded_steps = ", ".join(f"{rank.worker} {_listed(list(rank.recorded.steps))}" for rank in ranks)
    return (
        f"The ranks recorded different steps ({recorded_steps}); compared are {_listed(shared) if shared else 'none'}. "
        "Give the profilers of all ranks the same schedule."
    )


def _unequal(found: list[str]) -> str:
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        f"The ranks did not call the same operations, so these are not compared: {'; '.join(found[:3])}{more}. All "
        "ranks should get equally many batches and freeze the same parameters, and begin and end recording together."
    )


def _listed(names: list[str]) -> str:
    most = names if len(names) <= 8 else [*names[:7], f"{len(names) - 7} more"]
    return f"{', '.join(most[:-1])} and {most[-1]}" if len(most) > 1 else most[0]
