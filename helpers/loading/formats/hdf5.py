"""HDF5: named arrays in one file, with a library in every language. Here ``data.h5`` with ``images`` and ``labels``.

``images`` has N elements, each of HDF5's array type, a whole image of (C, H, W): that is read twice as fast as an array
of (N, C, H, W), where HDF5 selects in four dimensions (measured, batches of 128: 240,000 images/s and 100,000).
``h5py`` shows both alike: ``file["images"][7]``. The elements lie in a row: in chunks of one image each, 2,400 a second
were read. If shapes differ, ``images`` has the bytes of all.

``images.index.npy`` has the CRC-32C of each image, and where it begins; HDF5's own checksum is for chunks only.

A damaged header can make the library fail in any way. So all of the file that is no pixel of an image is compared with
its checksum when it is opened, before HDF5 sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import google_crc32c
import h5py
import numpy as np

from helpers.loading.formats import reading
from helpers.loading.formats.indexed import write_arrays
from helpers.loading.formats.writing import HEADER_BYTES, Samples, checksum, pack_folder, write_manifest

_FILE = "data.h5"
_COPIED_BYTES = 16 * 2**20  # at a time


def pack(images: Iterable, labels: Iterable, path: str | Path) -> None:
    """Pack images into an HDF5 file.

    An array that is contiguous needs its shape when it is made. So images go to a file of their own first, which
    needs as much of the disk again until all is done.

    Parameters
    ----------
    images, labels, path
        As for `helpers.loading.formats.npy.pack`.

    Raises
    ------
    PackExists, UnusableSamples
        As there.
    """
    samples = Samples(images, labels, path)
    with pack_folder(path) as folder:
        write_arrays(folder, samples)
        with h5py.File(folder / _FILE, "w") as file:
            arrays = {name: _move(folder / f"{name}.npy", file) for name in ("images", "labels")}
            by_item = ("images", "labels") if samples.pairs else ("images",)
            checked = [_place(arrays[name]) for name in by_item]
        rest = _rest_checksum(folder / _FILE, checked)
        write_manifest(folder, "hdf5", samples, [_FILE], checked_by_item=checked, rest_crc32c=rest)


class PackedDataset(reading.PackedDataset):
    __doc__ = reading.PackedDataset.__doc__
    format = "hdf5"

    def _open(self):
        rest = _rest_checksum(Path(self.path, _FILE), self._manifest["checked_by_item"])
        self._expect(self._manifest["rest_crc32c"], rest, _FILE)
        file = h5py.File(Path(self.path, _FILE), "r", locking=False)  # nobody writes; some network disks have no locks
        images = _Images(self, file, "images", self._manifest["image_shape"])
        labels = _Images(self, file, "labels", self._manifest["label_shape"]) if self.pairs else file["labels"][:]
        return file, images, labels

    def close(self):
        if self._opened:
            self._opened[0].close()
        super().close()

    def _read(self, opened, index):
        _, images, labels = opened
        return images[index], labels[index]

    def _read_batch(self, opened, indices):
        _, images, labels = opened
        if not self._one_shape:
            return super()._read_batch(opened, indices)
        return images.take(indices), labels.take(indices)


class _Images:
    """An array of images in the file. Every image is compared with its checksum whenever it is read."""

    def __init__(self, dataset: PackedDataset, file: h5py.File, name: str, shape: list[int] | None):
        self._dataset, self._array, self._shape = dataset, file[name], shape
        self._type = self._array.id.get_type()
        self._rows = dataset._load(f"{name}.index.npy")

    def __getitem__(self, index: int) -> np.ndarray:
        if self._shape:
            return self.take(np.array([index]))[0]
        start, shape = int(self._rows["start"][index]) - HEADER_BYTES, self._rows["shape"][index]
        image = self._array[start : start + int(shape.prod())].reshape(shape)
        self._dataset._expect(int(self._rows["checksum"][index]), checksum(image), _FILE, index)
        return image

    def take(self, indices: np.ndarray) -> np.ndarray:
        # h5py's array[indices] needs each index once, and in order, and is slower by a fifth
        images = np.empty((len(indices), *self._shape), np.uint8)
        places = self._array.id.get_space()
        places.select_elements(indices[:, None])
        self._array.id.read(h5py.h5s.create_simple((len(indices),)), places, images, self._type)
        self._dataset._expect_all(self._rows["checksum"][indices], images, _FILE, indices)
        return images


def _move(path: Path, file: h5py.File) -> h5py.Dataset:
    """Copy a .npy file into an array of its name, of which an element is an image, and delete it."""
    source = np.load(path, mmap_mode="r")
    target = file.create_dataset(path.stem, len(source), np.dtype((source.dtype, source.shape[1:])))
    rows = max(1, _COPIED_BYTES // (source.nbytes // len(source)))
    for start in range(0, len(source), rows):
        target[start : start + rows] = source[start : start + rows]
    path.unlink()
    return target


def _place(array: h5py.Dataset) -> tuple[int, int]:
    """Where in the file the bytes of a contiguous array begin and end."""
    start = array.id.get_offset()
    return start, start + array.id.get_storage_size()


def _rest_checksum(path: Path, places: Iterable[tuple[int, int]]) -> int:
    """CRC-32C of all of a file but these places."""
    data, crc, start = reading.mapped(path), 0, 0
    for stop, next_start in [*sorted(map(tuple, places)), (len(data), None)]:
        crc = google_crc32c.extend(crc, data[start:stop].tobytes())
        start = next_start
    return crc
