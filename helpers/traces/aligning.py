"""The traces of processes that trained together, on one clock: each operation in which they all take part ties them.

Each rank's trace has the clock of its machine. In an all-reduce nobody ends before the last one has begun, so each
bounds the difference of two clocks from both sides; and all end at nearly the same moment, so the median difference of
the ends estimates it. On a busy machine they end milliseconds apart, but there is one clock, if the bounds allow it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helpers.traces import files
from helpers.traces.exchanging import operations
from helpers.traces.files import SeveralRecordings
from helpers.traces.reading import Trace, of_worker

if TYPE_CHECKING:
    import pandas as pd

SYMMETRIC = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"]  # none ends before all have begun
BETWEEN_TWO = ["send", "recv", "send_recv"]  # not the same operation on all ranks of the group
SAME_SIZE = ["all_reduce", "reduce", "broadcast"]  # all ranks put in as many bytes
BLOCK = ["group", "operation", "counted", "size"]  # in one of these, operations are the same by their order
TOLERANCE = 1000  # µs that one operation may seem to end before its counterpart begins, as clocks are not exact


@dataclass(frozen=True, eq=False)
class Ranks(Mapping[str, Trace]):
    """The trace of each rank, by "rank 0" and so on, in the order of the ranks.

    Attributes
    ----------
    path : Path
        The folder or file they were read from.
    traces : mapping of str to Trace
    clock : dict of str to float
        µs to add to the times of a rank's trace, to have them on the clock of the first one: by their collective
        operations, or as recorded, if the ranks are on one machine or share no operation.
    uncertainty : float
        Half the width in µs of what the collectives leave open of a clock, of the rank where it is most, 0 on one
        machine; NaN if there is only one rank, or one without collectives. Clocks that drift while they record
        contradict themselves, then half of the contradiction.
    """

    path: Path
    traces: Mapping[str, Trace]

    def __getitem__(self, rank: str) -> Trace:
        return self.traces[rank]

    def __iter__(self) -> Iterator[str]:
        return iter(self.traces)

    def __len__(self) -> int:
        return len(self.traces)

    @property
    def clock(self) -> dict[str, float]:
        return dict(zip(self, self._clocks[0].tolist(), strict=True))

    @property
    def uncertainty(self) -> float:
        return self._clocks[1]

    @cached_property
    def operations(self) -> pd.DataFrame:
        """The operations of all ranks, a row each on each rank, times as in its own trace.

        Columns as `helpers.traces.exchanging.operations`; `rank` and `span`, int, the places of the rank and of its
        span; `number`, int, the same for the same operation on all ranks;
        `size`, the bytes of those that must have as many on all ranks, or −1.
        """
        return _numbered(self)

    @cached_property
    def recorded_clock(self) -> np.ndarray:
        """As `clock`, but by the clocks of the machines, in the order of the ranks."""
        origins = np.array([trace.spans[0].origin for trace in self.values()])
        return origins - origins[0]

    @cached_property
    def hosts(self) -> list[str | None]:
        """The machine of each rank."""
        return [trace.spans[0].host for trace in self.values()]

    @cached_property
    def _clocks(self) -> tuple[np.ndarray, float]:
        return _aligned(self.operations, self.recorded_clock, self.hosts)


def ranks(path: str | Path) -> Ranks:
    """Read the traces of processes that trained together: one trace a rank, or a worker.

    Parameters
    ----------
    path : str or Path
        The folder of a run, or a trace file.

    Returns
    -------
    Ranks
        A mapping by "rank 0" and so on, as recorded in the traces themselves, in this order; then by the first part
        of the file's name those without a rank. Times count from the first event of each, and ``clock`` ties them.

    Raises
    ------
    NoTraces, UnreadableFile, EmptyTrace, TruncatedTrace, ForeignFile
        As `load`.
    SeveralRecordings
        If two workers say that they are the same rank.
    """
    path, found = Path(path), {}
    for worker, of_it in files.by_worker(path).items():
        trace = of_worker(path if path.is_file() else of_it[0].with_name(worker), of_it)
        rank = trace.spans[0].rank
        key = (rank is None, rank or 0, worker if rank is None else f"rank {rank}")
        if key in found:
            raise SeveralRecordings(
                f"In {path} both {found[key].path.name} and {worker} say that they are rank {rank}: "
                "these are several recordings. Remove the older ones, or move them to a folder of their own."
            )
        found[key] = trace
    return Ranks(path, {name: found[_, number, name] for _, number, name in sorted(found)})


# Which operation of one rank is which of another.


def _numbered(found: Ranks) -> pd.DataFrame:
    """Return `Ranks.operations`: by their order in each step, or by when they ran where the ranks disagree."""
    import pandas as pd

    tables = [
        operations(span).table().assign(rank=rank, span=place)
        for rank, trace in enumerate(found.values())
        for place, span in enumerate(trace.spans)
    ]
    table = pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)
    if table.empty:
        return table.assign(number=0, size=0.0, counted=0.0)
    kinds = table.groupby(["group", "operation"])
    sized = table["operation"].isin(SAME_SIZE) & kinds["bytes"].transform(lambda each: each.notna().all()).astype(bool)
    sequenced = kinds["sequence"].transform(lambda each: each.notna().all()).astype(bool)
    table["size"] = table["bytes"].where(sized, -1.0)
    table["counted"] = table["step"].fillna(-1.0).where(~sequenced, table["sequence"])
    blocks = table.groupby([*BLOCK, "rank"])
    table["place"] = blocks.cumcount()
    between_two = table["operation"].isin(BETWEEN_TWO)
    table.loc[between_two, "place"] = -1 - np.arange(between_two.sum())  # each is one by itself
    certain = _certain(table)
    for _, block in table[~certain & table["operation"].isin(SYMMETRIC)].groupby(BLOCK):
        ends = [rows["end"] for _, rows in block.groupby("rank")]
        longest = max(ends, key=len).to_numpy()
        for each in ends:
            table.loc[each.index, "place"] += _skipped(longest, each.to_numpy())
    table["number"] = table.groupby([*BLOCK, "place"], sort=False).ngroup()
    clock, _ = _aligned(table[certain] if certain.any() else table, found.recorded_clock, found.hosts)
    return _rematched(table, certain, clock)


def _certain(table: pd.DataFrame) -> pd.Series:
    """Return whether an operation is in a block of which two ranks or more have operations, all of them as many."""
    counts = table.groupby([*BLOCK, "rank"])["place"].transform("size")
    blocks = table.assign(counts=counts).groupby(BLOCK)
    several = blocks["rank"].transform("nunique") > 1
    return several & (blocks["counts"].transform("min") == blocks["counts"].transform("max"))


def _skipped(longest: np.ndarray, ends: np.ndarray) -> int:
    """Return how many of one rank's operations another lacks at the beginning: then the ends differ by the clocks."""
    scatters = []
    for first in range(len(longest) - len(ends) + 1):
        differences = longest[first : first + len(ends)] - ends
        scatters.append(np.abs(differences - np.median(differences)).mean())
    return int(np.argmin(scatters))


def _rematched(table: pd.DataFrame, certain: pd.Series, clock: np.ndarray) -> pd.DataFrame:
    """Number anew the operations of blocks that do not fit: the same operation runs on all ranks at one time at least.

    A rank may lack one in the middle, or two may lack different ones, if a recording is incomplete.
    """
    shift = clock[table["rank"].to_numpy(int)]
    table = table.assign(begun=table["start"] + shift, ended=table["end"] + shift)
    numbers = table.groupby("number")
    apart = numbers["begun"].transform("max") > numbers["ended"].transform("min") + TOLERANCE
    blocks = table.assign(fits=certain & ~apart).groupby(BLOCK)["fits"].transform("all")
    following = int(table["number"].max()) + 1
    for _, block in table[~blocks & table["operation"].isin(SYMMETRIC)].groupby(BLOCK):
        ranks, until = set(), -math.inf
        for row in block.sort_values("ended").itertuples():
            if row.rank in ranks or row.begun > until + TOLERANCE:
                following, ranks, until = following + 1, set(), row.ended
            ranks.add(row.rank)
            table.loc[row.Index, "number"] = following
    return table.drop(columns=["begun", "ended", "place"])


# The difference of the clocks.


def _aligned(table: pd.DataFrame, recorded: np.ndarray, hosts: list[str | None]) -> tuple[np.ndarray, float]:
    """Return what to add to the times of each rank, and the uncertainty: one rank after the other.

    `recorded` is what to add by the clocks of the machines.
    """
    starts, ends = (_by_rank(table, column, len(recorded)) for column in ("start", "end"))
    clock, widths = np.zeros(len(recorded)), []
    known, unknown = [0], list(range(1, len(recorded)))
    while unknown:
        tied = ~np.isnan(starts[:, known]).all(axis=1)
        shared = (tied[:, None] & ~np.isnan(starts[:, unknown])).sum(axis=0)
        rank = unknown.pop(int(shared.argmax()))
        neighbours = [other for other in known if hosts[other] is not None and hosts[other] == hosts[rank]]
        nearest = (neighbours or known)[0]
        clock[rank], width = clock[nearest] + recorded[rank] - recorded[nearest], math.nan
        if shared.max():
            rows = tied & ~np.isnan(starts[:, rank])
            begun, ended = (each[rows][:, known] + clock[known] for each in (starts, ends))
            lowest = (np.nanmax(begun, axis=1) - ends[rows, rank]).max()
            highest = (np.nanmin(ended, axis=1) - starts[rows, rank]).min()
            if neighbours and lowest <= clock[rank] <= highest:
                width = 0.0
            else:
                estimate = float(np.median(np.nanmedian(ended, axis=1) - ends[rows, rank]))
                clock[rank] = np.clip(estimate, lowest, highest) if lowest <= highest else estimate
                width = abs(highest - lowest) / 2
        widths.append(width)
        known.append(rank)
    return clock, max(widths) if widths and not np.isnan(widths).any() else math.nan


def _by_rank(table: pd.DataFrame, column: str, ranks: int) -> np.ndarray:
    """Return a column of the operations that tie clocks, float [operations, ranks], NaN where a rank has none."""
    table = table[table["operation"].isin(SYMMETRIC)]
    wide = table.pivot_table(index="number", columns="rank", values=column, aggfunc="first")
    return wide.reindex(columns=range(ranks)).to_numpy(float)
