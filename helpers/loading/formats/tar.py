"""Tar shards, as WebDataset reads them: the file that streams best, from a disk or from the network.

A sample is two members with the same key: ``00000007.npy``, and ``00000007.cls`` with the label as text.
``webdataset.WebDataset(path).decode()`` makes arrays and numbers of them.
"""

from __future__ import annotations

import io
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from helpers.loading.formats import packed_dataset, packing


def pack(images: Iterable, labels: Iterable, path: str | Path) -> None:
    """Pack images into tar files of some 1 GiB, ``shard-000000.tar`` and so on; all else as `packing.pack` says."""
    packing.pack_shards("tar", _Shard, sys.maxsize, images, labels, path)


class PackedDataset(packed_dataset.ShardedDataset):
    __doc__ = packed_dataset.ShardedDataset.__doc__
    format = "tar"


class _Shard:
    def __init__(self, file: BinaryIO):
        self._file, self._tar = file, tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT)

    def add(self, number: int, image: np.ndarray, label: int) -> int:
        array = packing.npy_bytes(image)
        end = self._file.tell() + tarfile.BLOCKSIZE + len(array)  # USTAR: one block of header, whatever the name
        for name, data in ((f"{number:08d}.npy", array), (f"{number:08d}.cls", str(label).encode())):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            self._tar.addfile(member, io.BytesIO(data))
        return end

    def close(self) -> None:
        self._tar.close()
