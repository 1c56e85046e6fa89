"""Records small traces with plain torch.profiler, for the tests of `traces` and `tensorboard`."""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's own log fills a failing test's report

import torch  # it reads the level
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


class Block(nn.Module):
    """A convolution and what follows it."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3, padding=1)
        self.act = nn.ReLU()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.act(self.conv(images))


class Network(nn.Module):
    """Modules in modules, two of them alike."""

    def __init__(self):
        super().__init__()
        self.first = Block(3)
        self.second = Block(8)
        self.head = nn.Linear(8 * 16 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(images)).flatten(1))


EVERYTHING = {"record_shapes": True, "profile_memory": True, "with_stack": True}


def record(folder: Path, workers: int, *, spans: int = 1, **options: bool) -> None:
    """Train a tiny network under the profiler."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    steps = 6 * spans
    batches = iter(DataLoader(SlowImages(8 * steps), batch_size=8, num_workers=workers))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=4, repeat=spans),
        on_trace_ready=tensorboard_trace_handler(str(folder), use_gzip=True),
        **options,
    ) as profiler:
        for _ in range(steps):
            images, labels = next(batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            profiler.step()
    torch.set_num_threads(threads)


def read(file: Path) -> bytes:
    """Return the JSON of a trace file."""
    content = file.read_bytes()
    return gzip.decompress(content) if file.suffix == ".gz" else content
