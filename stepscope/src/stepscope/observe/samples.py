"""Which samples a DataLoader yields in an epoch: to compare an iterable dataset with other numbers of workers."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from stepscope import thresholds
from stepscope.timing.loaders import batch_size


class Samples:
    """Counts the samples of each DataLoader's first epoch.

    Attributes
    ----------
    ended : set of int
        The loaders whose first epoch has ended, by `id`.
    """

    def __init__(self) -> None:
        self.counts: dict[int, Counter[bytes]] = {}  # of each sample's digest, by the `id` of the loader
        self.ended = set[int]()

    def add(self, loader: object, batch: Any) -> None:
        """Note the samples of a batch, unless the first epoch has ended."""
        if id(loader) not in self.ended:
            counts = self.counts.setdefault(id(loader), Counter())
            counts.update(_digests(batch))
            if counts.total() > thresholds.CHECKED_SAMPLES:
                self.ended.add(id(loader))

    def end(self, loader: object) -> None:
        """Note that an epoch has ended."""
        self.ended.add(id(loader))

    def report(self, loader: object) -> dict[str, Any]:
        """Return the number of samples of an epoch, and the digest of all of them.

        The digest does not depend on their order; it is None if the epoch is too long to be checked.
        """
        counts = self.counts.get(id(loader), Counter())
        rows = sorted(digest + str(count).encode() for digest, count in counts.items())
        whole = counts.total() <= thresholds.CHECKED_SAMPLES
        digest = hashlib.sha256(b"".join(rows)).hexdigest() if whole else None
        return {"samples": counts.total(), "digest": digest}


def _digests(batch: Any) -> Iterator[bytes]:
    """Yield a digest of each sample in a batch."""
    size = batch_size(batch)
    for number in range(size):
        sample = hashlib.sha256()
        for part in _parts(batch, number, size):
            sample.update(part)
        yield sample.digest()


def _parts(batch: Any, number: int, size: int) -> Iterator[bytes]:
    """Yield the bytes of one sample in a batch of `size` samples, which may be nested."""
    if isinstance(batch, torch.Tensor):
        part = batch[number] if batch.ndim and len(batch) == size else batch
        yield part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield repr(key).encode()
            yield from _parts(value, number, size)
    elif isinstance(batch, (list, tuple)):
        plain = not any(isinstance(each, (torch.Tensor, Mapping, list, tuple)) for each in batch)
        for each in batch[number : number + 1] if plain and len(batch) == size else batch:  # such as names of files
            yield from _parts(each, number, size)
    else:
        yield repr(batch).encode()
