"""Folders of image files that appear whole or not at all, with a manifest of what was written."""

import json
import operator
import os
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from stepscope.base import machine, staging

FORMAT = 2
"""Of the folders: raise it when their layout or the drawn images change."""

_NAME = "manifest.json"
_ENDINGS = (".png", ".jpg", ".csv")  # of the files that count; a file browser adds others
_MAX_THREADS = 8  # Pillow and NumPy release the GIL for a part of the work only
_Result = TypeVar("_Result")


def write(
    folder: Path, inner: Iterable[str], encode: Callable[..., tuple[str, bytes]], items: Collection, **facts
) -> None:
    """Write a folder with the folders `inner` and a file for each of the items, and show a progress bar.

    For an item, `encode` returns the name of its file below `folder`, such as ``"train/00000.png"``, and the content.
    It runs in threads, which start at once and end with us if we are killed. The `facts` are for the manifest.
    """
    with staging.folder(folder) as new:
        for name in inner:
            (new / name).mkdir()

        def write_file(item: object) -> tuple[str, tuple[int, int]]:
            name, content = encode(item)
            (new / name).write_bytes(content)
            return name, (len(content), zlib.crc32(content))

        files = dict(_in_threads(write_file, items, "writing images"))
        # Only the manifest is forced to the disk: if images are lost by a power cut, it shows that
        staging.write(new / _NAME, json.dumps({"format": FORMAT, **facts, "files": files}), durable=True)


def check(folder: Path, every_byte: bool = False, facts: Callable[[dict], Any] = len) -> Any:
    """Compare a folder with its manifest, and return the facts.

    `every_byte` compares the content of all files; else only names and sizes are compared, and the content of tables.
    `facts` takes them from the manifest, and raises KeyError, TypeError or ValueError if one is missing or is something
    else. Raises `staging.DamagedFolder` with the name of the first file that is missing, was added or has changed.
    """
    path = folder / _NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"another version of the course made this folder, not in format {FORMAT}")
        written = manifest["files"]
        expected = {name: operator.index(size) for name, (size, _) in written.items()}
        found = facts(manifest)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _damaged(folder, path, f"expected a list of the images, but: {error!r}") from error
    sizes = {}
    for inner in os.scandir(folder):
        for file in os.scandir(inner) if inner.is_dir() else ():
            if file.name.endswith(_ENDINGS):
                sizes[f"{inner.name}/{file.name}"] = file.stat().st_size
    if sizes != expected:
        name = min(name for name in sizes.keys() | expected.keys() if sizes.get(name) != expected.get(name))
        wanted, there = (f"{table[name]:,} bytes" if name in table else "no such file" for table in (expected, sizes))
        raise _damaged(folder, folder / name, f"expected {wanted}, found {there}")
    names = [name for name in written if every_byte or name.endswith(".csv")]
    checksums = _in_threads(lambda name: zlib.crc32((folder / name).read_bytes()), names, "verifying", not every_byte)
    for name, checksum in zip(names, checksums, strict=True):
        if checksum != written[name][1]:
            raise _damaged(folder, folder / name, "its content is not what was written")
    return found


def _damaged(folder: Path, path: Path, what: str) -> staging.DamagedFolder:
    return staging.DamagedFolder(f"{path}: {what}. Delete the folder {folder} and run `python -m helpers prepare`.")


def _in_threads(work: Callable[..., _Result], items: Collection, title: str, silent: bool = False) -> Iterator[_Result]:
    """Yield the results of `work` in the order of the items."""
    with ThreadPoolExecutor(min(machine.cores(), _MAX_THREADS)) as threads:
        yield from tqdm(threads.map(work, items), title, len(items), unit="file", disable=silent)
