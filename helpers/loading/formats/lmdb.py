"""LMDB: a key-value store in one file, mapped into memory. Values are any bytes; here also PNG.

The key is the number of an image, as ``struct`` packs ``">Q"``. The value is its pixels, or a PNG of them.

LMDB trusts its file: a changed byte in the tree makes it read anywhere, and the process dies. So the pages of the tree
are compared with their checksum when the file is opened, before LMDB sees it. These are few, 0.7% of CIFAR-10:
values of more than about 2,000 bytes have pages of their own, and are checked when they are read. Smaller values are
kept in the tree itself, so a pack of small images is read completely when it is opened.
"""

import io
import struct
import weakref
from pathlib import Path

import lmdb
import numpy as np
from PIL import Image

from helpers.loading.formats.packed_dataset import PackedDataset
from helpers.loading.formats.packing import Contents

_FILE = "data.mdb"
_KEY = struct.Struct(">Q")

_COMMITTED = 100  # values at once: LMDB keeps them in memory until then, and so do we, in case the map is full
_FIRST_MAP_BYTES = 64 * 2**20

# Header of a page, in LMDB 0.9's mdb.c (struct MDB_page): its number, padding, flags, and how many pages it spans, if
# the flag of an overflow page is set
_PAGE = struct.Struct("<QHHI")
_OVERFLOW = 0x04


class Lmdb(PackedDataset):
    """Reads and writes LMDB; the option ``codec`` is ``"raw"`` or, for images of 1 to 4 channels, ``"png"``."""

    format = "lmdb"

    @classmethod
    def write(cls, folder: Path, contents: Contents, codec: str = "raw") -> dict[str, list]:
        if codec not in ("raw", "png"):
            raise ValueError(f"Expected the codec 'raw' or 'png', found {codec!r}.")
        # No lock: nobody else knows the file. No sync: the checksums show losses by a power cut.
        store = lmdb.open(str(folder / _FILE), _FIRST_MAP_BYTES, subdir=False, lock=False, sync=False, metasync=False)
        with store:
            waiting: list[tuple[bytes, bytes]] = []
            for number, (image, _) in enumerate(contents):
                stored = image.tobytes() if codec == "raw" else _to_png(image)
                contents.put(number, stored=stored)
                waiting.append((_KEY.pack(number), stored))
                if len(waiting) == _COMMITTED:
                    _commit(store, waiting)
                    waiting = []
            _commit(store, waiting)
            page_bytes = store.stat()["psize"]
        return {_FILE: _tree_ranges(folder / _FILE, page_bytes)}

    def _open(self):
        self._encoded = self._manifest.get("codec") == "png"
        environment = _environment(Path(self.path, _FILE))
        return environment.begin(buffers=True), environment

    def _read(self, file, start, size):
        return self._opened[0].get(_KEY.pack(start))

    def _image(self, stored, shape):
        if not self._encoded:
            return stored.reshape(shape)
        channels, height, width = shape
        pixels = np.asarray(Image.open(io.BytesIO(stored)))
        return pixels.reshape(height, width, channels).transpose(2, 0, 1)


def _commit(store: lmdb.Environment, values: list[tuple[bytes, bytes]]) -> None:
    """Write values in the order of their keys to a map that doubles when it is full."""
    while True:
        try:
            with store.begin(write=True) as transaction:
                transaction.cursor().putmulti(values, append=True)
            return
        except lmdb.MapFullError:
            store.set_mapsize(2 * store.info()["map_size"])


def _tree_ranges(path: Path, page_bytes: int) -> list[tuple[int, int]]:
    """Return the byte ranges of all pages except those of large values."""
    data, ranges, tree_start, start = np.memmap(path, np.uint8, "r").data, [], 0, 0
    while start < len(data):
        _, _, flags, span = _PAGE.unpack_from(data, start)
        if flags & _OVERFLOW:
            ranges.append((tree_start, start))
            start = tree_start = start + span * page_bytes
        else:
            start += page_bytes
    ranges.append((tree_start, start))
    return [(begin, end) for begin, end in ranges if begin < end]


def _to_png(image: np.ndarray) -> bytes:
    pixels, file = image.transpose(1, 2, 0), io.BytesIO()
    Image.fromarray(pixels[..., 0] if len(image) == 1 else pixels).save(file, "PNG")
    return file.getvalue()


# LMDB refuses to open a file twice in a process, so datasets share its environment until the last one closes it.
_environments: weakref.WeakValueDictionary[tuple[int, int], lmdb.Environment] = weakref.WeakValueDictionary()


def _environment(path: Path) -> lmdb.Environment:
    status = path.stat()
    key = status.st_dev, status.st_ino
    environment = _environments.get(key)
    if environment is None:
        # With readahead, LMDB's default: random reads of a file that was not in memory got 36,000 images/s, since soon
        # all of it was, and 16,000 without. With a file larger than memory, most of the readahead is wasted.
        environment = lmdb.open(str(path), subdir=False, readonly=True, create=False, lock=False)
        _environments[key] = environment
    return environment
