"""The traces of processes that trained together, on one clock: each operation in which they all take part ties them.

Each rank's trace has the clock of its machine. In an all-reduce nobody ends before the last one has begun, so each
bounds the difference of two clocks from both sides; and all end at nearly the same moment, so the median difference of
the ends estimates it. On a busy machine they end milliseconds apart, but there is one clock, if the bounds allow it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.traces import files
from stepscope.traces.columns import Columns, places
from stepscope.traces.events import Span, Trace, of_worker, step_at
from stepscope.traces.files import SeveralRecordings

OPERATIONS = {  # by what a name holds, its letters only: the first that fits; the names of c10d, NCCL and gloo differ
    "barrier": "barrier",
    "sendrecv": "send_recv",  # NCCL's kernel for both, and for an all-to-all
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
SYMMETRIC = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"]  # none ends before all have begun
BETWEEN_TWO = ["send", "recv", "send_recv"]  # not the same operation on all ranks of the group
SAME_SIZE = ["all_reduce", "reduce", "broadcast"]  # all ranks put in as many bytes
BLOCK = ["group", "operation", "counted", "size"]  # in one of these, operations are the same by their order
TOLERANCE = 1000  # µs that one operation may seem to end before its counterpart begins, as clocks are not exact


class Ranks(dict[str, Trace]):
    """The trace of each rank, by "rank 0" and so on, in the order of the ranks.

    Attributes
    ----------
    clock : dict of str to float
        µs to add to the times of a rank's trace, to have them on the clock of the first one: by their collective
        operations, or as recorded, if the ranks are on one machine or share no operation.
    operations : DataFrame
        A row for each operation on each rank, times as in the rank's own trace, columns as in `operations`; `rank` and
        `span`, int, the places of the rank and of its span; `number`, int, the same for the same operation on all
        ranks; `size`, the bytes of those that must have as many on all ranks, or −1.
    """

    @property
    def clock(self) -> dict[str, float]:
        return dict(zip(self, self._matched[1].tolist(), strict=True))

    @property
    def operations(self) -> pd.DataFrame:
        return self._matched[0]

    @cached_property
    def _matched(self) -> tuple[pd.DataFrame, np.ndarray]:
        first = [trace.spans[0] for trace in self.values()]
        recorded = np.array([span.origin - first[0].origin for span in first])
        hosts = [span.host for span in first]
        table = _matched(_of_all(self), recorded, hosts)
        return table, _aligned(table, recorded, hosts)


def ranks(path: str | Path) -> Ranks:
    """Read the traces of processes that trained together: one trace a rank, or a worker.

    `path` is the folder of a run, or a trace file. First come the ranks as recorded in the traces, in order, then those
    without a number, by the first part of the file's name. Times count from the first event of each trace.

    Raises NoTraces and TraceError as `load`, SeveralRecordings if two workers say that they are the same rank.
    """
    path, traces = Path(path), {}
    for worker, of_it in files.by_worker(path).items():
        trace = of_worker(path if path.is_file() else of_it[0].with_name(worker), of_it)
        rank = trace.spans[0].rank
        key = (rank is None, rank or 0, worker if rank is None else f"rank {rank}")
        if key in traces:
            raise SeveralRecordings(
                f"In {path} both {traces[key].path.name} and {worker} say that they are rank {rank}: "
                "these are several recordings. Remove the older ones, or move them to a folder of their own."
            )
        traces[key] = trace
    return Ranks({name: traces[_, number, name] for _, number, name in sorted(traces)})


# Which operation of one rank is which of another.


def _of_all(ranks: Ranks) -> pd.DataFrame:
    """Return the operations of all ranks, with `size` and `counted`: in what they must agree to be the same."""
    tables = [
        operations(span).assign(rank=rank, span=place)
        for rank, trace in enumerate(ranks.values())
        for place, span in enumerate(trace.spans)
    ]
    table = pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)
    kinds = table.groupby(["group", "operation"])
    sized = table["operation"].isin(SAME_SIZE) & (kinds["bytes"].transform("count") == kinds["bytes"].transform("size"))
    sequenced = kinds["sequence"].transform("count") == kinds["sequence"].transform("size")
    table["size"] = table["bytes"].where(sized, -1.0)
    table["counted"] = table["sequence"].where(sequenced, table["step"].fillna(-1.0))
    return table


def _matched(table: pd.DataFrame, recorded: np.ndarray, hosts: list[str | None]) -> pd.DataFrame:
    """Number the operations: by their order in each step, or by when they ran where the ranks disagree.

    A rank may lack one in the middle, or two may lack different ones, if a recording is incomplete.
    """
    table["place"] = table.groupby([*BLOCK, "rank"]).cumcount()
    between_two = table["operation"].isin(BETWEEN_TWO)
    table.loc[between_two, "place"] = -1 - np.arange(between_two.sum())  # each is one by itself
    table["number"] = table.groupby([*BLOCK, "place"], sort=False).ngroup()
    blocks = table.groupby(BLOCK)
    largest, ranks = (blocks[name].transform(how) for name, how in (("place", "max"), ("rank", "nunique")))
    certain = (ranks > 1) & (blocks["place"].transform("size") == ranks * (largest + 1))  # all have as many
    shift = _aligned(table[certain] if certain.any() else table, recorded, hosts)[table["rank"].to_numpy(int)]
    table = table.assign(begun=table["start"] + shift, ended=table["end"] + shift)
    numbers = table.groupby("number")
    apart = numbers["begun"].transform("max") > numbers["ended"].transform("min") + TOLERANCE
    fitting = table.assign(fits=certain & ~apart).groupby(BLOCK)["fits"].transform("all").astype(bool)
    following = len(table)
    for _, block in table[~fitting & table["operation"].isin(SYMMETRIC)].groupby(BLOCK):
        ranks, until = set(), -math.inf
        for row in block.sort_values("ended").itertuples():
            if row.rank in ranks or row.begun > until + TOLERANCE:  # the same operation runs on all ranks at one time
                following, ranks, until = following + 1, set(), row.ended
            ranks.add(row.rank)
            table.loc[row.Index, "number"] = following
    return table.drop(columns=["begun", "ended", "place"])


# The difference of the clocks.


def _aligned(table: pd.DataFrame, recorded: np.ndarray, hosts: list[str | None]) -> np.ndarray:
    """Return what to add to the times of each rank, one rank after the other; by the machines' clocks `recorded`."""
    starts, ends = (_by_rank(table, column, len(recorded)) for column in ("start", "end"))
    clock = np.zeros(len(recorded))
    for rank in range(1, len(recorded)):
        neighbours = [other for other in range(rank) if hosts[other] is not None and hosts[other] == hosts[rank]]
        nearest = (neighbours or [0])[0]
        clock[rank] = clock[nearest] + recorded[rank] - recorded[nearest]
        rows = ~np.isnan(starts[:, :rank]).all(axis=1) & ~np.isnan(starts[:, rank])
        if not rows.any():
            continue
        begun, ended = (each[rows, :rank] + clock[:rank] for each in (starts, ends))
        lowest = (np.nanmax(begun, axis=1) - ends[rows, rank]).max()
        highest = (np.nanmin(ended, axis=1) - starts[rows, rank]).min()
        if not (neighbours and lowest <= clock[rank] <= highest):
            estimate = float(np.median(np.nanmedian(ended, axis=1) - ends[rows, rank]))
            clock[rank] = np.clip(estimate, lowest, highest) if lowest <= highest else estimate
    return clock


def _by_rank(table: pd.DataFrame, column: str, ranks: int) -> np.ndarray:
    """Return a column of the operations that tie clocks, float [operations, ranks], NaN where a rank has none."""
    table = table[table["operation"].isin(SYMMETRIC)]
    wide = table.pivot_table(index="number", columns="rank", values=column, aggfunc="first")
    return wide.reindex(columns=range(ranks)).to_numpy(float)


# The operations of one rank, from the events of its trace: see `Span.communication`.


def operation(name: str) -> str:
    """Return the operation, as `torch.distributed` calls it, that an event's or a collective's name stands for."""
    letters = re.sub("[^a-z]", "", re.sub(r"\(.*|.*:", "", name).lower())
    return next((found for part, found in OPERATIONS.items() if part in letters), name)


def operations(span: Span) -> pd.DataFrame:
    """Return the operations in which the rank of a span exchanged data, in the order in which it issued them.

    Columns: `operation` and `backend`, "nccl" or "gloo"; `group`, `sequence` and `bytes` as `Span.communication`;
    `step`, the number of the step that issued it, or NaN; `issued`, `start` and `end` in µs since the first event.
    """
    rows = [*_by_nccl(span, span.communication), *_by_gloo(span.communication, span.world or 1)]
    types = dict.fromkeys(["operation", "backend", "group"], object)
    types |= dict.fromkeys(["sequence", "bytes", "issued", "start", "end"], float)
    table = pd.DataFrame(rows, columns=[*types]).astype(types)
    table = table.sort_values(["issued", "start"], kind="stable", ignore_index=True)
    step = step_at(span, table["issued"].to_numpy())
    return table.assign(step=np.where(step < 0, math.nan, step))


def _by_nccl(span: Span, events: Columns) -> list[dict]:
    """Return NCCL's kernels, each with what the events around its launch say of it."""
    kernels, host = events.rows(events["kernel"]).records(), events.rows(~events["kernel"])
    if not kernels:
        return []
    calls = span.event_columns.rows(span.event_columns["kind"] == "Runtime")
    launches = places(np.array([each["correlation"] for each in kernels]), calls.get("correlation", np.zeros(0)))
    for kernel, launch in zip(kernels, launches, strict=True):
        issued = float(calls["start"][launch]) if launch >= 0 else kernel["start"]
        around = _around(host, calls["thread"].codes[launch], issued) if launch >= 0 else []
        titles = [each["name"] for each in around if each["name"].startswith("nccl:")]
        names = [kernel["collective"], *titles, *(each["collective"] for each in around), kernel["name"]]
        kernel |= {
            "backend": "nccl",
            "issued": issued,
            "operation": operation(next(filter(None, names))),
            "group": next((each["group"] for each in (kernel, *around) if each["group"]), ""),
            "bytes": _known(each["bytes"] for each in (kernel, *around)),
            "sequence": _known(each["sequence"] for each in (kernel, *around)),
        }
    return kernels


def _around(host: Columns, thread: int, moment: float) -> list[dict]:
    """Return the events of an exchange that a thread is in, the innermost first; there are four at most."""
    last = int(np.searchsorted(host["start"], moment, side="right"))
    near = np.flatnonzero((host["thread"][:last] == thread) & (host["end"][:last] >= moment))[-4:]
    return host.rows(near[::-1]).records()


def _by_gloo(events: Columns, world: int) -> list[dict]:
    """Return gloo's operations, each with its issue: gloo begins them in the order in which they were issued."""
    rows, waiting = events.records(), defaultdict(deque)
    for issue in [row for row in rows if row["name"].startswith("c10d::")]:
        name = operation(issue["name"])
        # gloo has no reduce-scatter of a list: an all-reduce for each rank
        waiting[name].extend([issue] * (world if issue["name"] == "c10d::reduce_scatter_" else 1))
    exchanges = [row for row in rows if row["name"].startswith("gloo:")]
    for each in exchanges:
        name = operation(each["name"])
        queues = [waiting[kind] for kind in {name, "reduce_scatter" if name == "all_reduce" else name} if waiting[kind]]
        queue = min(queues, key=lambda queue: queue[0]["start"], default=None)
        issue = queue.popleft() if queue and queue[0]["start"] <= each["start"] else None
        each |= {
            "backend": "gloo",
            "issued": issue["start"] if issue else each["start"],
            "operation": operation(issue["name"]) if issue else name,
            "bytes": 0.0 if name in ("barrier", "recv") else each["bytes"],
        }
    return exchanges


def _known(values: Iterable[float]) -> float:
    return next((value for value in values if not math.isnan(value)), math.nan)
