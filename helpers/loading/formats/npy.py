"""NumPy's own file, mapped into memory: the fastest of all, since an image is a place in the file and nothing else.

``images.npy`` is an array of uint8 of shape (N, C, H, W), and ``labels.npy`` one of int64 of shape (N,), or of images
as the first; ``numpy.load`` reads both. ``images.checksums.npy`` has a CRC-32C for every 128 KiB or so. Images of
several shapes lie one after the other in an array of one dimension, with an index of where each begins.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from helpers.loading.formats import reading
from helpers.loading.formats.indexed import Images, write_arrays
from helpers.loading.formats.writing import (
    HEADER_BYTES,
    ArrayFile,
    Samples,
    checksum,
    file_checksum,
    pack_folder,
    write_manifest,
)

# Bytes that are checked together, in whole images. Linux reads as many around a missing page of a map, unless it is
# set otherwise, so that a check reads no more from the disk; in blocks of 1 MiB, a CIFAR-10 image takes 340 along.
_BLOCK_BYTES = 128 * 2**10


def pack(images: Iterable, labels: Iterable, path: str | Path) -> None:
    """Pack images into a memory map. A progress bar appears if that takes longer than 5 seconds.

    Parameters
    ----------
    images : iterable of ndarray or Tensor
        uint8 of shape (C, H, W), the same for all or not.
    labels : iterable of int, or of ndarray or Tensor
        Numbers; or images of the same kind, such as the high-resolution patch of a low-resolution one.
    path : path
        The folder to make.

    Raises
    ------
    PackExists
        If there is something at `path`.
    UnusableSamples
        If there are no images, fewer or more labels, or one that is of another type.
    """
    samples = Samples(images, labels, path)
    with pack_folder(path) as folder:
        write_arrays(folder, samples)
        for name, shape in (("images", samples.image_shape), ("labels", samples.label_shape)):
            if shape:
                _write_checksums(folder, name, samples.count, shape)
        checked_in_parts = ["images.npy", "labels.npy"] if samples.pairs else ["images.npy"]
        write_manifest(folder, "npy", samples, checked_in_parts)


class PackedDataset(reading.PackedDataset):
    __doc__ = reading.PackedDataset.__doc__
    format = "npy"
    # The process, images and labels, once every block has been checked: from then on a batch is a gather, and no more
    _ready: tuple[int, np.ndarray, np.ndarray] | None = None

    def __getitems__(self, indices: Sequence[int]) -> reading.Batch:
        numbers = np.asarray(indices)
        if self._ready is not None and self._ready[0] == os.getpid() and numbers.dtype.kind == "i" and numbers.size:
            try:
                return reading.Batch(*(torch.from_numpy(array.take(numbers, 0)) for array in self._ready[1:]))
            except IndexError:
                pass  # raised below, with what was expected
        batch = super().__getitems__(indices)
        arrays = [getattr(array, "checked", array) for array in self._opened]
        if all(isinstance(array, np.ndarray) for array in arrays):
            self._ready = (os.getpid(), *arrays)
        return batch

    def close(self) -> None:
        super().close()
        self._ready = None

    def __getstate__(self) -> dict:
        return super().__getstate__() | {"_ready": None}

    def _open(self):
        images = self._open_images("images")
        return images, self._open_images("labels") if self.pairs else self._load("labels.npy")

    def _open_images(self, name: str):
        shape = self._manifest["image_shape" if name == "images" else "label_shape"]
        return _Array(self, name, shape) if shape else Images(self, name, [f"{name}.npy"])

    def _read(self, opened, index):
        images, labels = opened
        return images[index], labels[index]

    def _read_batch(self, opened, indices):
        if not self._one_shape:
            return super()._read_batch(opened, indices)
        images, labels = opened
        return images.take(indices, 0), labels.take(indices, 0)


class _Array:
    """Images of one shape: an array mapped into memory, of which every block is checked once."""

    def __init__(self, dataset: PackedDataset, name: str, shape: list[int]):
        self._dataset, self._file = dataset, f"{name}.npy"
        self._checksums = dataset._load(f"{name}.checksums.npy")
        self._bytes = reading.mapped(Path(dataset.path, self._file))
        self._images = self._bytes[HEADER_BYTES:].reshape(len(dataset), *shape)
        self._items, self._edges = _blocks(len(dataset), math.prod(shape))
        self._unchecked = np.ones(len(self._checksums), bool)
        self._some_unchecked = True

    def __getitem__(self, index: int) -> np.ndarray:
        if self._some_unchecked:
            self._check(np.array([index]))
        return self._images[index]

    @property
    def checked(self) -> np.ndarray | None:
        """All images, once every block has been checked."""
        return None if self._some_unchecked else self._images

    def take(self, indices: np.ndarray, axis: int) -> np.ndarray:
        if self._some_unchecked:
            self._check(indices)
        return self._images.take(indices, axis)

    def _check(self, indices: np.ndarray) -> None:
        blocks = indices // self._items
        for block in np.unique(blocks[self._unchecked[blocks]]).tolist():
            found = checksum(self._bytes[self._edges[block] : self._edges[block + 1]])
            first, last = block * self._items, min((block + 1) * self._items, len(self._images)) - 1
            self._dataset._expect(int(self._checksums[block]), found, self._file, first, last)
            self._unchecked[block] = False
        self._some_unchecked = bool(self._unchecked.any())


def _write_checksums(folder: Path, name: str, count: int, shape: tuple[int, ...]) -> None:
    """Replace the index, with a checksum for each image, by checksums of blocks."""
    (folder / f"{name}.index.npy").unlink()
    checksums = ArrayFile(folder / f"{name}.checksums.npy", "<u4")
    _, edges = _blocks(count, math.prod(shape))
    for start, stop in pairwise(edges.tolist()):
        checksums.append(np.uint32(file_checksum(folder / f"{name}.npy", start, stop)))
    checksums.close(-1)


def _blocks(count: int, item_bytes: int) -> tuple[int, np.ndarray]:
    """How many images a block has, and where in the file the blocks begin and end: the header belongs to the first."""
    items = max(1, _BLOCK_BYTES // item_bytes)
    first = np.append(np.arange(0, count, items), count)
    edges = HEADER_BYTES + first * item_bytes
    edges[0] = 0
    return items, edges
