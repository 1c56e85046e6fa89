"""Reads from the traces of all ranks of a job the cost of communication, and the rank that delays the job."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from stepscope import thresholds, traces
from stepscope.facts.job import Exchanges, Job, Kind, Rank
from stepscope.traces.columns import coverage
from stepscope.traces.exposed_communication import NO_COMPUTATION

_ACCUMULATED = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
_EXCHANGED = r"c10d::_?(?:allreduce|reduce_scatter)"  # the operators that begin an exchange
_REDUCER = r"torch(?:::|\.)distributed.*reducer::"  # operators that copy gradients to buckets and back


def read(ranks: Mapping[str, traces.Trace]) -> Job:
    """Return the facts from the traces of all ranks; raises the errors of `traces.communication`."""
    table, steps = traces.communication(ranks), min(len(traces.steps(trace)) for trace in ranks.values())
    straggler, late_ms = table.attrs["straggler"], float(table.attrs["late_ms"])
    late_in, longer = ("", 0.0) if straggler is None else _longer_work(ranks, straggler, late_ms)
    operations = traces.collectives(ranks)
    rows = operations[operations["step"].notna()]
    groups = rows.groupby("number")
    took = (rows["end"] - groups["start"].transform("max")).clip(lower=0)  # since the last rank began the operation
    exchanges = groups[["operation", "bytes", "step"]].first()
    exchanges["ms"] = took.groupby(rows["number"]).mean() / 1e3
    broadcasts = exchanges["operation"] == "broadcast"
    gradients, buffers = exchanges[~broadcasts], exchanges[broadcasts]
    if buffers["step"].nunique() < thresholds.EVERY_STEP * steps:
        buffers = buffers.head(0)
    small = gradients[gradients["bytes"] < thresholds.SMALL_OPERATION_MB * 1e6]
    if len(small) < thresholds.MANY_OPERATIONS * steps:
        small = small.head(0)
    in_a_step = buffers.groupby("step")["bytes"].agg(["size", "sum"]).median()  # DDP sends more in its second forward
    return Job(
        ranks=tuple(_rank(str(name), row) for name, row in table.iterrows()),
        steps=steps,
        step_ms=float(table["step"].mean()),
        recorded=len(operations) > 0,
        all=_exchanges(exchanges, steps),
        gradients=_exchanges(gradients, steps),
        buffers=Exchanges(
            float(in_a_step["size"]), float(buffers["ms"].sum()) / steps, total_bytes=float(in_a_step["sum"])
        )
        if len(buffers)
        else Exchanges(),
        small=_exchanges(small, steps),
        by_kind=tuple(map(_kind, traces.communication_by_kind(ranks).reset_index().to_dict("records"))),
        sharded=bool(gradients["operation"].str.contains("all_gather|reduce_scatter").any()),
        sizes_known=not (len(exchanges) and exchanges["bytes"].isna().all()),
        unequal=tuple(table.attrs["unequal"]),
        straggler=straggler,
        late_ms=late_ms if math.isfinite(late_ms) else 0.0,
        late_in=late_in,
        late_longer_ms=longer,
        exchanging_passes=float(np.median([_exchanging_passes(trace) for trace in ranks.values()])),
        exchanging_ms=statistics.mean(_exchanging_ms(trace, table.loc[name]) for name, trace in ranks.items()),
    )


def _exchanging_passes(trace: traces.Trace) -> float:
    """Return in how many backward passes before an update DistributedDataParallel exchanges gradients, 0 if in none.

    It does so when the last gradient of a bucket is accumulated. A backward pass begins with a gradient of ones.
    """
    passes, updates = list[int](), 0
    for span in trace.spans:
        events, steps = span.events.table(), traces.steps(traces.Trace(trace.path, (span,)))
        begun = np.sort(events.loc[events["name"] == "aten::ones_like", "start"])
        accumulated = events[events["name"] == _ACCUMULATED].sort_values("start")
        exchanges = np.sort(events.loc[events["name"].str.match(_EXCHANGED), "start"])
        inside = np.searchsorted(accumulated["start"], exchanges, "right") - 1
        exchanges = exchanges[(inside >= 0) & (exchanges <= np.append(accumulated["end"], -np.inf)[inside])]
        updates += int(events["name"].str.startswith("Optimizer.step#").sum())
        for step in steps.itertuples():
            within = exchanges[(exchanges >= step.start) & (exchanges < step.end)]
            passes.append(len(np.unique(np.searchsorted(begun, within, "right"))))
    return float(np.median(passes)) / max(1.0, updates / len(passes)) if passes else 0.0


def _exchanging_ms(trace: traces.Trace, row: pd.Series) -> float:
    """Return the time of a step for exchanging gradients: exposed; without an accelerator all, as it takes cores."""
    if any(span.kernels.height for span in trace.spans):
        return float(row["exposed"])
    tables, steps = [span.events.table() for span in trace.spans], len(traces.steps(trace))
    copies = (table[table["name"].str.contains(_REDUCER)] for table in tables)
    copied = sum(float((each["end"] - each["start"]).sum()) for each in copies)
    return float(row["exposed"] + row["overlapped"]) + copied / steps / 1e3


def _rank(name: str, row: pd.Series) -> Rank:
    return Rank(
        name,
        exposed_ms=float(row["exposed"]),
        waiting_ms=float(row["waiting"]),
        overlapped_ms=float(row["overlapped"]),
        transfer_ms=float(row["transfer"]),
        operations=float(row["collectives"]),
        megabytes=_known(row["megabytes"]),
        efficiency=float(row["efficiency"]),
    )


def _kind(row: Mapping[Hashable, Any]) -> Kind:
    return Kind(
        row["operation"], row["group"], row["operations"], _known(row["megabytes"]), row["time"], row["exposed"]
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _exchanges(table: pd.DataFrame, steps: int) -> Exchanges:
    return Exchanges(
        per_step=len(table) / steps,
        ms=float(table["ms"].sum()) / steps,
        kinds=tuple(map(str, table["operation"].value_counts().index)),
        total_bytes=float(table["bytes"].sum()) / steps,
        median_bytes=_known(table["bytes"].median()),
        largest_bytes=_known(table["bytes"].max()),
    )


def _longer_work(ranks: Mapping[str, traces.Trace], late: str, late_ms: float) -> tuple[str, float]:
    """Return in which work the late rank takes longer than the other ranks, and by how many ms per step."""
    table = pd.DataFrame.from_dict({name: _work_ms(trace) for name, trace in ranks.items()}, orient="index")
    longer = table.loc[late] - table.drop(index=late).median()
    most = float(longer.max())
    return ("other", 0.0) if most < late_ms / 2 else (str(longer.idxmax()), most)


def _work_ms(trace: traces.Trace) -> dict[str, float]:
    """Return how long a rank waited for its batch, and how long operators or kernels computed; in ms per step."""
    covered, steps = {"loading": 0.0, "computing": 0.0}, 0
    for span in trace.spans:
        events, table = span.events.table(), traces.steps(traces.Trace(trace.path, (span,)))
        kernels, waits = events["kind"] == "Kernel", events["name"].str.match(NO_COMPUTATION)
        operators = events["operator"] & (events["kind"] == "CPU Exec") & ~waits
        computing = kernels if kernels.any() else operators
        for name, chosen in (("loading", events["kind"] == "DataLoader"), ("computing", computing)):
            starts, ends = (events.loc[chosen, column].to_numpy() for column in ("start", "end"))
            covered[name] += float(coverage(starts, ends, table).sum())
        steps += len(table)
    return {name: microseconds / steps / 1e3 for name, microseconds in covered.items()}
