"""Time and memory from a trace file to tables: ``python -m tests.bench.bench_traces``. Two minutes on two cores.

`traces.breakdown` and `traces.top_operators` of a large trace, plain and packed, timed interleaved.
"""

from __future__ import annotations

import gzip
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
    with tempfile.TemporaryDirectory() as folder:
        of_a_large_one(record_cpu(Path(folder), 170))


if __name__ == "__main__":
    main()
