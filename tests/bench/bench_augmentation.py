"""How fast images are cropped and mirrored at random: ``python -m tests.bench.bench_augmentation``.

50,000 images of 32×32, drawn and packed as npy; shuffled batches of 128, without workers, with one thread of PyTorch,
on one core: images a second and core. Naive is torchvision's v2, image by image. The limit is crop_and_flip alone, of
one batch that stays in memory. All variants are timed interleaved, for a moment in each round; ratios are medians of
those of the rounds. The first batch of each is compared with the images: their labels here are their numbers. The
libraries of the extra ``peers`` that augment batches, where they are installed, are timed in the same rounds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torchvision.transforms import v2

from helpers import config, training
from helpers.data import synthetic
from helpers.loading import datasets, formats, resident
from helpers.loading.formats import npy
from tests.bench import peers, timing
from tests.bench.bench_formats import COUNT, loader, repeated
from tests.bench.peers import PADDING, SHAPE
from tests.bench.timing import BATCH, Variant

PACKAGES = ("torch", "torchvision", "numpy")
IMAGE_BY_IMAGE = v2.Compose([v2.RandomCrop(SHAPE[1:], padding=PADDING), v2.RandomHorizontalFlip()])


def main() -> None:
    """Print for each way to augment images a second."""
    torch.set_num_threads(1)
    print(timing.provenance([*PACKAGES, *peers.installed(peers.AUGMENTING)]))
    images, _ = synthetic.draw(COUNT, config.SEED)
    with tempfile.TemporaryDirectory() as name:
        source = packed(np.ascontiguousarray(images.transpose(0, 3, 1, 2)), Path(name))
        with timing.one_core(), peers.contained(source.folder):
            theirs = peers.variants(source, peers.AUGMENTING, check)
            naive, *others, limit = all_variants(source).items()
            variants = dict([naive, *others, *theirs.items(), limit])
            rates = timing.interleaved(variants)
        timing.report(rates, variants)
        timing.report_beside(rates, variants)


def packed(images: np.ndarray, folder: Path) -> peers.Source:
    """Pack the images, each with its number as its label."""
    numbers = np.arange(len(images))
    npy.pack(images, numbers, folder / "npy")
    return peers.Source(images, numbers, folder, {"npy": npy.PackedDataset(folder / "npy")}, folder)


def all_variants(source: peers.Source) -> dict[str, Variant]:
    """Name each of our ways to augment, naive first and the limit last; each is checked."""
    pack = source.packs["npy"]
    images, labels = torch.from_numpy(source.images), torch.from_numpy(source.labels)
    in_memory = resident.OnDevice(images, labels, BATCH)
    one = images[:BATCH].clone(), labels[:BATCH]
    variants = {
        "v2, image by image": Variant(loader(datasets.Transformed(pack, IMAGE_BY_IMAGE))),
        "npy, batches, crop_and_flip": Variant(loader(pack, crop_and_flip)),
        "OnDevice in memory, crop_and_flip": Variant(lambda: augmented(in_memory)),
        "crop_and_flip alone (the limit)": Variant(lambda: augmented(repeated(lambda: one))),
    }
    for variant in variants.values():
        check(*next(variant.stream), source)
    return variants


def crop_and_flip(batch: formats.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    return training.crop_and_flip(batch.images, PADDING), batch.labels


def augmented(batches) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((training.crop_and_flip(images, PADDING), labels) for images, labels in batches)


def check(images: torch.Tensor, labels: torch.Tensor, source: peers.Source) -> None:
    """Raise ValueError if a batch has anything but our images, each moved and mirrored by a draw of its own."""
    if images.dtype == torch.float32:
        images = images.mul(255).round().to(torch.uint8)
    if images.dtype != torch.uint8 or images.shape != (BATCH, *SHAPE):
        raise ValueError(f"expected {BATCH} images of {SHAPE}, found {images.dtype} of {tuple(images.shape)}")
    draws = drawn(torch.from_numpy(source.images)[labels.flatten()], images)
    if None in draws:
        raise ValueError("expected the images with their labels, moved and mirrored, found others")
    # One of 9 offsets is missing among 128 images once in 200,000 times
    kinds = [len(set(each)) for each in (*zip(*draws, strict=True), draws)]
    if kinds[:3] != [2 * PADDING + 1, 2 * PADDING + 1, 2] or kinds[3] < BATCH // 3:
        raise ValueError(f"expected a draw for each image, found {kinds[3]} for {BATCH} images")


def drawn(originals: torch.Tensor, images: torch.Tensor) -> list[tuple[int, int, bool] | None]:
    """Where each image begins in the padded original, and whether it is mirrored; None if it is no part of it."""
    padded = nn.functional.pad(originals, 4 * [PADDING])
    height, width = originals.shape[2:]
    found = [None] * len(images)
    for mirrored in (False, True):
        plain = images.flip(3) if mirrored else images
        for top in range(2 * PADDING + 1):
            for left in range(2 * PADDING + 1):
                same = padded[:, :, top : top + height, left : left + width] == plain
                for number in same.flatten(1).all(1).nonzero().flatten().tolist():
                    found[number] = top, left, mirrored
    return found


if __name__ == "__main__":
    main()
