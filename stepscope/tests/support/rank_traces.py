"""Traces of several ranks: jobs simulated in whole microseconds, whose truth is known, and real ones of gloo.

In each step of a simulated job a rank computes, for each bucket of gradients, as long as the test says, then asks for
its operation; the operations queue for one link; at the end the rank waits for all of them, and updates.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from support import processes
from support.written import event
from support.written import loading as load

PYTHON = 5  # µs at the beginning of a step, without an operator
UPDATE = 10  # µs at its end
ELEMENTS = 250_000  # of a bucket of float32: 1 MB


@dataclass
class Rank:
    """What one rank does, in µs on a clock that all share."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    loading: list[tuple[int, int]] = field(default_factory=list)
    computing: list[tuple[int, int]] = field(default_factory=list)
    operations: list[tuple[int, int, int]] = field(default_factory=list)  # issued, start, end
    kinds: list[tuple[str, int]] = field(default_factory=list)  # of each operation its name and elements


def job(
    computing: Sequence[Sequence[Sequence[int]]],
    transfer: int,
    begins: Sequence[int] | None = None,
    *,
    before: Callable[[int, int], tuple[int, int]] = lambda step, rank: (0, PYTHON),
    broadcast: int = 0,
    extra: dict[int, int] | None = None,
    kind: tuple[str, int] = ("all_reduce", ELEMENTS),
) -> list[Rank]:
    """Simulate a job: `computing` has the µs for each rank, step and bucket; each transfer takes `transfer` µs.

    Before it computes, a rank loads and runs Python, `before` µs, and waits for a broadcast of so many µs, if any. Some
    ranks have `extra` operations in the last step.
    """
    ranks = [Rank() for _ in computing]
    now, free = list(begins or [0] * len(ranks)), 0

    def exchange(moments: dict[int, int], took: int, of: tuple[str, int]) -> int:
        starts = {rank: max(moment, free) for rank, moment in moments.items()}
        end = max(starts.values()) + took
        for rank, start in starts.items():
            ranks[rank].operations.append((moments[rank], start, end))
            ranks[rank].kinds.append(of)
        return end

    steps = list(zip(*computing, strict=True))
    for number, step in enumerate(steps):
        begun, issued = list(now), []
        for rank in range(len(ranks)):
            loads, python = before(number, rank)
            ranks[rank].loading += [(now[rank], now[rank] + loads)] * (loads > 0)
            now[rank] += loads + python
        if broadcast:
            free = exchange(dict(enumerate(now)), broadcast, ("broadcast", 6))
            now = [free] * len(ranks)
        for rank, buckets in enumerate(step):
            issued.append([])
            for duration in buckets:
                ranks[rank].computing.append((now[rank], now[rank] + duration))
                now[rank] += duration
                issued[rank].append(now[rank])
        for operation in zip(*issued, strict=True):
            free = exchange(dict(enumerate(operation)), transfer, kind)
        for rank, times in (extra or {}).items():
            for each in range(times * (number == len(steps) - 1)):
                free = exchange({rank: now[rank] + each + 1}, 100, (kind[0], 100))
        for rank, each in enumerate(ranks):
            now[rank] = max([now[rank], *(end for _, _, end in each.operations[-1:])])
            each.computing.append((now[rank], now[rank] + UPDATE))
            now[rank] += UPDATE
            each.steps.append((begun[rank], now[rank]))
    return ranks


def ddp(
    folder: Path,
    *,
    ranks: int = 2,
    steps: int = 4,
    layers: int = 10,  # each takes 5 ms forward and 10 ms backward
    megabytes: float = 100,  # of all gradients
    buckets: int = 10,  # in which they travel, each as soon as the gradients of the last layer in it are there
    milliseconds: float = 6,  # that each bucket travels
    by_hand: bool = False,  # whether all travel when backward has ended
    operation: str = "all_reduce",  # by which they travel, as `torch.distributed` calls it
    broadcast: int = 0,  # ms of a broadcast before each forward, if any
    # Of some ranks: the ms that they wait for their batches, and that their host does something else between loading
    # and forward, and by which factor they compute longer
    loading: dict[int, int] | None = None,
    python: dict[int, int] | None = None,
    slower: dict[int, float] | None = None,
    late: Callable[[int, int], int] = lambda step, rank: 0,  # further ms that the host takes there
    extra: dict[int, int] | None = None,  # operations in the last step that only these ranks have
    **written: bool,
) -> Path:
    """Write the traces of ranks that train with NCCL, by DistributedDataParallel; as it stands nothing is wrong."""
    computing = []
    for rank in range(ranks):
        layer, spent = round(5000 * (slower or {}).get(rank, 1)), 0
        times = []
        for bucket in range(buckets):
            last = layers if by_hand else max((bucket + 1) * layers // buckets, 1)
            times.append(max(layer * (layers + 2 * last) - spent, 1))
            spent += times[-1]
        computing.append([times] * steps)
    simulated = job(
        computing,
        round(1e3 * milliseconds),
        before=lambda step, rank: (
            200 + 1000 * (loading or {}).get(rank, 0),
            500 + 1000 * ((python or {}).get(rank, 0) + late(step, rank)),
        ),
        broadcast=1000 * broadcast,
        extra=extra,
        kind=(operation, round(megabytes / max(buckets, 1) * ELEMENTS)),
    )
    return write(folder, simulated, backend="nccl", **written)


def truth(ranks: list[Rank], backend: str = "gloo") -> list[dict[str, float]]:
    """Return for each rank what `traces.communication` must find, in ms a step, by painting each microsecond."""
    rows = []
    for rank in ranks:
        others = [
            max((other.operations[place][1] for other in ranks if other is not rank), default=-1)
            for place in range(len(rank.operations))
        ]
        steps, computes, in_flight, transfers, waits = (
            _painted(intervals, rank.steps[-1][1])
            for intervals in (
                rank.steps,
                rank.computing,
                [(issued if backend == "gloo" else start, end) for issued, start, end in rank.operations],
                [(max(start, late), end) for (_, start, end), late in zip(rank.operations, others, strict=True)],
                [(start, late) for (_, start, _), late in zip(rank.operations, others, strict=True)],
            )
        )
        exposed = steps & in_flight & ~computes
        parts = {"step": steps, "overlapped": steps & in_flight & computes, "exposed": exposed}
        parts["waiting"] = exposed & waits & ~transfers
        rows.append({name: moments.sum() / len(rank.steps) / 1e3 for name, moments in parts.items()})
    return rows


def _painted(intervals: list[tuple[int, int]], length: int) -> np.ndarray:
    painted = np.zeros(length, bool)
    for start, end in intervals:
        painted[start : max(start, end)] = True
    return painted


def write(
    folder: Path,
    ranks: list[Rank],
    *,
    clocks: Sequence[float] | None = None,
    backend: str = "gloo",
    shapes: bool = True,
    marked: bool = True,
    leave_out: dict[int, Sequence[int]] | None = None,
    spans: int = 1,
    one_host: bool = False,
    passes: int = 0,
) -> Path:
    """Write the trace of each rank.

    Parameters
    ----------
    clocks : sequence of float
        µs by which each rank's clock is ahead.
    leave_out : dict
        By rank, the places of operations that its trace lacks.
    spans : int
        Files a rank; the steps are divided among them.
    passes : int
        Backward passes of DistributedDataParallel in a step, which have equal numbers of operations; 0 writes none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, rank in enumerate(ranks):
        clock = clocks[number] if clocks else 0
        events = _events(rank, backend, shapes, marked, set((leave_out or {}).get(number, ())))
        events += _backward(rank, passes) if passes else []
        for each in events:
            each["ts"] += clock
        size = -(-len(rank.steps) // spans)
        bounds = [clock + rank.steps[place][0] for place in range(0, len(rank.steps), size)]
        for span, bound in enumerate(bounds):
            following = bounds[span + 1] if span + 1 < len(bounds) else float("inf")
            content = {
                "schemaVersion": 1,
                "distributedInfo": {"backend": backend, "rank": number, "world_size": len(ranks)},
                "host_name": "one" if one_host else f"host-{number}",
                "traceEvents": [each for each in events if bound <= each["ts"] < following],
            }
            packed = gzip.compress(json.dumps(content).encode(), 1)
            (folder / f"rank_{number}.{span + 1}.pt.trace.json.gz").write_bytes(packed)
    return folder


def _events(rank: Rank, backend: str, shapes: bool, marked: bool, left_out: set[int]) -> list[dict]:
    work = _work_of_nccl if backend == "nccl" else _work_of_gloo
    operations = [
        (*each, *kind)
        for place, (each, kind) in enumerate(zip(rank.operations, rank.kinds, strict=True))
        if place not in left_out
    ]
    marks = [
        event("user_annotation", f"ProfilerStep#{number + 3}", start, end)
        for number, (start, end) in enumerate(rank.steps)
        if marked
    ]
    return [*marks, *(load(start, end) for start, end in rank.loading), *work(rank, operations, shapes)]


def _backward(rank: Rank, passes: int) -> list[dict]:
    found, of_a_pass = [], len(rank.operations) // len(rank.steps) // passes
    accumulated = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
    for place, (issued, *_) in enumerate(rank.operations):
        if place % of_a_pass == 0:
            found.append(event("cpu_op", "aten::ones_like", issued - 3, issued - 2))
        found.append(event("cpu_op", accumulated, issued - 1, issued + 1))
    return found


def _work_of_gloo(rank: Rank, operations: list[tuple], shapes: bool) -> list[dict]:
    found = [event("cpu_op", "aten::mm", start, end) for start, end in rank.computing]
    for place, (issued, start, end, name, elements) in enumerate(operations):
        sizes = {"Input Dims": [[elements]], "Input type": ["float"]} if shapes else {}
        found.append(event("cpu_op", f"c10d::{name.replace('_', '')}_", issued, issued))
        found.append(event("user_annotation", f"gloo:{name}", start, end, thread=20 + place % 2, **sizes))
    return found


def _work_of_nccl(rank: Rank, operations: list[tuple], shapes: bool) -> list[dict]:
    found, number = [], 0

    def launched(kernel: str, at: int, start: int, end: int) -> None:
        nonlocal number
        number += 1
        link = {"correlation": number, "External id": number, "device": 0}
        found.append(event("cuda_runtime", "cudaLaunchKernel", at, at, correlation=number))
        found.append(event("kernel", kernel, start, end, thread=7, **link))

    for start, end in rank.computing:
        launched("gemm", start, start, end)
    group = {"Process Group Name": "0", "Process Group Ranks": "[0, 1]"}
    for place, (issued, start, end, name, elements) in enumerate(operations):
        sizes = {"In msg nelems": elements, "Out msg nelems": elements, "dtype": "Float"} if shapes else {}
        around = {"Collective name": name.replace("_", ""), **group, **sizes}
        found.append(event("cpu_op", "record_param_comms", issued, issued, Seq=place, **around))
        launched(f"ncclDevKernel_{name.title().replace('_', '')}_Sum_f32_RING_LL(…)", issued, start, end)
    return found


# Real ones.

SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group: else DDP imports it, and gloo's threads outlive the group
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

folder, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 300))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def step():
    if rank == 1:
        time.sleep(0.3)
    optimizer.zero_grad()
    model(torch.ones(8, 300)).sum().backward()
    optimizer.step()
    x, parts = torch.ones(100), [torch.ones(100), torch.ones(100)]
    dist.all_gather(parts, x)
    dist.all_gather_into_tensor(torch.ones(200), x)
    dist.reduce_scatter_tensor(torch.ones(50), x)
    dist.reduce(x, 0)
    dist.all_to_all_single(torch.ones(100), x)
    dist.gather(x, parts if rank == 0 else None, 0)
    dist.scatter(x, parts if rank == 0 else None, 0)
    dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    dist.barrier()

with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=1, warmup=1, active=4, repeat=1),
    on_trace_ready=tensorboard_trace_handler(f"{folder}/run", worker_name=f"rank_{rank}", use_gzip=True),
    record_shapes=True,
) as profiler:
    for _ in range(6):
        step()
        profiler.step()
del model, optimizer  # what uses the process group is freed first, or its threads go on
dist.destroy_process_group()
"""


def record(folder: Path) -> Path:
    """Train on two ranks with gloo, and record both; rank 1 sleeps 0.3 s in each step. Return where the traces are."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    for code, written in processes.run(script, folder, 2):
        assert code == 0, written
    return folder / "run"
