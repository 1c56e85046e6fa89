"""The index of a folder of shards: which pieces there are, where, and how many samples each holds."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import orjson

from helpers.data import buckets

NAME = "index.json"
VERSION = 2
END = 1_024  # bytes of zeros after a shard's last piece, the end of a tar file


class ShardsError(ValueError):
    """The shards are not as expected: without an index, unfinished, missing, damaged, or not those of a state."""


class Piece(NamedTuple):
    """A range of a shard that holds some whole samples, and that one request reads.

    Its bytes are those from `start` up to `end`, without `end`; `crc32c` is their CRC32C (Castagnoli).
    """

    shard: str
    start: int
    end: int
    samples: int
    crc32c: int


@dataclass(frozen=True)
class Index:
    """All pieces, in the order in which the samples were written."""

    pieces: tuple[Piece, ...]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all pieces: indexes with the same one hold the same samples."""
        return hashlib.sha256(orjson.dumps(self._rows)).hexdigest()[:16]

    @property
    def _rows(self) -> list[list]:
        return [list(piece) for piece in self.pieces]

    @cached_property
    def samples(self) -> np.ndarray:
        """How many samples each piece has: int64, shape (pieces,)."""
        return np.array([piece.samples for piece in self.pieces], np.int64)

    @cached_property
    def first(self) -> np.ndarray:
        """The number of each piece's first sample: int64, shape (pieces,)."""
        return np.cumsum(self.samples) - self.samples

    @cached_property
    def shard_bytes(self) -> dict[str, int]:
        """The bytes of each shard, by its name."""
        return {piece.shard: piece.end + END for piece in self.pieces}

    def __len__(self) -> int:
        return int(self.samples.sum())

    def to_json(self) -> bytes:
        """Return the index as it is stored: a list of pieces, each a list, below the names of its fields."""
        head = {"version": VERSION, "fingerprint": self.fingerprint, "fields": Piece._fields}
        return orjson.dumps(head | {"pieces": self._rows})

    @classmethod
    def from_json(cls, content: bytes, name: str = NAME) -> Index:
        """Return the index that `to_json` wrote; ShardsError if it is no index, of another version, or damaged."""
        try:
            table = orjson.loads(content)
            if table["version"] != VERSION:
                raise ValueError(f"version {table['version']}")
            index = cls(tuple(Piece(*row) for row in table["pieces"]))
            if index.fingerprint != table["fingerprint"]:
                raise ValueError(f"pieces of the fingerprint {index.fingerprint} instead of {table['fingerprint']}")
            outside = [piece.shard for piece in index.pieces if not re.fullmatch(r"[\w-][\w.-]*", piece.shard)]
            if outside:
                raise ValueError(f"{outside[0]!r} as the name of a shard")
            return index
        except (ValueError, TypeError, KeyError) as error:
            raise ShardsError(
                f"{name}: expected an index of shards of version {VERSION}, found something else ({error}); pack anew."
            ) from error

    @classmethod
    def load(cls, store: Any, prefix: str = "", name: str = NAME) -> Index:
        """Read the index of the shards below `prefix`, a folder with a slash at its end.

        Raises ShardsError, if there is none of this version, or StoreError, as `buckets.request` says.
        """
        path = f"{prefix}{name}"
        try:
            with buckets.request(f"{path} in {store}"):
                content = bytes(store.get(path).bytes())
        except FileNotFoundError as error:
            raise ShardsError(
                f"{path}: expected an index of shards in {store}, found none. Write shards there with shards.pack, and "
                "then, if several tasks did so, call shards.join."
            ) from error
        return cls.from_json(content, path)
