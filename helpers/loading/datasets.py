"""Map-style datasets over files. They live here, not in a notebook, so that spawned workers can import them."""

import csv
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import Dataset, get_worker_info

from helpers.data import photos
from stepscope.base import staging

# The errors for damage of Pillow and, last, TorchCodec
_DAMAGE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError, RuntimeError)


class UnreadableImage(OSError):
    """An image file is missing, damaged or no image."""


class PngDataset(Dataset):
    """One PNG per image, opened and decoded at every read: simple, and slow.

    Raises `staging.DamagedFolder` if a label is missing or not a number, or if the files in the folder are not those in
    the table.

    Parameters
    ----------
    folder : path
        Holds the PNG files and ``labels.csv`` with the columns ``file`` and ``label``.
    transform : callable, optional
        Takes the decoded `PIL.Image.Image` (RGB); its result becomes the item's image.
    storage : simulate.SlowStorage, optional
        Reads the files as late as a slow disk would.
    """

    def __init__(self, folder: str | Path, transform: Callable | None = None, storage=None):
        self.folder = str(folder)
        self.transform = transform
        self.storage = storage
        # Arrays, not lists of Python objects: workers keep sharing them with us (measured in notebook 03).
        self.files, self.labels = _read_labels(Path(folder))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        path = os.path.join(self.folder, self.files[index].decode())
        with _named(path, "Delete the folder of prepared images and run `python -m helpers prepare` to make it anew."):
            content = self.storage.read(path) if self.storage else _read(path)
            image = Image.open(io.BytesIO(content)).convert("RGB")
        if self.transform:
            image = self.transform(image)
        return image, int(self.labels[index])


class JpegDataset(Dataset):
    """Images in class folders, opened and decoded at every read, like torchvision's ImageFolder.

    Whatever colours a file has (grey, palette, CMYK, transparent), its image is RGB. It is turned upright, as its EXIF
    orientation says. Raises `config.CourseError` if there is no class folder, or no image in one of them;
    `UnreadableImage` when an image is read whose file is missing, damaged or no image. Damage that leaves a JPEG
    decodable is not found: JPEG has no checksum.

    Parameters
    ----------
    folder : path
        Holds a folder of images for each class; see `photos.list_images`.
    transform : callable, optional
        Takes the decoded image, a `PIL.Image.Image` or, from the decoder ``"torchcodec"``, a tensor; its result
        becomes the item's image.
    draft : int, optional
        Let Pillow decode a JPEG at 1/2, 1/4 or 1/8 of its size, as long as the shorter side keeps this many pixels.
        It saves time, since a JPEG's 8 × 8 blocks are not computed in full; a photo too small for 1/2 is decoded whole.
    decoder : {"pillow", "torchcodec"}
        Pillow, or TorchCodec, which gives a uint8 tensor of shape (3, H, W). Both use libjpeg-turbo.
    """

    def __init__(
        self, folder: str | Path, transform: Callable | None = None, draft: int | None = None, decoder: str = "pillow"
    ):
        if decoder not in ("pillow", "torchcodec") or (draft and decoder != "pillow"):
            raise ValueError(f"Expected the decoder 'pillow' or, without draft, 'torchcodec', not {decoder!r}.")
        self.folder = str(folder)
        self.transform = transform
        self.draft = draft
        self.decoder = decoder
        self.classes, self.files, self.labels = photos.list_images(folder)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        path = self.path(index)
        with _named(path, "Remove the file, or put an intact one in its place."):
            image = self._decode(_read(path))
        if self.transform:
            image = self.transform(image)
        return image, int(self.labels[index])

    def _decode(self, content: bytes) -> Image.Image | torch.Tensor:
        if self.decoder == "torchcodec":
            from torchcodec.decoders import decode_image  # here: it takes 0.1 s, and most loaders have no need of it

            return decode_image(content)
        image = Image.open(io.BytesIO(content))
        if self.draft:
            image.draft("RGB", (self.draft, self.draft))
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")

    def path(self, index: int) -> Path:
        """Return the path of an image."""
        return Path(self.folder, os.fsdecode(self.files[index]))


class Transformed(Dataset):
    """Another dataset of images and labels, with `transform` applied to each image as that dataset yields it."""

    def __init__(self, dataset: Dataset, transform: Callable):
        self.dataset, self.transform = dataset, transform

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]  # PyTorch's class does not promise a length

    def __getitem__(self, index: int):
        image, label = self.dataset[index]
        return self.transform(image), label


class SleepDataset(Dataset):
    """`count` items that take `seconds` and no CPU time: shows what the loader does, undisturbed by other work.

    The last of every `hiccup_every` items takes `hiccup_seconds` instead. An item is a float64 tensor of shape
    (3,), with the number of the worker that made it (-1: no worker), its start and its end, and then the item's index
    as the label. Times are seconds of ``time.monotonic()``, which all processes of a machine share.
    """

    def __init__(self, count: int, seconds: float, hiccup_every: int | None = None, hiccup_seconds: float = 0.0):
        self.count, self.seconds = count, seconds
        self.hiccup_every, self.hiccup_seconds = hiccup_every, hiccup_seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        worker = get_worker_info()
        start = time.monotonic()
        hiccup = self.hiccup_every and index % self.hiccup_every == self.hiccup_every - 1
        time.sleep(self.hiccup_seconds if hiccup else self.seconds)
        return torch.tensor([worker.id if worker else -1, start, time.monotonic()], dtype=torch.float64), index


class FileNames(Dataset):
    """Nothing but file names: shows what workers do to the memory of a Python list, or of one NumPy array of bytes."""

    def __init__(self, count: int, kind: Literal["list", "array"]):
        self.names: list[str] | np.ndarray = [f"train/{index:08d}.png" for index in range(count)]
        if kind == "array":
            self.names = np.array(self.names, dtype="S")

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return len(self.names[index])


@contextmanager
def _named(path: str | Path, remedy: str) -> Iterator[None]:
    """Turn the errors of a damaged image into one that names its file."""
    try:
        yield
    except PermissionError:  # no damage; its message names the file
        raise
    except _DAMAGE as error:
        raise UnreadableImage(f"{path}: expected a readable image, but: {error}. {remedy}") from error


def _read(path: str | Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _read_labels(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    table = folder / "labels.csv"
    try:
        with open(table, newline="", encoding="utf-8") as file:
            labels = {row["file"]: int(row["label"]) for row in csv.DictReader(file)}
    except PermissionError:
        raise
    except (OSError, KeyError, TypeError, ValueError, csv.Error) as error:
        raise staging.DamagedFolder(
            f"{table}: expected a table with the columns file and label, and a class number in each row, but: "
            f"{error!r}. Run `python -m helpers prepare` to make the images."
        ) from error
    images = {entry.name for entry in os.scandir(folder) if entry.name.endswith(".png")}
    if unlabelled := images - labels.keys():
        raise staging.DamagedFolder(f"{folder / min(unlabelled)}: this image has no label in {table}.")
    if missing := labels.keys() - images:
        raise staging.DamagedFolder(f"{folder / min(missing)}: no such image, but {table} has a label for it.")
    return np.array(list(labels), dtype="S"), np.array(list(labels.values()))
