"""Gets photo-sized images in class folders: the reader's own, or drawn ones."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from helpers import config
from helpers.data import manifests, synthetic
from stepscope.base import staging, wording

QUALITY = 90
"""Of the JPEG files that the course writes, from 1 to 95."""
ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""Endings of the files that count as images: those of torchvision's ImageFolder."""

_FORMAT = 1  # of the prepared folder: count up when its layout or the drawn photos change
_BYTES_PER_PHOTO = 80_000  # most have less: 45 kB in the median


@dataclass(frozen=True)
class Photos:
    """Photos ready to load.

    Attributes
    ----------
    folder : Path
        Holds a folder of images for each class.
    source : str
        What they are: "drawn photos (600)" or "photos in 256_ObjectCategories (30,607)". Every figure says so.
    classes : tuple of str
        Names of the classes, sorted: those of their folders.
    images : int
        Number of photos.
    """

    folder: Path
    source: str
    classes: tuple[str, ...]
    images: int


def prepare(*, data_dir: Path | None = None, drawn: int | None = None) -> Photos:
    """Get the photos, once: later calls only check them. Prints one line that says where they come from.

    Drawn photos appear whole or not at all. Many processes may call this at once: one draws, the others wait.

    Parameters
    ----------
    data_dir : Path, optional
        Where to keep drawn photos, by default `config.data_dir`. May be read-only when they are there.
    drawn : int, optional
        How many to draw if `config.photos` names no folder of the reader's own, by default those of `config.preset`.
        The reader's photos are only read.

    Raises
    ------
    config.CourseError
        If the reader's own folder does not hold images in class folders.
    staging.DamagedFolder
        If drawn photos are missing, were altered or added.
    staging.NotEnoughDisk
        If the disk has no room.
    """
    folder, hint = config.photos(), ""
    if folder is None:
        data_dir = config.data_dir() if data_dir is None else Path(data_dir)
        drawn = config.preset().drawn_photos if drawn is None else drawn
        folder, source = data_dir / f"photos-drawn-{drawn}", f"drawn photos ({drawn:,})"
        hint = " For real ones, set COURSE_PHOTOS to a folder that holds a folder of images for each class."
        if not folder.exists():
            data_dir.mkdir(parents=True, exist_ok=True)
            with staging.only_one_process(data_dir):
                if not folder.exists():
                    _draw(folder, drawn)
        manifests.check_sizes(folder, manifests.read(folder, _FORMAT)["bytes"], ".jpg")
    classes, files, _ = list_images(folder)
    if not hint:
        source = f"photos in {folder.name} ({len(files):,})"
    print(f"Photos: {source} of {len(classes)} classes, in {folder}.{hint}", flush=True)
    return Photos(folder, source, classes, len(files))


def list_images(folder: str | Path) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """List the images in class folders, in the order of torchvision's ImageFolder.

    Parameters
    ----------
    folder : path
        Holds a folder for each class, and in it or deeper files with one of the `ENDINGS`. Names that begin with a
        dot are passed over: file browsers and Jupyter make such files.

    Returns
    -------
    classes : tuple of str
        Names of the class folders, sorted.
    files : ndarray of bytes, shape (images,)
        Paths below `folder`, as `os.fsencode` encodes them.
    labels : ndarray of int64, shape (images,)
        Index in `classes`.

    Raises
    ------
    config.CourseError
        If there is no class folder, or no image in one of them.
    """
    folder, expected = Path(folder), "Expected a folder of images for each class"
    if not folder.is_dir():
        raise config.CourseError(f"{folder}: no such folder; is COURSE_PHOTOS right? {expected} in it.")
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        loose = sum(_is_image(entry.name) for entry in os.scandir(folder))
        raise config.CourseError(f"{folder}: {expected} in it, found no folder and {wording.counted(loose, 'image')}.")
    files, labels = [], []
    for label, name in enumerate(classes):
        found = _images_below(folder / name)
        if not found:
            raise config.CourseError(
                f"{folder / name}: {expected}, found none in this one with the ending {', '.join(ENDINGS)}. Remove "
                "the folder, or put images into it."
            )
        files += [os.fsencode(os.path.relpath(path, folder)) for path in found]
        labels += [label] * len(found)
    return tuple(classes), np.array(files, dtype="S"), np.array(labels)


def _images_below(folder: Path) -> list[str]:
    found = []
    for place, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [(place, name) for name in names if _is_image(name)]
    return [os.path.join(place, name) for place, name in sorted(found)]


def _is_image(name: str) -> bool:
    return name.lower().endswith(ENDINGS) and not name.startswith(".")


def _draw(folder: Path, count: int) -> None:
    staging.check_free(folder.parent, count, _BYTES_PER_PHOTO)
    with staging.folder(folder) as new:
        for name in synthetic.CLASSES[:count]:
            (new / _folder_name(name)).mkdir()

        def write(number: int) -> tuple[str, int]:
            image, label = synthetic.draw_photo(number, config.SEED)
            name = f"{_folder_name(synthetic.CLASSES[label])}/{number:05d}.jpg"
            Image.fromarray(image).save(new / name, quality=QUALITY)
            return name, (new / name).stat().st_size

        sizes = dict(manifests.in_threads(write, range(count), count, "drawing", "photo"))
        staging.write(new / manifests.NAME, json.dumps({"format": _FORMAT, "bytes": sizes}), durable=True)


def _folder_name(name: str) -> str:
    return name.removeprefix("drawn: ").replace(" ", "-")
