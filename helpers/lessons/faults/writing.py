"""Writes the script of an exercise, and keeps what its reader makes of it, step by step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from helpers import staging
from helpers.lessons.faults.catalogue import Fault, draw, seeds_of_groups, text


class NotAFile(IsADirectoryError):
    """Where a script should be written there is a folder."""


def write(path: Path, faults: Sequence[Fault], images: Path) -> Path:
    """Write a script with these faults, unless there is one that has been edited; print which, and return its path.

    Parameters
    ----------
    path : Path
    faults : sequence of Fault
        None for the script as it should be.
    images : Path
        Folder of the training images, as `cifar10.Prepared.train` names it.

    Raises
    ------
    NotAFile
        If `path` is a folder.
    """
    path, script = Path(path).resolve(), text(faults, images).encode()
    if path.is_dir():
        raise NotAFile(
            f"Expected the name of a script to write, such as {path / 'train.py'}, and found the folder {path}."
        )
    if path.exists() and path.read_bytes() != script:
        print(f"{path} is not as it was drawn, and stays as it is. Delete it to begin anew.")
        return path
    staging.write(path, script)
    print(f"Wrote {path}.")
    return path


def write_for_groups(folder: Path, groups: int, seed: int, images: Path) -> dict[Path, int]:
    """Write a script for each group of a class, with other faults each; print which.

    Parameters
    ----------
    folder : Path
        Made if it is not there. A script is named after its group and its seed, such as ``train-group-1-seed-701.py``.
    groups, seed : int
        As for `catalogue.seeds_of_groups`.
    images : Path
        As for `write`.

    Returns
    -------
    dict of Path to int
        The seed of each script.

    Raises
    ------
    staging.TargetExists
        If `folder` is a file.
    catalogue.WrongGroups
        If there are fewer groups or more.
    """
    seeds, folder = seeds_of_groups(groups, seed), Path(folder)
    if folder.exists() and not folder.is_dir():
        raise staging.TargetExists(
            f"Expected the name of a folder for {groups} scripts, and found the file {folder.resolve()}."
        )
    scripts = {f"train-group-{number}-seed-{each}.py": each for number, each in enumerate(seeds, 1)}
    return {write(folder / name, draw(each), images): each for name, each in scripts.items()}


def keep(path: Path, name: str) -> dict[str, Path]:
    """Copy a script as it is now into the folder ``steps`` beside it, and return all copies, oldest first.

    Parameters
    ----------
    path : Path
    name : str
        What has been done to it. A copy of that name is replaced.

    Returns
    -------
    dict of str to Path
        By their names, without characters that a file's name cannot have.
    """
    steps, name = path.parent / "steps", " ".join(re.sub(r"[^\w ,()-]", " ", name).split())
    if not name:
        raise ValueError("Expected a name for what you have fixed, such as 'more workers', and found none.")
    kept = _kept(steps, path.name)
    copy = kept.get(name) or steps / f"{len(kept):02} {name}" / path.name
    staging.write(copy, path.read_bytes())
    return kept | {name: copy}


def _kept(steps: Path, file: str) -> dict[str, Path]:
    return {copy.parent.name.split(" ", 1)[1]: copy for copy in sorted(steps.glob(f"[0-9][0-9] */{file}"))}
