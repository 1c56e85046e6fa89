"""What it costs a script to be watched: ``python -m tests.bench.bench_watch``. Half a minute.

Steps of a tiny network, some of which `stepscope.watch` times, in pairs. What it adds to a step does not depend on the
network, and is seen best in short steps, by the CPU time of the thread, which others hardly change.
"""

from __future__ import annotations

import gc
import itertools
import math
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stepscope import thresholds
from stepscope.base import confidence
from stepscope.observe import hooks
from stepscope.observe.watched import ScriptRecorder

STEPS, PAIRS, BATCH, WIDTH = 200, 60, 64, 8


def main() -> None:
    """Print how much longer a watched step takes."""
    torch.set_num_threads(1)
    model = nn.Linear(WIDTH, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    data = TensorDataset(torch.rand(BATCH * STEPS, WIDTH), torch.zeros(BATCH * STEPS, dtype=torch.long))
    order = torch.arange(len(data)).view(-1, BATCH).repeat(2 * PAIRS + 1, 1)
    thresholds.REPORT_EVERY_S = math.inf  # of all these steps; a script has fewer
    with tempfile.TemporaryDirectory() as folder:
        recorder = ScriptRecorder(10**9, Path(folder), lambda report: None)  # it goes on timing
        hooks.install_here(recorder)
        batches = iter(DataLoader(data, batch_size=None, sampler=order))

        def step_us(over: bool) -> float:
            recorder.over = over
            start = time.thread_time()
            for inputs, labels in itertools.islice(batches, STEPS):
                nn.functional.cross_entropy(model(inputs), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
            return (time.thread_time() - start) / STEPS * 1e6

        step_us(False)
        gc.disable()  # it keeps thousands of steps here, and some sixty of a script
        both = (True, False)
        pairs = [{over: step_us(over) for over in (both if number % 2 else both[::-1])} for number in range(PAIRS)]
        recorder.over = True
    added = confidence.change([0.0] * PAIRS, [pair[False] - pair[True] for pair in pairs])
    print(f"a step takes {min(pair[True] for pair in pairs):.0f} µs by itself")
    print(f"watching adds {added.mean:.0f} µs ({added.lowest:.0f} to {added.highest:.0f})")
    print(f"of a step of 2 ms: {added.mean / 2e3:.1%} ({added.lowest / 2e3:.1%} to {added.highest / 2e3:.1%})")


if __name__ == "__main__":
    main()
