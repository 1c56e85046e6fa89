"""The dataset: batches from an object store, in an order that does not depend on ranks or workers."""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any

import google_crc32c
import numpy as np
import torch
from obstore import exceptions
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from helpers.data import buckets
from helpers.loading.shards import ordering
from helpers.loading.shards.index import Index, Piece, ShardsError
from helpers.loading.shards.sharding import read_samples
from stepscope.base.wording import counted

_ORDER = ("seed", "lanes", "shuffle")
_SAID_AFTER = 10.0  # seconds without an answer until a warning says so


class ShardStream(IterableDataset):
    """Batches of the samples of shards; use it with ``DataLoader(stream, batch_size=None, num_workers=…)``.

    The loader yields this rank's batches in the order of `batches`, with any number of workers. Range requests run
    ahead in threads, which wait without holding the GIL, so workers pay off for decoding only.
    A loop may end at any time: no further request is sent.

    Parameters
    ----------
    bucket : buckets.Bucket or buckets.Folder
        Where the shards are. Each process connects for itself.
    index : Index
    batch : int
        Samples of a batch of one rank.
    decode : callable
        Takes a sample, a dict of bytes by extension, with its ``__key__``; its results are collated to
        batches, as a `DataLoader` does by default. For spawned workers, it must be a function of a module.
    prefix : str
        Folder of the shards, with a slash at its end.
    seed : int
    rank, world : int
        Those of `torch.distributed`, where it is used.
    lanes, shuffle : int
        See `order`. They do not depend on the batch or on the ranks: the defaults always give the same order.
    threads : int
        Requests at a time, in each worker, which asks for twice as many pieces ahead.

    Raises
    ------
    StoreError, ShardsError
        During iteration: if the store does not answer or refuses (see `buckets.request`), if a shard is missing, or
        does not match its index. While a store is away, the stream waits, with a warning after 10 s.
    RuntimeError
        During iteration in a worker that was forked from a process that had used a store.
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
        lanes: int = 32,
        shuffle: int = 8_000,
        threads: int = 8,
    ):
        self.bucket, self.index, self.batch, self.decode, self.prefix = bucket, index, batch, decode, prefix
        self.rank, self.world, self.threads = rank, world, threads
        # Epoch, first position, order; in memory shared with the workers: persistent ones see what set_epoch and
        # load_state change.
        self._now = torch.tensor([0, 0, seed, lanes, shuffle]).share_memory_()
        self._say_what_is_left_out()
        ordering.order(index.samples[:0], epoch=0, **self.order)  # refuses impossible settings here, not in a worker

    @property
    def epoch(self) -> int:
        return int(self._now[0])

    @property
    def order(self) -> dict[str, int]:
        """What `order` takes, besides the epoch."""
        return dict(zip(_ORDER, self._now[2:].tolist(), strict=True))

    def __len__(self) -> int:
        """Batches of this rank from where the epoch begins or resumes."""
        return len(self._batches(self.rank))

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch at its start; call it on all ranks before the loader is iterated. All workers see it."""
        self._now[:2] = torch.tensor([epoch, 0])

    def state(self, steps: int) -> dict[str, Any]:
        """Return what to save with the weights: the position after `steps` batches of each rank in this iteration.

        The training loop counts the steps. The loader cannot: its workers are ahead of the loop.
        """
        batches = self._batches(self.world - 1)  # the last rank's end a step
        ends = [int(self._now[1]), *(batch.stop for batch in batches)]
        if not 0 <= steps < len(ends):
            raise ValueError(f"Expected 0 to {len(ends) - 1} steps, as many as there are batches, found {steps}.")
        return {"epoch": self.epoch, "done": ends[steps], "shards": self.index.fingerprint, **self.order}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on after the samples of a state, in its order, with any number of ranks and workers and any batch size.

        If fewer samples than ranks remain, they are left out, with a warning: set_epoch begins the next epoch.
        Raises ShardsError if the state is of other shards, or no state.
        """
        numbers = [state.get(name) for name in ("epoch", "done", *_ORDER)]
        whole = all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers)
        if not whole or not state["lanes"] or "shards" not in state:
            raise ShardsError(f"Expected a state of ShardStream.state, found {dict(state)}.")
        if state["shards"] != self.index.fingerprint:
            raise ShardsError(
                f"Expected a state of these shards ({self.index.fingerprint}), found one of others "
                f"({state['shards']}): the shards were written anew, or the state is of another data set."
            )
        if state["done"] > len(self.index):
            raise ShardsError(f"Expected at most {len(self.index):,} samples done, found {state['done']:,}.")
        self._now[:] = torch.tensor(numbers)
        self._say_what_is_left_out()

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        mine = self._batches(self.rank)
        if worker:
            mine = mine[worker.id :: worker.num_workers]
        with closing(self._samples(mine)) as samples:
            for batch in mine:
                yield default_collate([self._decoded(sample) for sample in islice(samples, len(batch))])

    def _batches(self, rank: int) -> list[range]:
        return ordering.batches(len(self.index), self.batch, rank=rank, world=self.world, start=int(self._now[1]))

    def _say_what_is_left_out(self) -> None:
        left = len(self.index) - int(self._now[1])
        if not self._batches(self.rank) and left:
            warnings.warn(
                f"{counted(left, 'sample')} of epoch {self.epoch} left out: there are {self.world} ranks, and each "
                "needs one or more in each step. Fewer ranks could read them.",
                stacklevel=3,
            )

    def _decoded(self, sample: dict[str, Any]) -> Any:
        try:
            return self.decode(sample)
        except Exception as error:
            error.add_note(f"This happened in decode, with sample {sample['__key__']} of {self.bucket}/{self.prefix}.")
            raise

    def _samples(self, batches: list[range]) -> Generator[dict[str, Any], None, None]:
        """Yield the samples of batches and free each; its piece was requested long before."""
        if not batches:
            return
        order = ordering.order(self.index.samples, epoch=self.epoch, **self.order)
        numbers = order[np.concatenate([np.arange(batch.start, batch.stop) for batch in batches])]
        pieces = np.searchsorted(self.index.first, numbers, side="right") - 1
        rows = numbers - self.index.first[pieces]
        needed, first_use, uses = np.unique(pieces, return_index=True, return_counts=True)
        to_ask = iter(needed[np.argsort(first_use)].tolist())
        left = dict(zip(needed.tolist(), uses.tolist(), strict=True))
        store = self.bucket.connect()
        asked: dict[int, Future] = {}
        samples: dict[int, list] = {}
        pool = ThreadPoolExecutor(self.threads, thread_name_prefix="shards")
        try:
            for piece, row in zip(pieces.data, rows.data, strict=True):  # .data: Python numbers, one by one
                if piece not in samples:
                    for number in islice(to_ask, 2 * self.threads - len(asked)):
                        asked[number] = pool.submit(self._download, store, self.index.pieces[number])
                    samples[piece] = read_samples(self._answer(asked.pop(piece), self.index.pieces[piece]))
                sample, samples[piece][row] = samples[piece][row], None
                left[piece] -= 1
                if not left[piece]:
                    del samples[piece], left[piece]
                yield sample
        finally:  # the loop has ended: requests under way end by themselves, and no new one is sent
            pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, asked: Future, piece: Piece) -> bytes:
        try:
            return asked.result(_SAID_AFTER)
        except TimeoutError:
            warnings.warn(
                f"{self._name(piece)}: no answer from the store for {_SAID_AFTER:g} s. It is asked again for up to "
                f"{buckets.PATIENCE:g} s.",
                stacklevel=2,
            )
            return asked.result()

    def _name(self, piece: Piece) -> str:
        return f"{self.bucket}/{self.prefix}{piece.shard}"

    def _download(self, store: Any, piece: Piece) -> bytes:
        """Return the bytes of a piece as they were written; a damaged piece is requested once more."""
        path, name, size = f"{self.prefix}{piece.shard}", self._name(piece), self.index.shard_bytes[piece.shard]
        again = "Write it again, or load the index of what is there now."
        try:
            with buckets.request(name):
                for _ in range(2):
                    content = _range(store, path, piece)
                    crc32c = google_crc32c.value(content)
                    if crc32c == piece.crc32c:
                        return content
                there = store.get(path).meta["size"]
        except FileNotFoundError as error:
            raise ShardsError(f"{name}: in the index, but not in the store. {again}") from error
        raise ShardsError(
            f"{name}: expected {size:,} bytes, and {piece.crc32c:08x} as the CRC32C of bytes {piece.start:,} to "
            f"{piece.end:,}; found {there:,} bytes, and {crc32c:08x}. The shard was damaged, cut off or replaced after "
            f"its index was written. {again}"
        )


def _range(store: Any, path: str, piece: Piece) -> bytes:
    try:
        return bytes(store.get_range(path, start=piece.start, end=piece.end))
    except exceptions.GenericError as error:
        if "416 Range Not Satisfiable" in str(error) or "StartTooLarge" in str(error):  # a server's words, a folder's
            return b""  # the shard ends before the range begins
        raise
