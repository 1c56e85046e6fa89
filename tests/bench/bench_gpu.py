"""What only a GPU shows and no notebook measures: ``python -m tests.bench.bench_gpu``. Without a GPU nothing.

Whether the host's waiting differs from the GPU's idling: a step that keeps the host for 8 ms and the GPU for 13, in
front of a loader that delivers every 14 ms. So the host waits for 6 of 14 ms, and the GPU is idle for 1.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial

import torch
from torch.utils.data import DataLoader

from helpers.loading import datasets
from stepscope import timing, traces
from stepscope.timing import profiling

HOST, GPU, LOADER = 8, 13, 14  # ms
STEPS = 50


def main() -> None:
    """Print the share in which the host waits by the stopwatch, and in which kernels run by the trace."""
    if not torch.cuda.is_available():
        print("There is no GPU here, and so nothing to measure.")
        return
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
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


if __name__ == "__main__":
    main()
