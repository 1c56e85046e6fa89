"""Zip archives that store their members as they are, not compressed: any system opens them, and so does NumPy.

Members are ``00000007.npy``; the labels are in ``index.npy``, beside the archives.
``numpy.load("shard-000000.zip")["00000007"]`` reads an image: an .npz file is nothing else. The directory of a zip
archive comes last, and Python reads all of it to open the archive, 5 µs and 0.5 kB of memory a member; our index of
offsets saves that.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from helpers.loading.formats import packed_dataset, packing

_MEMBERS = 60_000  # beyond 65,535, and beyond 2 GiB, the archive would need extensions that not all programs know


def pack(images: Iterable, labels: Iterable, path: str | Path) -> None:
    """Pack images into zip archives of some 1 GiB, ``shard-000000.zip`` and so on; all else as `packing.pack` says."""
    packing.pack_shards("zip", _Shard, _MEMBERS, images, labels, path)


class PackedDataset(packed_dataset.ShardedDataset):
    __doc__ = packed_dataset.ShardedDataset.__doc__
    format = "zip"


class _Shard:
    def __init__(self, file: BinaryIO):
        self._file, self._zip = file, zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)

    def add(self, number: int, image: np.ndarray, label: int) -> int:
        member = zipfile.ZipInfo(f"{number:08d}.npy")  # of 1980, so that the same images give the same archive
        data = packing.npy_bytes(image)
        self._zip.writestr(member, data)
        return member.header_offset + len(member.FileHeader()) + len(data)

    def close(self) -> None:
        self._zip.close()
