"""Packed formats: many small files become one, or a few.

=============  ==================================================================  =============================
in `FORMATS`   what it is                                                          random reads
=============  ==================================================================  =============================
``npy``        NumPy's file, mapped into memory                                    a batch is one gather
``lmdb``       a key-value store in one mapped file: pixels or PNG                 a search in a tree each
``hdf5``       named arrays in one file                                            a call of its library each
``tar``        shards for WebDataset, to stream                                    by an index of offsets beside it
``parquet``    a table, for all data tools                                         a row group of images each
=============  ==================================================================  =============================

Notebook 06 lists the formats of other libraries, and which of these each resembles.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from helpers.loading.formats import packing
from helpers.loading.formats.packed_dataset import Batch, ByItem, DamagedPack, PackedDataset, ShuffledBatches


@dataclass(frozen=True)
class Format:
    """A packed format: `pack` writes, `PackedDataset` reads.

    Its module is imported at first use: a spawned worker needs only one, and all take a quarter of a second.
    """

    module: str
    class_name: str

    @property
    def PackedDataset(self) -> type[PackedDataset]:
        """The format's subclass of `packed_dataset.PackedDataset`."""
        return getattr(importlib.import_module(f"{__name__}.{self.module}"), self.class_name)

    def pack(self, images: Iterable, labels: Iterable, path: str | Path, **options: object) -> None:
        """Pack images into the folder `path`, as `packing.pack` says; LMDB has the option ``codec="png"``."""
        packing.pack(self.PackedDataset, images, labels, path, **options)


FORMATS = {
    "npy": Format("mapped", "Npy"),
    "lmdb": Format("lmdb", "Lmdb"),
    "hdf5": Format("hdf5", "Hdf5"),
    "tar": Format("mapped", "Tar"),
    "parquet": Format("parquet", "Parquet"),
}
