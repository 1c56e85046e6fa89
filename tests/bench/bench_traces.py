"""Time and memory from a trace file to tables: ``python -m tests.bench.bench_traces``. Two minutes on two cores.

First the tables that notebook 12 makes of its traces, with the traces that `stepscope.traces` keeps and without. Then
`traces.breakdown` and `traces.top_operators` of larger traces, plain and packed. All ways are timed interleaved.
"""

from __future__ import annotations

import gzip
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from helpers import training
from helpers.training import models
from stepscope import traces
from stepscope.timing import profiling
from stepscope.traces import events

ROUNDS = 5
KINDS = ["top_operators", "accelerators", "kernels", "memory_curve", "gaps", "steps", "breakdown"]
GPU = {
    "id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0, "numSms": 108, "warpSize": 32,
    "maxThreadsPerMultiprocessor": 2048, "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 167936,
}  # fmt: skip
LAUNCH = {
    "device": 0, "context": 1, "stream": 7, "registers per thread": 128, "shared memory": 49152, "blocks per SM": 2.0,
    "warps per SM": 8.0, "grid": [16, 8, 1], "block": [128, 1, 1], "est. achieved occupancy %": 25,
}  # fmt: skip
PRODUCT = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn"


def event(category: str, name: str, start: float, duration: float, thread: int = 1, **arguments: object) -> dict:
    place = {"pid": thread == 1, "tid": thread, "ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, "args": arguments}


def write_cuda(folder: Path, steps: int, kernels: int = 1000) -> Path:
    """Write a trace as one of a GPU looks like, of steps that launch `kernels` kernels each, 10 µs apart."""
    found, length = [], 10.0 * kernels + 20
    for step in range(steps):
        start = 1e9 + step * length
        found.append(event("user_annotation", f"ProfilerStep#{step}", start, length))
        for number in range(1 + step * kernels, 1 + (step + 1) * kernels):
            call = start + 10 * ((number - 1) % kernels)
            links = {"External id": number, "correlation": number}
            place = {"Device Type": 1, "Device Id": 0, "Addr": 1024 * number, "Bytes": 1024}
            totals = {"Total Allocated": 1024 * number, "Total Reserved": 1 << 30}
            found += [
                event("cpu_op", "aten::mm", call, 8.0, **{"External id": number}),
                event("cuda_runtime", "cudaLaunchKernel", call + 2, 4.0, **links),
                event("kernel", PRODUCT, call + 10, 9.0, 7, **links, **LAUNCH),
                {"ph": "i", "name": "[memory]", "ts": call + 1, "args": place | totals},
            ]
    head = {"schemaVersion": 1, "deviceProperties": [GPU], "distributedInfo": {"backend": "nccl", "rank": 0}}
    file = folder / "gpu_1.1000.pt.trace.json"
    file.write_text(json.dumps(head | {"traceEvents": found}, indent=2))
    return file


def record_cpu(folder: Path, steps: int) -> Path:
    """Record steps of batch 64, loaded in this process."""
    model, count = models.SmallCNN(), 64 * 10_000
    images = TensorDataset(torch.rand(1, 3, 32, 32).expand(count, -1, -1, -1), torch.zeros(count, dtype=torch.long))
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.01))
    (packed,) = profiling.record(DataLoader(images, 64), step, folder / "cpu", active=steps).glob("*.gz")
    file = folder / packed.stem
    file.write_bytes(gzip.decompress(packed.read_bytes()))
    return file


def compare(ways: dict[str, list[Callable[[], object]]]) -> None:
    """Print how long the tables of each way take together: the median, and the range."""
    seconds = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, tables in ways.items():
            events.clear()
            start = time.perf_counter()
            for make in tables:
                make()
            seconds[way].append(time.perf_counter() - start)
    for way, each in seconds.items():
        print(f"  {way:24} {statistics.median(each):6.2f} s ({min(each):.2f} to {max(each):.2f})", flush=True)


def of_notebook_11(folder: Path) -> None:
    """Compare the tables of ten traces as notebook 12 has them, and all kinds of its tables of one trace."""
    paths = [folder / str(number) for number in range(10)]
    for path in paths:
        path.mkdir()
        write_cuda(path, 2)
    ten = [partial(getattr(traces, kind), path) for path in paths for kind in ("top_operators", "accelerators", "gaps")]
    one = [partial(getattr(traces, kind), paths[0]) for kind in KINDS]
    for title, tables in (("10 traces", ten), ("one trace", one)):
        print(f"{len(tables)} tables of {title}, each parsed once or for each table")
        compare({"once": tables, "for each table": [do for table in tables for do in (table, events.clear)]})


def of_a_large_one(file: Path) -> None:
    """Compare tables of a trace, plain and packed, and print how much memory Python allocates for the first one."""
    packed = file.with_name(f"{file.name}.gz")
    packed.write_bytes(gzip.compress(file.read_bytes(), 6))
    breakdown, size = partial(traces.breakdown, file), file.stat().st_size
    events.clear()
    tracemalloc.start()
    breakdown()
    print(f"{size / 1e6:.1f} MB; memory {tracemalloc.get_traced_memory()[1] / size:.2f} × file")
    tracemalloc.stop()
    gzipped = partial(traces.breakdown, packed)
    compare(
        {"breakdown": [breakdown], "top_operators": [partial(traces.top_operators, file)], "breakdown, gzip": [gzipped]}
    )


def main() -> None:
    """Print all comparisons."""
    for compared in (
        of_notebook_11,
        lambda folder: of_a_large_one(record_cpu(folder, 170)),
        lambda folder: of_a_large_one(write_cuda(folder, 40)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            compared(Path(folder))


if __name__ == "__main__":
    main()
