"""Packed formats: many small files become one, or a few. Each module has ``pack`` and ``PackedDataset``.

=============  ==================================================================  =============================
in `FORMATS`   what it is                                                          random reads
=============  ==================================================================  =============================
``npy``        NumPy's file, mapped into memory                                    a batch is one gather
``lmdb``       a key-value store in one mapped file: pixels or PNG                 a search in a tree each
``hdf5``       named arrays in one file                                            a call of its library each
``tar``        shards for WebDataset, to stream                                    by an index of offsets beside it
``zip``        archives that any system opens, not compressed                      by an index of offsets beside it
``tfrecord``   records for TensorFlow and DALI, to stream                          by an index of offsets beside it
``parquet``    a table, for all data tools                                         a row group of images each
=============  ==================================================================  =============================

Notebook 06 lists the formats of other libraries, and which of these each resembles.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from helpers.loading.formats.packed_dataset import Batch, ByItem, DamagedPack, PackedDataset, ShuffledBatches

__all__ = ["FORMATS", "Batch", "ByItem", "DamagedPack", "PackedDataset", "ShuffledBatches"]

_MODULES = {name: name for name in ("npy", "lmdb", "hdf5", "tar", "tfrecord", "parquet")}
_MODULES["zip"] = "zipped"  # a module with the name of the function zip would hide it


class _Formats(Mapping):
    """Imports a module when it is asked for: a spawned worker needs one, and all take a quarter of a second."""

    def __getitem__(self, name: str) -> ModuleType:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}")

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


FORMATS: Mapping[str, ModuleType] = _Formats()
"""The module of each format, by its name."""
