"""Folders of image files that appear whole or not at all, with a manifest of what was written."""

import json
import operator
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from helpers.data import sharing
from stepscope.base import machine, staging, terminal

FORMAT = 2
"""Of the folders: raise it when their layout or the drawn images change."""

NAME = "manifest.json"
_ENDINGS = (".png", ".jpg", ".csv")  # of the files that count; a file browser adds others
MOST_WORKERS = 8
"""Processes that draw, encode or decode images; what each needs in memory counts on machines with many cores."""

Files = Iterable[tuple[str, bytes]]
"""Names of files below a folder, such as ``"train/00000.png"``, and their contents."""


def write(folder: Path, inner: Iterable[str], parts: Sequence[Callable[[], Files]], count: int, **facts) -> None:
    """Write a folder with the folders `inner` and the `count` files of all parts, and show a progress bar.

    The parts are called in as many processes as there are cores, so they must be picklable. The `facts` are for the
    manifest.
    """
    from torch.utils.data import DataLoader  # here, since most callers find the folder made

    workers = min(machine.cores(), MOST_WORKERS, len(parts) // 8)  # starting one takes longer than some parts
    dataset: Any = parts  # for type checkers no dataset, though it has a length and items
    made = DataLoader(dataset, batch_size=None, collate_fn=_made, num_workers=workers)
    files = {}
    with staging.folder(folder) as new, terminal.bar("writing images", "file", count) as bar:
        for name in inner:
            (new / name).mkdir()
        for part in made:
            for name, content in part:
                (new / name).write_bytes(content)
                files[name] = len(content), zlib.crc32(content)
            bar.update(len(part))
        # Only the manifest is forced to the disk: if images are lost by a power cut, it shows that
        staging.write(new / NAME, json.dumps({"format": FORMAT, **facts, "files": files}), durable=True)


def check(folder: Path, every_byte: bool = False, facts: Callable[[dict], Any] = len) -> Any:
    """Compare a folder with its manifest, and return the facts.

    `every_byte` compares the content of all files; else only names and sizes are compared, and the content of tables.
    `facts` takes them from the manifest, and raises KeyError, TypeError or ValueError if one is missing or is something
    else. Raises `staging.DamagedFolder` with the name of the first file that is missing, was added or has changed;
    `sharing.NotPermitted` if this account may not read one.
    """
    try:
        return _checked(folder, every_byte, facts)
    except PermissionError as error:
        raise sharing.NotPermitted(
            f"{error.filename}: this account may not read it. Ask its owner to open the folder:  chmod -R a+rX {folder}"
        ) from error


def _checked(folder: Path, every_byte: bool, facts: Callable[[dict], Any]) -> Any:
    path = folder / NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ValueError(f"another version of the course made this folder, not in format {FORMAT}")
        written = manifest["files"]
        expected = {name: operator.index(size) for name, (size, _) in written.items()}
        found = facts(manifest)
    except PermissionError:
        raise
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
    with terminal.bar("verifying", "file", len(names), delay=3) as bar:
        for name in names:
            if zlib.crc32((folder / name).read_bytes()) != written[name][1]:
                raise _damaged(folder, folder / name, "its content is not what was written")
            bar.update()
    return found


def _made(part: Any) -> list[tuple[str, bytes]]:
    """Call a part: a loader without batches gives it to the function that would make a batch of items."""
    return list(part())


def _damaged(folder: Path, path: Path, what: str) -> staging.DamagedFolder:
    return staging.DamagedFolder(f"{path}: {what}. Delete the folder {folder} and run `python -m helpers prepare`.")
