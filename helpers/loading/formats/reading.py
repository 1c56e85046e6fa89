"""What reading has in common: a dataset that opens its files lazily in each process, and that checks what it reads."""

from __future__ import annotations

import json
import operator
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import google_crc32c
import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from helpers.loading.formats.writing import MANIFEST, VERSION, file_checksum, manifest_checksum


class DamagedPack(OSError):
    """A file of a pack is missing, or is not as it was written."""


class WrongFormat(ValueError):
    """A pack has another format, or was made by another version of the course."""


class Batch(Sequence):
    """A batch that was read as a whole: a sequence of samples for other collate functions, and ready for `collate`.

    Attributes
    ----------
    images : Tensor of uint8, shape (N, C, H, W); or list of Tensor, if they have several shapes
    labels : Tensor of int64, shape (N,); or as `images`, if labels are images
    """

    def __init__(self, images: torch.Tensor | list[torch.Tensor], labels: torch.Tensor | list[torch.Tensor]):
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int):
        label = self.labels[index]
        return self.images[index], label if label.ndim else int(label)


class PackedDataset(Dataset):
    """The samples of a pack. Base of the class with this name in each format's module.

    A DataLoader gets whole batches from it, through ``__getitems__``. Give it ``collate_fn=dataset.collate``,
    which lets them through as they are: the usual function takes them apart and puts them together again.

    The files are opened when they are first needed, in each process anew, so that no handle crosses a fork. The
    pickled dataset is little more than its path. What is read is compared with its checksum: the small files when they
    are opened, images with every read or, of npy and Parquet, with the first. Whoever cuts off a file that is open and
    mapped into memory ends the process: nobody can catch that.

    Parameters
    ----------
    path : path
        The folder that ``pack`` made, or a copy of it.

    Raises
    ------
    DamagedPack
        If a file is missing or is not as it was written; here, or when the damaged part is read.
    WrongFormat
        If the pack has another format.
    """

    format: ClassVar[str]

    def __init__(self, path: str | Path):
        self.path = os.path.abspath(path)
        self._pid, self._opened = None, None
        self._manifest = _read_manifest(Path(self.path), self.format)

    def __len__(self) -> int:
        return self._manifest["count"]

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int | torch.Tensor]:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise self._beyond(number)
        image, label = self._read(self._handle(), number % len(self))
        return torch.from_numpy(image.copy()), torch.from_numpy(label.copy()) if self.pairs else int(label)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        numbers = np.asarray(indices)
        if not len(numbers):
            raise IndexError(f"{self.path}: expected the indices of a batch, found none.")
        if numbers.dtype.kind not in "iu":
            raise TypeError(f"{self.path}: expected whole numbers as indices, found {numbers.dtype}.")
        numbers = numbers.astype(np.int64, copy=False)
        lowest = numbers.min()
        if lowest < -len(self) or numbers.max() >= len(self):
            raise self._beyond(next(number for number in numbers.tolist() if not -len(self) <= number < len(self)))
        if lowest < 0:
            numbers = np.where(numbers < 0, numbers + len(self), numbers)
        images, labels = self._read_batch(self._handle(), numbers)
        return Batch(_tensors(images), _tensors(labels))

    @staticmethod
    def collate(batch: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the images and labels of a batch; a DataLoader's ``collate_fn``."""
        return (batch.images, batch.labels) if isinstance(batch, Batch) else default_collate(batch)

    def close(self) -> None:
        """Close the files. The next access opens them again."""
        self._pid, self._opened = None, None

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_pid": None, "_opened": None, "_manifest": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._manifest = _read_manifest(Path(self.path), self.format)

    @property
    def pairs(self) -> bool:
        """Whether labels are images."""
        return self._manifest["labels"] == "images"

    @property
    def _one_shape(self) -> bool:
        """Whether all images have the same shape, and all labels that are images."""
        return bool(self._manifest["image_shape"] and (self._manifest["label_shape"] or not self.pairs))

    # What a format adds

    def _open(self) -> object:
        """Open the files, which are there and have the right size; return what reading needs."""
        raise NotImplementedError

    def _read(self, opened, index: int) -> tuple[np.ndarray, int | np.ndarray]:
        """Return a sample, checked; arrays may be views of a file."""
        raise NotImplementedError

    def _read_batch(self, opened, indices: np.ndarray) -> tuple:
        """Return images and labels, checked, each an array or a list of arrays, copied from the file."""
        images = self._empty(len(indices), self._manifest["image_shape"])
        labels = self._empty(len(indices), self._manifest["label_shape"]) if self.pairs else [0] * len(indices)
        for row in np.argsort(indices).tolist():  # in the order of the file, which a disk likes
            image, label = self._read(opened, int(indices[row]))
            images[row] = image if isinstance(images, np.ndarray) else image.copy()
            labels[row] = label.copy() if isinstance(labels, list) and self.pairs else label
        if not self.pairs:
            labels = np.array(labels, np.int64)
        return images, labels

    # For the formats

    def _empty(self, count: int, shape: Sequence[int] | None) -> np.ndarray | list:
        """Room for images: an array if they have one shape, otherwise a list."""
        return [None] * count if shape is None else np.empty((count, *shape), np.uint8)

    def _load(self, name: str) -> np.ndarray:
        """Map a .npy file of the pack that was checked as a whole."""
        return np.load(Path(self.path, name), mmap_mode="r").view(np.ndarray)

    def _damaged(self, file: str, what: str, items: Sequence[int] = ()) -> DamagedPack:
        return _damaged(Path(self.path), file, what, items)

    def _expect(self, expected: int, found: int, file: str, *items: int) -> None:
        """Raise `DamagedPack` if a checksum is not as expected: of a file, of an item in it, or of a first and last."""
        if expected != found:
            raise self._damaged(file, f"expected the checksum {expected:#010x}, found {found:#010x}", items)

    def _expect_all(
        self, expected: np.ndarray, rows: np.ndarray, files: str | Sequence[str], indices: np.ndarray
    ) -> None:
        """Compare the rows of a batch, which are items of a file or of several files, with their checksums."""
        found = list(map(google_crc32c.value, rows))
        if found != expected.tolist():
            row = next(row for row, crc in enumerate(found) if crc != expected[row])
            self._expect(int(expected[row]), found[row], files if isinstance(files, str) else files[row], indices[row])

    def _beyond(self, index: int) -> IndexError:
        return IndexError(f"{self.path}: there is no item {index}, only {len(self)} items.")

    def _handle(self):
        pid = os.getpid()
        if self._pid != pid:  # the first access, or the first after a fork
            _close_inherited(pid)
            self._check_files()
            self._opened, self._pid = self._open(), pid
            _opened_here.add(self)
        return self._opened

    def _check_files(self) -> None:
        for name, expected in self._manifest["files"].items():
            file = Path(self.path, name)
            try:
                size = file.stat().st_size
            except FileNotFoundError:
                raise self._damaged(name, "it is missing") from None
            if size != expected["bytes"]:
                raise self._damaged(name, f"expected {expected['bytes']:,} bytes, found {size:,}")
            if expected["crc32c"] is not None:
                self._expect(expected["crc32c"], file_checksum(file), name)


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


def _tensors(arrays: np.ndarray | list[np.ndarray]) -> torch.Tensor | list[torch.Tensor]:
    return [torch.from_numpy(each) for each in arrays] if isinstance(arrays, list) else torch.from_numpy(arrays)


def _read_manifest(folder: Path, name: str) -> dict:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise DamagedPack(f"{folder / MANIFEST}: no such file; expected a folder that pack() made.") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, MANIFEST, f"it is no JSON ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("crc32c") != manifest_checksum(manifest):
        raise _damaged(folder, MANIFEST, "its content is not what was written")
    if (manifest["format"], manifest["version"]) != (name, VERSION):
        raise WrongFormat(
            f"{folder}: expected a pack of format {name}, version {VERSION}, found {manifest['format']}, "
            f"version {manifest['version']}. Open it with the module of its format, or pack anew."
        )
    return manifest


def _damaged(folder: Path, file: str, what: str, items: Sequence[int] = ()) -> DamagedPack:
    where = ""
    if len(items) == 1:
        where = f", item {items[0]}"
    elif items:
        where = f", items {items[0]} to {items[1]}"
    return DamagedPack(
        f"{folder / file}{where}: {what}. The pack is damaged: copy it again, or delete {folder} and pack anew."
    )
