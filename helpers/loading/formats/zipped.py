"""Zip archives that store their members as they are, not compressed: any system opens them, and so does NumPy.

Members are ``00000007.npy``, and ``00000007.label.npy`` for a label that is an image; the labels that are numbers are
all together in ``labels.npy``, beside the archives. ``numpy.load("shard-000000.zip")["00000007"]`` reads an image: an
.npz file is nothing else. The directory of a zip archive comes last, and Python reads all of it to open the archive,
5 µs and 0.5 kB of memory a member; our index of offsets saves that.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from helpers.loading.formats import indexed
from helpers.loading.formats.writing import Samples

_MEMBERS = 60_000  # beyond 65,535, and beyond 2 GiB, the archive would need extensions that not all programs know


def pack(images: Iterable, labels: Iterable, path: str | Path, *, shard_bytes: int = 2**30) -> None:
    """Pack images into zip archives, ``shard-000000.zip`` and so on.

    Parameters
    ----------
    images, labels, path
        As for `helpers.loading.formats.npy.pack`.
    shard_bytes : int
        An archive with so many bytes gets no more images; nor does one with 60,000 members.

    Raises
    ------
    PackExists, UnusableSamples
        As there.
    """
    samples = Samples(images, labels, path)
    members = 2 if samples.pairs else 1
    indexed.pack_shards("zip", samples, path, _Shard, shard_bytes, _MEMBERS // members)


class PackedDataset(indexed.IndexedDataset):
    __doc__ = indexed.IndexedDataset.__doc__
    format = "zip"


class _Shard:
    def __init__(self, folder: Path, number: int):
        self.path = folder / f"shard-{number:06d}.zip"
        self._zip = zipfile.ZipFile(self.path, "w", zipfile.ZIP_STORED)
        self._end = 0

    def add(self, index: int, image: np.ndarray, label: int | np.ndarray) -> tuple[int, ...]:
        start = self._add(f"{index:08d}.npy", indexed.npy_bytes(image)) - image.size
        if isinstance(label, np.ndarray):
            return start, self._add(f"{index:08d}.label.npy", indexed.npy_bytes(label)) - label.size
        return (start,)

    def _add(self, name: str, data: bytes) -> int:
        """Add a member; return where its data ends."""
        member = zipfile.ZipInfo(name)  # of 1980, so that the same images give the same archive
        self._zip.writestr(member, data)
        self._end = member.header_offset + len(member.FileHeader()) + len(data)
        return self._end

    def tell(self) -> int:
        return self._end

    def close(self) -> None:
        self._zip.close()
