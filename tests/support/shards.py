"""What the tests of shards share: samples, stores that can be watched, and readers in one process or in many."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from obstore.store import MemoryStore

from helpers.loading import shards
from helpers.loading.shards import stream as streaming

END = object()


def samples(count: int, size: int = 300) -> list[dict[str, bytes]]:
    """Samples of different sizes, each with two files."""
    return [
        {"cls": str(number % 10).encode(), "seg.png": bytes([number % 251]) * (size + 37 * (number % 5))}
        for number in range(count)
    ]


def number_of(sample: dict[str, Any]) -> int:
    """Decode a sample as its number, and see that its content is its own."""
    number = int(sample["__key__"])
    assert bytes(sample["cls"]) == str(number % 10).encode()
    assert sample["seg.png"][0] == number % 251
    return number


@dataclass
class InMemory:
    """A bucket in this process; all who connect have the same store."""

    store: Any = field(default_factory=MemoryStore)

    def connect(self) -> Any:
        return self.store

    def __str__(self) -> str:
        return "memory"


class Watched:
    """A store that counts requests, and lets `before` happen, in the thread that asks, before each is answered."""

    def __init__(self, store: Any, before: Callable[[], None] = lambda: None):
        self.store, self.before = store, before
        self.requests, self.now, self.most = 0, 0, 0
        self._lock = threading.Lock()

    def get_range(self, path: str, **where: int) -> Any:
        with self._lock:
            self.requests += 1
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            self.before()
            return self.store.get_range(path, **where)
        finally:
            with self._lock:
                self.now -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def packed(count: int, *, piece_bytes: float = 8_000, shard_bytes: float = 40_000, bucket: Any = None, **options: Any):
    """Pack samples into a bucket; return it and the index."""
    bucket = bucket or InMemory()
    index = shards.pack(samples(count), bucket.connect(), piece_bytes=piece_bytes, shard_bytes=shard_bytes, **options)
    return bucket, index


def streams(bucket: Any, index: shards.Index, batch: int, world: int = 1, **options: Any) -> list[shards.ShardStream]:
    """The stream of each rank, with batches of numbers."""
    settings = {"threads": 2, "lanes": 4, "shuffle": 20} | options
    return [
        shards.ShardStream(bucket, index, batch, number_of, rank=rank, world=world, **settings) for rank in range(world)
    ]


def as_workers(stream: shards.ShardStream, workers: int) -> Iterator[list[int]]:
    """Give batches as a DataLoader with so many workers does, in this process; 0 is without workers."""
    readers = []
    for number in range(workers):
        info = SimpleNamespace(id=number, num_workers=workers)
        with mock.patch.object(streaming, "get_worker_info", lambda info=info: info):
            reader = iter(stream)
            readers.append(itertools.chain([next(reader, END)], reader))  # it asks who it is when it begins
    turns = itertools.zip_longest(*readers, fillvalue=END) if workers else ((batch,) for batch in stream)
    for turn in turns:
        yield from (batch.tolist() for batch in turn if batch is not END)


def numbers(ranks: list[shards.ShardStream], workers: int = 0, steps: int | None = None) -> list[int]:
    """The samples of all ranks, step by step; all ranks must have equally many steps."""
    batches = [as_workers(stream, workers) for stream in ranks]
    turns = itertools.islice(zip(*batches, strict=True), steps)
    taken = [number for turn in turns for batch in turn for number in batch]
    for each in batches:
        each.close()
    return taken
