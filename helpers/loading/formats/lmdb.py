"""LMDB: a key-value store in one file, mapped into memory. Of every kind of bytes; here also of PNG and of LZ4.

The key is the index and the part (0 the image, 1 a label that is an image), as ``struct`` packs ``">QB"``. The value
begins with the CRC-32C of all that follows, the shape, and the label (``"<3Iq"``); the encoded pixels come next.

LMDB trusts its file: a changed byte in the tree makes it read anywhere, and the process dies. So the pages of the tree
are compared with their checksum when the file is opened, before LMDB sees it. These are few, 0.7% of CIFAR-10:
values of more than about 2,000 bytes have pages of their own, and are checked when they are read. Smaller values are
kept in the tree itself, so that a pack of small images is read as a whole when it is opened.
"""

from __future__ import annotations

import math
import struct
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import google_crc32c
import lmdb
import numpy as np

from helpers.loading.formats import reading
from helpers.loading.formats.codecs import CODECS
from helpers.loading.formats.writing import ArrayFile, Samples, checksum, pack_folder, write_manifest

_KEY = struct.Struct(">QB")
_HEAD = struct.Struct("<3Iq")
_CHECKSUM_BYTES = 4

_COMMIT_BYTES = 16 * 2**20  # LMDB keeps in memory what is not committed, and so do we, in case the map is full
_WAITING_BYTES = 250  # of a key and a value that wait, besides the value's content
_FIRST_MAP_BYTES = 64 * 2**20

# Up to here it is quicker to copy values twice, with less Python: 3.4 times as quick for 3 kB, 1.2 times for 49 kB. For
# 150 kB it is slower, 0.8 times.
_SMALL_BYTES = 2**16

# Header of a page, in LMDB 0.9's mdb.c (struct MDB_page): its number, padding, flags, and how many pages it spans,
# which counts where the flag of an overflow page is set
_PAGE = struct.Struct("<QHHI")
_OVERFLOW = 0x04


def pack(images: Iterable, labels: Iterable, path: str | Path, *, codec: str = "raw") -> None:
    """Pack images into an LMDB file. Its map grows with it.

    Parameters
    ----------
    images, labels, path
        As for `helpers.loading.formats.npy.pack`.
    codec : {"raw", "png", "lz4"}
        What to store: the pixels; a PNG of them, for images of 1 to 4 channels; or the pixels as an LZ4 block.

    Raises
    ------
    PackExists, UnusableSamples
        As there; also if PNG has no such number of channels.
    """
    encode = CODECS[codec].encode
    samples = Samples(images, labels, path)
    with pack_folder(path) as folder:
        with _Store(folder / "data.mdb") as store:
            for index, (image, label) in enumerate(samples):
                store.put(_KEY.pack(index, 0), _value(image, 0 if samples.pairs else label, encode))
                if samples.pairs:
                    store.put(_KEY.pack(index, 1), _value(label, 0, encode))
        tree = _write_tree_pages(folder, store.page_bytes)
        write_manifest(
            folder, "lmdb", samples, ["data.mdb"], codec=codec, page_bytes=store.page_bytes, tree_crc32c=tree
        )


class PackedDataset(reading.PackedDataset):
    __doc__ = reading.PackedDataset.__doc__
    format = "lmdb"

    def _open(self):
        pages = self._load("tree-pages.npy")
        found = _tree_checksum(Path(self.path, "data.mdb"), pages, self._manifest["page_bytes"])
        self._expect(self._manifest["tree_crc32c"], found, "data.mdb")
        file = _opened(Path(self.path, "data.mdb"))
        return file, file.environment.begin(buffers=True), CODECS[self._manifest["codec"]].decode

    def _read(self, opened, index):
        image, label = self._image(opened, index, 0)
        return image, self._image(opened, index, 1)[0] if self.pairs else label

    def _image(self, opened, index: int, part: int) -> tuple[np.ndarray, int]:
        _, transaction, decode = opened
        value = np.frombuffer(transaction.get(_KEY.pack(index, part)), np.uint8)
        checked = value[_CHECKSUM_BYTES:]
        self._expect(int.from_bytes(value[:_CHECKSUM_BYTES], "little"), checksum(checked), "data.mdb", index)
        *shape, label = _HEAD.unpack_from(checked)
        return decode(checked[_HEAD.size :], shape), label

    def _read_batch(self, opened, indices):
        shape = self._manifest["image_shape"]
        if self._manifest["codec"] != "raw" or not self._one_shape or math.prod(shape) > _SMALL_BYTES:
            return super()._read_batch(opened, indices)
        images, labels = self._raw_images(opened, indices, 0, shape)
        if self.pairs:
            labels, _ = self._raw_images(opened, indices, 1, self._manifest["label_shape"])
        return images, labels

    def _raw_images(self, opened, indices: np.ndarray, part: int, shape: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Read values of one length into an array, with as little Python as possible for each: 1.3 µs, for 4."""
        _, transaction, _ = opened
        head, size = _CHECKSUM_BYTES + _HEAD.size, _CHECKSUM_BYTES + _HEAD.size + math.prod(shape)
        values = np.empty((len(indices), size), np.uint8)
        flat, get, key = memoryview(values).cast("B"), transaction.get, _KEY.pack
        for row, index in enumerate(indices.tolist()):
            flat[row * size : (row + 1) * size] = get(key(index, part))
        expected = values[:, :_CHECKSUM_BYTES].copy().view("<u4")[:, 0]
        self._expect_all(expected, values[:, _CHECKSUM_BYTES:], "data.mdb", indices)
        labels = values[:, head - 8 : head].copy().view("<i8")[:, 0]
        return np.ascontiguousarray(values[:, head:]).reshape(-1, *shape), labels


class _Store:
    """Writes values in the order of their keys, some megabytes at a time, to a map that doubles when it is full."""

    def __init__(self, path: Path):
        # No lock: nobody else knows the file. No sync: what a power cut takes, the checksums show.
        self._environment = lmdb.open(str(path), _FIRST_MAP_BYTES, subdir=False, lock=False, sync=False, metasync=False)
        self.page_bytes = self._environment.stat()["psize"]
        self._waiting, self._bytes = [], 0

    def put(self, key: bytes, value: bytes) -> None:
        self._waiting.append((key, value))
        self._bytes += len(value) + _WAITING_BYTES
        if self._bytes >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        while True:
            try:
                with self._environment.begin(write=True) as transaction:
                    transaction.cursor().putmulti(self._waiting, append=True)
                break
            except lmdb.MapFullError:
                self._environment.set_mapsize(2 * self._environment.info()["map_size"])
        self._waiting, self._bytes = [], 0

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, failure, *_) -> None:
        if failure is None:
            self._commit()
        self._environment.close()


class _File:
    """The file, opened in this process."""

    def __init__(self, path: Path):
        # With readahead, LMDB's default: random reads of a file that was not in memory got 36,000 images/s, since soon
        # all of it was, and 16,000 without. Of a file larger than memory, most of what is read ahead is lost again.
        self.environment = lmdb.open(str(path), subdir=False, readonly=True, create=False, lock=False)


# LMDB refuses to open a file twice in a process, so its datasets share it. When the last one closes it, it is gone.
_files: weakref.WeakValueDictionary[tuple[int, int], _File] = weakref.WeakValueDictionary()


def _opened(path: Path) -> _File:
    status = path.stat()
    key = status.st_dev, status.st_ino
    file = _files.get(key)
    if file is None:
        file = _files[key] = _File(path)
    return file


def _write_tree_pages(folder: Path, page_bytes: int) -> int:
    """Write the numbers of all pages but those of large values; return the checksum of these pages."""
    data = reading.mapped(folder / "data.mdb")
    numbers = ArrayFile(folder / "tree-pages.npy", "<i8")
    page, end = 0, len(data) // page_bytes
    while page < end:
        _, _, flags, span = _PAGE.unpack_from(data, page * page_bytes)
        if not flags & _OVERFLOW:
            numbers.append(np.int64(page))
        page += span if flags & _OVERFLOW else 1
    numbers.close(-1)
    return _tree_checksum(folder / "data.mdb", np.load(folder / "tree-pages.npy"), page_bytes)


def _tree_checksum(path: Path, numbers: np.ndarray, page_bytes: int) -> int:
    # Read, not mapped: around each page of a map the system reads on, here until it had the whole file
    crc = 0
    with open(path, "rb", buffering=0) as file:
        for number in numbers.tolist():
            file.seek(number * page_bytes)
            crc = google_crc32c.extend(crc, file.read(page_bytes))
    return crc


def _value(image: np.ndarray, label: int, encode: Callable[[np.ndarray], bytes]) -> bytes:
    checked = _HEAD.pack(*image.shape, label) + encode(image)
    return checksum(checked).to_bytes(_CHECKSUM_BYTES, "little") + checked
