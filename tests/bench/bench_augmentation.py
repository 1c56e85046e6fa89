"""How fast images are cropped and mirrored at random: ``python -m tests.bench.bench_augmentation``.

50,000 drawn images of 32 × 32 pixels, packed as npy; shuffled batches of 128 without workers, on one core with one
thread of PyTorch. The baseline is torchvision's v2, image by image; the limit is crop_and_flip alone, of one batch that
stays in memory. All ways are timed interleaved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from helpers import config, training
from helpers.data import synthetic
from helpers.loading import datasets, formats
from tests.bench.bench_formats import BATCH, COUNT, compare

IMAGE_BY_IMAGE = v2.Compose([v2.RandomCrop(32, padding=4), v2.RandomHorizontalFlip()])


class Augmented:
    """Batches of a loader, cropped and mirrored."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((training.crop_and_flip(images), labels) for images, labels in self.loader)


class InMemory:
    """Batches of tensors in memory in a random order, as notebook 07 has them on the device."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        self.images, self.labels = images, labels

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for chosen in torch.randperm(COUNT)[: COUNT // BATCH * BATCH].split(BATCH):
            yield self.images.index_select(0, chosen), self.labels[chosen]


def main() -> None:
    """Print for each way to augment images a second."""
    print(config.describe())
    images, labels = synthetic.draw(COUNT, config.SEED)
    images = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
    with tempfile.TemporaryDirectory() as folder:
        npy = formats.FORMATS["npy"]
        npy.pack(images, labels, Path(folder, "npy"))
        pack = npy.PackedDataset(Path(folder, "npy"))
        in_memory = InMemory(torch.from_numpy(images), torch.from_numpy(labels))
        one = next(iter(in_memory))
        compare(
            {
                "v2, image by image": DataLoader(datasets.Transformed(pack, IMAGE_BY_IMAGE), BATCH, shuffle=True),
                "npy, batches, crop_and_flip": Augmented(
                    DataLoader(pack, BATCH, shuffle=True, collate_fn=pack.collate)
                ),
                "in memory, crop_and_flip": Augmented(in_memory),
                "crop_and_flip alone (the limit)": Augmented([one]),
            }
        )


if __name__ == "__main__":
    main()
