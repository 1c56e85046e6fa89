"""LMDB: a key-value store in one file, mapped into memory. Of every kind of bytes; here also of PNG.

The key is the number of an image, as ``struct`` packs ``">Q"``. The value is its pixels, or a PNG of them.

LMDB trusts its file: a changed byte in the tree makes it read anywhere, and the process dies. So the pages of the tree
are compared with their checksum when the file is opened, before LMDB sees it. These are few, 0.7% of CIFAR-10:
values of more than about 2,000 bytes have pages of their own, and are checked when they are read. Smaller values are
kept in the tree itself, so that a pack of small images is read as a whole when it is opened.
"""

from __future__ import annotations

import io
import struct
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import lmdb
import numpy as np
from PIL import Image

from helpers.loading.formats import packed_dataset, packing

_FILE = "data.mdb"
_KEY = struct.Struct(">Q")
_PNG_CHANNELS = (1, 2, 3, 4)  # grey, grey with alpha, RGB, RGB with alpha

_COMMIT_BYTES = 16 * 2**20  # LMDB keeps in memory what is not committed, and so do we, in case the map is full
_WAITING_BYTES = 250  # of a key and a value that wait, besides the value's content
_FIRST_MAP_BYTES = 64 * 2**20

# Header of a page, in LMDB 0.9's mdb.c (struct MDB_page): its number, padding, flags, and how many pages it spans,
# which counts where the flag of an overflow page is set
_PAGE = struct.Struct("<QHHI")
_OVERFLOW = 0x04


def pack(images: Iterable, labels: Iterable, path: str | Path, *, codec: str = "raw") -> None:
    """Pack images into an LMDB file, of which the map grows; all else as `packing.pack` says.

    Parameters
    ----------
    codec : {"raw", "png"}
        What to store: the pixels; or a PNG of them, for images of 1 to 4 channels.

    Raises
    ------
    ValueError
        If PNG has no such number of channels, or there is no such codec.
    """
    if codec not in ("raw", "png"):
        raise ValueError(f"Expected the codec 'raw' or 'png', found {codec!r}.")
    packing.pack("lmdb", partial(_write, codec), images, labels, path, codec=codec)


def _write(codec: str, folder: Path, contents: packing.Contents) -> dict[str, list]:
    # No lock: nobody else knows the file. No sync: what a power cut takes, the checksums show.
    store = lmdb.open(str(folder / _FILE), _FIRST_MAP_BYTES, subdir=False, lock=False, sync=False, metasync=False)
    with store:
        waiting, waiting_bytes = [], 0
        for number, (image, _) in enumerate(contents):
            stored = image.tobytes() if codec == "raw" else _to_png(image)
            contents.put(number, stored=stored)
            waiting.append((_KEY.pack(number), stored))
            waiting_bytes += len(stored) + _WAITING_BYTES
            if waiting_bytes >= _COMMIT_BYTES:
                _commit(store, waiting)
                waiting, waiting_bytes = [], 0
        _commit(store, waiting)
        page_bytes = store.stat()["psize"]
    return {_FILE: _tree_ranges(folder / _FILE, page_bytes)}


def _commit(store: lmdb.Environment, values: list[tuple[bytes, bytes]]) -> None:
    """Write values in the order of their keys to a map that doubles when it is full."""
    while True:
        try:
            with store.begin(write=True) as transaction:
                transaction.cursor().putmulti(values, append=True)
            return
        except lmdb.MapFullError:
            store.set_mapsize(2 * store.info()["map_size"])


def _tree_ranges(path: Path, page_bytes: int) -> list[list[int]]:
    """Where in the file all pages lie but those of large values."""
    data = packed_dataset.mapped(path)
    ranges, start = [], 0
    while start < len(data):
        _, _, flags, span = _PAGE.unpack_from(data, start)
        stop = start + (span if flags & _OVERFLOW else 1) * page_bytes
        if not flags & _OVERFLOW:
            if ranges and ranges[-1][1] == start:
                ranges[-1][1] = stop
            else:
                ranges.append([start, stop])
        start = stop
    return ranges


def _to_png(image: np.ndarray) -> bytes:
    if len(image) not in _PNG_CHANNELS:
        raise ValueError(f"PNG has images of 1 to 4 channels, found {len(image)}. Choose another codec.")
    pixels, file = image.transpose(1, 2, 0), io.BytesIO()
    Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels).save(file, "PNG")
    return file.getvalue()


class PackedDataset(packed_dataset.PackedDataset):
    __doc__ = packed_dataset.PackedDataset.__doc__
    format = "lmdb"

    def _open(self):
        file = _opened_file(Path(self.path, _FILE))
        return file.environment.begin(buffers=True), file

    def _read(self, opened, file, start, size):
        return opened[0].get(_KEY.pack(start))

    @property
    def _encoded(self):
        return self._manifest["codec"] == "png"

    def _image(self, stored, shape):
        if not self._encoded:
            return stored.reshape(shape)
        channels, height, width = shape
        pixels = np.asarray(Image.open(io.BytesIO(stored)))
        return pixels.reshape(height, width, channels).transpose(2, 0, 1)

    def _data_file(self, file):
        return _FILE


class _File:
    """The file, opened in this process."""

    def __init__(self, path: Path):
        # With readahead, LMDB's default: random reads of a file that was not in memory got 36,000 images/s, since soon
        # all of it was, and 16,000 without. Of a file larger than memory, most of what is read ahead is lost again.
        self.environment = lmdb.open(str(path), subdir=False, readonly=True, create=False, lock=False)


# LMDB refuses to open a file twice in a process, so its datasets share it. When the last one closes it, it is gone.
_files: weakref.WeakValueDictionary[tuple[int, int], _File] = weakref.WeakValueDictionary()


def _opened_file(path: Path) -> _File:
    status = path.stat()
    key = status.st_dev, status.st_ino
    file = _files.get(key)
    if file is None:
        file = _files[key] = _File(path)
    return file
