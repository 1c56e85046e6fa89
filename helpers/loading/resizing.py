"""Resizes images once, ahead of time, instead of in every epoch."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from helpers.data import photos
from helpers.loading import datasets
from stepscope.base import machine, staging, terminal

_MANIFEST = "resized.json"
_BYTES_PER_COPY = 40_000  # most have less: 15 kB in the median for drawn photos and 256 pixels


@dataclass(frozen=True)
class Resized:
    """Resized copies of images in class folders.

    `folder` has the same class folders and file names as the originals; files of another kind got ``.jpg`` added.
    `seconds` is the wall-clock time that it took to make them.
    """

    folder: Path
    images: int
    seconds: float
    bytes_before: int
    bytes_after: int


def resize_ahead(folder: str | Path, out: str | Path, size: int) -> Resized:
    """Write a copy of each image with a shorter side of `size` pixels, as ``Resize(size)`` would make it.

    `folder` holds a folder of images for each class. The copies are JPEG files of quality `photos.QUALITY`. They appear
    in `out` whole or not at all, and replace those of an earlier call. It uses all cores. Raises `config.CourseError`
    if `folder` does not hold images in class folders; `datasets.UnreadableImage` if an image is damaged;
    `FileExistsError` if `out` exists and holds something other than resized copies; `staging.NotEnoughDisk` if the disk
    has no room.
    """
    from torchvision.transforms import v2  # here, since it takes 2 s, as in helpers.training.models

    images, out = datasets.JpegDataset(folder), Path(out)
    if out.exists() and not (out / _MANIFEST).exists():
        raise FileExistsError(f"{out}: expected a new folder, or one that an earlier call made; name another one.")
    out.parent.mkdir(parents=True, exist_ok=True)
    staging.check_free(out.parent, len(images), _BYTES_PER_COPY)
    start = time.perf_counter()
    with staging.folder(out, replace=True) as copies:
        write = partial(_write_copy, images, copies, v2.Resize(size))
        # Threads: Pillow releases the GIL while it decodes, resizes and encodes
        with ThreadPoolExecutor(machine.cores()) as threads:
            sizes = []
            with terminal.bar("resizing", "image", len(images)) as bar:
                for pair in threads.map(write, range(len(images))):
                    sizes.append(pair)
                    bar.update()
        staging.write(copies / _MANIFEST, json.dumps({"size": size, "images": len(images)}), durable=True)
    return Resized(out, len(images), time.perf_counter() - start, *map(sum, zip(*sizes, strict=True)))


def _write_copy(images: datasets.JpegDataset, folder: Path, resize: Callable, index: int) -> tuple[int, int]:
    """Write the copy of one image below `folder`; return the bytes of the original and of the copy."""
    original = images.path(index)
    image, _ = images[index]
    name = original.relative_to(images.folder)
    if name.suffix.lower() not in (".jpg", ".jpeg"):
        name = name.with_name(f"{name.name}.jpg")
    copy = folder / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    resize(image).save(copy, quality=photos.QUALITY)
    return original.stat().st_size, copy.stat().st_size
