"""Packed formats: many small files become one, or a few. Each module has ``pack`` and ``PackedDataset``.

=============  ==================================================================  =============================
in `FORMATS`   what it is                                                          random reads
=============  ==================================================================  =============================
``npy``        NumPy's file, mapped into memory                                    a batch is one gather
``lmdb``       a key-value store in one mapped file: pixels, PNG or LZ4            a search in a tree each
``hdf5``       named arrays in one file                                            a call of its library each
``tar``        shards for WebDataset, to stream                                    by an index of offsets beside it
``zip``        archives that any system opens, not compressed                      by an index of offsets beside it
``tfrecord``   records for TensorFlow and DALI, to stream                          by an index of offsets beside it
``parquet``    a table, for all data tools                                         a row group of images each
=============  ==================================================================  =============================

What else you will meet, with its releases on PyPI as of November 2026:

==================  ==================================================================  ================  =========
format              what it is for                                                      releases          resembles
==================  ==================================================================  ================  =========
Arrow IPC, Feather  tables mapped into memory; Hugging Face ``datasets`` keeps them     regular           npy
Beton               FFCV's one file, read by compiled code that augments as well        none since 2023   npy
Lance               tables in columns, with versions, made for random reads             regular           parquet
Petastorm           Parquet for training, from Spark, by Uber                           one since 2023    parquet
Zarr                arrays in chunks, each a file or an object in a store               regular           hdf5
MDS                 shards of MosaicML's ``streaming``, from object stores to a cache   regular           tar
ArrayRecord         Google's records with an index, for Grain                           regular           tfrecord
RecordIO            MXNet's records, with an index beside them                          retired in 2023   tfrecord
==================  ==================================================================  ================  =========
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType

from helpers.loading.formats.reading import Batch, ByItem, DamagedPack, PackedDataset, WrongFormat
from helpers.loading.formats.sampling import ShuffledBatches
from helpers.loading.formats.writing import PackExists, UnusableSamples

__all__ = [
    "FORMATS",
    "Batch",
    "ByItem",
    "DamagedPack",
    "PackExists",
    "PackedDataset",
    "ShuffledBatches",
    "UnusableSamples",
    "WrongFormat",
]

_MODULES = {
    "npy": "npy",
    "lmdb": "lmdb",
    "hdf5": "hdf5",
    "tar": "tar",
    "zip": "zipped",  # a module with the name of the function zip would hide it
    "tfrecord": "tfrecord",
    "parquet": "parquet",
}


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


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES.values():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
