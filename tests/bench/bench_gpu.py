"""What only a GPU shows and no notebook measures: ``python -m tests.bench.bench_gpu``. Minutes; without a GPU nothing.

- Whether the host's waiting differs from the GPU's idling: a step that keeps the host for 8 ms and the GPU for 13,
  in front of a loader that delivers every 14 ms. So the host waits for 6 of 14 ms, and the GPU is idle for 1.
- What a profile leaves behind: launch-bound steps timed before one and after it, in processes of their own, since
  CUPTI stays attached; the same with ``TEARDOWN_CUPTI=1`` (pytorch, issue 144455); and without a profile between.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch
from torch.utils.data import DataLoader

from helpers import confidence, config, timing, traces, training
from helpers.loading import datasets
from helpers.timing import profiling
from helpers.training import models

HOST, GPU, LOADER = 8, 13, 14  # ms
STEPS, ROUNDS, PROCESSES = 50, 7, 3


def main() -> None:
    """Measure both, if there is a GPU."""
    if not torch.cuda.is_available():
        print("There is no GPU here, and so nothing to measure.")
        return
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    waiting_and_idling()
    for between in ("a profile", "a profile, TEARDOWN_CUPTI=1", "no profile"):
        before_and_after(between)


def waiting_and_idling() -> None:
    """Print the share in which the host waits by the stopwatch, and in which kernels run by the trace."""
    for side in (2048, 1024, 512):  # long enough that the time between two kernels does not count
        matrix, result = torch.randn(2, side, side, device="cuda")
        product_ms = timing.call_ms(partial(torch.mm, matrix, matrix, out=result))
        if product_ms < 0.7:
            break
    products = max(round(GPU / product_ms), 1)

    def step(*_: object) -> None:
        start = time.perf_counter()
        for _ in range(products):
            torch.mm(matrix, matrix, out=result)
        time.sleep(max(HOST / 1e3 - (time.perf_counter() - start), 0))

    loader = DataLoader(datasets.SleepDataset(10_000, LOADER / 1e3), 1, num_workers=1)
    timed = timing.loop(loader, step, STEPS)
    print(f"A step: {timed.step_ms:.1f} ms; {products} products of {product_ms:.3f} ms. {LOADER} ms expected")
    print(f"The host waits for data: {timed.loading_share:.0%}, {(LOADER - HOST) / LOADER:.0%} expected")
    with tempfile.TemporaryDirectory() as folder:
        used = traces.accelerators(profiling.record(loader, step, f"{folder}/run", active=STEPS)).iloc[0]
    bound = products * product_ms / timed.step_ms
    print(f"Kernels run, by the trace: {used['utilization']:.0%}, at most {bound:.0%} expected")


def before_and_after(between: str) -> None:
    """Print how much longer a step takes after a profile, or after as long without, in each of some processes."""
    command = [sys.executable, "-m", "tests.bench.bench_gpu", between]
    environment = os.environ | ({"TEARDOWN_CUPTI": "1"} if "TEARDOWN" in between else {})
    runs = (
        subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        for _ in range(PROCESSES)
    )
    interval = confidence.geometric(float(run.stdout.splitlines()[-1]) for run in runs)
    ends = f"{interval.lowest:.3f} to {interval.highest:.3f} in {PROCESSES} processes"
    print(f"A launch-bound step after {between}: {interval.mean:.3f}× as long as before ({ends})", flush=True)


def one(between: str) -> None:
    """Print the time of a step after a profile, or after a while, as a multiple of that before."""
    workload = training.launch_bound_workload()
    model = models.resnet50(workload.side).to(config.device())
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    batch = torch.randint(256, (workload.batch, 3, 32, 32), dtype=torch.uint8), torch.zeros(workload.batch).long()

    def step_ms() -> float:
        return min(timing.loop([batch], step, STEPS).step_ms for _ in range(ROUNDS))

    before = step_ms()
    if between == "no profile":
        time.sleep(2)
    else:
        with tempfile.TemporaryDirectory() as folder:
            profiling.record([batch], step, f"{folder}/run")
    print(step_ms() / before)


if __name__ == "__main__":
    one(sys.argv[1]) if sys.argv[1:] else main()
