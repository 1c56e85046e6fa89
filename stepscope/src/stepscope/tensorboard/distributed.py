"""The profiler tab's Distributed view, with the numbers that `stepscope.traces` computes from the ranks' traces.

The numbers equal `traces.communication_by_step` and `traces.collectives`, and so agree with `traces.communication`: the
wait chart splits exposed communication. Times are in µs. A note at the head of the page states which data could not
be compared, and why.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from stepscope import traces
from stepscope.traces import TraceError

if TYPE_CHECKING:
    import pandas as pd
    from torch_tb_profiler.profiler.data import DistributedRunProfileData, RunProfileData
    from torch_tb_profiler.profiler.loader import RunLoader
    from torch_tb_profiler.run import DistributedRunProfile

# The page's names for columns of `traces.communication_by_step`
OVERLAP = {"Computation": "compute", "Overlapping": "overlapped", "Communication": "exposed", "Other": "other"}
WAIT = {"Data Transfer Time": "transfer", "Synchronizing Time": "waiting"}
OPERATIONS = {  # the table of operations: a quantity, and the column names of its sum and its mean
    "bytes": ("Total Size (bytes)", "Avg Size (bytes)"),
    "latency": ("Total Latency (us)", "Avg Latency (us)"),
    "transfer": ("Data Transfer Time (us)", "Avg Data Transfer Time (us)"),
}


def keep_the_path_of_the_trace(
    stock: Callable[..., None], self: DistributedRunProfileData, profile: RunProfileData
) -> None:
    """Distributed: communication is missing or wrong, so the view is computed from the traces themselves.

    The plugin no longer recognizes NCCL's kernels, counts operators that wait for gloo as computation, and does not
    know all_to_all, barrier, gather, scatter and the operations that FSDP calls.
    """
    stock(self, profile)
    self.trace_file_path = profile.trace_file_path
    self.comm_node_list = None


def compare_ranks(
    stock: Callable[..., object], self: RunLoader, profiles: list[DistributedRunProfileData], span: str | None
) -> DistributedRunProfile | None:
    """Distributed: the view vanishes if a rank has one more operation, and is wrong if ranks recorded different steps.

    Our view is made in a separate process: if a thread of this process used pandas, the forks that parse other runs
    would wait for ever for a lock that the thread holds.
    """
    from torch_tb_profiler.multiprocessing import get_context, get_start_method

    profiles = [profile for profile in profiles if profile.distributed_info or profile.has_communication]
    if not profiles:
        return None
    with ProcessPoolExecutor(1, get_context(get_start_method())) as pool:
        try:
            return pool.submit(_page, profiles, span).result()
        except Exception:  # also if the process was killed: the other views are shown
            logging.getLogger(__name__).exception("The Distributed view of %s could not be made.", self.run_name)
            return None


def _page(profiles: list[DistributedRunProfileData], span: str | None) -> DistributedRunProfile | None:
    """Return the view of a recording, or None if the recording is not of a job of several ranks."""
    from torch_tb_profiler import consts
    from torch_tb_profiler.profiler.run_generator import DistributedRunGenerator
    from torch_tb_profiler.run import DistributedRunProfile

    ranks = _ranks({profile.worker: profile.trace_file_path for profile in profiles})
    world = max((trace.spans[0].world or 1 for trace in ranks.values()), default=1)
    operations, silent = traces.collectives(ranks), _without_kernels(ranks)
    if not len(operations) and not silent and world == 1:
        return None
    same_rank = _same_rank(ranks)
    compared = len(ranks) > 1 and not same_rank
    notes = [*_missing(ranks, world, silent, operations), *same_rank]
    try:
        steps = traces.communication_by_step(ranks)
    except TraceError as error:
        steps = waits = None
        notes.append(str(error))
    else:
        operations = operations[operations.set_index(["rank", "step"]).index.isin(steps.index)]
        waits = steps[steps.groupby(level="step")["length"].transform("size") == len(ranks)] if compared else None
        if compared:
            notes += [*_steps_missing(steps), *traces.communication(ranks).attrs["unequal"]]
    shared = operations.groupby("number")["rank"].transform("size") > 1
    # The waiting time of a single rank is unknown
    operations = operations.assign(transfer=operations["transfer"].where(shared & compared))
    page = DistributedRunProfile(span)
    page.views.append(consts.DISTRIBUTED_VIEW)
    page.gpu_info = DistributedRunGenerator(profiles, span)._generate_gpu_info()
    page.steps_to_overlap = _chart("Computation/Communication Overview", OVERLAP, steps)
    page.steps_to_overlap["metadata"]["note"] = "\n".join(notes) or None
    page.steps_to_wait = _chart("Synchronizing/Communication Overview", WAIT, waits)
    tables = {rank: _table(operations[operations["rank"] == rank]) for rank in ranks}
    page.comm_ops = {"metadata": {"title": "Communication Operations Stats"}, "data": tables}
    return page


def _ranks(paths: Mapping[str, str]) -> traces.Ranks:
    """Return the trace of each worker, in the order of ranks, without traces that our reader refuses."""
    ranks = []
    for worker, path in sorted(paths.items()):
        with suppress(TraceError):
            ranks.append((worker, traces.load(path)))
    ranks.sort(key=lambda rank: (rank[1].spans[0].rank is None, rank[1].spans[0].rank or 0))
    return traces.Ranks(ranks)


def _chart(title: str, columns: dict[str, str], steps: pd.DataFrame | None) -> dict[str, object]:
    """Return the values of these columns by step and worker, and under "all" the means over the steps."""
    tables: dict[str, dict[str, list[float]]] = {"all": {}}
    if steps is not None:
        amounts = steps[list(columns.values())]
        tables["all"] = _rows(amounts.groupby(level="rank", sort=False).mean())
        tables |= {str(step): _rows(rows.droplevel("step")) for step, rows in amounts.groupby(level="step")}
    return {"metadata": {"title": title, "legends": list(columns), "units": "us"}, "data": tables}


def _rows(table: pd.DataFrame) -> dict[str, list[float]]:
    return dict(zip(table.index, (table.round(3) + 0.0).to_numpy().tolist(), strict=True))  # no −0.0


def _table(operations: pd.DataFrame) -> dict[str, object]:
    """Return the table of a rank's operations by name: their number, and sum and mean of each quantity."""
    names = ["Calls", *(name for pair in OPERATIONS.values() for name in pair)]
    columns = [{"type": "string", "name": "Name"}, *({"type": "number", "name": name} for name in names)]
    kinds = operations["backend"] + ":" + operations["operation"]
    operations = operations.assign(latency=operations["end"] - operations["start"])
    rows = [
        [name, len(calls), *(amount for quantity in OPERATIONS for amount in _sum_and_mean(calls[quantity]))]
        for name, calls in operations.groupby(kinds, sort=False)
    ]
    return {"columns": columns, "rows": rows}


def _sum_and_mean(amounts: pd.Series) -> tuple[float | None, int | None]:
    known = amounts.notna().all()
    return (round(float(amounts.sum()), 3), round(float(amounts.mean()))) if known else (None, None)


def _without_kernels(ranks: traces.Ranks) -> list[str]:
    """Return the ranks that called NCCL, but recorded none of its kernels."""
    events = {rank: trace.spans[0].exchanges for rank, trace in ranks.items()}
    return [
        rank
        for rank, table in events.items()
        if not table["kernel"].any() and any(name.startswith("nccl:") for name in table["name"])
    ]


# Sentences for the head of the view, on missing data and its reasons.


def _missing(ranks: traces.Ranks, world: int, silent: list[str], operations: pd.DataFrame) -> Iterator[str]:
    here = len(ranks)
    if here < world or (here == 1 and ranks[next(iter(ranks))].spans[0].world is None):
        waiting = "how long it waited is unknown" if here == 1 else "waiting for missing ranks counts as data transfer"
        yield (
            f"Traces of {here} of {world if world > 1 else 'several'} ranks are here: {waiting}. Record all ranks into "
            "one folder, each named by its rank in the whole job: tensorboard_trace_handler(folder, "
            'worker_name=f"rank_{rank}").'
        )
    if silent:
        yield (
            f"{', '.join(silent)} called NCCL, but none of its kernels is recorded. Record with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
        )
    with_shapes = all("record_shapes" in trace.spans[0].settings for trace in ranks.values())
    if operations["bytes"].isna().any() and not with_shapes:
        yield "Missing sizes are unknown. Record with record_shapes=True."


def _steps_missing(steps: pd.DataFrame) -> Iterator[str]:
    recorded = {rank: sorted(rows.index.get_level_values("step")) for rank, rows in steps.groupby(level="rank")}
    if len(set(map(tuple, recorded.values()))) > 1:
        listed = "; ".join(f"{rank}: {', '.join(map(str, numbers))}" for rank, numbers in recorded.items())
        yield (
            f"The ranks recorded different steps ({listed}); only steps that all ranks have are compared. Give the "
            "profilers of all ranks the same schedule."
        )


def _same_rank(ranks: traces.Ranks) -> list[str]:
    numbers = Counter(trace.spans[0].rank for trace in ranks.values())
    return [
        f"{count} traces are recorded as rank {number}: they belong to several jobs, and are not compared. Move the "
        "traces of each job to a separate folder."
        for number, count in numbers.items()
        if number is not None and count > 1
    ]
