"""Formats that need no library: their files are mapped into memory, and an image is a range of bytes there.

**npy** is the fastest of all: ``images.npy`` is an array of uint8 of shape (N, C, H, W), and ``labels.npy`` one of
int64 of shape (N,); ``numpy.load`` reads both. Images of several shapes lie one after the other in an array of one
dimension.

**tar** shards are files of some 1 GiB, ``shard-000000.tar`` and so on. Their pixels are not compressed, so our index of
offsets finds them; other programs read these files sequentially.
"""

import io
import math
import tarfile
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path

import numpy as np

from helpers.loading.formats.packed_dataset import PackedDataset
from helpers.loading.formats.packing import Contents

SHARD_BYTES = 2**30  # a shard of this size gets no more images
_HEADER_BYTES = 4096  # of images.npy: a page, so that the pixels begin with the next one


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file, mapped into memory: uint8 of shape (bytes,), read-only."""
    return np.memmap(path, np.uint8, "r").view(np.ndarray)  # a slice of a memmap itself takes 10 times as long


class Npy(PackedDataset):
    """Reads and writes npy; an image is compared with its checksum when it is first read."""

    format = "npy"

    @classmethod
    def write(cls, folder: Path, contents: Contents) -> dict[str, list]:
        with open(folder / "images.npy", "wb", buffering=2**20) as file:
            file.write(bytes(_HEADER_BYTES))
            contents.write_pixels(file)
            size, shape = file.tell() - _HEADER_BYTES, contents.shape() or ()
            header = {"descr": "|u1", "fortran_order": False, "shape": (size // math.prod(shape), *shape)}
            length = _HEADER_BYTES - 10  # format 1.0: magic and version, 8 bytes; length, 2; text, and a new line
            file.seek(0)
            file.write(np.lib.format.magic(1, 0) + length.to_bytes(2, "little"))
            file.write(repr(header).encode().ljust(length - 1) + b"\n")
        np.save(folder / "labels.npy", contents.index()["label"])
        return {"images.npy": [(0, _HEADER_BYTES)]}

    def _open(self):
        self._unchecked = np.ones(len(self), bool)
        self._some_unchecked = True
        return mapped(Path(self.path, "images.npy"))[_HEADER_BYTES:]

    def _read(self, file, start, size):
        return self._opened[start : start + size]

    def _read_batch(self, rows, size):
        return self._opened.reshape(-1, size).take(rows["start"] // size, 0)

    def _intact(self, numbers, rows, images):
        if self._some_unchecked:
            new = np.flatnonzero(self._unchecked[numbers])
            if not super()._intact(numbers[new], rows[new], images[new]):
                return False
            self._unchecked[numbers] = False
            self._some_unchecked = bool(self._unchecked.any())
        return True


class Tar(PackedDataset):
    """Tar shards, as WebDataset reads them: the file that streams best, from a disk or from the network.

    A shard is written until it has `SHARD_BYTES`. A sample is two members with the same key: ``00000007.npy``, and
    ``00000007.cls`` with the label as text. ``webdataset.WebDataset(path).decode()`` makes arrays and numbers of them.
    """

    format = "tar"

    @classmethod
    def write(cls, folder: Path, contents: Contents) -> dict[str, list]:
        names: list[str] = []
        file = None
        with ExitStack() as opened:
            for number, (image, label) in enumerate(contents):
                if file is None or file.tell() >= SHARD_BYTES:
                    opened.close()
                    names.append(f"shard-{len(names):06d}.tar")
                    file = opened.enter_context(open(folder / names[-1], "wb", buffering=2**20))
                    tar = opened.enter_context(tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT))
                array = _npy_header(image.shape) + image.tobytes()  # the pixels come last
                end = file.tell() + tarfile.BLOCKSIZE + len(array)  # USTAR: one block of header, whatever the name
                for name, data in ((f"{number:08d}.npy", array), (f"{number:08d}.cls", str(label).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                contents.put(end - image.size, len(names) - 1)
        return {name: [] for name in names}

    def _open(self):
        return [memoryview(mapped(Path(self.path, name))) for name in self._manifest["data"]]

    def _read(self, file, start, size):
        return self._opened[file][start : start + size]


@lru_cache(256)
def _npy_header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()
