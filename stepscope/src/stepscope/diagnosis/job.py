"""What the traces of all ranks of a job show together: the cost of communication, and the rank that others wait for.

`read` returns the facts, `RULES` is the table of findings. A new finding is a row of the table.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd

from stepscope import traces
from stepscope.base.wording import counted, milliseconds, percent
from stepscope.diagnosis import result
from stepscope.diagnosis.device import EVERY
from stepscope.diagnosis.profile import LEAST_STEPS
from stepscope.diagnosis.result import WORTH, Diagnosis, Rule, conclude
from stepscope.traces.columns import coverage
from stepscope.traces.exposed_communication import NO_COMPUTATION

# MB of an operation: these take 0.8 ms at 1 Gbit/s and 8 µs at 100 Gbit/s, mostly less than an operation's latency.
# DistributedDataParallel's own buckets have 25 MiB, the first one 1 MiB, so that it begins early.
SMALL = 0.1
MANY = 10  # small operations in a step; a loss that is averaged over the ranks, or a counter, is one or two
# Overlapped share of the communication: from here on the problem is too many bytes, below it they come too late.
# ResNet-50 at 1 Gbit/s overlaps nothing with one bucket, and half with buckets of 25 MB: from there, buckets of 5 MB
# gain 9% of the step, half of the bytes 44%.
OVERLAPPED = 0.2
BUCKETS = (25, 10, 5, 2, 1)  # MB; five or more should hold the gradients, so that few wait for the last bucket
LISTED = 8  # ranks with a separate line
# What a rank does for longer than the others: the text, and what to change.
_DOING = {
    "loading": (
        "waits for its batches",
        "its data on node-local storage, in shards as large as the others', and as many cores for its workers",
    ),
    "computing": (
        "computes",
        "batches as large and as long as the others'; or its machine is slower, or busy: leave it out",
    ),
    "other": (
        "neither computes nor loads: Python, mostly",
        "work that only this rank does, such as logs and checkpoints, outside of the step or in a thread",
    ),
}


def read(ranks: Mapping[str, traces.Trace]) -> SimpleNamespace:
    """Return the traces of all ranks in numbers, times in ms per step; raises what `traces.communication` raises."""
    table, steps = traces.communication(ranks), min(len(traces.steps(trace)) for trace in ranks.values())
    facts = SimpleNamespace(table=table, steps=steps, step_ms=float(table["step"].mean()))  # steps of each rank
    facts.unequal, facts.straggler, facts.late = (table.attrs[name] for name in ("unequal", "straggler", "late_ms"))
    if facts.straggler is not None:
        facts.doing, facts.change = _doing(ranks, facts.straggler, facts.late)
    operations = traces.collectives(ranks)
    facts.recorded = len(operations) > 0  # in the steps or outside of them
    rows = operations[operations["step"].notna()]
    groups = rows.groupby("number")
    took = (rows["end"] - groups["start"].transform("max")).clip(lower=0)  # since the last rank began it
    facts.exchanges = groups[["operation", "bytes", "step"]].first()
    facts.exchanges["ms"] = took.groupby(rows["number"]).mean() / 1e3
    broadcasts = facts.exchanges["operation"] == "broadcast"
    facts.gradients, facts.buffers = facts.exchanges[~broadcasts], facts.exchanges[broadcasts]
    if facts.buffers["step"].nunique() < EVERY * steps:
        facts.buffers = facts.buffers.head(0)
    facts.small = facts.gradients[facts.gradients["bytes"] < SMALL * 1e6]
    if len(facts.small) < MANY * steps:
        facts.small = facts.small.head(0)
    facts.latency, facts.broadcasting, facts.transfer = _transfers(facts)
    overlapped = float(table["overlapped"].mean())
    facts.behind = overlapped / max(overlapped + facts.transfer, 1e-6)  # share of the communication
    facts.kind = "overlapped" if facts.behind >= OVERLAPPED else "late"  # why communication is exposed
    if facts.gradients["operation"].str.contains("all_gather|reduce_scatter").any():
        facts.kind = "sharded"
    return facts


def _transfers(job: SimpleNamespace) -> tuple[float, float, float]:
    """Return the exposed transfer time in ms of small operations, of buffers, and of the rest.

    It is that of the rank with the least: on the others, it has further causes.
    """
    transfer = float(job.table["transfer"].min())
    buffers = min(float(job.buffers["ms"].sum()) / job.steps, transfer)
    rest = transfer - buffers
    small = rest * float(job.small["ms"].sum() / job.gradients["ms"].sum()) if len(job.small) else 0.0
    small = small if small >= WORTH * job.step_ms else 0.0
    return small, buffers, rest - small


def _doing(ranks: Mapping[str, traces.Trace], late: str, ms: float) -> tuple[str, str]:
    """Return what a late rank does for longer than the others, as the end of a sentence, and the change."""
    table = pd.DataFrame.from_dict({name: _meanwhile(trace) for name, trace in ranks.items()}, orient="index")
    longer = table.loc[late] - table.drop(index=late).median()
    if longer.max() < ms / 2:
        return _DOING["other"]
    doing, change = _DOING[str(longer.idxmax())]
    return f"{doing}, {milliseconds(longer.max())} longer than others do", change


def _meanwhile(trace: traces.Trace) -> dict[str, float]:
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


def of_ranks(path: str | Path | Mapping[str, traces.Trace]) -> Diagnosis:
    """Find the cost of training in several processes: communication, and waiting for a late process.

    `of_trace` diagnoses each process by itself.

    Parameters
    ----------
    path : str, Path or mapping of str to Trace
        The folder with the traces of all ranks, or what `traces.ranks` returns.

    It raises TraceError if there is no trace, if one cannot be read, or if two belong to the same rank.
    """
    ranks = path if isinstance(path, Mapping) else traces.ranks(path)
    if len(ranks) < 2:
        alone = (
            "There is the trace of one rank only. Let each rank record into the same folder: "
            'tensorboard_trace_handler(folder, worker_name=f"rank_{rank}").'
        )
        return conclude(math.nan, (), (), doubt=alone)
    try:
        job = read(ranks)
    except traces.NoSteps as error:
        return conclude(math.nan, (), (), doubt=str(error))
    unknown = []
    if len(job.exchanges) and job.exchanges["bytes"].isna().all():
        unknown = ["how many bytes each operation has. Record the traces with profile(…, record_shapes=True)."]
    found = conclude(job.step_ms, evidence(job), result.findings(RULES, job), unknown, doubt(job), uneven(job))
    if found.verdict == "communication" and not job.unequal:
        exposed = percent(1 - float(job.table["efficiency"].mean()))
        found = replace(found, reason=f"Communication is exposed for {exposed} of a step: a rank does nothing else.")
    return found


def doubt(job: SimpleNamespace) -> str | None:
    """Return why the traces allow no verdict, or None."""
    if not job.recorded:
        return (
            f"The traces of {counted(len(job.table), 'rank')} hold no operation that exchanges data. Were they "
            "recorded during training, and do the processes train together?"
        )
    if job.steps < LEAST_STEPS and not job.unequal:
        return (
            f"The traces hold {counted(job.steps, 'step')}; a rank may be late in one by chance, so a verdict needs "
            f"{LEAST_STEPS} or more. Record them with schedule(…, active=8)."
        )
    return None


def uneven(job: SimpleNamespace) -> str | None:
    """Return why something may be wrong even if nothing is found, or None."""
    exposed, waiting = job.table["exposed"], float(job.table["waiting"].max())
    more = float(exposed.max() - exposed.min())
    if max(more, waiting) < WORTH * job.step_ms:
        return None
    text = f"On average {exposed.idxmin()} is busy {milliseconds(more)} longer in a step than {exposed.idxmax()}"
    if more <= waiting:
        text = f"In a step a rank waits up to {milliseconds(waiting)} for the others, each time for another one"
    return f"{text}: by chance, or because their batches differ. Record more steps, and diagnose each rank on its own."


def evidence(job: SimpleNamespace) -> list[tuple[str, str]]:
    """Return the evidence of the traces, as names and values."""
    table = job.table
    rows = [("ranks", f"{len(table)}, {counted(job.steps, 'step')} recorded, on average {milliseconds(job.step_ms)}")]
    for rank, row in table.sort_values("waiting").head(LISTED).sort_index(key=table.index.get_indexer).iterrows():
        rows.append((str(rank), _parts(row)))
    if len(table) > LISTED:
        rows.append(("all ranks", f"{_parts(table.mean())}; above are the {LISTED} ranks that wait least"))
    sizes = "" if math.isnan(table["megabytes"].mean()) else f", {table['megabytes'].mean():.3g} MB"
    kinds = ", ".join(job.exchanges["operation"].value_counts().index)
    exchanged = f"{_operations(table['collectives'].mean())}{sizes} a step{f': {kinds}' if kinds else ''}"
    return [*rows, ("exchanged", exchanged), ("efficiency", percent(float(table["efficiency"].mean())))]


def _parts(row: pd.Series) -> str:
    """Return the communication of a rank in a step as text."""
    exposed, waiting, overlapped = (
        milliseconds(row[name]) if row[name] >= 0.05 else "0 ms" for name in ("exposed", "waiting", "overlapped")
    )
    return f"communication: {exposed} exposed ({waiting} waiting for others), {overlapped} overlapped"


def _operations(number: float) -> str:
    return counted(round(number), "operation") if abs(number - round(number)) < 0.05 else f"{number:.1f} operations"


def _buffers(job: SimpleNamespace) -> str:
    steps = job.buffers.groupby("step")["bytes"].agg(["size", "sum"]).median()  # DDP sends more in its second forward
    sizes = f" of {steps['sum']:,.0f} bytes" if steps["sum"] else ""
    return (
        f"In every step the ranks wait for {counted(round(steps['size']), 'broadcast')}{sizes} from one of them, "
        f"{milliseconds(job.broadcasting)} in addition to waiting for a late rank. DistributedDataParallel sends a "
        "model's buffers before each forward, whether they have changed or not."
    )


def _small(job: SimpleNamespace) -> str:
    small = job.small
    return (
        f"In a step {len(small) / job.steps:,.0f} of the operations have less than {SMALL:g} MB, "
        f"{small['bytes'].median() / 1e3:,.3g} kB in the median (mostly {small['operation'].mode()[0]}). Their time, "
        f"{milliseconds(job.latency)} of it exposed, is latency, which one large operation has only once."
    )


def _bucket(job: SimpleNamespace) -> int:
    """Return the largest bucket size in MB with which the gradients of a step fill five or more buckets."""
    total = job.gradients["bytes"].sum() / job.steps / 1e6
    return next((size for size in BUCKETS if size <= total / 5), BUCKETS[-1])


def _exposed(job: SimpleNamespace) -> str:
    largest = job.gradients["bytes"].max() / 1e6
    sizes = "" if math.isnan(largest) else f", the largest of {largest:,.3g} MB"
    more = {
        "sharded": "",
        "late": " It begins too late: by hand after backward, or in buckets that are too large.",
        "overlapped": " It overlaps already, so only less communication helps.",
    }
    return (
        f"For {percent(job.transfer / job.step_ms)} of a step the ranks transfer data and compute nothing "
        f"meanwhile; {percent(job.behind)} of the communication overlaps with computation "
        f"({_operations(len(job.gradients) / job.steps)} a step{sizes}).{more[job.kind]}"
    )


RULES = (
    Rule(
        "unequal numbers of operations", "communication", "uneven inputs",
        lambda job: math.inf if job.unequal else None,
        lambda job: (
            f"{' '.join(job.unequal)} An operation waits for all ranks: this job hangs, or adds up values that "
            "do not belong together. Most often one rank has more batches than another."
        ),
        "DistributedSampler(dataset, drop_last=True)  # shards and files: as many batches for each rank\n"
        "with Join([model]): …  # or let ranks that have ended answer the others",
    ),
    Rule(
        "a straggler", "communication", "stragglers",
        lambda job: job.late / job.step_ms if job.straggler is not None else None,
        "In a step the other ranks have {late:ms} more exposed communication than {straggler}: they wait for it. "
        "Meanwhile it {doing}.",
        "# {straggler}: {change}",
        least=0.0,
    ),
    Rule(
        "buffers broadcast in every forward", "communication", "buffers of a distributed model",
        lambda job: job.broadcasting / job.step_ms if len(job.buffers) else None, _buffers,
        "DDP(model, broadcast_buffers=False)  # if nothing changes them, or if you save those of rank 0",
        least=0.0,
    ),
    Rule(
        "many small operations", "communication", "gradient buckets",
        lambda job: job.latency / job.step_ms, _small,
        lambda job: (
            "DDP(model, bucket_cap_mb=25)  # not one all_reduce for each weight"
            if job.small["operation"].mode()[0] == "all_reduce"
            else "# combine small tensors into one; SyncBatchNorm: use BatchNorm, if batches are large enough"
        ),
    ),
    *(
        Rule(
            "exposed communication", "communication", topic,
            lambda job, kind=kind: job.transfer / job.step_ms if job.kind == kind else None, _exposed, change,
        )
        for kind, topic, change in (
            (
                "sharded", "overlapping communication with computation",
                "fully_shard(layer)  # each block by itself, then the model; reshard_after_forward=False if memory "
                "allows\nlayer.set_modules_to_forward_prefetch([next_layer])",
            ),
            (
                "late", "overlapping communication with computation",
                lambda job: (
                    f"DDP(model, bucket_cap_mb={_bucket(job)})  # sends a bucket when its gradients are ready, during "
                    "backward"
                ),
            ),
            (
                "overlapped", "less communication",
                "model.register_comm_hook(None, default_hooks.bf16_compress_hook)  # half of the bytes\n"
                "with model.no_sync(): loss_of(model(images)).backward()  # except every n-th step; or a larger batch\n"
                "DDP(…, gradient_as_bucket_view=True, bucket_cap_mb=…)  # saves copies; each bucket has a latency, "
                "and the last bucket overlaps with nothing",
            ),
        )
    ),
)  # fmt: skip
