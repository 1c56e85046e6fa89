"""What the tests of packed formats share: all kinds of packs, and samples to pack."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np

from helpers.loading import formats
from helpers.loading.formats import mapped, parquet

KINDS = {name: (name, {}) for name in formats.FORMATS} | {"lmdb png": ("lmdb", {"codec": "png"})}


def pack(kind: str, images, labels, path: Path):
    """Pack into shards and row groups so small that there are several; return the dataset."""
    name, options = KINDS[kind]
    with mock.patch.object(mapped, "SHARD_BYTES", 4_000), mock.patch.object(parquet, "ROWS_PER_GROUP", 7):
        formats.FORMATS[name].pack(images, labels, path, **options)
    return formats.FORMATS[name].PackedDataset(path)


def images(*shapes: tuple[int, int, int], seed: int = 0) -> list[np.ndarray]:
    """Random images of these shapes."""
    random = np.random.RandomState(seed)
    return [random.randint(0, 256, shape, dtype=np.uint8) for shape in shapes]


def same(sample, image: np.ndarray, label: int) -> bool:
    """Whether a sample read is the one that was packed, to the bit and with the right types."""
    pixels, number = sample[0].numpy(), sample[1]
    right_type = pixels.dtype == image.dtype and pixels.shape == image.shape and type(number) is int
    return right_type and number == label and bool((pixels == image).all())
