"""How long from a trace file to the breakdown of its steps: ``python -m tests.bench.bench_traces``.

`traces` against the plugin's own parsing, each in a fresh process, in turn, without the time to import them; and
against TensorBoard from its start to the Overview's data.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 5
STEPS = {"5 MB": 22, "50 MB": 220}  # steps of batch 64, loaded in the training process, which put 230 kB into the trace

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

TRACES = """
import sys, time
from helpers import traces
start = time.perf_counter()
traces.breakdown(sys.argv[1])
print(time.perf_counter() - start)
"""

PLUGIN = """
import logging, sys, tempfile, time
logging.disable(logging.ERROR)
from helpers.tensorboard import corrections
corrections.apply()
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator
start = time.perf_counter()
data = RunProfileData.parse("worker", None, sys.argv[1], tempfile.gettempdir())
RunGenerator("worker", None, data).generate_run_profile()
print(time.perf_counter() - start)
"""

TENSORBOARD = """
import sys, time
from pathlib import Path
from helpers import tensorboard
start = time.perf_counter()
server = tensorboard.start(Path(sys.argv[1]).parent)
(run,) = server.runs
(worker,) = server.get("workers", run=run, view="Overview")
server.get("overview", run=run, worker=worker, span="1")
print(time.perf_counter() - start)
server.stop()
"""

WAYS = {"traces": TRACES, "plugin's parsing": PLUGIN, "TensorBoard to Overview": TENSORBOARD}


def run(code: str, *arguments: str) -> str:
    """Run `code` in a fresh process and return what it prints."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Print the median seconds of each way, the range of the rounds, and the ratio to `traces`."""
    for name, steps in STEPS.items():
        with tempfile.TemporaryDirectory() as folder:
            run(RECORD, folder, str(steps))
            (file,) = Path(folder).iterdir()
            print(f"about {name}: {file.stat().st_size / 1e6:.1f} MB, {ROUNDS} rounds in turn")
            rounds = [{way: float(run(code, str(file))) for way, code in WAYS.items()} for _ in range(ROUNDS)]
        ours = statistics.median(each["traces"] for each in rounds)
        for way in WAYS:
            seconds = sorted(each[way] for each in rounds)
            median = statistics.median(seconds)
            print(f"  {way:24} {median:6.2f} s ({seconds[0]:.2f} to {seconds[-1]:.2f}), {median / ours:5.1f} × traces")


if __name__ == "__main__":
    main()
