"""Shards in an object store: written as tar files, read by ranges, each sample once an epoch, resumed anywhere.

A **shard** is an ordinary tar file, as WebDataset names its members: ``000000007.png`` and ``000000007.cls`` are one
sample. A **piece** is a range of a shard that is read by one request: some samples as a whole, with their checksum.
The **index** lists all pieces. The **order** of an epoch's samples depends on the seed, the epoch, the index and
the settings of `order`; ranks and workers only divide it among themselves, so a run can stop after any batch and go
on with others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from helpers.loading.shards.asking import ForkedAfterUse, MissingShard, StoreFailed, StoreRefused
from helpers.loading.shards.cache import Cache
from helpers.loading.shards.fetching import DamagedShard, read_samples
from helpers.loading.shards.index import Index, NoIndex, UnfinishedShards
from helpers.loading.shards.ordering import batches, order
from helpers.loading.shards.writing import join, pack

if TYPE_CHECKING:
    from helpers.loading.shards.stream import OtherShards, ShardStream

__all__ = [
    "Cache",
    "DamagedShard",
    "ForkedAfterUse",
    "Index",
    "MissingShard",
    "NoIndex",
    "OtherShards",
    "ShardStream",
    "StoreFailed",
    "StoreRefused",
    "UnfinishedShards",
    "batches",
    "join",
    "order",
    "pack",
    "read_samples",
]


def __getattr__(name: str) -> object:
    """Import what needs torch when it is first asked for: a task that packs does without, and starts in 0.3 s."""
    if name in ("OtherShards", "ShardStream"):
        from helpers.loading.shards import stream

        return getattr(stream, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
