"""What packing has in common: a folder that appears whole or not at all, samples checked as they stream, the manifest.

A pack is a folder: the data in the format's own file or files, and ``manifest.json``. The manifest says how many
samples there are and of which shape, and the size of every file. A file of which parts are checked when they are read
has the checksums of those parts in a file beside it; of all other files, the manifest has the checksum. All checksums
are CRC-32C, which finds every change of up to 32 bits in a row (Koopman, "32-bit cyclic redundancy codes for internet
applications", 2002). Of those in Python, for the 3 kB of a CIFAR-10 image: google-crc32c 0.17 µs, zlib.crc32 1.26 µs,
xxhash.xxh3_64 0.07 µs, measured; TFRecord prescribes the first.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import google_crc32c
import numpy as np
import torch
from tqdm import tqdm

from helpers import staging

VERSION = 1  # of the folder's layout, for all formats: count up when it changes
HEADER_BYTES = 4096  # of our .npy files: a page, so that the pixels begin with the next one
MANIFEST = "manifest.json"

_QUIET_SECONDS = 5.0  # the progress bar appears after this time
_READ_BYTES = 4 * 2**20
_NOTHING = object()


class PackExists(FileExistsError):
    """There is something already where the pack should go."""


class UnusableSamples(ValueError):
    """Images or labels are not what can be packed: their type, shape or number."""


class Samples:
    """Images with their labels, each checked as it streams by. Afterwards knows their number and shapes.

    Attributes
    ----------
    count : int
        Samples so far.
    pairs : bool
        Whether labels are images, not numbers. Known from the beginning.
    image_shape, label_shape : tuple of int or None
        The shape that all had so far; None if there were several, and for labels that are numbers.
    """

    def __init__(self, images: Iterable, labels: Iterable, path: str | Path):
        total = next((len(each) for each in (images, labels) if hasattr(each, "__len__")), None)
        self._images, labels = iter(images), iter(labels)
        first = next(labels, _NOTHING)
        self._labels = labels if first is _NOTHING else chain([first], labels)
        self.pairs = getattr(first, "ndim", 0) > 0
        self.count, self.image_shape, self.label_shape = 0, None, None
        self._bar = {"total": total, "desc": f"packing {Path(path).name}", "delay": _QUIET_SECONDS}

    def __iter__(self) -> Iterator[tuple[np.ndarray, int | np.ndarray]]:
        image_shapes, label_shapes = set(), set()
        for image in tqdm(self._images, unit="image", **self._bar):
            label = next(self._labels, _NOTHING)
            if label is _NOTHING:
                raise UnusableSamples(f"Expected a label for every image, but image {self.count} has none.")
            image = _pixels(image, f"image {self.count}")
            label = _pixels(label, f"label {self.count}") if self.pairs else _number(label, self.count)
            self.count += 1
            if image.shape != self.image_shape:
                self.image_shape = _common(image_shapes, image.shape)
            if self.pairs and label.shape != self.label_shape:
                self.label_shape = _common(label_shapes, label.shape)
            yield image, label
        if not self.count:
            raise UnusableSamples("Expected at least one image to pack, found none.")
        if next(self._labels, _NOTHING) is not _NOTHING:
            raise UnusableSamples(f"Expected as many labels as images, found {self.count} images and more labels.")


class ArrayFile:
    """A .npy file written piece by piece. Its header is written last, when the shape is known.

    Parameters
    ----------
    path : Path
    dtype : dtype
    """

    def __init__(self, path: Path, dtype: np.dtype | str):
        self._file, self._dtype = open(path, "wb", buffering=2**20), np.dtype(dtype)
        self._file.write(bytes(HEADER_BYTES))

    def append(self, array: np.ndarray) -> None:
        """Write the elements of `array`, in C order."""
        self._file.write(np.ascontiguousarray(array, self._dtype))

    def close(self, *shape: int) -> None:
        """Write the header, for an array of `shape`; -1 is what results from the number of elements, as in NumPy."""
        elements = (self._file.tell() - HEADER_BYTES) // self._dtype.itemsize
        shape = tuple(elements // -int(np.prod(shape)) if axis < 0 else axis for axis in shape)
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = repr({"descr": descr, "fortran_order": False, "shape": shape})
        length = HEADER_BYTES - 10  # format 1.0: magic and version, 8 bytes; length, 2; text that ends in a new line
        self._file.seek(0)
        self._file.write(np.lib.format.magic(1, 0) + length.to_bytes(2, "little"))
        self._file.write(header.encode().ljust(length - 1) + b"\n")
        self._file.close()


class NumbersFile(ArrayFile):
    """The labels of a pack that are numbers: ``labels.npy``, int64."""

    def __init__(self, folder: Path):
        super().__init__(folder / "labels.npy", "<i8")

    def close(self) -> None:
        """Complete the file."""
        super().close(-1)


@contextmanager
def pack_folder(path: str | Path) -> Iterator[Path]:
    """Give a staging folder to fill, which becomes `path` when the block ends, and is gone if the block raises.

    Nothing is forced to the disk: what a power cut takes from the files, their sizes and checksums show.

    Raises
    ------
    PackExists
        If there is something at `path`.
    staging.NotEnoughDisk
        If the disk becomes full meanwhile.
    """
    try:
        with staging.folder(path) as folder:
            yield folder
    except staging.TargetExists as error:
        raise PackExists(str(error)) from error


def write_manifest(folder: Path, name: str, samples: Samples, checked_in_parts: Iterable[str] = (), **more) -> None:
    """Write ``manifest.json``, the last file of a pack.

    Parameters
    ----------
    folder : Path
        With all other files.
    name : str
        The format.
    samples : Samples
        What was packed.
    checked_in_parts : iterable of str
        Names of the files that the reader checks part by part; all others are checked when the pack is opened.
    **more
        What the format must know to read.
    """
    parts = set(checked_in_parts)
    files = {
        file.name: {"bytes": file.stat().st_size, "crc32c": None if file.name in parts else file_checksum(file)}
        for file in sorted(folder.iterdir())
    }
    manifest = {
        "format": name,
        "version": VERSION,
        "count": samples.count,
        "labels": "images" if samples.pairs else "numbers",
        "image_shape": samples.image_shape,
        "label_shape": samples.label_shape,
        "files": files,
        **more,
    }
    manifest["crc32c"] = manifest_checksum(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def manifest_checksum(manifest: dict) -> int:
    """CRC-32C of what a manifest says, however it is spaced."""
    content = {key: value for key, value in manifest.items() if key != "crc32c"}
    return checksum(json.dumps(content, sort_keys=True).encode())


def checksum(data: bytes | np.ndarray) -> int:
    """CRC-32C of bytes, or of an array that is contiguous."""
    return google_crc32c.value(data)


def file_checksum(path: Path, start: int = 0, stop: int | None = None) -> int:
    """CRC-32C of the bytes of a file from `start` to `stop`, by default all."""
    crc, left = 0, (path.stat().st_size if stop is None else stop) - start
    with open(path, "rb") as file:
        file.seek(start)
        while left > 0 and (data := file.read(min(left, _READ_BYTES))):
            crc, left = google_crc32c.extend(crc, data), left - len(data)
    return crc


def _pixels(image, name: str) -> np.ndarray:
    if isinstance(image, torch.Tensor):
        image = image.numpy()
    if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 3 or not image.size:
        found = f"{image.dtype} of shape {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
        raise UnusableSamples(f"Expected {name} to be uint8 of shape (channels, height, width), found {found}.")
    return np.ascontiguousarray(image)


def _number(label, index: int) -> int:
    try:
        number = operator.index(label)
    except TypeError:
        number = None
    if number is None or not -(2**63) <= number < 2**63:
        raise UnusableSamples(f"Expected label {index} to be a whole number of 64 bits, as label 0, found {label!r}.")
    return number


def _common(shapes: set, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if len(shapes) < 2:  # no more than that to know, however many there are
        shapes.add(shape)
    return shape if shapes == {shape} else None
