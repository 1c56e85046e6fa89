"""The dataset: batches from an object store, in an order that neither ranks nor workers change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any

import google_crc32c
import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from helpers.loading.shards import ordering
from helpers.loading.shards.asking import PATIENCE, connect
from helpers.loading.shards.cache import Cache
from helpers.loading.shards.fetching import fetch, read_samples
from helpers.loading.shards.index import Index

_ORDER = ("seed", "lanes", "shuffle", "chunk")


class OtherShards(ValueError):
    """A state to go on from is of other shards."""


class ShardStream(IterableDataset):
    """Batches of the samples of shards; use it with ``DataLoader(stream, batch_size=None, num_workers=…)``.

    The loader gives the batches of this rank in the order that `batches` says, with any number of workers. Range
    requests run ahead in threads, which wait without holding the GIL: workers are worth their start for decoding only.
    A loop may be left at any time: no further request is sent.

    Parameters
    ----------
    bucket : stores.Bucket or stores.Folder
        Where the shards are. Each process connects for itself.
    index : Index
    batch : int
        Samples of a batch of one rank.
    decode : callable
        Takes a sample, a dict of bytes by extension, with its ``__key__``; what it returns is collated to
        batches. To use spawned workers, it must be a function of a module.
    prefix : str
        Folder of the shards, with a slash at its end.
    seed : int
    rank, world : int
        Those of `torch.distributed`, where it is used.
    remainder : {"share", "drop", "repeat"}
        See `batches`.
    lanes, shuffle, chunk : int
        See `order`. They do not depend on the batch or on the ranks: whoever takes the defaults has the same order.
    threads : int
        Requests at a time, in each worker.
    ahead : int, optional
        Pieces that a worker has asked for, or holds, before it needs them; twice the threads by default.
    cache : Cache, optional
        Keeps pieces on this machine's disk.
    collate : callable
        Makes a batch of a list of decoded samples.
    patience : float
        Seconds that a store may fail until the error is raised.

    Raises
    ------
    ValueError
        If a number is out of range.
    StoreFailed, StoreRefused, MissingShard, DamagedShard, ForkedAfterUse
        While it is iterated.
    """

    def __init__(
        self,
        bucket: Any,
        index: Index,
        batch: int,
        decode: Callable[[Mapping[str, Any]], Any],
        *,
        prefix: str = "",
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        remainder: str = "share",
        lanes: int = 32,
        shuffle: int = 8_000,
        chunk: int = 32,
        threads: int = 8,
        ahead: int | None = None,
        cache: Cache | None = None,
        collate: Callable[[list], Any] = default_collate,
        patience: float = PATIENCE,
    ):
        if threads < 1 or (ahead is not None and ahead < 1):
            raise ValueError(f"Expected a thread and a piece ahead or more, found {threads} threads and {ahead} ahead.")
        self.bucket, self.index, self.batch, self.decode, self.prefix = bucket, index, batch, decode, prefix
        self.rank, self.world, self.remainder = rank, world, remainder
        self.threads, self.ahead, self.cache = threads, 2 * threads if ahead is None else ahead, cache
        self.collate, self.patience = collate, patience
        # In memory that is shared with the workers: those that persist see what set_epoch and load_state change.
        self._now = torch.tensor([0, 0, seed, lanes, shuffle, chunk]).share_memory_()
        self._batches()  # refuses what cannot be, here and not in a worker
        ordering.order(index.samples[:0], epoch=0, **self.order)

    @property
    def epoch(self) -> int:
        return int(self._now[0])

    @property
    def start(self) -> int:
        """The position at which the epoch begins, or goes on."""
        return int(self._now[1])

    @property
    def order(self) -> dict[str, int]:
        """What `order` takes, besides the epoch."""
        return dict(zip(_ORDER, self._now[2:].tolist(), strict=True))

    def __len__(self) -> int:
        """Batches of this rank from where the epoch goes on."""
        return len(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its start; call it on all ranks before the loader is iterated. All workers see it."""
        self._now[:2] = torch.tensor([epoch, 0])

    def state(self, steps: int) -> dict[str, Any]:
        """Return what to keep with the weights: where all ranks are after `steps` batches each of this iteration.

        The training loop counts the steps. The loader cannot: its workers are ahead of the loop.

        Raises
        ------
        ValueError
            If there are not so many batches.
        """
        ends = [self.start, *(batch.stop for batch in self._batches(self.world - 1))]  # the last rank's end a step
        if not 0 <= steps < len(ends):
            raise ValueError(f"Expected 0 to {len(ends) - 1} steps, as many as there are batches, found {steps}.")
        done = min(ends[steps], len(self.index))
        return {"epoch": self.epoch, "done": done, "shards": self.index.fingerprint, **self.order}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the samples of a state, with any number of ranks and workers and any batch size.

        Raises
        ------
        OtherShards
            If the state is of other shards. The order of the samples is taken from the state.
        """
        if state["shards"] != self.index.fingerprint:
            raise OtherShards(
                f"Expected a state of these shards ({self.index.fingerprint}), found one of others "
                f"({state['shards']}): they were written anew, or the state is of another data set."
            )
        self._now[:] = torch.tensor([state["epoch"], state["done"], *(state[name] for name in _ORDER)])

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = self._batches()[worker.id :: worker.num_workers] if worker else self._batches()
        with closing(self._samples(mine)) as samples:
            for batch in mine:
                yield self.collate([self._decoded(sample) for sample in islice(samples, len(batch))])

    def _batches(self, rank: int | None = None) -> list[range]:
        rank = self.rank if rank is None else rank
        return ordering.batches(
            len(self.index), self.batch, rank=rank, world=self.world, start=self.start, remainder=self.remainder
        )

    def _decoded(self, sample: dict[str, Any]) -> Any:
        try:
            return self.decode(sample)
        except Exception as error:
            error.add_note(f"This happened in decode, with sample {sample['__key__']} of {self.bucket}/{self.prefix}.")
            raise

    def _samples(self, batches: list[range]) -> Iterator[dict[str, Any]]:
        """Give the samples of batches, each of which is freed with that; its piece was asked for long before."""
        if not batches:
            return
        order = ordering.order(self.index.samples, epoch=self.epoch, **self.order)
        times, places = np.divmod(np.concatenate([np.arange(each.start, each.stop) for each in batches]), len(order))
        numbers = order[places]
        pieces = np.searchsorted(self.index.first, numbers, side="right") - 1
        rows = numbers - self.index.first[pieces]
        pieces += times * len(self.index.pieces)  # what "repeat" takes again is read again, not kept for an epoch
        wanted, first_use, uses = np.unique(pieces, return_index=True, return_counts=True)
        to_ask = iter(wanted[np.argsort(first_use)].tolist())
        left = dict(zip(wanted.tolist(), uses.tolist(), strict=True))
        store, stop = connect(self.bucket), threading.Event()
        asked: dict[int, Future] = {}
        held: dict[int, list] = {}
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="shards")
        try:
            for piece, row in zip(pieces.data, rows.data, strict=True):  # .data: numbers of Python's, one by one
                if piece not in held:
                    for each in islice(to_ask, self.ahead - len(asked)):
                        asked[each] = pool.submit(self._piece, store, each % len(self.index.pieces), stop)
                    held[piece] = read_samples(asked.pop(piece).result())
                sample, held[piece][row] = held[piece][row], None
                left[piece] -= 1
                if not left[piece]:
                    del held[piece], left[piece]
                yield sample
        finally:  # the loop was left: requests on their way end by themselves, and no new one is sent
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _piece(self, store: Any, number: int, stop: threading.Event) -> bytes:
        piece = self.index.pieces[number]

        def download() -> bytes:
            size = self.index.shard_bytes[piece.shard]
            return fetch(store, self.prefix, piece, size, bucket=self.bucket, patience=self.patience, stop=stop)

        if self.cache is None:
            return download()
        name = f"{self.index.fingerprint}-{piece.shard}-{piece.start}"
        return self.cache.get(name, download, lambda content: google_crc32c.value(content) == piece.crc32c)
