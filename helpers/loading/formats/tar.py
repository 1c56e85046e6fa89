"""Tar shards, as WebDataset reads them: the file that streams best, from a disk or from the network.

A sample is two members with the same key: ``00000007.npy``, and ``00000007.cls`` with the label as text, or
``00000007.label.npy`` if it is an image. ``webdataset.WebDataset(path).decode()`` makes arrays and numbers of them.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from helpers.loading.formats import indexed
from helpers.loading.formats.writing import Samples


def pack(images: Iterable, labels: Iterable, path: str | Path, *, shard_bytes: int = 2**30) -> None:
    """Pack images into tar files, ``shard-000000.tar`` and so on.

    Parameters
    ----------
    images, labels, path
        As for `helpers.loading.formats.npy.pack`.
    shard_bytes : int
        A file with so many bytes gets no more images.

    Raises
    ------
    PackExists, UnusableSamples
        As there.
    """
    indexed.pack_shards("tar", Samples(images, labels, path), path, _Shard, shard_bytes)


class PackedDataset(indexed.IndexedDataset):
    __doc__ = indexed.IndexedDataset.__doc__
    format = "tar"


class _Shard:
    def __init__(self, folder: Path, number: int):
        self.path = folder / f"shard-{number:06d}.tar"
        self._tar = tarfile.open(self.path, "w", format=tarfile.USTAR_FORMAT)

    def add(self, index: int, image: np.ndarray, label: int | np.ndarray) -> tuple[int, ...]:
        start = self._add(f"{index:08d}.npy", indexed.npy_bytes(image)) - image.size
        if isinstance(label, np.ndarray):
            return start, self._add(f"{index:08d}.label.npy", indexed.npy_bytes(label)) - label.size
        self._add(f"{index:08d}.cls", str(label).encode())
        return (start,)

    def _add(self, name: str, data: bytes) -> int:
        """Add a member; return where its data ends."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        start = self._tar.offset + tarfile.BLOCKSIZE  # USTAR: one block of header, whatever the name
        self._tar.addfile(member, io.BytesIO(data))
        return start + len(data)

    def tell(self) -> int:
        return self._tar.offset

    def close(self) -> None:
        self._tar.close()
