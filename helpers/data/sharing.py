"""Images that one process makes for all processes and accounts that need them."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
from filelock import FileLock, Timeout

from stepscope.base import staging

LONGEST_WAIT_S = 1800.0  # for another process that prepares images: a slow download takes minutes
_Made = TypeVar("_Made")


class NotPermitted(PermissionError):
    """This account may not read or write shared files."""


class HeldTooLong(TimeoutError):
    """Another process holds a lock for longer than its work takes."""


def once(folder: Path, find: Callable[[], _Made | None], make: Callable[[], _Made]) -> _Made:
    """Return the result of `find`, or else of `make` in one process; other processes print that they wait, and wait.

    `folder` is made if it does not exist. Leftovers of killed processes in it are removed. Raises `NotPermitted` if
    this account may not write to `folder`; `HeldTooLong` if another process takes longer than `LONGEST_WAIT_S`.
    """
    staging.clean(folder)
    if found := find():
        return found
    path = folder / ".preparing.lock"
    lock = FileLock(path, mode=0o666)  # other users of a shared folder need it too
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print(f"{_holder(path)} is preparing images in {folder}, waiting for it.", flush=True)
            lock.acquire(timeout=LONGEST_WAIT_S)
        return find() or make()
    except Timeout:
        raise HeldTooLong(
            f"{path}: {_holder(path)} has held it for {LONGEST_WAIT_S / 60:.0f} minutes. End that process, or wait for "
            "it, and run again."
        ) from None
    except PermissionError as error:
        raise NotPermitted(
            f"{folder} lacks images that are wanted here, and this account cannot make them: {error}. Let the folder's "
            "owner run  python -m helpers prepare --preset NAME  with the preset in use here."
        ) from error
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """Return the process that holds a lock file, in words, as far as Linux says it: a network disk's may be unknown."""
    with suppress(OSError, IndexError, ValueError, StopIteration, psutil.Error):
        status = path.stat()
        place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        held = [
            line.split()
            for line in Path("/proc/locks").read_text(encoding="utf-8").splitlines()
            if f" {place} " in line
        ]
        number = next(int(fields[4]) for fields in held if fields[1] != "->")
        return f"Process {number} of {psutil.Process(number).username()}"
    return "Another process"
