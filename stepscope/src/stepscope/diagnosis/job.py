"""What the traces of all ranks of a job say together: what communication costs, and for whom the others wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from stepscope import traces
from stepscope.base.wording import counted, milliseconds, percent
from stepscope.diagnosis import result
from stepscope.diagnosis.gpu import EVERY
from stepscope.diagnosis.recorded import LEAST_STEPS
from stepscope.diagnosis.result import WORTH, Diagnosis, Rule, conclude
from stepscope.traces.columns import coverage
from stepscope.traces.exposure import NO_COMPUTATION

if TYPE_CHECKING:
    import pandas as pd

# MB of an operation: so few take 0.8 ms at 1 Gbit/s and 8 µs at 100, and mostly less than what each takes at least.
# DistributedDataParallel's own buckets have 25 MiB, the first one 1 MiB, so that it begins early.
SMALL = 0.1
MANY = 10  # small operations in a step; a loss that is averaged over the ranks, or a counter, is one or two
# Of the communication, the part behind computation from which on the bytes are too many, and do not come too late.
# ResNet-50 at 1 Gbit/s overlaps none of one bucket, and half in buckets of 25 MB: those of 5 MB gain 9% of that step,
# half of the bytes 44%.
OVERLAPPED = 0.2
BUCKETS = (25, 10, 5, 2, 1)  # MB; of which five or more should make up the gradients, so that few wait for the last one
LISTED = 8  # ranks with a line of their own


@dataclass(frozen=True)
class Job:
    """The traces of all ranks, in numbers.

    Attributes
    ----------
    table : DataFrame
        As `traces.communication` returns it.
    operations : DataFrame
        As `traces.collectives` returns it.
    meanwhile : DataFrame
        Index as that of `table`; columns `loading` and `computing`: ms of a step in which the rank waited for its
        batch, and in which an operator that exchanges nothing ran, or a kernel if it has an accelerator.
    steps : int
        Steps recorded by each rank; the fewest.
    """

    table: pd.DataFrame
    operations: pd.DataFrame
    meanwhile: pd.DataFrame
    steps: int

    @property
    def step_ms(self) -> float:
        """Mean duration of a step."""
        return float(self.table["step"].mean())

    @cached_property
    def exchanges(self) -> pd.DataFrame:
        """The operations of the steps, a row each: `operation`, `bytes`, and `ms` since the last rank had begun it."""
        rows = self.operations[self.operations["step"].notna()]
        groups = rows.groupby("number")
        took = (rows["end"] - groups["start"].transform("max")).clip(lower=0)
        found = groups[["operation", "bytes", "step"]].first()
        return found.assign(ms=took.groupby(rows["number"]).mean() / 1e3)

    @property
    def straggler(self) -> tuple[str, pd.Series]:
        """What the late rank does for longer than the others, one of `_DOING`, and how much longer, in ms."""
        name = self.table.attrs["straggler"]
        longer = self.meanwhile.loc[name] - self.meanwhile.drop(index=name).median()
        return (str(longer.idxmax()) if longer.max() >= self.table.attrs["late_ms"] / 2 else "other"), longer

    @cached_property
    def buffers(self) -> pd.DataFrame:
        """The broadcasts, if there are such in every step; else none."""
        broadcasts = self.exchanges[self.exchanges["operation"] == "broadcast"]
        return broadcasts if broadcasts["step"].nunique() >= EVERY * self.steps else broadcasts.head(0)

    @cached_property
    def gradients(self) -> pd.DataFrame:
        """All operations but broadcasts."""
        return self.exchanges[self.exchanges["operation"] != "broadcast"]

    @cached_property
    def small(self) -> pd.DataFrame:
        """Those that transfer little; none if they are few."""
        small = self.gradients[self.gradients["bytes"] < SMALL * 1e6]
        return small if len(small) >= MANY * self.steps else small.head(0)

    @cached_property
    def transfers(self) -> dict[str, float]:
        """The exposed transfer in ms of a step: of buffers, of small operations, and of the rest.

        It is that of the rank that has least: on the others something else is in the way, too.
        """
        transfer = float(self.table["transfer"].min())
        buffers = min(float(self.buffers["ms"].sum()) / self.steps, transfer)
        rest = transfer - buffers
        small = rest * float(self.small["ms"].sum() / self.gradients["ms"].sum()) if len(self.small) else 0.0
        small = small if small >= WORTH * self.step_ms else 0.0
        return {"buffers": buffers, "small": small, "rest": rest - small}

    @property
    def behind(self) -> float:
        """The part of the communication that is behind computation, 0 to 1."""
        overlapped = float(self.table["overlapped"].mean())
        return overlapped / max(overlapped + self.transfers["rest"], 1e-6)

    @property
    def kind(self) -> str:
        """Why communication is exposed: the model is sharded, it begins too late, or has overlapped all it can."""
        if self.gradients["operation"].str.contains("all_gather|reduce_scatter").any():
            return "sharded"
        return "overlapped" if self.behind >= OVERLAPPED else "late"


def read(ranks: Mapping[str, traces.Trace]) -> Job:
    """Return the traces of all ranks in numbers.

    Raises
    ------
    traces.NoSteps, traces.SeveralRecordings
        As `traces.communication`.
    """
    import pandas as pd

    meanwhile = pd.DataFrame.from_dict({name: _meanwhile(trace) for name, trace in ranks.items()}, orient="index")
    steps = min(len(traces.steps(trace)) for trace in ranks.values())
    return Job(traces.communication(ranks), traces.collectives(ranks), meanwhile, steps)


def _meanwhile(trace: traces.Trace) -> dict[str, float]:
    """Return a row of `Job.meanwhile`."""
    loading = computing = steps = 0.0
    for span in trace.spans:
        events, table = span.events, traces.steps(traces.Trace(trace.path, (span,)))
        kernels, waits = events["kind"] == "Kernel", events["name"].str.match(NO_COMPUTATION)
        operators = events["operator"] & (events["kind"] == "CPU Exec") & ~waits
        computing += _covered(events[kernels if kernels.any() else operators], table)
        loading += _covered(events[events["kind"] == "DataLoader"], table)
        steps += len(table)
    return {"loading": loading / steps / 1e3, "computing": computing / steps / 1e3}


def _covered(events: pd.DataFrame, steps: pd.DataFrame) -> float:
    return float(coverage(events["start"].to_numpy(), events["end"].to_numpy(), steps).sum())


def diagnose(ranks: Mapping[str, traces.Trace]) -> Diagnosis:
    """Find what the ranks of a job cost each other; see `stepscope.diagnosis.of_ranks`."""
    if len(ranks) < 2:
        alone = (
            "Here is the trace of one rank only. Let each rank record into the same folder: "
            'tensorboard_trace_handler(folder, worker_name=f"rank_{rank}").'
        )
        return conclude(float("nan"), (), (), doubt=alone)
    try:
        job = read(ranks)
    except traces.NoSteps as error:
        return conclude(float("nan"), (), (), doubt=str(error))
    return conclude(job.step_ms, evidence(job), result.findings(RULES, job), unknown(job), doubt(job), uneven(job))


def doubt(job: Job) -> str | None:
    """Return why the traces allow no verdict, or None."""
    if job.operations.empty:
        return (
            f"The traces of {counted(len(job.table), 'rank')} hold no operation in which they exchange data. Were they "
            "recorded inside of training, and do the processes train together?"
        )
    if job.steps < LEAST_STEPS and not job.table.attrs["unequal"]:
        return (
            f"The traces hold {counted(job.steps, 'step')}; a rank may be late in one by chance, so a verdict takes "
            f"{LEAST_STEPS} or more. Record them with schedule(…, active=8)."
        )
    return None


def uneven(job: Job) -> str | None:
    """Return why to find nothing does not mean that nothing is wrong, or None."""
    exposed, waiting = job.table["exposed"], float(job.table["waiting"].max())
    more = float(exposed.max() - exposed.min())
    if max(more, waiting) < WORTH * job.step_ms:
        return None
    if more > waiting:
        text = f"On average {exposed.idxmin()} is busy {milliseconds(more)} longer in a step than {exposed.idxmax()}"
    else:
        text = f"In a step a rank waits up to {milliseconds(waiting)} for the others, now for this one, now for that"
    return f"{text}: by chance, or because their batches differ. Record more steps, and see what each does on its own."


def unknown(job: Job) -> list[str]:
    """Return what could not be looked at."""
    if job.exchanges.empty or job.exchanges["bytes"].notna().any():
        return []
    return ["how many bytes each operation has. Record the traces with profile(…, record_shapes=True)."]


def evidence(job: Job) -> list[tuple[str, str]]:
    """Return what the traces say, as names and values."""
    table = job.table
    rows = [("ranks", f"{len(table)}, {counted(job.steps, 'step')} recorded, on average {milliseconds(job.step_ms)}")]
    for rank, row in table.sort_values("waiting").head(LISTED).sort_index(key=table.index.get_indexer).iterrows():
        rows.append((str(rank), _parts(row)))
    if len(table) > LISTED:
        rows.append(("all ranks", f"{_parts(table.mean())}; above are the {LISTED} that wait least"))
    sizes = "" if math.isnan(table["megabytes"].mean()) else f", {table['megabytes'].mean():.3g} MB"
    kinds = ", ".join(job.exchanges["operation"].value_counts().index)
    exchanged = f"{_operations(table['collectives'].mean())}{sizes} a step{f': {kinds}' if kinds else ''}"
    return [*rows, ("exchanged", exchanged), ("efficiency", percent(float(table["efficiency"].mean())))]


def _parts(row: pd.Series) -> str:
    """Say what a rank does in a step."""
    exposed, waiting, overlapped = (
        milliseconds(row[name]) if row[name] >= 0.05 else "0 ms" for name in ("exposed", "waiting", "overlapped")
    )
    return f"communication: {exposed} exposed ({waiting} waiting for others), {overlapped} overlapped"


def _operations(number: float) -> str:
    return counted(round(number), "operation") if abs(number - round(number)) < 0.05 else f"{number:.1f} operations"


def _late(job: Job) -> float | None:
    """Return what the others wait for one rank: they can gain what it is busy for longer than they are."""
    return job.table.attrs["late_ms"] / job.step_ms if job.table.attrs["straggler"] is not None else None


def _straggler(job: Job) -> str:
    name, doing, late = job.table.attrs["straggler"], *job.straggler
    longer = f", {milliseconds(late[doing])} longer than others do" if doing in late else ""
    return (
        f"{name} takes {milliseconds(job.table.attrs['late_ms'])} longer for a step than the others, and they wait for "
        f"it. Meanwhile it {_DOING[doing][0]}{longer}."
    )


# What a rank does for longer than the others do; how to say it, and what to change.
_DOING = {
    "loading": (
        "waits for its batches",
        "# {}: its data on node-local storage, in shards as large as the others', and as many cores for its workers",
    ),
    "computing": (
        "computes",
        "# {}: batches as large and as long as the others'; or its machine is slower, or busy: leave it out",
    ),
    "other": (
        "neither computes nor loads: Python, mostly",
        "# {}: what only this rank does, such as logs and checkpoints, outside of the step or in a thread",
    ),
}


def _buffers(job: Job) -> str:
    steps = job.buffers.groupby("step")["bytes"].agg(["size", "sum"]).median()  # DDP sends more in its second forward
    sizes = f" of {steps['sum']:,.0f} bytes" if steps["sum"] else ""
    return (
        f"In every step the ranks wait for {counted(round(steps['size']), 'broadcast')}{sizes} from one of them, "
        f"{milliseconds(job.transfers['buffers'])} beside the waiting for a late one: as DistributedDataParallel sends "
        "a model's buffers before each forward, whether they have changed or not."
    )


def _small(job: Job) -> str:
    small = job.small
    return (
        f"In a step {len(small) / job.steps:,.0f} of the operations have less than {SMALL:g} MB, "
        f"{small['bytes'].median() / 1e3:,.3g} kB in the median (mostly {small['operation'].mode()[0]}). What they "
        f"take, {milliseconds(job.transfers['small'])} of it exposed, is latency, and one large operation has it once."
    )


def _exposed(kind: str, more: str, change: str | Callable[[Job], str], topic: str) -> Rule:
    """Return the row for one kind of exposed communication, as `Job.kind` names it."""

    def evidence(job: Job) -> str:
        largest = job.gradients["bytes"].max() / 1e6
        sizes = "" if math.isnan(largest) else f", the largest of {largest:,.3g} MB"
        return (
            f"In {percent(job.transfers['rest'] / job.step_ms)} of a step the ranks transfer data and compute nothing "
            f"meanwhile; {percent(job.behind)} of the communication is behind computation "
            f"({_operations(len(job.gradients) / job.steps)} a step{sizes}).{more}"
        )

    return Rule(
        "exposed communication", "communication", topic,
        lambda job: job.transfers["rest"] / job.step_ms if job.kind == kind else None, evidence, change,
    )  # fmt: skip


def _bucket(job: Job) -> int:
    """Return the largest size of buckets in MB of which five or more make up the gradients of a step."""
    total = job.gradients["bytes"].sum() / job.steps / 1e6
    return next((size for size in BUCKETS if size <= total / 5), BUCKETS[-1])


def _less(job: Job) -> str:
    many = len(job.gradients) >= MANY * job.steps
    buckets = "larger ones: each has its latency" if many else "smaller ones: the last one has nothing to hide behind"
    return (
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook)  # half of the bytes\n"
        "with model.no_sync(): loss_of(model(images)).backward()  # but every n-th step; or a larger batch a rank\n"
        f"DDP(…, gradient_as_bucket_view=True, bucket_cap_mb=…)  # saves copies; {buckets}"
    )


RULES = (
    Rule(
        "unequal numbers of operations", "communication", "uneven inputs",
        lambda job: math.inf if job.table.attrs["unequal"] else None,
        lambda job: (
            f"{' '.join(job.table.attrs['unequal'])} An operation waits for all ranks: this job hangs, or adds up what "
            "does not belong together. Most often one rank has more batches than another."
        ),
        "DistributedSampler(dataset, drop_last=True)  # shards and files: as many batches for each rank\n"
        "with Join([model]): …  # or let those that have ended answer the others",
    ),
    Rule(
        "a straggler", "communication", "stragglers", _late, _straggler,
        lambda job: _DOING[job.straggler[0]][1].format(job.table.attrs["straggler"]),
        least=0.0,
    ),
    Rule(
        "buffers broadcast in every forward", "communication", "buffers of a distributed model",
        lambda job: job.transfers["buffers"] / job.step_ms if len(job.buffers) else None, _buffers,
        "DDP(model, broadcast_buffers=False)  # if nothing changes them, or if it is rank 0's that you save",
        least=0.0,
    ),
    Rule(
        "many small operations", "communication", "gradient buckets",
        lambda job: job.transfers["small"] / job.step_ms, _small,
        lambda job: (
            "DDP(model, bucket_cap_mb=25)  # not one all_reduce for each weight"
            if job.small["operation"].mode()[0] == "all_reduce"
            else "# gather what belongs together into one tensor; SyncBatchNorm: BatchNorm, if batches are large enough"
        ),
    ),
    _exposed(
        "sharded", "",
        "fully_shard(layer)  # each block by itself, then the model; reshard_after_forward=False if memory allows\n"
        "layer.set_modules_to_forward_prefetch([next_layer])",
        "overlapping communication with computation",
    ),
    _exposed(
        "late", " It begins too late: after backward by hand, or in buckets that are too large.",
        lambda job: (
            f"DDP(model, bucket_cap_mb={_bucket(job)})  # sends a bucket when its gradients are there, during backward"
        ),
        "overlapping communication with computation",
    ),
    _exposed(
        "overlapped", " It overlaps already, so only less of it helps.", _less, "less communication",
    ),
)  # fmt: skip
