"""All ranks of a job together: the cost of communication, and the rank that delays the job."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from stepscope import thresholds
from stepscope.base.wording import counted, milliseconds, percent, printable
from stepscope.facts.job import Job, Kind, Rank
from stepscope.report.findings import Diagnosis
from stepscope.rules.conclusion import conclude
from stepscope.rules.rule import Rule, findings, mostly

LISTED = 8  # ranks with a separate line
LISTED_KINDS = 4  # kinds of operations with a separate line, the largest exposed time first
# For each kind of work in which a rank is late: a description, and the change.
_DOING = {
    "loading": (
        "waits for its batches",
        "its data on node-local storage, and shards and cores for its workers as on the other ranks",
    ),
    "computing": (
        "computes",
        "batches as large, and sequences as long, as on the other ranks; leave out a slower or busy machine",
    ),
    "other": (
        "neither computes nor loads; mostly it runs Python",
        "work that only this rank does, such as logs and checkpoints: move it out of the step, or into a thread",
    ),
}


def diagnose(job: Job) -> Diagnosis:
    """Return the diagnosis of a job: the cost of communication, and of waiting for a late rank."""
    unknown = []
    if not job.sizes_known:
        unknown = ["the size of each operation. Record the traces with profile(…, record_shapes=True)."]
    found = conclude(job.step_ms, _evidence(job), findings(RULES, job), unknown, _doubt(job), _uneven(job))
    if found.verdict == "communication" and not job.unequal:
        exposed = percent(1 - job.efficiency)
        found = replace(found, reason=f"Exposed communication, with no other work, takes {exposed} of a step.")
    return found


def _doubt(job: Job) -> str | None:
    """Return why the traces allow no verdict; None if they allow one."""
    if not job.recorded:
        return (
            f"The traces of {counted(len(job.ranks), 'rank')} hold no operation that exchanges data. Were they "
            "recorded during training, and do the processes train together?"
        )
    if job.steps < thresholds.LEAST_STEPS and not job.unequal:
        return (
            f"The traces hold {counted(job.steps, 'step')}, and a verdict needs {thresholds.LEAST_STEPS} or more: a "
            "rank may be late in one step by chance. Record the traces with schedule(…, active=8)."
        )
    return None


def _uneven(job: Job) -> str | None:
    """Return why something may be wrong even if nothing is found, or None."""
    waiting = max(rank.waiting_ms for rank in job.ranks)
    least, most = (of(job.ranks, key=lambda rank: rank.exposed_ms) for of in (min, max))
    more = most.exposed_ms - least.exposed_ms
    if max(more, waiting) < thresholds.WORTH * job.step_ms:
        return None
    text = f"On average {least.name} is busy {milliseconds(more)} longer in a step than {most.name}"
    if more <= waiting:
        text = f"In a step a rank waits up to {milliseconds(waiting)}, each time for a different rank"
    return f"{text}: by chance, or because batches differ. Record more steps, and diagnose each rank separately."


def _evidence(job: Job) -> list[tuple[str, str]]:
    """Return the evidence of the traces, as names and values."""
    count = len(job.ranks)
    rows = [("ranks", f"{count}, {counted(job.steps, 'step')} recorded, on average {milliseconds(job.step_ms)}")]
    wait_least = sorted(job.ranks, key=lambda rank: rank.waiting_ms)[:LISTED]
    rows += [(rank.name, _communication((rank,))) for rank in job.ranks if rank in wait_least]
    if count > LISTED:
        rows.append(("all ranks", f"{_communication(job.ranks)}; above are the {LISTED} ranks that wait least"))
    known = [rank.megabytes for rank in job.ranks if rank.megabytes is not None]
    sizes = f", {sum(known) / len(known):.3g} MB" if known else ""
    kinds = f": {', '.join(job.all.kinds)}" if job.all.kinds else ""
    exchanged = f"{_operations(sum(rank.operations for rank in job.ranks) / count)}{sizes} a step{kinds}"
    rows += [("exchanged", exchanged), *map(_of_kind, job.by_kind[:LISTED_KINDS])]
    return [*rows, ("efficiency", percent(job.efficiency))]


def _of_kind(kind: Kind) -> tuple[str, str]:
    """Return the evidence of one kind of operation, as name and value."""
    size = kind.megabytes or 0.0
    sizes = f", {size:.3g} MB" if size >= 0.01 else f", {size * 1e6:,.0f} bytes" if size else ""
    group = f"; group {printable(kind.group)}" if kind.group else ""
    cost = f"{milliseconds(kind.ms)} in a step, {milliseconds(kind.exposed_ms)} of it exposed"
    return kind.operation, f"{_operations(kind.per_step)}{sizes}, {cost}{group}"


def _communication(ranks: tuple[Rank, ...]) -> str:
    """Return the mean communication of ranks in a step as text."""

    def mean(times: list[float]) -> str:
        ms = sum(times) / len(times)
        return milliseconds(ms) if ms >= 0.05 else "0 ms"

    exposed, waiting = mean([rank.exposed_ms for rank in ranks]), mean([rank.waiting_ms for rank in ranks])
    overlapped = mean([rank.overlapped_ms for rank in ranks])
    return f"communication: {exposed} exposed ({waiting} waiting for another rank), {overlapped} overlapped"


def _operations(number: float) -> str:
    return counted(round(number), "operation") if abs(number - round(number)) < 0.05 else f"{number:.1f} operations"


def _late(job: Job) -> str:
    doing = _DOING[job.late_in][0]
    if job.late_in != "other":
        doing += f", {milliseconds(job.late_longer_ms)} longer than the other ranks"
    return (
        f"In a step the other ranks have {milliseconds(job.late_ms)} more exposed communication than {job.straggler}: "
        f"they wait for this rank. Meanwhile {job.straggler} {doing}."
    )


def _buffers(job: Job) -> str:
    sizes = f" of {job.buffers.total_bytes:,.0f} bytes" if job.buffers.total_bytes else ""
    broadcasts = counted(round(job.buffers.per_step), "broadcast")
    return (
        f"In every step the ranks wait {milliseconds(job.broadcasting_ms)} for {broadcasts}{sizes} from one rank, "
        "without waiting for a late rank. DistributedDataParallel sends a model's buffers before each forward pass, "
        "even if the buffers have not changed."
    )


def _small(job: Job) -> str:
    return (
        f"In a step {job.small.per_step:,.0f} operations, mostly {job.small.kinds[0]}, exchange less than "
        f"{thresholds.SMALL_OPERATION_MB:g} MB each, with a median of {(job.small.median_bytes or 0.0) / 1e3:,.3g} kB. "
        f"Their time, {milliseconds(job.latency_ms)} of it exposed, is latency; one large operation has it only once."
    )


def _bucket(job: Job) -> int:
    """Return the largest bucket size in MB with which the gradients of a step fill five or more buckets."""
    total = job.gradients.total_bytes / 1e6
    return next((size for size in thresholds.BUCKETS_MB if size <= total / 5), thresholds.BUCKETS_MB[-1])


def _kind(job: Job) -> str:
    """Return why communication is exposed, as the end of a rule's key."""
    if job.repeats:
        return "each-pass"
    if job.sharded:
        return "sharded"
    return "overlapped" if job.overlapped >= thresholds.OVERLAPPED else "late"


def _exposed(
    kind: str, topic: str, means: str, more: str, change: str | Callable[[Job], str], example: str = ""
) -> Rule[Job]:
    """Return the row for one cause of exposed communication."""

    def evidence(job: Job) -> str:
        largest = job.gradients.largest_bytes
        sizes = "" if largest is None else f", the largest of {largest / 1e6:,.3g} MB"
        return (
            f"For {percent(job.transfer_ms / job.step_ms)} of a step the ranks transfer data and compute nothing "
            f"meanwhile; {percent(job.overlapped)} of the communication overlaps with computation "
            f"({_operations(job.gradients.per_step)} a step{sizes}).{more}"
        )

    return Rule(
        f"communication.{kind}", "exposed communication", "communication", topic, means,
        lambda job: job.transfer_ms / job.step_ms if _kind(job) == kind else None, evidence, change, example=example,
    )  # fmt: skip


OVERLAPPING = "overlapping communication with computation"
RULES: tuple[Rule[Job], ...] = (
    Rule(
        "communication.unequal", "unequal numbers of operations", "communication", "uneven inputs",
        "The ranks do not take part in the same operations: the job hangs, or adds up values that do not belong "
        "together.",
        lambda job: math.inf if job.unequal else None,
        lambda job: (
            f"{' '.join(job.unequal)} An operation waits for all ranks: this job hangs, or adds up values that "
            "do not belong together. The usual cause: one rank has more batches than another."
        ),
        "DistributedSampler(dataset, drop_last=True)  # with shards or files: as many batches for each rank\n"
        "with Join([model]): …  # or: ranks without batches take part in the remaining operations",
    ),
    Rule(
        "communication.straggler", "a straggler", "communication", "stragglers",
        "All ranks wait for the same late rank.",
        lambda job: job.late_ms / job.step_ms if job.straggler is not None else None,
        _late,
        lambda job: f"# {job.straggler}: {_DOING[job.late_in][1]}",
        least=0.0,
        example="# shorten the work in which the late rank takes longer than the other ranks",
    ),
    Rule(
        "communication.buffers", "buffers broadcast in every forward", "communication",
        "buffers of a distributed model",
        "In every step the ranks wait for the model's buffers from one rank.",
        lambda job: job.broadcasting_ms / job.step_ms if job.buffers.per_step else None,
        _buffers,
        "model.broadcast_buffers = False  # of DDP: if no step changes the buffers, or if you save those of rank 0",
        least=0.0,
    ),
    Rule(
        "communication.small-operations", "many small operations", "communication", "gradient buckets",
        "Most operations exchange so few bytes that their time is latency.",
        lambda job: job.latency_ms / job.step_ms,
        _small,
        lambda job: (
            "DDP(model, bucket_cap_mb=25)  # not one all_reduce for each weight"
            if job.small.kinds[0] == "all_reduce"
            else "# combine small tensors; replace SyncBatchNorm with BatchNorm, if batches are large enough"
        ),
        example="DDP(model, bucket_cap_mb=25)  # not one all_reduce for each weight",
    ),
    Rule(
        "communication.each-pass", "gradients exchanged in each backward pass", "communication", "less communication",
        "Gradients are exchanged in each of several backward passes before one update.",
        lambda job: (1 - 1 / job.exchanging_passes) * job.exchanging_ms / job.step_ms if job.repeats else None,
        lambda job: (
            f"Before an update the ranks exchange gradients in each of {round(job.exchanging_passes)} backward passes, "
            f"which takes {milliseconds(job.exchanging_ms)} of a step. Only the last exchange is needed: it can send "
            f"the sum of all passes.{mostly(job.backward)}"
        ),
        "with model.no_sync(): loss_of(model(images)).backward()  # all but the last pass, with the forward inside",
        line=lambda job: job.backward,
    ),
    _exposed(
        "sharded", OVERLAPPING,
        "Sharded weights are gathered while the ranks compute nothing.", "",
        "fully_shard(layer)  # each block, then the whole model; reshard_after_forward=False if memory allows\n"
        "layer.set_modules_to_forward_prefetch([next_layer])",
    ),
    _exposed(
        "late", OVERLAPPING,
        "Gradients are exchanged after the backward pass instead of during it.",
        " The exchange begins too late: by hand after the backward pass, or in buckets that are too large.",
        lambda job: (
            f"DDP(model, bucket_cap_mb={_bucket(job)})  # sends a bucket when its gradients are ready, during backward"
        ),
        "DDP(model, bucket_cap_mb=…)  # sends a bucket when its gradients are ready, during backward",
    ),
    _exposed(
        "overlapped", "less communication",
        "The exchange already overlaps with the backward pass, and takes longer than the backward pass.",
        " The exchange already overlaps, so only less communication helps.",
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook)  # half of the bytes\n"
        "with model.no_sync(): loss_of(model(images)).backward()  # except every n-th step; or use a larger batch\n"
        "DDP(…, gradient_as_bucket_view=True, bucket_cap_mb=…)  # saves copies; each bucket has a latency, and the "
        "last bucket overlaps with nothing",
    ),
)  # fmt: skip
