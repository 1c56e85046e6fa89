"""Formats that need no library: their files are mapped into memory, and an image is a range of bytes there.

**npy** is the fastest of all: ``images.npy`` is an array of uint8 of shape (N, C, H, W), and ``labels.npy`` one of
int64 of shape (N,); ``numpy.load`` reads both. Images of several shapes lie one after the other in an array of one
dimension.

**tar**, **zip** and **TFRecord** are files of some 1 GiB, ``shard-000000.tar`` and so on. Their pixels are not
compressed, so our index of offsets finds them; other programs read these files sequentially.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

from helpers.loading.formats.packed_dataset import PackedDataset
from helpers.loading.formats.packing import Contents

SHARD_BYTES = 2**30  # a shard of this size gets no more images
_HEADER_BYTES = 4096  # of images.npy: a page, so that the pixels begin with the next one


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file, mapped into memory: uint8 of shape (bytes,), read-only."""
    return np.memmap(path, np.uint8, "r").view(np.ndarray)  # a slice of a memmap itself takes 10 times as long


class Npy(PackedDataset):
    """Reads and writes npy; an image is compared with its checksum when it is first read."""

    format = "npy"

    @classmethod
    def write(cls, folder: Path, contents: Contents) -> dict[str, list]:
        with open(folder / "images.npy", "wb", buffering=2**20) as file:
            file.write(bytes(_HEADER_BYTES))
            contents.write_pixels(file)
            size, shape = file.tell() - _HEADER_BYTES, contents.shape() or ()
            header = {"descr": "|u1", "fortran_order": False, "shape": (size // math.prod(shape), *shape)}
            length = _HEADER_BYTES - 10  # format 1.0: magic and version, 8 bytes; length, 2; text, and a new line
            file.seek(0)
            file.write(np.lib.format.magic(1, 0) + length.to_bytes(2, "little"))
            file.write(repr(header).encode().ljust(length - 1) + b"\n")
        np.save(folder / "labels.npy", contents.index()["label"])
        return {"images.npy": [(0, _HEADER_BYTES)]}

    def _open(self):
        self._unchecked = np.ones(len(self), bool)
        self._some_unchecked = True
        return mapped(Path(self.path, "images.npy"))[_HEADER_BYTES:]

    def _read(self, file, start, size):
        return self._opened[start : start + size]

    def _read_batch(self, rows, size):
        return self._opened.reshape(-1, size).take(rows["start"] // size, 0)

    def _intact(self, numbers, rows, images):
        if self._some_unchecked:
            new = np.flatnonzero(self._unchecked[numbers])
            if not super()._intact(numbers[new], rows[new], images[new]):
                return False
            self._unchecked[numbers] = False
            self._some_unchecked = bool(self._unchecked.any())
        return True


class _Shards(PackedDataset):
    """Images in several files, each written until it has `SHARD_BYTES` or `max_images`."""

    max_images = sys.maxsize

    @staticmethod
    def shard(file: BinaryIO) -> AbstractContextManager[Callable[[int, np.ndarray, int], int]]:
        """Yield a function that writes a number, an image and a label, and returns where the pixels end in the file."""
        raise NotImplementedError

    @classmethod
    def write(cls, folder: Path, contents: Contents) -> dict[str, list]:
        names, file, first = [], None, 0
        with ExitStack() as opened:
            for number, (image, label) in enumerate(contents):
                if file is None or file.tell() >= SHARD_BYTES or number - first == cls.max_images:
                    opened.close()
                    names.append(f"shard-{len(names):06d}.{cls.format}")
                    file = opened.enter_context(open(folder / names[-1], "wb", buffering=2**20))
                    add, first = opened.enter_context(cls.shard(file)), number
                contents.put(add(number, image, label) - image.size, len(names) - 1)
        return {name: [] for name in names}

    def _open(self):
        return [memoryview(mapped(Path(self.path, name))) for name in self._manifest["data"]]

    def _read(self, file, start, size):
        return self._opened[file][start : start + size]


class Tar(_Shards):
    """Tar shards, as WebDataset reads them: the file that streams best, from a disk or from the network.

    A sample is two members with the same key: ``00000007.npy``, and ``00000007.cls`` with the label as text.
    ``webdataset.WebDataset(path).decode()`` makes arrays and numbers of them.
    """

    format = "tar"

    @staticmethod
    @contextmanager
    def shard(file):
        with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as tar:

            def add(number: int, image: np.ndarray, label: int) -> int:
                array = _npy_bytes(image)
                end = file.tell() + tarfile.BLOCKSIZE + len(array)  # USTAR: one block of header, whatever the name
                for name, data in ((f"{number:08d}.npy", array), (f"{number:08d}.cls", str(label).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
                return end

            yield add


class Zip(_Shards):
    """Zip archives without compression: any system opens them, and so does NumPy.

    Members are ``00000007.npy``; the labels are in ``index.npy``, beside the archives.
    ``numpy.load("shard-000000.zip")["00000007"]`` reads an image: an .npz file is such an archive. The directory of a
    zip archive comes last, and Python reads all of it to open the archive: 5 µs and 0.5 kB of memory per member. Our
    index of offsets saves that.
    """

    format = "zip"
    max_images = 60_000  # beyond 65,535, and beyond 2 GiB, the archive needs extensions that not all programs know

    @staticmethod
    @contextmanager
    def shard(file):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

            def add(number: int, image: np.ndarray, label: int) -> int:
                member = zipfile.ZipInfo(f"{number:08d}.npy")  # of 1980: the same images give the same archive
                data = _npy_bytes(image)
                archive.writestr(member, data)
                return member.header_offset + len(member.FileHeader()) + len(data)

            yield add


class TFRecord(_Shards):
    """TFRecord, which TensorFlow and NVIDIA DALI read: records one after the other, each a ``tf.train.Example``.

    Its features: ``image`` (the pixels), ``shape`` (channels, height, width), and ``label``, a number. Beside each
    shard is an index for DALI, ``shard-000000.tfrecord.idx``: a line with the start and the length of each record.

    Written by hand: TensorFlow is 1 GB, and the package tfrecord only reads and writes sequentially. The
    format is a page: https://www.tensorflow.org/tutorials/load_data/tfrecord and
    https://protobuf.dev/programming-guides/encoding
    """

    format = "tfrecord"

    @staticmethod
    @contextmanager
    def shard(file):
        with open(f"{file.name}.idx", "w", newline="\n") as index:

            def add(number: int, image: np.ndarray, label: int) -> int:
                # A record: length, checksum of the length, example, its checksum; the pixels end the example
                numbers = _int64s("shape", *image.shape) + _int64s("label", label)
                example = _field(1, numbers + _feature("image", _BYTES, image.tobytes()))
                start, length = file.tell(), struct.pack("<Q", len(example))
                file.write(length + _masked_checksum(length) + example + _masked_checksum(example))
                index.write(f"{start} {file.tell() - start}\n")
                return file.tell() - 4

            yield add


def _npy_bytes(image: np.ndarray) -> bytes:
    """A .npy file of an image; its pixels come last."""
    return _npy_header(image.shape) + image.tobytes()


@lru_cache(256)
def _npy_header(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _masked_checksum(data: bytes) -> bytes:
    """CRC-32C rotated by 15 bits plus a constant, as in TensorFlow's core/lib/hash/crc32c.h."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# tf.train.Example: a field 1, Features, with a field 1 for each Feature: its name is field 1, its values are field 2.
# These are a BytesList or an Int64List, whose own field 1 has the values.
_BYTES, _INT64S = 1, 3


def _feature(name: str, kind: int, values: bytes) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, _field(kind, _field(1, values))))


def _int64s(name: str, *numbers: int) -> bytes:
    return _feature(name, _INT64S, b"".join(map(_varint, numbers)))


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(content)) + content  # 2: its length comes first


def _varint(number: int) -> bytes:
    number &= 2**64 - 1  # negative numbers have all 64 bits
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)
