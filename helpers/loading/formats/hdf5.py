"""HDF5: named arrays in one file, with a library in every language. Here ``data.h5`` with ``images`` and ``labels``.

``images`` has N elements of HDF5's array type, each a whole image of (C, H, W). They are read twice as fast as an array
of (N, C, H, W), where HDF5 selects in four dimensions (measured, batches of 128: 240,000 images/s and 100,000).
``h5py`` shows both alike: ``file["images"][7]``. The elements are contiguous: chunks of one image each were read at
2,400 images/s. If shapes differ, ``images`` has the bytes of all.

A damaged header can make the library fail in any way. So all parts of the file except pixels are compared with their
checksum when the file is opened, before HDF5 sees it.
"""

from pathlib import Path

import h5py
import numpy as np

from helpers.loading.formats.packed_dataset import PackedDataset
from helpers.loading.formats.packing import Contents

_FILE = "data.h5"


class Hdf5(PackedDataset):
    """Reads and writes HDF5.

    A contiguous array needs its shape when it is created. So images are written to a temporary file first, which needs
    the same space on the disk again until all is done.
    """

    format = "hdf5"

    @classmethod
    def write(cls, folder: Path, contents: Contents) -> dict[str, list]:
        pixels = folder / "pixels"
        with open(pixels, "wb", buffering=2**20) as file:
            contents.write_pixels(file)
        shape = contents.shape() or ()
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

    def _open(self):
        file = h5py.File(Path(self.path, _FILE), "r", locking=False)  # nobody writes; some network disks have no locks
        return file, file["images"], file["images"].id.get_type()

    def close(self):
        if self._opened:
            self._opened[0].close()
        super().close()

    def _read(self, file, start, size):
        if not self._manifest["shape"]:
            return self._opened[1][start : start + size]
        return self._select(np.array([start]), size)

    def _read_batch(self, rows, size):
        return self._select(rows["start"], size)

    def _select(self, starts: np.ndarray, size: int) -> np.ndarray:
        # h5py's array[indices] needs sorted indices without repetition, and is slower by a fifth
        _, array, element = self._opened
        images = np.empty((len(starts), size), np.uint8)
        places = array.id.get_space()
        places.select_elements(starts[:, None] // size)
        array.id.read(h5py.h5s.create_simple((len(starts),)), places, images, element)
        return images
