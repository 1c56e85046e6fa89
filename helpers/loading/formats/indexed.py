"""Formats of which an index knows where the pixels of each image lie: no library is needed to read them at random.

Tar, zip and TFRecord are made to be read from the front to the back, or through a directory that is read first. Here,
``images.index.npy`` has a row for each image: which file, where in it, of which shape, and the CRC-32C of its pixels;
``labels.npy`` has the labels, or ``labels.index.npy`` does as much for labels that are images. The files have the
labels, too, for other readers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from helpers.loading.formats.reading import PackedDataset, mapped
from helpers.loading.formats.writing import (
    HEADER_BYTES,
    ArrayFile,
    NumbersFile,
    Samples,
    checksum,
    pack_folder,
    write_manifest,
)

_ROW = np.dtype([("file", "<u4"), ("checksum", "<u4"), ("start", "<i8"), ("shape", "<i4", 3)])


class Shard(Protocol):
    """A file of some images, being written."""

    path: Path

    def add(self, index: int, image: np.ndarray, label: int | np.ndarray) -> tuple[int, ...]:
        """Write a sample; return where the pixels of its images begin in the file."""

    def tell(self) -> int:
        """Bytes written so far."""

    def close(self) -> None:
        """Complete the file."""


class Index:
    """Writes the rows for the images, or for the labels if these are images."""

    def __init__(self, folder: Path, name: str):
        self._rows = ArrayFile(folder / f"{name}.index.npy", _ROW)

    def append(self, file: int, start: int, image: np.ndarray) -> None:
        self._rows.append(np.array((file, checksum(image), start, image.shape), _ROW))

    def close(self) -> None:
        self._rows.close(-1)


class ImagesFile:
    """Writes images one after the other to a .npy file, with an index. Only the end shows if they make an array."""

    def __init__(self, folder: Path, name: str):
        self._pixels, self._index = ArrayFile(folder / f"{name}.npy", np.uint8), Index(folder, name)
        self._start = HEADER_BYTES

    def append(self, image: np.ndarray) -> None:
        self._index.append(0, self._start, image)
        self._pixels.append(image)
        self._start += image.size

    def close(self, shape: tuple[int, ...] | None) -> None:
        """Complete the file: an array of images if they have one `shape`, otherwise of bytes."""
        self._pixels.close(-1, *(shape or ()))
        self._index.close()


def write_arrays(folder: Path, samples: Samples) -> None:
    """Write the images to ``images.npy`` and the labels to ``labels.npy``, each with an index if they are images."""
    images = ImagesFile(folder, "images")
    if samples.pairs:
        labels = ImagesFile(folder, "labels")
        for image, label in samples:
            images.append(image)
            labels.append(label)
        labels.close(samples.label_shape)
    else:
        labels = NumbersFile(folder)
        for image, label in samples:
            images.append(image)
            labels.append(label)
        labels.close()
    images.close(samples.image_shape)


def pack_shards(
    name: str,
    samples: Samples,
    path: str | Path,
    new_shard: Callable[[Path, int], Shard],
    shard_bytes: int,
    shard_items: int | None = None,
) -> None:
    """Write `samples` to files, each until it has `shard_bytes` or `shard_items`, and their index."""
    with pack_folder(path) as folder:
        images = Index(folder, "images")
        labels = Index(folder, "labels") if samples.pairs else NumbersFile(folder)
        files, shard, first = [], None, 0
        for index, (image, label) in enumerate(samples):
            if shard is None or shard.tell() >= shard_bytes or index - first == shard_items:
                if shard:
                    shard.close()
                shard, first = new_shard(folder, len(files)), index
                files.append(shard.path.name)
            starts = shard.add(index, image, label)
            images.append(len(files) - 1, starts[0], image)
            if samples.pairs:
                labels.append(len(files) - 1, starts[1], label)
            else:
                labels.append(label)
        shard.close()
        images.close()
        labels.close()
        write_manifest(folder, name, samples, files, shards=files)


def npy_bytes(image: np.ndarray) -> bytes:
    """A .npy file of an image; its pixels come last."""
    return _npy_header(image.shape) + image.tobytes()


@lru_cache(256)
def _npy_header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


class Images:
    """Images at the places that an index gives. Every one is compared with its checksum whenever it is read."""

    def __init__(self, dataset: PackedDataset, name: str, files: list[str]):
        self._dataset, self._names = dataset, np.array(files)
        self._files = [memoryview(mapped(Path(dataset.path, file))) for file in files]
        self._rows = dataset._load(f"{name}.index.npy")

    def __getitem__(self, index: int) -> np.ndarray:
        """Return a view of image `index`."""
        file, expected, start, shape = self._rows[index].item()
        image = np.frombuffer(self._files[file][start : start + math.prod(shape)], np.uint8)
        self._dataset._expect(expected, checksum(image), str(self._names[file]), index)
        return image.reshape(shape)

    def take(self, indices: np.ndarray, shape: list[int]) -> np.ndarray:
        """Copy images of one shape into an array, with as little Python as possible for each: 0.8 µs, for 3.5."""
        rows, size = self._rows[indices], math.prod(shape)
        images = np.empty((len(indices), size), np.uint8)
        flat, files = memoryview(images).cast("B"), self._files
        for row, (file, start) in enumerate(zip(rows["file"].tolist(), rows["start"].tolist(), strict=True)):
            flat[row * size : (row + 1) * size] = files[file][start : start + size]
        self._dataset._expect_all(rows["checksum"], images, self._names[rows["file"]], indices)
        return images.reshape(-1, *shape)


class IndexedDataset(PackedDataset):
    __doc__ = PackedDataset.__doc__

    def _open(self):
        files = self._manifest["shards"]
        images = Images(self, "images", files)
        return images, Images(self, "labels", files) if self.pairs else self._load("labels.npy")

    def _read(self, opened, index):
        images, labels = opened
        return images[index], labels[index]

    def _read_batch(self, opened, indices):
        if not self._one_shape:
            return super()._read_batch(opened, indices)
        images, labels = opened
        taken = images.take(indices, self._manifest["image_shape"])
        if self.pairs:
            return taken, labels.take(indices, self._manifest["label_shape"])
        return taken, labels[indices]
