"""Time and memory from a trace file to tables: ``python -m tests.bench.bench_traces``.

First all tables that notebook 11 makes of its traces, with the traces that `helpers.traces` keeps and without,
interleaved in one process. Then the breakdown of the steps: `traces` against the parsing of TensorBoard's plugin,
TensorBoard from its start to the Overview's data, and Holistic Trace Analysis (HTA) 0.5.0, its designated successor.
Each in a fresh process, interleaved; the time to import, and the memory that importing takes, are left out. About five
minutes on two cores.
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

from helpers import traces
from helpers.traces import keeping

HTA = "HolisticTraceAnalysis==0.5.0"

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
def measure(work, note=""):
    before, start = peak(), time.perf_counter()
    work()
    print(json.dumps({"seconds": time.perf_counter() - start, "bytes": peak() - before, "note": note}))
"""

# Imports are timed nowhere here; helpers.traces imports what it needs when it is first asked for it.
TRACES = """
import pandas
from helpers.traces import breakdown
measure(lambda: breakdown(sys.argv[1]))
"""

PLUGIN = """
import logging, tempfile
logging.disable(logging.ERROR)
from helpers.tensorboard import corrections
corrections.apply()
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator
def work():
    data = RunProfileData.parse("worker", None, sys.argv[1], tempfile.gettempdir())
    RunGenerator("worker", None, data).generate_run_profile()
measure(work)
"""

TENSORBOARD = """
from pathlib import Path
from helpers import tensorboard
def work():
    server = tensorboard.start(Path(sys.argv[1]).parent)
    (run,) = server.runs
    (worker,) = server.get("workers", run=run, view="Overview")
    server.get("overview", run=run, worker=worker, span="1")
    server.stop()
measure(work)
"""

# HTA's breakdown needs a GPU, and the number of the rank in the trace.
HOLISTIC = """
import logging
logging.disable(logging.CRITICAL)
from hta.common.trace import parse_trace_file
from hta.trace_analysis import TraceAnalysis
if sys.argv[2] == "GPU":
    measure(lambda: TraceAnalysis(trace_files={0: sys.argv[1]}).get_temporal_breakdown(visualize=False))
else:
    measure(lambda: parse_trace_file(sys.argv[1]), "parsing only: it fails on traces without a GPU")
"""

KERNEL = """  {
    "ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1,
    "ts": %(call).3f, "dur": 8.000,
    "args": {
      "External id": %(id)d, "Record function id": 0, "Ev Idx": %(id)d
    }
  },
  {
    "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1,
    "ts": %(launch).3f, "dur": 4.000,
    "args": {
      "External id": %(id)d, "cbid": 211, "correlation": %(id)d
    }
  },
  {
    "ph": "s", "id": %(id)d, "pid": 1, "tid": 1, "ts": %(launch).3f,
    "cat": "ac2g", "name": "ac2g"
  },
  {
    "ph": "X", "cat": "kernel", "name": "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x3_nn",
    "pid": 0, "tid": 7,
    "ts": %(kernel).3f, "dur": 9.000,
    "args": {
      "External id": %(id)d, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": %(id)d,
      "registers per thread": 128, "shared memory": 49152, "blocks per SM": 2.0, "warps per SM": 8.0,
      "grid": [16, 8, 1], "block": [128, 1, 1], "est. achieved occupancy %%": 25
    }
  },
  {
    "ph": "f", "id": %(id)d, "pid": 0, "tid": 7, "ts": %(kernel).3f,
    "cat": "ac2g", "name": "ac2g", "bp": "e"
  }"""

GPU = {
    "id": 0, "name": "NVIDIA A100-SXM4-80GB", "computeMajor": 8, "computeMinor": 0, "numSms": 108, "warpSize": 32,
    "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536,
    "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 167936,
}  # fmt: skip


MEMORY = {"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1}

UPDATES = ["zeros", "one by one", "together", "fused"]  # kinds of updates of the weights in notebook 11


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
        file.write(json.dumps(head, indent=2).removesuffix("\n}") + ',\n  "traceEvents": [\n')
        for step in range(steps):
            start = 1e9 + step * length
            mark = {"ph": "X", "name": f"ProfilerStep#{step}", "ts": start, "dur": length}
            file.write("  " + json.dumps(mark | {"cat": "user_annotation", "pid": 1, "tid": 1}) + ",\n")
            file.write("  " + json.dumps(mark | {"cat": "gpu_user_annotation", "pid": 0, "tid": 7}) + ",\n")
            for kernel in range(kernels):
                call = start + 10 * kernel
                times = {"call": call, "launch": call + 2, "kernel": call + 10}
                file.write(KERNEL % (times | {"id": 1 + step * kernels + kernel}) + ",\n")
                if memory:
                    total = 1024 * (1 + step * kernels + kernel)
                    place = {"Device Type": 1, "Device Id": 0, "Addr": total, "Bytes": 1024}
                    arguments = place | {"Total Allocated": total, "Total Reserved": 1 << 30}
                    file.write("  " + json.dumps(MEMORY | {"ts": call + 1, "args": arguments}) + ",\n")
        file.write('  {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1e10}\n]}')


MAKE: dict[str, tuple[Callable[[Path, int], None], int, int]] = {  # how, of how many steps, in how many rounds
    "5 MB, CPU": (record, 18, 7),
    "50 MB, CPU": (record, 170, 2),
    "50 MB, CUDA": (write_cuda, 40, 2),
    "200 MB, CPU": (record, 680, 1),
}


def tables_of_notebook_11(folder: Path) -> list[Callable[[], object]]:
    """Write ten traces as of a GPU; return what makes tables of them, as notebook 11 did when it made the most."""
    names = ["plain", *UPDATES, "asking", "launched one by one", "replayed", "before", "best"]
    traces_of = {name: folder / name for name in names}
    for name, place in traces_of.items():
        place.mkdir()
        write_cuda(place, 2, memory=name in ("plain", "zeros"))

    def calls_of(path: Path) -> object:
        return traces.top_operators(path, count=10_000)

    used, gaps = traces.accelerators, traces.gaps
    made = [(calls_of, "plain"), (calls_of, "plain"), (used, "plain"), (traces.kernels, "plain")]
    made += [(traces.memory_curve, "plain"), (traces.memory_curve, "zeros")]
    made += [(table, name) for name in UPDATES[1:] for table in (calls_of, used)]
    made += [(table, name) for name in ("plain", "asking") for table in (calls_of, gaps)]
    # The last two are what `figures.accelerator` makes.
    made += [
        (table, name)
        for name in ("launched one by one", "replayed")
        for table in (gaps, traces.steps, used, traces.steps)
    ]
    made += [(table, name) for name in ("before", "best") for table in (calls_of, used, gaps)]
    made += [(traces.breakdown, name) for name in 2 * ("before", "best")]  # two for the difference
    return [functools.partial(table, traces_of[name]) for table, name in made]


def bench_notebook_11(rounds: int = 5) -> None:
    """Print how long notebook 11's tables take together if each trace is parsed once, and for each table.

    Then the same of all kinds of its tables, made of one trace.
    """
    with tempfile.TemporaryDirectory() as folder:
        compare_parsing("tables of notebook 11, of its 10 traces", tables_of_notebook_11(Path(folder)), rounds)
        plain = Path(folder) / "plain"
        kinds = ["top_operators", "accelerators", "kernels", "memory_curve", "gaps", "steps", "breakdown"]
        tables = [functools.partial(getattr(traces, kind), plain) for kind in kinds]
        tables.append(functools.partial(traces.difference, plain, plain))
        compare_parsing("kinds of tables of notebook 11, of one trace", tables, rounds)
        compare_parsing("the same, each made three times", 3 * tables, rounds)


def compare_parsing(title: str, tables: list[Callable[[], object]], rounds: int) -> None:
    """Print how long some tables take together if each trace is parsed once, and if it is parsed for each table."""
    seconds = {"once": [], "for each table": []}
    for _ in range(rounds):
        for way, each in seconds.items():
            keeping.clear()
            start = time.perf_counter()
            for make in tables:
                make()
                if way == "for each table":
                    keeping.clear()
            each.append(time.perf_counter() - start)
    once, each = (statistics.median(seconds[way]) for way in seconds)
    print(
        f"{len(tables)} {title}: each trace parsed once {once:.2f} s, for each table {each:.2f} s, {each / once:.1f}×"
    )


def run(command: list[str], *arguments: str) -> str:
    """Run a command in a fresh process and return what it prints."""
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout


def ways() -> dict[str, list[str]]:
    """Return the commands to measure; HTA's runs in an environment of its own, if uv can install it."""
    here = [sys.executable, "-c"]
    commands = {
        "traces": [*here, MEASURE + TRACES],
        "traces, of a gzip file": [*here, MEASURE + TRACES],
        "plugin's parsing": [*here, MEASURE + PLUGIN],
        "TensorBoard to Overview": [*here, MEASURE + TENSORBOARD],
    }
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    isolated = [str(uv), "run", "--no-project", "--isolated", "--python", sys.executable, "--with", HTA, "python", "-c"]
    try:
        run(isolated, "import hta")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{HTA} cannot be installed here, so it is left out: {getattr(error, 'stderr', error)!s:.200}")
        return commands
    return commands | {"HTA": [*isolated, MEASURE + HOLISTIC]}


def main() -> None:
    """Print for each way the median seconds, the range, the ratio of the fastest rounds, and the peak memory."""
    bench_notebook_11()
    commands = ways()
    for name, (make, steps, rounds) in MAKE.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            make(Path(folder), steps)
            (file,) = Path(folder).iterdir()
            packed = Path(other) / f"{file.name}.gz"
            with file.open("rb") as plain, gzip.open(packed, "wb", compresslevel=6) as copy:
                shutil.copyfileobj(plain, copy)  # a process starts with the peak of the one that starts it: stay small
            size = file.stat().st_size
            print(
                f"{name}: {size / 1e6:.1f} MB, gzip {packed.stat().st_size / 1e6:.2f} MB, {rounds} interleaved rounds"
            )
            results = {way: [] for way in commands}
            for _ in range(rounds):
                for way, command in commands.items():
                    arguments = str(packed if "gzip" in way else file), "GPU" if make is write_cuda else "CPU"
                    results[way].append(json.loads(run(command, *arguments).splitlines()[-1]))
        ours = min(each["seconds"] for each in results["traces"])  # what else the machine does only ever adds
        for way, each in results.items():
            seconds = sorted(result["seconds"] for result in each)
            median = statistics.median(seconds)
            memory = statistics.median(result["bytes"] for result in each) / size
            peak = f"{memory:5.2f} × file" if way != "TensorBoard to Overview" else "in other processes"
            print(
                f"  {way:24} {median:6.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}) {seconds[0] / ours:6.1f} "
                f"× traces; memory {peak} {each[0]['note']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
