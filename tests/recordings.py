"""Records small traces with plain torch.profiler, for the tests of `traces` and `tensorboard`."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, Dataset


class SlowImages(Dataset):
    """Images in memory, each of which takes 2 ms to read."""

    def __init__(self, count: int):
        self.images = torch.rand(count, 3, 16, 16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.002)
        return self.images[index] * 2 - 1, index % 10


def record(folder: Path, workers: int, *, active: int = 4, spans: int = 1) -> dict[int, float]:
    """Train a tiny CNN under the profiler, and return the seconds that ``next(it)`` took in each recorded step."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    cycle = 2 + active
    batches = iter(DataLoader(SlowImages(8 * cycle * spans), batch_size=8, num_workers=workers))
    waited = {}
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=active, repeat=spans),
        on_trace_ready=tensorboard_trace_handler(str(folder), use_gzip=True),
    ) as profiler:
        for step in range(cycle * spans):
            start = time.perf_counter()
            images, labels = next(batches)
            if step % cycle >= 2:
                waited[step] = time.perf_counter() - start
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            profiler.step()
    torch.set_num_threads(threads)
    return waited
