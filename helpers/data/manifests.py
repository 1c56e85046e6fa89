"""Prepared folders of images: a manifest tells what was written, and threads write the files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from stepscope.base import machine, staging

NAME = "manifest.json"
_MAX_THREADS = 8  # Pillow and NumPy release the GIL for a part of the work only
_Result = TypeVar("_Result")


def read(folder: Path, version: int) -> dict:
    """Return a folder's manifest, whose "format" must be `version`.

    Raises
    ------
    staging.DamagedFolder
    """
    path = folder / NAME
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise damaged(folder, path, f"expected a list of the images, but: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != version:
        raise damaged(folder, path, f"expected format {version}; another version of the course made this folder")
    return manifest


def check_sizes(folder: Path, expected: Mapping[str, int], ending: str) -> None:
    """Compare the names and sizes (bytes) of the files in the folders of `folder` with those that were written.

    Raises
    ------
    staging.DamagedFolder
        With the name of the first file that is missing, was added, or has another size.
    """
    sizes = {}
    for inner in os.scandir(folder):
        for file in os.scandir(inner) if inner.is_dir() else ():
            if file.name.endswith(ending):
                sizes[f"{inner.name}/{file.name}"] = file.stat().st_size
    if sizes == expected:
        return
    name = min(name for name in sizes.keys() | expected.keys() if sizes.get(name) != expected.get(name))
    wanted, there = (f"{table[name]:,} bytes" if name in table else "no such file" for table in (expected, sizes))
    raise damaged(folder, folder / name, f"expected {wanted}, found {there}")


def damaged(folder: Path, path: Path, what: str) -> staging.DamagedFolder:
    """Return the error for a file in a prepared folder, with the remedy."""
    return staging.DamagedFolder(f"{path}: {what}. Delete the folder {folder} and run `python -m helpers prepare`.")


def in_threads(work: Callable[..., _Result], items: Iterable, total: int, title: str, unit: str) -> Iterator[_Result]:
    """Yield the results of `work` for each of the items, in their order, and show a progress bar.

    Threads, not processes: they start at once, and end with us if we are killed.
    """
    with ThreadPoolExecutor(min(machine.cores(), _MAX_THREADS)) as threads:
        yield from tqdm(threads.map(work, items), title, total, unit=unit)
