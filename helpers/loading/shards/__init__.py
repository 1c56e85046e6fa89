"""Shards in an object store: written as tar files, read by ranges, each sample once an epoch, resumed anywhere.

A **shard** is an ordinary tar file with WebDataset's names: its members ``000000007.png`` and ``000000007.cls`` are one
sample. A **piece** is a range of a shard that one request reads: some whole samples, with their checksum.
The **index** lists all pieces. The **order** of an epoch's samples depends on the seed, the epoch, the index and
the settings of `order`. Ranks and workers only divide it, so a run can stop after any batch and go on with other
numbers of them.
"""

from helpers.loading.shards.index import Index, ShardsError
from helpers.loading.shards.ordering import batches, order
from helpers.loading.shards.sharding import join, pack, read_samples
from helpers.loading.shards.stream import ShardStream
