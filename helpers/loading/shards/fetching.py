"""Getting a piece: checked, and named where it is not as it was written."""

from __future__ import annotations

import threading
from typing import Any

import google_crc32c
from obstore import exceptions

from helpers.loading.shards.asking import PATIENCE, MissingShard, ask
from helpers.loading.shards.index import Piece

_BLOCK = 512  # bytes; all in a tar file begins at a multiple, as POSIX.1-1988 (ustar) says
_AGAIN = "Write it again, or load the index of what is there now."


class DamagedShard(ValueError):
    """A shard is not as it was when its index was written."""


def fetch(
    store: Any, prefix: str, piece: Piece, size: int, *,
    bucket: Any = "", patience: float = PATIENCE, stop: threading.Event | None = None,
) -> bytes:  # fmt: skip
    """Return the bytes of a piece, as they were written; one that arrives damaged is asked for once more.

    Parameters
    ----------
    store : obstore store, or anything with its `get_range` and `get`
    prefix : str
    piece : Piece
    size : int
        Bytes of its whole shard.
    bucket : stores.Bucket or stores.Folder
        For messages.
    patience, stop
        See `ask`.

    Raises
    ------
    StoreFailed, StoreRefused, MissingShard, DamagedShard
    """
    path = f"{prefix}{piece.shard}"
    name = f"{bucket}/{path}" if bucket else path
    try:
        for _ in range(2):
            content = ask(lambda: _range(store, path, piece), name, patience=patience, stop=stop)
            found = google_crc32c.value(content)
            if found == piece.crc32c:
                return content
        there = ask(lambda: store.get(path).meta["size"], name, patience=patience, stop=stop)
    except FileNotFoundError as error:
        raise MissingShard(f"{name}: in the index, but not in the store. {_AGAIN}") from error
    if there < piece.end:
        what = f"expected {size:,} bytes, found {there:,}: it was cut off after its index was written"
    elif there != size:
        what = f"expected {size:,} bytes, found {there:,}: another shard has replaced it since its index was written"
    else:
        what = (
            f"expected the CRC32C {piece.crc32c:08x} of bytes {piece.start:,} to {piece.end:,}, found {found:08x}: "
            "bytes of it are damaged, or a shard of the same size has replaced it"
        )
    raise DamagedShard(f"{name}: {what}. {_AGAIN}")


def read_samples(piece: bytes) -> list[dict[str, Any]]:
    """Return the samples of a piece: members of a tar file that follow each other and have the same stem.

    As in WebDataset, a member's extension is what follows the first dot of its name: ``seg.png``.

    Parameters
    ----------
    piece : bytes
        Whole members of a tar file, with names of less than 100 bytes, as `pack` and WebDataset write them.

    Returns
    -------
    list of dict
        A sample's files by their extensions, each as bytes, and its stem, a str, as ``__key__``.

    Raises
    ------
    ValueError
        If this is no such file.
    """
    # Files are copied: views of the piece take 6 µs a sample more, in which the garbage collector looks at them.
    samples: list[dict[str, Any]] = []
    position, stem = 0, None
    while position < len(piece) and piece[position]:  # a name of no letters: the end of the tar file
        name = piece[position : piece.index(0, position)].decode()
        folder, slash, base = name.rpartition("/")
        key, _, extension = base.partition(".")
        key = folder + slash + key
        if key != stem:
            samples.append({"__key__": key})
            stem = key
        size = int(piece[position + 124 : position + 135], 8)
        position += _BLOCK
        samples[-1][extension] = piece[position : position + size]
        position += -(-size // _BLOCK) * _BLOCK
    return samples


def _range(store: Any, path: str, piece: Piece) -> bytes:
    try:
        return bytes(store.get_range(path, start=piece.start, end=piece.end))
    except exceptions.GenericError as error:
        if "416 Range Not Satisfiable" in str(error) or "StartTooLarge" in str(error):  # a server's words, a folder's
            return b""  # the shard ends before the range begins
        raise
