"""What the tests and the benchmark of packed formats share: all kinds of packs, and samples to pack."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from helpers.loading import formats

# Format and options. Shards and row groups are small, so that there are several.
KINDS: Mapping[str, tuple[str, dict]] = {
    "npy": ("npy", {}),
    "lmdb raw": ("lmdb", {}),
    "lmdb png": ("lmdb", {"codec": "png"}),
    "lmdb lz4": ("lmdb", {"codec": "lz4"}),
    "hdf5": ("hdf5", {}),
    "tar": ("tar", {"shard_bytes": 20_000}),
    "zip": ("zip", {"shard_bytes": 20_000}),
    "tfrecord": ("tfrecord", {"shard_bytes": 20_000}),
    "parquet": ("parquet", {"rows_per_group": 7}),
}


def pack(kind: str, images, labels, path: Path):
    """Pack, and return the dataset."""
    name, options = KINDS[kind]
    formats.FORMATS[name].pack(images, labels, path, **options)
    return formats.FORMATS[name].PackedDataset(path)


def environment() -> dict[str, str]:
    """Environment variables with which another Python finds all that this one does, and this file."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}


def images(*shapes: tuple[int, int, int], seed: int = 0) -> list[np.ndarray]:
    """Random images of these shapes."""
    random = np.random.RandomState(seed)
    return [random.randint(0, 256, shape, dtype=np.uint8) for shape in shapes]


def same(sample, image, label) -> bool:
    """Whether a sample read is the one that was packed, to the bit and with the right types."""
    found_image, found_label = sample
    if isinstance(label, int):
        return type(found_label) is int and found_label == label and equal(found_image, image)
    return equal(found_image, image) and equal(found_label, label)


def equal(tensor, array: np.ndarray) -> bool:
    """Whether a tensor has exactly the type, shape and elements of an array."""
    found = tensor.numpy()
    return found.dtype == array.dtype and found.shape == array.shape and bool((found == array).all())
