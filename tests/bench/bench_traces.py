"""Time and memory from a trace file to tables: ``python -m tests.bench.bench_traces``. About two minutes on two cores.

First the tables that notebook 11 makes of its traces, with the traces that `stepscope.traces` keeps and without,
interleaved in one process. Then `traces.breakdown` and `traces.top_operators` of larger traces, plain and packed,
each in a fresh process, interleaved; importing is left out.
"""

from __future__ import annotations

import functools
import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from stepscope import traces
from stepscope.traces import events

RECORD = """
import sys, torch
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, TensorDataset

class Images(TensorDataset):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image.mul(2).sub(1), label

torch.set_num_threads(1)
folder, steps = sys.argv[1], int(sys.argv[2])
count = 64 * (steps + 1)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 6 * 6, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Images(torch.rand(count, 3, 8, 8), torch.randint(10, (count,))), batch_size=64)
with profile(
    activities=[ProfilerActivity.CPU],
    schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
    on_trace_ready=tensorboard_trace_handler(folder),
) as profiler:
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        profiler.step()
"""

MEASURE = """
import json, resource, sys, time
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def measure(work):
    before, start = peak(), time.perf_counter()
    work()
    print(json.dumps({"seconds": time.perf_counter() - start, "bytes": peak() - before}))
"""

# stepscope.traces imports what it needs when it is first asked for it.
WAY = """
import pandas
from stepscope.traces import {0}
measure(lambda: {0}(sys.argv[1]))
"""

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


def record(folder: Path, steps: int) -> None:
    """Record steps of batch 64, loaded in the training process: they put 290 kB into the trace each."""
    run([sys.executable, "-c", RECORD], str(folder), str(steps))


def write_cuda(folder: Path, steps: int, kernels: int = 1000, *, memory: bool = False) -> None:
    """Write a trace as one of a GPU looks like, of steps that launch `kernels` kernels each, 10 µs apart.

    With `memory`, each kernel's operator allocates its result.
    """
    head = {"schemaVersion": 1, "deviceProperties": [GPU], "distributedInfo": {"backend": "nccl", "rank": 0}}
    length = 10.0 * kernels + 20
    with (folder / "gpu_1.1000.pt.trace.json").open("w") as file:
        file.write(json.dumps(head).removesuffix("}") + ',\n"traceEvents": [\n')
        for step in range(steps):
            start = 1e9 + step * length
            for number in range(1 + step * kernels, 1 + (step + 1) * kernels):
                call = start + 10 * ((number - 1) % kernels)
                links = {"External id": number, "correlation": number}
                events = [
                    event("cpu_op", "aten::mm", call, 8.0, **{"External id": number}),
                    event("cuda_runtime", "cudaLaunchKernel", call + 2, 4.0, **links),
                    event("kernel", PRODUCT, call + 10, 9.0, 7, **links, **LAUNCH),
                ]
                if memory:
                    place = {"Device Type": 1, "Device Id": 0, "Addr": 1024 * number, "Bytes": 1024}
                    totals = {"Total Allocated": 1024 * number, "Total Reserved": 1 << 30}
                    events.append({"ph": "i", "name": "[memory]", "ts": call + 1, "args": place | totals})
                file.write("".join(json.dumps(each, indent=2) + ",\n" for each in events))
            file.write(json.dumps(event("user_annotation", f"ProfilerStep#{step}", start, length)) + ",\n")
        file.write('{"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1e10}\n]}')


MAKE: dict[str, tuple[Callable[[Path, int], None], int, int]] = {  # how, of how many steps, in how many rounds
    "10 MB, CPU": (record, 35, 7),
    "50 MB, CPU": (record, 170, 3),
    "50 MB, CUDA": (write_cuda, 40, 3),
}


def bench_notebook_11(rounds: int = 5) -> None:
    """Print how long tables take together if each trace is parsed once, and for each table.

    Of ten traces as notebook 11 has them, and all kinds of its tables of one trace.
    """
    kinds = ["top_operators", "accelerators", "kernels", "memory_curve", "gaps", "steps", "breakdown"]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, str(number)) for number in range(10)]
        for path in paths:
            path.mkdir()
            write_cuda(path, 2, memory=True)
        ten = [functools.partial(getattr(traces, kind), path) for path in paths for kind in kinds[:2] + kinds[4:5]]
        compare_parsing("tables of 10 traces", ten, rounds)
        one = [functools.partial(getattr(traces, kind), paths[0]) for kind in kinds]
        compare_parsing("kinds of tables of one trace", [*one, lambda: traces.difference(*paths[:2])], rounds)


def compare_parsing(title: str, tables: list[Callable[[], object]], rounds: int) -> None:
    """Print how long some tables take together if each trace is parsed once, and if it is parsed for each table."""
    seconds = {"once": [], "for each table": []}
    for _ in range(rounds):
        for way, each in seconds.items():
            events.clear()
            start = time.perf_counter()
            for make in tables:
                make()
                if way == "for each table":
                    events.clear()
            each.append(time.perf_counter() - start)
    once, each = (statistics.median(seconds[way]) for way in seconds)
    print(
        f"{len(tables)} {title}: each trace parsed once {once:.2f} s, for each table {each:.2f} s, {each / once:.1f}×"
    )


def run(command: list[str], *arguments: str) -> str:
    """Run a command in a fresh process and return what it prints."""
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print for each way the median seconds, the range, and the peak memory."""
    bench_notebook_11()
    for name, (make, steps, rounds) in MAKE.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            make(Path(folder), steps)
            (file,) = Path(folder).iterdir()
            packed = Path(other) / f"{file.name}.gz"
            with file.open("rb") as plain, gzip.open(packed, "wb", compresslevel=6) as copy:
                shutil.copyfileobj(plain, copy)  # a process starts with the peak of the one that starts it: stay small
            size = file.stat().st_size
            print(f"{name}: {size / 1e6:.1f} MB, {rounds} interleaved rounds")
            ways = {"breakdown": file, "top_operators": file, "breakdown of a gzip file": packed}
            results = {way: [] for way in ways}
            for _ in range(rounds):
                for way, path in ways.items():
                    printed = run([sys.executable, "-c", MEASURE + WAY.format(way.split()[0])], str(path))
                    results[way].append(json.loads(printed.splitlines()[-1]))
        for way, each in results.items():
            seconds = sorted(result["seconds"] for result in each)
            memory = statistics.median(result["bytes"] for result in each) / size
            median, ends = statistics.median(seconds), f"{seconds[0]:.2f} to {seconds[-1]:.2f}"
            print(f"  {way:24} {median:6.2f} s ({ends}); memory {memory:5.2f} × file", flush=True)


if __name__ == "__main__":
    main()
