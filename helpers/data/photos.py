"""Gets photo-sized images in class folders: the reader's own, or drawn ones."""

import io
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from helpers import config
from helpers.data import manifests, sharing, synthetic
from stepscope.base import staging

QUALITY = 90
"""Of the JPEG files that the course writes, from 1 to 95."""

_CLASSES = [name.removeprefix("drawn: ").replace(" ", "-") for name in synthetic.CLASSES]  # names of folders
_PART = 10  # photos that one process draws at a time
_FILE_BYTES = 80_000  # most have less: 45 kB in the median


@dataclass(frozen=True)
class Photos:
    """Photos ready to load."""

    folder: Path  #: Holds a folder of images for each class
    #: What they are: "drawn photos (600)" or "photos in 256_ObjectCategories (30,607)". Every figure says so.
    source: str
    classes: tuple[str, ...]  #: Names of the classes, sorted: those of their folders
    images: int  #: Number of photos


def prepare() -> Photos:
    """Get the photos, once: later calls only check them. Prints one line that says where they come from.

    The reader's own photos, in the folder that `config.photos` names, are only read. If it names none, as many are
    drawn as `config.preset` says, in `config.data_dir`, which may be read-only when they are there. Drawn photos appear
    whole or not at all. Many processes may call this at once: one draws, the others wait. Raises `config.CourseError`
    if the reader's own folder does not hold images in class folders; `staging.DamagedFolder` if drawn photos are
    missing, were altered or added; `staging.NotEnoughDisk` if the disk has no room.
    """
    folder, hint = config.photos(), ""
    if folder is None:
        drawn = config.preset().drawn_photos
        folder, source = folder_of(), f"drawn photos ({drawn:,})"
        hint = " For real ones, set COURSE_PHOTOS to a folder that holds a folder of images for each class."
        sharing.once(folder.parent, folder.exists, lambda: _draw(folder, drawn))
        manifests.check(folder)
    classes, files, _ = list_images(folder)
    if not hint:
        source = f"photos in {folder.name} ({len(files):,})"
    print(f"Photos: {source} of {len(classes)} classes, in {folder}.{hint}", flush=True)
    return Photos(folder, source, classes, len(files))


def folder_of() -> Path:
    """Return the folder of drawn photos, which need not exist yet."""
    return config.data_dir() / f"photos-drawn-{config.preset().drawn_photos}"


def list_images(folder: str | Path) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """List the images in class folders, as torchvision's ImageFolder does and in its order.

    `folder` holds a folder for each class, with images at any depth. Names that begin with a dot are skipped: file
    browsers and Jupyter make such files. Raises `config.CourseError` if there is no class folder, or no image in one.

    Returns the sorted names of the class folders; paths below `folder`, as `os.fsencode` encodes them, shape
    (images,); and for each its index in the names, int64, shape (images,).
    """
    from torchvision.datasets.folder import find_classes, is_image_file, make_dataset  # here: it imports torch

    def is_valid(path: str) -> bool:
        return is_image_file(path) and f"{os.sep}." not in path[len(os.fspath(folder)) :]

    try:
        classes = [name for name in find_classes(folder)[0] if not name.startswith(".")]
        images = make_dataset(folder, {name: label for label, name in enumerate(classes)}, is_valid_file=is_valid)
    except (OSError, ValueError) as error:  # ValueError: each name of a class folder begins with a dot
        raise config.CourseError(
            f"{folder}: expected a folder of images for each class in it; is COURSE_PHOTOS right? {error}"
        ) from error
    files = [os.fsencode(os.path.relpath(path, folder)) for path, _ in images]
    return tuple(classes), np.array(files, dtype="S"), np.array([label for _, label in images])


def _draw(folder: Path, count: int) -> None:
    staging.check_free(folder.parent, count, _FILE_BYTES)
    parts = [partial(_drawn, range(start, min(start + _PART, count))) for start in range(0, count, _PART)]
    manifests.write(folder, _CLASSES, parts, count)


def _drawn(numbers: range) -> manifests.Files:
    for number in numbers:
        image, label = synthetic.draw_photo(number, config.SEED)
        jpeg = io.BytesIO()
        Image.fromarray(image).save(jpeg, "JPEG", quality=QUALITY)
        yield f"{_CLASSES[label]}/{number:05d}.jpg", jpeg.getvalue()
