"""The cost of communication: exposed and overlapped time of each rank, and the straggler."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.base.confidence import student
from stepscope.base.wording import counted
from stepscope.traces.alignment import BETWEEN_TWO, Ranks, ranks
from stepscope.traces.columns import Columns, coverage, named, union
from stepscope.traces.events import Span, Trace
from stepscope.traces.step_times import by_step, steps_of

LATE = 0.05  # share of the step: a straggler delays the other ranks by at least this much
# Operators that wait for an exchange, or that contain other operators and waits.
NO_COMPUTATION = re.compile(r"c10d::|_?c10d_functional::|record_param_comms|(gloo|nccl):|autograd::engine::")


def collectives(path: str | Path | Mapping[str, Trace]) -> pd.DataFrame:
    """Return the operations in which the ranks exchanged data, on one clock.

    `path` is the folder of a run, or the result of `ranks`. An operation of NCCL is its kernel; an operation of gloo is
    the work of gloo's own thread. Raises the errors of `ranks`.

    Returns
    -------
    DataFrame
        A row for each operation on each rank, in the order of `issued`: `rank`, "rank 0"; `step`, the number of the
        step that issued it, NaN outside of the steps; `number`, int, equal for the same operation on all ranks;
        `operation`, "all_reduce", "broadcast" and so on; `backend`, "gloo" or "nccl"; `bytes` of the rank's input, NaN
        if not recorded; `issued`, `start` and `end` in µs on the clock of the first rank, since the first event of its
        trace; `transfer`, the µs from the moment at which the last of the other ranks had begun the operation to its
        end: before this moment, the rank waited; `group`, a name of the process group and its ranks, "" if not
        recorded, as with gloo.
    """
    job = _ranks(path)
    table = _on_one_clock(job)
    table["rank"] = np.array(list(job), object)[table["rank"]]
    table["number"] = pd.factorize(table["number"])[0]
    table["transfer"] = (table["end"] - np.maximum(table["start"], table["late"])).clip(lower=0.0)
    columns = ["rank", "step", "number", "operation", "backend", "bytes", "issued", "start", "end", "transfer", "group"]
    return table[columns].reset_index(drop=True)


def communication(path: str | Path | Mapping[str, Trace]) -> pd.DataFrame:
    """Return the mean cost of communication for each rank in a step.

    Returns
    -------
    DataFrame
        Index `rank`; float columns. In ms a step: `step`, the length, is the sum of `compute`, time without
        communication, `overlapped`, communication during other work, and `exposed`, communication without other work.
        `exposed` is the sum of `waiting`, until the last of the other ranks had begun the operation, and `transfer`,
        the rest. `collectives`, operations a step; `megabytes` of the rank's input, 1e6 bytes a step, NaN if sizes were
        not recorded; `efficiency`, 1 − exposed / step.

        ``attrs["straggler"]`` is the rank that slows down the other ranks, and ``attrs["late_ms"]`` its delay in ms a
        step: the mean exposed communication of the other ranks minus the straggler's own. (The delay exceeds
        `waiting` if operations overlap: while the straggler still computes, its transfers are overlapped, and those of
        the other ranks are exposed.) They are None and 0.0 unless the delay is at least 5% of the step, and exceeds
        every other rank's: the 95% interval of the difference, over the steps, is above 0.
        ``attrs["unequal"]`` is a list of sentences, one for each kind of operation whose number in a step differs
        between ranks.

        On an accelerator, communication lasts while a kernel of NCCL runs, and overlaps if another kernel runs. With
        gloo, communication lasts from the issue of an operation to its end. It is exposed from the rank's last operator
        to the end of the operation, if the rank continues at that time.

    Raises NoSteps and SeveralRecordings like `steps`.
    """
    job = _ranks(path)
    table, operations, names = communication_by_step(job), collectives(job), list(job)
    means = table.groupby(level="rank").mean().loc[names].rename(columns={"length": "step"}) / 1e3
    means["compute"] += means["other"]
    result = means[["step", "compute", "overlapped", "exposed", "waiting", "transfer"]]
    within = operations[pd.MultiIndex.from_frame(operations[["rank", "step"]]).isin(table.index)]
    steps = table.groupby(level="rank").size()
    of_rank = within.groupby("rank")
    result["collectives"] = (of_rank.size().reindex(names, fill_value=0) / steps).astype(float)
    sizes = of_rank["bytes"].agg(lambda sizes: sizes.sum(skipna=False)).reindex(names, fill_value=0.0)
    result["megabytes"] = sizes / steps / 1e6
    result["efficiency"] = 1 - result["exposed"] / result["step"]
    straggler, late = _straggler(table["exposed"].unstack("rank")[names] / 1e3, result["step"].mean())
    result.attrs = {"straggler": straggler, "late_ms": late, "unequal": _unequal(job)}
    return result


def communication_by_step(path: str | Path | Mapping[str, Trace]) -> pd.DataFrame:
    """Return the time of each step of each rank by category: `communication`, not averaged.

    Returns
    -------
    DataFrame
        Index `rank`, as in `ranks`, and `step`, the profiler's number. Columns in µs: `length` is the sum of `compute`,
        computation without communication, `overlapped`, `exposed` and `other`, neither computation nor communication;
        `waiting` and `transfer` are the parts of `exposed`, as in `communication`. A rank computes while a kernel runs
        that exchanges no data; in a trace without kernels, while a thread runs an operator that exchanges no data.

    Raises NoSteps and SeveralRecordings like `steps`.
    """
    job = _ranks(path)
    tables = {
        name: by_step(job[name], itertools.starmap(_of_span, spans))
        for name, spans in _operations_of_spans(job).items()
    }
    return pd.concat(tables, names=["rank"])


def communication_by_kind(path: str | Path | Mapping[str, Trace]) -> pd.DataFrame:
    """Return the mean cost of each kind of operation in a step of a rank: which kind is exposed, and in which group.

    Returns
    -------
    DataFrame
        Index `operation`, "all_reduce" and so on, and `group`, as in `collectives`. Float columns, in a step of a rank:
        `operations`, their number; `megabytes` of the rank's input, 1e6 bytes, NaN if a size was not recorded; `time`
        in ms in which at least one of them lasted, as in `communication`; `exposed`, the part of it in ms without other
        work. Kinds that last at the same moment all count. The largest `exposed` comes first.

    Raises NoSteps and SeveralRecordings like `steps`.
    """
    job = _ranks(path)
    spans = [each for of_rank in _operations_of_spans(job).values() for each in of_rank]
    steps = sum(steps_of(span).height for span, _ in spans)
    table = pd.concat([_kinds_of_span(*each) for each in spans])
    kinds = table.groupby(["operation", "group"])
    sums = kinds[["operations", "time", "exposed"]].sum()
    sums.insert(1, "megabytes", kinds["megabytes"].agg(lambda sizes: sizes.sum(skipna=False)))
    return (sums / max(steps, 1)).sort_values(["exposed", "time"], ascending=False, kind="stable")


def _operations_of_spans(job: Ranks) -> dict[str, list[tuple[Span, pd.DataFrame]]]:
    """Return for each rank its spans, each with its operations, in µs on the rank's clock."""
    operations, of_ranks = _on_one_clock(job), {}
    for place, (name, trace) in enumerate(job.items()):
        of_rank = operations[operations["rank"] == place].copy()
        of_rank[["issued", "start", "end", "late"]] -= job.clock[name]
        of_ranks[name] = [(span, of_rank[of_rank["span"] == number]) for number, span in enumerate(trace.spans)]
    return of_ranks


def _ranks(path: str | Path | Mapping[str, Trace]) -> Ranks:
    if isinstance(path, Ranks):
        return path
    return Ranks(path) if isinstance(path, Mapping) else ranks(path)


def _on_one_clock(job: Ranks) -> pd.DataFrame:
    """Return the operations in the order of `issued`; `late` is the start on the last of the other ranks, or −inf."""
    table = job.operations.copy()
    clock = np.array(list(job.clock.values()))[table["rank"].to_numpy(int)]
    for column in ("issued", "start", "end"):
        table[column] += clock
    starts = table.groupby("number")["start"]
    place = starts.rank(method="first", ascending=False)
    before_the_last = table["start"].where(place == 2).groupby(table["number"]).transform("max")
    table["late"] = starts.transform("max").where(place > 1, before_the_last).fillna(-math.inf)
    return table.sort_values(["issued", "start"], kind="stable")


@dataclass(frozen=True)
class _Moments:
    """The moments of a span's steps, in each of which the same work goes on; one value for each moment."""

    steps: Columns  # of the span
    step: np.ndarray  # position in `steps`
    begins: np.ndarray  # µs
    lengths: np.ndarray  # µs
    computing: np.ndarray  # bool
    exchanging: np.ndarray  # bool
    exposed: np.ndarray  # bool: communication without other work
    waiting: np.ndarray  # bool: before the last of the other ranks has begun the operation

    def sums(self, chosen: np.ndarray) -> np.ndarray:
        """Return the time of the chosen moments in each step, in µs."""
        return np.bincount(self.step[chosen], weights=self.lengths[chosen], minlength=self.steps.height)


def _moments(span: Span, operations: pd.DataFrame) -> _Moments:
    table, events = steps_of(span), span.events
    starts, ends, late, issued = operations[["start", "end", "late", "issued"]].to_numpy(float).T
    by_gloo = (operations["backend"] == "gloo").to_numpy()
    computing = events["kind"] == "Kernel"
    waits, until = starts < late, np.minimum(late, ends)
    sets = {
        "gloo": union(issued[by_gloo], ends[by_gloo]),
        "nccl": union(starts[~by_gloo], ends[~by_gloo]),
        "kernels": union(events["start"][computing], events["end"][computing]),
        "computing": _computing(span, "Kernel" if computing.any() else "CPU Exec"),
        "idle": _idle(span, ends[by_gloo]),
        "transfer": union(np.maximum(starts, until), ends),
        "waiting": union(starts[waits], until[waits]),
    }
    moments = np.unique(np.concatenate([*map(np.concatenate, sets.values()), table["start"], table["end"]]))
    begins, lengths = moments[:-1], np.diff(moments)
    step = np.searchsorted(table["start"], begins, side="right") - 1
    within = (step >= 0) & (begins < np.r_[table["end"], -math.inf][step])
    begins, lengths, step = begins[within], lengths[within], step[within]
    # Whether each moment is in a set. A set's intervals are disjoint, and contain their starts but not their ends.
    masks = {
        name: np.searchsorted(starts, begins, side="right") > np.searchsorted(ends, begins, side="right")
        for name, (starts, ends) in sets.items()
    }
    exposed = (masks["gloo"] & masks["idle"]) | (masks["nccl"] & ~masks["kernels"])
    waiting = exposed & masks["waiting"] & ~masks["transfer"]
    exchanging = masks["gloo"] | masks["nccl"]
    return _Moments(table, step, begins, lengths, masks["computing"], exchanging, exposed, waiting)


def _of_span(span: Span, operations: pd.DataFrame) -> Columns:
    """Return the `communication_by_step` of one span."""
    at = _moments(span, operations)
    return Columns(
        step=at.steps["step"],
        length=at.steps["end"] - at.steps["start"],
        compute=at.sums(at.computing & ~at.exchanging),
        overlapped=at.sums(at.exchanging & ~at.exposed),
        exposed=at.sums(at.exposed),
        other=at.sums(~at.computing & ~at.exchanging),
        waiting=at.sums(at.waiting),
        transfer=at.sums(at.exposed & ~at.waiting),
    )


def _kinds_of_span(span: Span, operations: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each kind of operation in the steps of a span: `communication_by_kind`, not divided by steps."""
    at = _moments(span, operations)
    until = at.begins + at.lengths
    rows = []
    for (operation, group), of_kind in operations[operations["step"].notna()].groupby(["operation", "group"]):
        begins = of_kind["issued"].where(of_kind["backend"] == "gloo", of_kind["start"])
        starts, ends = union(begins.to_numpy(float), of_kind["end"].to_numpy(float))
        lasting = Columns(start=starts, end=ends)
        time = coverage(at.begins, until, lasting).sum() / 1e3
        exposed = coverage(at.begins[at.exposed], until[at.exposed], lasting).sum() / 1e3
        megabytes = of_kind["bytes"].sum(skipna=False) / 1e6
        rows.append((operation, group, len(of_kind), megabytes, time, exposed))
    return pd.DataFrame(rows, columns=["operation", "group", "operations", "megabytes", "time", "exposed"])


def _idle(span: Span, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the starts and ends in µs of the intervals in which the rank only waited for an operation of gloo.

    They lie in gaps, in which no thread runs an operator. A gap in which an operation ends is waiting until this end,
    and other work after it. A gap in which none ends is only other work, Python for example. On a busy machine gloo
    wakes the waiting thread milliseconds before it records the end, so an operation may end after its gap, by up to the
    length of the gap.
    """
    starts, stops = _computing(span, "CPU Exec", "DataLoader", "Kernel")
    gap_starts, gap_ends = np.r_[-math.inf, stops], np.r_[starts, math.inf]
    at_most = np.where(np.isfinite(gap_ends - gap_starts), 2 * gap_ends - gap_starts, gap_ends)
    ends = np.r_[-math.inf, np.sort(ends)]
    last = ends[np.searchsorted(ends, at_most, side="right") - 1]
    waits = last > gap_starts
    return gap_starts[waits], np.minimum(last, gap_ends)[waits]


def _computing(span: Span, *kinds: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the intervals in which events of these kinds ran that exchange no data.

    An operator that issues an exchange may also wait for the exchange, so only the operators inside it count.
    """
    events, exchanges = span.events, span.exchanges
    computes = events["operator"] & ~named(events["name"], NO_COMPUTATION.match)
    for thread in np.unique(exchanges["thread"]):
        moments = exchanges["start"][exchanges["thread"] == thread]
        places = np.flatnonzero(computes & (events["thread"].codes == thread))
        first = np.searchsorted(moments, events["start"][places], side="right")
        after = np.searchsorted(moments, events["end"][places], side="left")
        computes[places[first < after]] = False
    busy = (computes | (events["kind"] != "CPU Exec")) & np.isin(events["kind"], kinds)
    return union(events["start"][busy], events["end"][busy])


def _straggler(exposed: pd.DataFrame, step_ms: float) -> tuple[str | None, float]:
    """Return the straggler and its delay in ms a step; None and 0.0 if the delay is small, or may be chance.

    `exposed` is the exposed communication in ms [steps, ranks], NaN if a rank lacks the step.
    """
    exposed = exposed.dropna()
    if min(exposed.shape) < 2:
        return None, 0.0
    count = exposed.shape[1]
    late = exposed.mul(-count).add(exposed.sum(axis=1), axis=0) / (count - 1)  # mean of the other ranks, minus own
    second, first = late.mean().sort_values(kind="stable").index[-2:]
    more = late[first] - late[second]
    reach = student(len(more) - 1) * more.std() / math.sqrt(len(more))
    if late[first].mean() < LATE * step_ms or more.mean() <= reach:
        return None, 0.0
    return first, float(late[first].mean())


def _unequal(job: Ranks) -> list[str]:
    """Return a sentence for each operation whose number in a step differs between the ranks of its group."""
    names, table, sentences = list(job), job.operations, []
    table = table[~table["operation"].isin(BETWEEN_TWO) & table["step"].notna()]
    for (group, operation), rows in table.groupby(["group", "operation"], sort=False):
        members = sorted(rows["rank"].unique()) if group else range(len(names))
        counts = (
            rows.groupby(["step", "size", "rank"]).size().unstack(fill_value=0).reindex(columns=members, fill_value=0)
        )
        counts = counts[counts.min(axis=1) < counts.max(axis=1)]
        if len(counts):
            (step, size), first = counts.index[0], counts.iloc[0]
            usual = first.mode().iloc[-1]
            other = " and ".join(f"{names[rank]} has {number}" for rank, number in first.items() if number != usual)
            sizes = f" of {size / 1e6:.3g} MB" if size >= 0 else ""
            further = counts.index.get_level_values("step").nunique() - 1
            so_on = f"; the same in {counted(further, 'more step')}" if further else ""
            sentences.append(f"Calls of {operation}{sizes}, step {step:.0f}: {other}, the other ranks {usual}{so_on}.")
    return sentences
