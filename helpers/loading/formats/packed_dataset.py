"""Reads a pack: a dataset that opens its files lazily in each process, and checks what it reads."""

from __future__ import annotations

import json
import math
import operator
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import google_crc32c
import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, default_collate

from helpers.loading.formats.packing import INDEX, MANIFEST, VERSION, manifest_checksum, ranges_checksum


class DamagedPack(OSError):
    """A file of a pack is missing, or is not as it was written."""


class Batch(Sequence):
    """A batch that was read as a whole: a sequence of samples for other collate functions, and ready for `collate`.

    Attributes
    ----------
    images : Tensor of uint8, shape (N, C, H, W); or list of Tensor, if they have several shapes
    labels : Tensor of int64, shape (N,)
    """

    def __init__(self, images: torch.Tensor | list[torch.Tensor], labels: torch.Tensor):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], int(self.labels[index])


class PackedDataset(Dataset):
    """The samples of a pack. Base of the class with this name in each format's module.

    A DataLoader gets whole batches from it, through ``__getitems__``. Give it ``collate_fn=dataset.collate``,
    which lets them through as they are: the usual function takes them apart and puts them together again.

    The files are opened when they are first needed, in each process anew, so that no handle crosses a fork. The
    pickled dataset is little more than its path. What is read is compared with its checksum: all that is no image when
    the files are opened, images with every read or, of npy, with the first. Whoever cuts off a file that is open and
    mapped into memory ends the process: nobody can catch that.

    Parameters
    ----------
    path : path
        The folder that ``pack`` made, or a copy of it.

    Raises
    ------
    DamagedPack
        If a file is missing or is not as it was written; here, or when the damaged part is read.
    ValueError
        If the pack has another format, or is of another version of the course.
    """

    format: ClassVar[str]

    def __init__(self, path: str | Path):
        self.path = os.path.abspath(path)
        self._pid, self._opened, self._rows = None, None, None
        self._manifest = _read_manifest(Path(self.path), self.format)

    def __len__(self) -> int:
        return self._manifest["count"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number, opened = operator.index(index), self._handle()
        try:
            row = self._rows[number]
        except IndexError as error:
            raise IndexError(f"{self.path}: {error}") from None
        return self._sample(opened, number, row)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        numbers, opened = np.asarray(indices), self._handle()
        try:
            rows = self._rows.take(numbers)
        except IndexError as error:
            raise IndexError(f"{self.path}: {error}") from None
        labels, shape = torch.from_numpy(rows["label"].copy()), self._manifest["shape"]
        if shape and not self._encoded:
            images = self._read_batch(opened, rows, math.prod(shape))
            self._check_all(numbers, rows, images)
            return Batch(torch.from_numpy(images.reshape(-1, *shape)), labels)
        images = [self._sample(opened, *item)[0] for item in zip(numbers.tolist(), rows, strict=True)]
        return Batch(torch.stack(images) if shape else images, labels)

    def _sample(self, opened, number: int, row: np.void) -> tuple[torch.Tensor, int]:
        file, expected, start, label, shape = row.item()
        stored = np.frombuffer(self._read(opened, file, start, math.prod(shape)), np.uint8)
        self._check(number, file, expected, google_crc32c.value(stored))
        return torch.from_numpy(self._image(stored, shape).copy()), label

    @staticmethod
    def collate(batch: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and labels of a batch; a DataLoader's ``collate_fn``."""
        return (batch.images, batch.labels) if isinstance(batch, Batch) else default_collate(batch)

    def close(self) -> None:
        """Close the files. The next access opens them again."""
        self._pid, self._opened, self._rows = None, None, None

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return {"path": self.path}

    def __setstate__(self, state: dict) -> None:
        self.__init__(state["path"])

    # What a format adds

    _encoded = False  # whether `_image` must decode what is stored

    def _open(self) -> object:
        """Open the files, of which all but the images has been checked; return what reading needs."""
        raise NotImplementedError

    def _read(self, opened, file: int, start: int, size: int) -> np.ndarray | memoryview | bytes:
        """Return what is stored of an image of `size` bytes; it may be a view of a file."""
        raise NotImplementedError

    def _read_batch(self, opened, rows: np.ndarray, size: int) -> np.ndarray:
        """Copy images of one size into an array, with as little Python as possible for each: (rows, size)."""
        images = np.empty((len(rows), size), np.uint8)
        flat, read = memoryview(images).cast("B"), self._read
        for place, (file, start) in enumerate(zip(rows["file"].tolist(), rows["start"].tolist(), strict=True)):
            flat[place * size : (place + 1) * size] = read(opened, file, start, size)
        return images

    def _image(self, stored: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Make the image of its stored bytes."""
        return stored.reshape(shape)

    def _data_file(self, file: int) -> str:
        """Name of a file of images, by its number in the index."""
        return self._data_files[file]

    # For the formats

    @property
    def _data_files(self) -> list[str]:
        return [name for name in self._manifest["files"] if name.startswith("shard-") and not name.endswith(".idx")]

    def _check(self, number: int, file: int, expected: int, found: int) -> None:
        """Raise `DamagedPack` if an image has another checksum than expected."""
        if expected != found:
            name = f"{self._data_file(file)}, item {number}"
            raise damaged(self.path, name, f"expected the checksum {expected:#010x}, found {found:#010x}")

    def _check_all(self, numbers: np.ndarray, rows: np.ndarray, images: np.ndarray) -> None:
        """Compare the images of a batch with their checksums."""
        found = list(map(google_crc32c.value, images))
        if found != rows["checksum"].tolist():
            for number, row, crc in zip(numbers.tolist(), rows, found, strict=True):
                self._check(number, int(row["file"]), int(row["checksum"]), crc)

    def _handle(self):
        pid = os.getpid()
        if self._pid != pid:  # the first access, or the first after a fork
            _close_inherited(pid)
            self._check_files()
            self._rows = np.load(Path(self.path, INDEX), mmap_mode="r").view(np.ndarray)
            self._opened, self._pid = self._open(), pid
            _opened_here.add(self)
        return self._opened

    def _check_files(self) -> None:
        for name, expected in self._manifest["files"].items():
            file = Path(self.path, name)
            try:
                size = file.stat().st_size
            except FileNotFoundError:
                raise damaged(self.path, name, "it is missing") from None
            if size != expected["bytes"]:
                raise damaged(self.path, name, f"expected {expected['bytes']:,} bytes, found {size:,}")
            found = ranges_checksum(file, expected["checked"])
            if found != expected["crc32c"]:
                raise damaged(self.path, name, f"expected the checksum {expected['crc32c']:#010x}, found {found:#010x}")


class ShardedDataset(PackedDataset):
    __doc__ = PackedDataset.__doc__

    def _open(self):
        return [memoryview(mapped(Path(self.path, name))) for name in self._data_files]

    def _read(self, opened, file, start, size):
        return opened[file][start : start + size]


class ByItem(Dataset):
    """A packed dataset that reads item by item, as most datasets do: shows what reading whole batches gains.

    Parameters
    ----------
    dataset : PackedDataset
    """

    def __init__(self, dataset: PackedDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        return self.dataset[index]


class ShuffledBatches(Sampler):
    """All indices in a random order, a batch at a time, each an array: for a DataLoader's ``batch_sampler``.

    What ``shuffle=True`` does, without a Python object for each index: a batch of 128 comes 13 µs sooner.

    Parameters
    ----------
    count : int
        Number of samples.
    batch_size : int
        The last batch may be smaller.
    """

    def __init__(self, count: int, batch_size: int):
        self.count, self.batch_size = count, batch_size

    def __len__(self) -> int:
        return -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[np.ndarray]:
        order = self._order()
        for start in range(0, self.count, self.batch_size):
            yield order[start : start + self.batch_size]

    def _order(self) -> np.ndarray:
        return torch.randperm(self.count).numpy()


_opened_here: weakref.WeakSet[PackedDataset] = weakref.WeakSet()


def _close_inherited(pid: int) -> None:
    """Close what a fork left us, of all datasets: of a file that is open, a library gives out the old handle."""
    for dataset in list(_opened_here):
        if dataset._pid != pid:
            dataset.close()
            _opened_here.discard(dataset)


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file, mapped into memory: uint8 of shape (bytes,), read-only."""
    return np.memmap(path, np.uint8, "r").view(np.ndarray)  # a slice of a memmap itself takes 10 times as long


def _read_manifest(folder: Path, name: str) -> dict:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamagedPack(f"{folder / MANIFEST}: no such file; expected a folder that pack() made.") from None
    except (ValueError, RecursionError) as error:
        raise damaged(folder, MANIFEST, f"it is no JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("crc32c") != manifest_checksum(manifest):
        raise damaged(folder, MANIFEST, "its content is not what was written")
    if (manifest["format"], manifest["version"]) != (name, VERSION):
        raise ValueError(
            f"{folder}: expected a pack of format {name}, version {VERSION}, found {manifest['format']}, "
            f"version {manifest['version']}. Open it with the module of its format, or pack anew."
        )
    return manifest


def damaged(folder: str | Path, file: str, what: str) -> DamagedPack:
    """Return the error that names a damaged file of a pack and what is wrong with it."""
    return DamagedPack(
        f"{Path(folder, file)}: {what}. The pack is damaged: copy it again, or delete {folder} and pack anew."
    )
