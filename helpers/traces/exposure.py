"""What the exchange of data costs: how much of it nothing hides, and for which rank the others wait."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helpers.confidence import student
from helpers.traces.aligning import BETWEEN_TWO, Ranks, ranks
from helpers.traces.intervals import union
from helpers.traces.reading import Span, Trace
from helpers.traces.timeline import concatenate, steps_of
from helpers.wording import counted

if TYPE_CHECKING:
    import pandas as pd

LATE = 0.05  # of the step: from here on a rank for which the others wait is named
# Operators that wait for an exchange, or that hold whatever else ran, a wait included.
NO_COMPUTATION = re.compile(r"c10d::|_?c10d_functional::|record_param_comms|(gloo|nccl):|autograd::engine::")


def collectives(path: str | Path | Mapping[str, Trace]) -> pd.DataFrame:
    """Return the operations in which the ranks exchanged data, on one clock.

    An operation of NCCL is its kernel, one of gloo what gloo's own thread did.

    Parameters
    ----------
    path : str, Path or mapping of str to Trace
        The folder of a run, or what `ranks` returned.

    Returns
    -------
    DataFrame
        A row for each operation on each rank, in the order of `issued`: `rank`, "rank 0"; `step`, the number of the
        step that issued it, NaN outside of the steps; `number`, int, the same for the same operation on all ranks;
        `operation`, "all_reduce", "broadcast" and so on; `backend`, "gloo" or "nccl"; `bytes` that the rank put in,
        NaN where they were not recorded; `issued`, `start` and `end` in µs on the clock of the first rank, since the
        first event of its trace.

    Raises
    ------
    As `ranks`.
    """
    found = _ranks(path)
    table = _on_one_clock(found)
    table["rank"] = np.array(list(found), object)[table["rank"]]
    table["number"] = table["number"].map({number: place for place, number in enumerate(table["number"].unique())})
    columns = ["rank", "step", "number", "operation", "backend", "bytes", "issued", "start", "end"]
    return table[columns].astype({"number": int}).reset_index(drop=True)


def communication(path: str | Path | Mapping[str, Trace]) -> pd.DataFrame:
    """Return what the exchange of data costs each rank in a step, on average.

    Returns
    -------
    DataFrame
        Index `rank`; float columns. In ms a step: `step`, its length, which is the sum of `compute`, in which nothing
        was exchanged, `overlapped`, in which data was exchanged while the rank went on, and `exposed`, in which it did
        nothing else. `exposed` is the sum of `waiting`, until the last of the other ranks had begun the operation, and
        `transfer`, the rest. `collectives`, operations a step; `megabytes` that the rank put in, 1e6 bytes a step, NaN
        where sizes were not recorded; `efficiency`, 1 − exposed / step.

        ``attrs["straggler"]`` is the rank that the others are slowed down by, and ``attrs["late_ms"]`` by how many ms a
        step: what they have more of exposed communication on average than that rank itself. (That is more than
        `waiting` where operations overlap: while a late rank still computes, its transfers hide behind that, and on
        the others they are exposed.) None and 0.0 unless it is 5% of the step or more, and so much more than for any
        other rank that over the steps the 95% interval of the difference is above 0.
        ``attrs["unequal"]`` is a list of sentences, one for each kind of operation of which not all ranks have equally
        many in each step.

        On an accelerator data is exchanged while a kernel of NCCL runs, and the rank goes on if another kernel does.
        With gloo it is exchanged from the issue of an operation to its end, and the rank does nothing else from its
        last operator until the operation has ended, if it goes on then.

    Raises
    ------
    NoSteps, SeveralRecordings
        As `steps`.
    """
    import pandas as pd

    found = _ranks(path)
    operations = _on_one_clock(found)
    operations["late"] = _last_of_the_others(operations)
    rows, exposed = {}, []
    for place, (name, trace) in enumerate(found.items()):
        of_rank = operations[operations["rank"] == place].copy()
        of_rank[["issued", "start", "end", "late"]] -= found.clock[name]
        spans = [_of_span(span, of_rank[of_rank["span"] == number]) for number, span in enumerate(trace.spans)]
        table = concatenate(trace, spans)
        within = of_rank[of_rank["step"].isin(table.index)]
        means = table[["step", "overlapped", "exposed", "waiting"]].mean() / 1e3
        exposed.append(table["exposed"])
        rows[name] = {
            "step": means["step"],
            "compute": means["step"] - means["overlapped"] - means["exposed"],
            "overlapped": means["overlapped"],
            "exposed": means["exposed"],
            "waiting": means["waiting"],
            "transfer": means["exposed"] - means["waiting"],
            "collectives": len(within) / len(table),
            "megabytes": within["bytes"].sum(skipna=False) / len(table) / 1e6,
            "efficiency": 1 - means["exposed"] / means["step"],
        }
    result = pd.DataFrame.from_dict(rows, orient="index").astype(float).rename_axis("rank")
    straggler, late = _straggler(exposed, result["step"].mean())
    result.attrs = {
        "straggler": None if straggler is None else list(found)[straggler],
        "late_ms": late,
        "unequal": _unequal(found),
    }
    return result


def _ranks(path: str | Path | Mapping[str, Trace]) -> Ranks:
    if isinstance(path, Ranks):
        return path
    return Ranks(Path(), path) if isinstance(path, Mapping) else ranks(path)


def _on_one_clock(found: Ranks) -> pd.DataFrame:
    table = found.operations.copy()
    clock = np.array(list(found.clock.values()))[table["rank"].to_numpy(int)]
    for column in ("issued", "start", "end"):
        table[column] += clock
    return table.sort_values(["issued", "start"], kind="stable")


def _last_of_the_others(operations: pd.DataFrame) -> np.ndarray:
    """Return for each row when the last of the other ranks began its operation; −inf if there is no other."""
    order = operations.sort_values("start", kind="stable")
    last, before = (order.groupby("number")[["start", "rank"]].nth(place) for place in (-1, -2))
    last, before = (
        each.set_axis(order["number"].loc[each.index].to_numpy()).reindex(operations["number"])
        for each in (last, before)
    )
    own = last["rank"].to_numpy() == operations["rank"].to_numpy()
    late = np.where(own, before["start"], last["start"])
    return np.where(np.isnan(late), -math.inf, late)


def _of_span(span: Span, operations: pd.DataFrame) -> pd.DataFrame:
    """Return for each step its length, and what was overlapped, exposed and waiting, in µs."""
    import pandas as pd

    table = steps_of(span)
    starts, ends, late = (operations[column].to_numpy() for column in ("start", "end", "late"))
    by_gloo = (operations["backend"] == "gloo").to_numpy()
    issued = operations["issued"].to_numpy()
    events = span.event_columns
    computing = events["kind"] == "Kernel"
    waits = starts < late
    until = np.minimum(late, ends)
    sets = {
        "gloo": _union(issued[by_gloo], ends[by_gloo]),
        "nccl": _union(starts[~by_gloo], ends[~by_gloo]),
        "kernels": _union(events["start"][computing], events["end"][computing]),
        "idle": _idle(span, issued[by_gloo], ends[by_gloo]) if by_gloo.any() else _union(starts[:0], ends[:0]),
        "transfer": _union(np.maximum(starts, until), ends),
        "waiting": _union(starts[waits], until[waits]),
    }
    moments = np.unique(np.concatenate([*map(np.concatenate, sets.values()), table["start"], table["end"]]))
    masks = {name: _inside(*each, moments[:-1]) for name, each in sets.items()}
    exposed = (masks["gloo"] & masks["idle"]) | (masks["nccl"] & ~masks["kernels"])
    waiting = exposed & ~masks["transfer"]
    step = np.searchsorted(table["start"].to_numpy(), moments[:-1], side="right") - 1
    within = (step >= 0) & (moments[:-1] < table["end"].to_numpy()[step]) if len(table) else np.zeros(len(step), bool)
    lengths = np.diff(moments)

    def of_steps(mask: np.ndarray) -> np.ndarray:
        chosen = mask & within
        return np.bincount(step[chosen], weights=lengths[chosen], minlength=len(table))

    columns = {
        "step": (table["end"] - table["start"]).to_numpy(),
        "overlapped": of_steps((masks["gloo"] | masks["nccl"]) & ~exposed),
        "exposed": of_steps(exposed),
        "waiting": of_steps(waiting & masks["waiting"]),
    }
    return pd.DataFrame(columns, index=table.index)


def _idle(span: Span, issued: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when the rank did nothing but wait for an operation of gloo.

    No thread ran an operator, and then one goes on as an operation has ended: what it did after that it did by itself,
    and without such an end it did something else all the time, Python for example. gloo wakes who waits before it
    notes the end itself, which on a busy machine takes milliseconds: so the end may be as much later as they waited.
    """
    starts, stops = _computing(span)
    gap_starts, gap_ends = np.r_[-math.inf, stops], np.r_[starts, math.inf]
    ends = np.sort(ends)
    at_most = np.where(np.isfinite(gap_ends - gap_starts), 2 * gap_ends - gap_starts, gap_ends)
    place = np.searchsorted(ends, at_most, side="right") - 1
    last = np.r_[ends, -math.inf][place]
    found = last > gap_starts
    return gap_starts[found], np.minimum(last, gap_ends)[found]


def _computing(span: Span) -> tuple[np.ndarray, np.ndarray]:
    """Return the intervals in which a batch was waited for, or an operator or kernel ran that exchanges nothing.

    An operator in which an exchange is issued may wait for it as well: what it does counts by the operators inside.
    """
    events = span.event_columns
    names, kinds = events["name"], events["kind"]
    other = {name: NO_COMPUTATION.match(name) is None for name in set(names)}
    computes = events["operator"] & (kinds == "CPU Exec") & np.array([other[name] for name in names], bool)
    exchanges = span.communication_columns
    for thread in np.unique(exchanges["thread"]):
        moments = exchanges["start"][exchanges["thread"] == thread]
        places = np.flatnonzero(computes & (events["thread"].codes == thread))
        first = np.searchsorted(moments, events["start"][places], side="right")
        after = np.searchsorted(moments, events["end"][places], side="left")
        computes[places[first < after]] = False
    busy = computes | np.isin(kinds, ["DataLoader", "Kernel"])
    return _union(events["start"][busy], events["end"][busy])


def _union(starts: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(starts, kind="stable")
    return union(np.asarray(starts, float)[order], np.asarray(ends, float)[order])


def _inside(starts: np.ndarray, ends: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Return whether each moment is in one of some disjoint intervals, which hold their starts and not their ends."""
    return np.searchsorted(starts, moments, side="right") > np.searchsorted(ends, moments, side="right")


def _straggler(exposed: list[pd.Series], step_ms: float) -> tuple[int | None, float]:
    """Return the place of the rank for which the others wait, and the ms a step they do; None, 0.0 if by chance.

    `exposed` has for each rank the µs of exposed communication in each step.
    """
    common = sorted(set.intersection(*(set(column.index) for column in exposed)))
    if len(exposed) < 2 or len(common) < 2:
        return None, 0.0
    table = np.column_stack([column.loc[common] for column in exposed]) / 1e3  # [step, rank], ms
    of_others = (table.sum(axis=1, keepdims=True) - table) / (len(exposed) - 1)
    late = of_others - table
    second, first = np.argsort(late.mean(axis=0), kind="stable")[-2:]
    more = (late[:, first] - late[:, second]).tolist()
    reach = student(len(more) - 1) * statistics.stdev(more) / math.sqrt(len(more))
    if late[:, first].mean() < LATE * step_ms or statistics.fmean(more) <= reach:
        return None, 0.0
    return int(first), float(late[:, first].mean())


def _unequal(found: Ranks) -> list[str]:
    """Return a sentence for each operation of which not all ranks of its group have equally many in each step."""
    names, table = list(found), found.operations
    table = table[~table["operation"].isin(BETWEEN_TWO)]
    if table["step"].notna().any():
        table = table[table["step"].notna()]
    sentences = []
    for (group, operation), rows in table.groupby(["group", "operation"], sort=False):
        members = range(len(names)) if not group else sorted(rows["rank"].unique())
        counts = (
            rows.assign(step=rows["step"].fillna(-1)).groupby(["step", "size", "rank"]).size().unstack(fill_value=0)
        )
        counts = counts.reindex(columns=members, fill_value=0)
        counts = counts[counts.min(axis=1) < counts.max(axis=1)]
        if len(counts):
            sentences.append(_sentence(operation, counts.rename(columns=dict(enumerate(names)))))
    return sentences


def _sentence(operation: str, counts: pd.DataFrame) -> str:
    """Return in words that the ranks have not as many of an operation: a row a step and size, a column a rank."""
    (step, size), first = counts.index[0], counts.iloc[0].astype(int)
    usual = int(first.mode().iloc[-1])
    other = first[first != usual]
    listed = " and ".join(f"{rank} has {number or 'none'}" for rank, number in other.iloc[:3].items())
    more = f" and {len(other) - 3} more have other numbers" if len(other) > 3 else ""
    rest = "the other has" if len(first) - len(other) == 1 else "the others have"
    sizes = f" of {size / 1e6:.3g} MB" if size >= 0 else ""
    steps = f" in step {step:.0f}" if step >= 0 else ""
    further = counts.index.get_level_values("step").nunique() - 1
    so_on = f"; {counted(further, 'more step')} differ{'s' * (further == 1)}" if further else ""
    return f"Of {operation}{sizes}{steps} {listed}{more}, {rest} {usual or 'none'}{so_on}."
