"""How fast packed formats are written and read: ``python -m tests.bench.bench_formats``.

50,000 drawn images of 32 × 32 pixels, shuffled batches of 128 through a DataLoader without workers, on one core with
one thread of PyTorch; files are in the page cache, every checksum is on. All ways are timed interleaved. Naive is one
PNG an image, with ToTensor and Normalize; the limit is the gather alone, index_select of tensors in memory.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision import transforms

from helpers import config
from helpers.data import cifar10, synthetic
from helpers.loading import datasets, formats
from stepscope import timing

COUNT, BATCH, ROUNDS, SECONDS = 50_000, 128, 7, 0.3


class Gather:
    """Batches of tensors in memory, by index_select alone."""

    def __init__(self, images: torch.Tensor):
        self.images = images

    def __iter__(self) -> Iterator[tuple[torch.Tensor]]:
        kept = torch.empty(BATCH, *self.images.shape[1:], dtype=torch.uint8)
        for places in torch.randperm(COUNT)[: COUNT // BATCH * BATCH].split(BATCH):
            yield (torch.index_select(self.images, 0, places, out=kept),)


def main() -> None:
    """Print how long packing took and each pack's size, then images a second of each way to read."""
    print(config.describe())
    images, labels = synthetic.draw(COUNT, config.SEED)
    images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    with tempfile.TemporaryDirectory() as folder:
        naive = cifar10.prepare(data_dir=Path(folder), drawn=(COUNT, 10), download=False).train
        normalize = transforms.Compose([transforms.ToTensor(), transforms.Normalize(cifar10.MEAN, cifar10.STD)])
        loaders = {"naive": DataLoader(datasets.PngDataset(naive, normalize), BATCH, shuffle=True)}
        for name, packed_format in formats.FORMATS.items():
            path = Path(folder, name)
            begin = time.perf_counter()
            packed_format.pack(images, labels, path)
            seconds, size = time.perf_counter() - begin, sum(file.stat().st_size for file in path.rglob("*"))
            print(f"{name:10} {size / 1e6:6.1f} MB, packed {COUNT / seconds:9,.0f} images/s", flush=True)
            pack = packed_format.PackedDataset(path)
            loaders[f"{name}, by item"] = DataLoader(formats.ByItem(pack), BATCH, shuffle=True)
            loaders[f"{name}, batches"] = DataLoader(pack, BATCH, shuffle=True, collate_fn=pack.collate)
            order = formats.ShuffledBatches(COUNT, BATCH)
            loaders[f"{name}, ShuffledBatches"] = DataLoader(pack, batch_sampler=order, collate_fn=pack.collate)
        loaders["gather alone (the limit)"] = Gather(torch.from_numpy(images))
        compare(loaders)
        shutil.rmtree(folder, ignore_errors=True)


def compare(loaders: dict) -> None:
    """Time all loaders interleaved on one core, and print the table; the first is the baseline."""
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    runs = {name: lambda loader=loader: timing.loading(loader, SECONDS) for name, loader in loaders.items()}
    print(timing.interleaved(runs, ROUNDS).table().drop(columns="host waits").to_string())


if __name__ == "__main__":
    main()
