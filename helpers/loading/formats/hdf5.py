"""HDF5: named arrays in one file, with a library in every language. Here ``data.h5`` with ``images`` and ``labels``.

``images`` has N elements, each of HDF5's array type, a whole image of (C, H, W): that is read twice as fast as an array
of (N, C, H, W), where HDF5 selects in four dimensions (measured, batches of 128: 240,000 images/s and 100,000).
``h5py`` shows both alike: ``file["images"][7]``. The elements lie in a row: in chunks of one image each, 2,400 a second
were read. If shapes differ, ``images`` has the bytes of all.

A damaged header can make the library fail in any way. So all of the file that is no pixel of an image is compared with
its checksum when it is opened, before HDF5 sees it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np

from helpers.loading.formats import packed_dataset, packing
from helpers.loading.formats.npy import write_pixels

_FILE = "data.h5"


def pack(images: Iterable, labels: Iterable, path: str | Path) -> None:
    """Pack images into an HDF5 file; all else as `packing.pack` says.

    An array that is contiguous needs its shape when it is made. So images go to a file of their own first, which
    needs as much of the disk again until all is done.
    """
    packing.pack("hdf5", _write, images, labels, path)


def _write(folder: Path, contents: packing.Contents) -> dict[str, list]:
    pixels = folder / "pixels"
    with open(pixels, "wb", buffering=2**20) as file:
        write_pixels(file, contents)
    shape = contents.shape or ()
    source = np.memmap(pixels, np.uint8, "r").reshape(-1, *shape)
    with h5py.File(folder / _FILE, "w") as file:
        array = file.create_dataset("images", len(source), np.dtype((np.uint8, shape)))
        array[...] = source
        file["labels"] = contents.index()["label"]
        start = array.id.get_offset()
    size = source.nbytes
    del source
    pixels.unlink()
    return {_FILE: [(0, start), (start + size, (folder / _FILE).stat().st_size)]}


class PackedDataset(packed_dataset.PackedDataset):
    __doc__ = packed_dataset.PackedDataset.__doc__
    format = "hdf5"

    def _open(self):
        # nobody writes; some network disks have no locks
        file = h5py.File(Path(self.path, _FILE), "r", locking=False)
        return file, file["images"], file["images"].id.get_type()

    def close(self):
        if self._opened:
            self._opened[0].close()
        super().close()

    def _read(self, opened, file, start, size):
        if not self._manifest["shape"]:
            return opened[1][start : start + size]
        return self._select(opened, np.array([start]), size)

    def _read_batch(self, opened, rows, size):
        return self._select(opened, rows["start"], size)

    def _select(self, opened, starts: np.ndarray, size: int) -> np.ndarray:
        # h5py's array[indices] needs each index once, and in order, and is slower by a fifth
        _, array, element = opened
        images = np.empty((len(starts), size), np.uint8)
        places = array.id.get_space()
        places.select_elements(starts[:, None] // size)
        array.id.read(h5py.h5s.create_simple((len(starts),)), places, images, element)
        return images

    def _data_file(self, file):
        return _FILE
