"""TFRecord, which TensorFlow and NVIDIA DALI read: records one after the other, each a ``tf.train.Example``.

Its features: ``image`` (the pixels), ``shape`` (channels, height, width), and ``label``, a number. Each shard has an
index beside it, ``shard-000000.tfrecord.idx``, as DALI wants it: a line with the begin and the length of each record.

Written by hand: TensorFlow is 1 GB, and the package tfrecord only reads and writes from the front to the back. The
format is a page: https://www.tensorflow.org/tutorials/load_data/tfrecord and
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import numpy as np

from helpers.loading.formats import packed_dataset, packing


def pack(images: Iterable, labels: Iterable, path: str | Path) -> None:
    """Pack images into TFRecord files of some 1 GiB, ``shard-000000.tfrecord``, …; all else as `packing.pack` says."""
    packing.pack_shards("tfrecord", _Shard, sys.maxsize, images, labels, path)


class PackedDataset(packed_dataset.ShardedDataset):
    __doc__ = packed_dataset.ShardedDataset.__doc__
    format = "tfrecord"


class _Shard:
    def __init__(self, file: BinaryIO):
        self._file, self._index = file, open(f"{file.name}.idx", "w", newline="\n")

    def add(self, number: int, image: np.ndarray, label: int) -> int:
        # A record is its length, that one's checksum, the example, and its checksum; the pixels end the example
        shape, pixels = _feature("shape", _int64_list(image.shape)), _feature("image", _bytes_list(image))
        example = _field(1, shape + _feature("label", _int64_list([label])) + pixels)
        start, length = self._file.tell(), struct.pack("<Q", len(example))
        self._file.write(length + _masked_checksum(length) + example + _masked_checksum(example))
        self._index.write(f"{start} {self._file.tell() - start}\n")
        return self._file.tell() - 4

    def close(self) -> None:
        self._index.close()


def _masked_checksum(data: bytes) -> bytes:
    """CRC-32C turned by 15 bits plus a constant, as in TensorFlow's core/lib/hash/crc32c.h."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


# tf.train.Example: a field 1, Features, with a field 1 for each Feature: its name is field 1, its values are field 2.
# These are a field 1, BytesList, or a field 3, Int64List, whose own field 1 has the values.


def _feature(name: str, values: bytes) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, values))


def _bytes_list(pixels: np.ndarray) -> bytes:
    return _field(1, _field(1, pixels.tobytes()))


def _int64_list(numbers: Iterable[int]) -> bytes:
    return _field(3, _field(1, b"".join(map(_varint, numbers))))


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
