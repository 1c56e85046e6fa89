"""Reads a pack: a dataset that opens its files lazily in each process, and checks what it reads."""

import json
import math
import operator
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import google_crc32c
import numpy as np
import torch
from torch.utils.data import Dataset, Sampler, default_collate

from helpers.loading.formats.packing import INDEX, MANIFEST, VERSION, Contents, ranges_checksum


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

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:  # type: ignore[override]  # takes no slice
        return self.images[index], int(self.labels[index])


class PackedDataset(Dataset):
    """The samples of a pack. Each format is a subclass, which says how its files are written and read.

    A DataLoader gets whole batches from it, through ``__getitems__``. Give it ``collate_fn=dataset.collate``,
    which passes them on unchanged: the usual function takes them apart and puts them together again.

    Each process opens the files when it first needs them, so that no handle crosses a fork. The pickled dataset is
    little more than its path. All data is compared with checksums: everything except images when the files are opened,
    images at every read (npy: at the first). Truncating a file that is open and mapped into memory kills the process:
    no error can be caught. Raises `DamagedPack` if a file is missing or is not as it was written; here, or when the
    damaged part is read; `ValueError` if the pack has another format, or is of another version of the course.

    Parameters
    ----------
    path : path
        The folder that ``pack`` made, or a copy of it.
    """

    format: ClassVar[str]
    _encoded = False  # whether `_image` must decode what is stored

    def __init__(self, path: str | Path):
        self.path = os.path.abspath(path)
        self._manifest = _read_manifest(Path(self.path), self.format)
        self._opened: Any = None
        self._rows: np.ndarray | None = None

    def __len__(self) -> int:
        return self._manifest["count"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = operator.index(index)
        return self._sample(number, self._rows_of(number).item())

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        numbers = np.asarray(indices)
        rows = self._rows_of(numbers)
        labels, shape = torch.from_numpy(rows["label"].copy()), self._manifest["shape"]
        if shape and not self._encoded:
            images = self._read_batch(rows, math.prod(shape))
            if self._intact(numbers, rows, images):
                return Batch(torch.from_numpy(images.reshape(-1, *shape)), labels)
        tensors = [self._sample(*item)[0] for item in zip(numbers.tolist(), rows.tolist(), strict=True)]
        return Batch(torch.stack(tensors) if shape else tensors, labels)

    @staticmethod
    def collate(batch: Batch | list) -> tuple[torch.Tensor | list[torch.Tensor], torch.Tensor]:
        """Return the images and labels of a batch; a DataLoader's ``collate_fn``."""
        return (batch.images, batch.labels) if isinstance(batch, Batch) else default_collate(batch)

    def close(self) -> None:
        """Close the files. The next access opens them again."""
        self._opened, self._rows = None, None

    def __getstate__(self) -> dict:
        return {"path": self.path}

    def __setstate__(self, state: dict) -> None:
        PackedDataset.__init__(self, state["path"])

    # What a format adds

    @classmethod
    def write(cls, folder: Path, contents: Contents) -> dict[str, list]:
        """Write the format's files into a folder, calling `Contents.put` for each image.

        Returns
        -------
        dict
            For each file that has images, in the order of their numbers: the ranges of other bytes to check when the
            pack is opened, pairs of start and end.
        """
        raise NotImplementedError

    def _open(self) -> Any:
        """Open the files, in which all but the images is checked; return what reading needs, as `_opened`."""
        raise NotImplementedError

    def _read(self, file: int, start: int, size: int) -> np.ndarray | memoryview | bytes:
        """Return the stored bytes of an image of `size` bytes; they may be a view of a file."""
        raise NotImplementedError

    def _read_batch(self, rows: np.ndarray, size: int) -> np.ndarray:
        """Copy images of one size into an array, with as little Python as possible for each: (rows, size)."""
        images = np.empty((len(rows), size), np.uint8)
        flat = images.data.cast("B")
        read: Any = self._read  # for type checkers, arrays are no buffers before Python 3.12
        for place, (file, start) in enumerate(zip(rows["file"].tolist(), rows["start"].tolist(), strict=True)):
            flat[place * size : (place + 1) * size] = read(file, start, size)
        return images

    def _image(self, stored: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Make the image from its stored bytes."""
        return stored.reshape(shape)

    # For all formats

    def _sample(self, number: int, row: tuple) -> tuple[torch.Tensor, int]:
        file, checksum, start, label, shape = row
        stored = np.frombuffer(self._read(file, start, math.prod(shape)), np.uint8)
        crc = google_crc32c.value(stored)
        if crc != checksum:
            name = f"{self._manifest['data'][file]}, item {number}"
            raise damaged(self.path, name, f"expected the checksum {checksum:#010x}, found {crc:#010x}")
        return torch.from_numpy(self._image(stored, shape).copy()), label

    def _intact(self, numbers: np.ndarray, rows: np.ndarray, images: np.ndarray) -> bool:
        """Whether images match their checksums; else they are read one by one, to name the damaged one."""
        return list(map(google_crc32c.value, images)) == rows["checksum"].tolist()

    def _rows_of(self, numbers: int | np.ndarray) -> np.ndarray:
        """Return the index's rows of some images, once the files are open."""
        if self._rows is None:
            for name, expected in self._manifest["files"].items():
                file = Path(self.path, name)
                if not file.exists():
                    raise damaged(self.path, name, "it is missing")
                found = {"bytes": file.stat().st_size, "crc32c": ranges_checksum(file, expected["checked"])}
                for unit, number in found.items():  # the checksum is that of all but images
                    if number != expected[unit]:
                        raise damaged(self.path, name, f"expected {unit} {expected[unit]:,}, found {number:,}")
            self._opened = self._open()
            self._rows = np.load(Path(self.path, INDEX), mmap_mode="r").view(np.ndarray)
            _opened_here.add(self)
        try:
            # For an array, take needs a quarter of the time; for a number, 20 times as much
            return self._rows[numbers] if isinstance(numbers, int) else self._rows.take(numbers)
        except IndexError as error:
            raise IndexError(f"{self.path}: {error}") from None


class ByItem(Dataset):
    """A `PackedDataset` that is read item by item, as most datasets are: shows what reading whole batches gains."""

    def __init__(self, dataset: PackedDataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int):
        return self.dataset[index]


class ShuffledBatches(Sampler):
    """Yields all indices in random order, an array for each batch: for a DataLoader's ``batch_sampler``.

    Like ``shuffle=True``, without a Python object for each index: a batch of 128 comes 13 µs sooner. The last
    batch may be smaller.
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


def _close_inherited() -> None:
    """In a forked child: close all datasets, or HDF5 would use the inherited handle of a file."""
    for dataset in list(_opened_here):
        dataset.close()
    _opened_here.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def _read_manifest(folder: Path, name: str) -> dict:
    try:
        content = (folder / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise DamagedPack(f"{folder / MANIFEST}: no such file; expected a folder that pack() made.") from None
    text, _, checksum = content.partition(b"\n")
    if checksum.strip() != b"%d" % google_crc32c.value(text):
        raise damaged(folder, MANIFEST, "its content is not what was written")
    manifest = json.loads(text)
    if (manifest["format"], manifest["version"]) != (name, VERSION):
        raise ValueError(
            f"{folder}: expected a pack of format {name}, version {VERSION}, found {manifest['format']}, "
            f"version {manifest['version']}. Open it in that format, or pack anew."
        )
    return manifest


def damaged(folder: str | Path, file: str, what: str) -> DamagedPack:
    """Return the error that names a damaged file of a pack and what is wrong with it."""
    return DamagedPack(
        f"{Path(folder, file)}: {what}. The pack is damaged: copy it again, or delete {folder} and pack anew."
    )
