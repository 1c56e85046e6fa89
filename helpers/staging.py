"""Folders that appear whole or not at all, made once however many processes want them at the same moment."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


class DamagedFolder(ValueError):
    """A folder of prepared images is not as it was made."""


class NotEnoughDisk(OSError):
    """The disk has no room for the images."""


@contextmanager
def only_one_process(data_dir: Path) -> Iterator[None]:
    """Let one process at a time prepare images in `data_dir`; the others say that they wait, and do.

    What a process left aside that was killed in the middle (see `aside`) is removed.
    """
    lock = FileLock(data_dir / ".preparing.lock", mode=0o666)  # other users of a shared folder need it too
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Another process is preparing images in {data_dir}, waiting for it.", flush=True)
        lock.acquire()
    try:
        for leftover in data_dir.glob("*.preparing-*"):
            # We hold the lock, so nobody works on it. Another user's may resist; no harm.
            shutil.rmtree(leftover, ignore_errors=True)
        yield
    finally:
        lock.release()


@contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """Give a new folder beside `folder`, gone afterwards unless it was renamed.

    Raises
    ------
    NotEnoughDisk
        If the disk becomes full meanwhile.
    """
    beside = folder.with_name(f"{folder.name}.preparing-{uuid.uuid4().hex[:8]}")
    try:
        beside.mkdir()
        yield beside
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotEnoughDisk(
            error.errno, f"the disk of {folder.parent} became full while preparing; free some space and run again"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def check_free(folder: Path, images: int, bytes_per_image: int) -> None:
    """Check that `images` files fit on the disk of `folder`, which must exist.

    Raises
    ------
    NotEnoughDisk
        If they do not.
    """
    needed, free = images * bytes_per_image, shutil.disk_usage(folder).free
    if free < needed:
        raise NotEnoughDisk(
            errno.ENOSPC, f"{folder}: {images:,} images need {needed / 1e6:,.0f} MB, found {free / 1e6:,.0f} MB free"
        )
    disk = os.statvfs(folder) if hasattr(os, "statvfs") else None
    if disk and disk.f_files and disk.f_favail < images + 8:  # f_files is 0 where files are not counted
        raise NotEnoughDisk(
            errno.ENOSPC, f"{folder}: {images:,} images need as many inodes, found {disk.f_favail:,} free"
        )


def write_durably(path: Path, text: str) -> None:
    """Write so that it survives a power cut. Images are not written so: were some lost, their sizes would tell."""
    with open(path, "w", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
