"""Time and memory from a trace file to the breakdown of its steps: ``python -m tests.bench.bench_traces``.

`traces` against the parsing of TensorBoard's plugin, TensorBoard from its start to the Overview's data, and Holistic
Trace Analysis (HTA) 0.5.0, its designated successor. Each in a fresh process, in turn; the time to import, and the
memory that importing takes, are left out. About five minutes on two cores.
"""

from __future__ import annotations

import gzip
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

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

TRACES = """
from helpers import traces
measure(lambda: traces.breakdown(sys.argv[1]))
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


def record(folder: Path, steps: int) -> None:
    """Record steps of batch 64, loaded in the training process: they put 290 kB into the trace each."""
    run([sys.executable, "-c", RECORD], str(folder), str(steps))


def write_cuda(folder: Path, steps: int, kernels: int = 1000) -> None:
    """Write a trace as one of a GPU looks like, of steps that launch `kernels` kernels each, 10 µs apart."""
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
        file.write('  {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 1e10}\n]}')


MAKE: dict[str, tuple[Callable[[Path, int], None], int, int]] = {  # how, of how many steps, in how many rounds
    "5 MB, CPU": (record, 18, 7),
    "50 MB, CPU": (record, 170, 2),
    "50 MB, CUDA": (write_cuda, 40, 2),
    "200 MB, CPU": (record, 680, 1),
}


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
    commands = ways()
    for name, (make, steps, rounds) in MAKE.items():
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as beside:
            make(Path(folder), steps)
            (file,) = Path(folder).iterdir()
            packed = Path(beside) / f"{file.name}.gz"
            with file.open("rb") as plain, gzip.open(packed, "wb", compresslevel=6) as copy:
                shutil.copyfileobj(plain, copy)  # a process starts with the peak of the one that starts it: stay small
            size = file.stat().st_size
            print(f"{name}: {size / 1e6:.1f} MB, gzip {packed.stat().st_size / 1e6:.2f} MB, {rounds} rounds in turn")
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
                f"  {way:24} {median:6.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}) {seconds[0] / ours:6.1f} × traces; "
                f"memory {peak} {each[0]['note']}",
                flush=True,
            )


if __name__ == "__main__":
    main()
