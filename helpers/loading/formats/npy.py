"""NumPy's own file, mapped into memory: the fastest of all, since an image is a place in the file and nothing else.

``images.npy`` is an array of uint8 of shape (N, C, H, W), and ``labels.npy`` one of int64 of shape (N,); ``numpy.load``
reads both. Images of several shapes lie one after the other in an array of one dimension. An image is compared with its
checksum when it is first read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from helpers.loading.formats import packed_dataset, packing

_FILE = "images.npy"
_HEADER_BYTES = 4096  # a page, so that the pixels begin with the next one


def pack(images: Iterable, labels: Iterable, path: str | Path) -> None:
    """Pack images into an array that can be mapped into memory; all else as `packing.pack` says."""
    packing.pack("npy", _write, images, labels, path)


def _write(folder: Path, contents: packing.Contents) -> dict[str, list]:
    with open(folder / _FILE, "wb", buffering=2**20) as file:
        file.write(bytes(_HEADER_BYTES))
        write_pixels(file, contents)
        size, shape = file.tell() - _HEADER_BYTES, contents.shape
        header = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
        if shape:
            header["shape"] = (size // int(np.prod(shape)), *shape)
        length = _HEADER_BYTES - 10  # format 1.0: magic and version, 8 bytes; length, 2; text that ends in a new line
        file.seek(0)
        file.write(np.lib.format.magic(1, 0) + length.to_bytes(2, "little"))
        file.write(repr(header).encode().ljust(length - 1) + b"\n")
    np.save(folder / "labels.npy", contents.index()["label"])
    return {_FILE: [(0, _HEADER_BYTES)]}


def write_pixels(file, contents: packing.Contents) -> None:
    """Write the pixels of all images to a file; an image's place is where they begin, after those before."""
    start = 0
    for image, _ in contents:
        contents.put(start)
        file.write(image)
        start += image.size


class PackedDataset(packed_dataset.PackedDataset):
    __doc__ = packed_dataset.PackedDataset.__doc__
    format = "npy"

    def _open(self):
        self._unchecked = np.ones(len(self), bool)
        self._some_unchecked = True
        return packed_dataset.mapped(Path(self.path, _FILE))[_HEADER_BYTES:]

    def _read(self, opened, file, start, size):
        return opened[start : start + size]

    def _read_batch(self, opened, rows, size):
        return opened.reshape(-1, size).take(rows["start"] // size, 0)

    def _check_all(self, numbers, rows, images):
        if self._some_unchecked:
            new = np.flatnonzero(self._unchecked[numbers])
            super()._check_all(numbers[new], rows[new], images[new])
            self._unchecked[numbers] = False
            self._some_unchecked = bool(self._unchecked.any())

    def _data_file(self, file):
        return _FILE
