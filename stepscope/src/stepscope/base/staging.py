"""Files and folders that appear whole or not at all.

New content is written to a staging folder or file beside its target, and gets its name by an atomic rename. The next
process that stages content in the same folder removes leftovers of killed processes: a staging folder always has a lock
file, made before it and removed after it, and the system releases the lock when the process ends.

On a network disk whose locks do not reach other machines (``local_lock`` of NFS, ``localflock`` of Lustre), prepare
shared folders from one machine.
"""

import errno
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_STAGING = re.compile(r"\..+\.staging-[0-9a-f]{8}(\.lock)?")
_RENAME_AGAIN_S = (0.1, 0.3, 1.0, 3.0)
_SHOWN_CHARACTERS = 40  # of a target's name: with a whole long name, the staging folder's name could be too long
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)  # errors of rename, by system, if the target exists
LARGEST = 64 << 20  # bytes of a file to read at once: results with all steps take less than 1 MB


class DamagedFolder(ValueError):
    """A folder of prepared images has changed since it was made."""


class NotEnoughDisk(OSError):
    """The disk has no room for the new files."""


class TargetExists(FileExistsError):
    """The path of a new folder exists already."""


@contextmanager
def folder(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Give a staging folder to fill, which becomes `path` when the block ends, and is removed if the block raises.

    The parent folders of `path` are made. With `replace`, an existing `path` is replaced; a process that is killed
    between the two renames leaves no `path`. Otherwise an existing `path` raises `TargetExists`, before the block or
    after it. A disk that becomes full raises `NotEnoughDisk`.
    """
    path = Path(os.path.abspath(path))
    if not replace:
        _refuse_existing(path)
    with scratch(path) as staging:
        yield staging
        while not _renamed(staging, path):  # `path` existed before, or another process made it meanwhile
            if replace:
                with scratch(path) as former, suppress(FileNotFoundError):
                    path.rename(former / path.name)
            else:
                _refuse_existing(path)


@contextmanager
def scratch(path: str | Path) -> Iterator[Path]:
    """Give a new folder next to `path`, on the same disk; it is removed when the block ends, unless renamed."""
    with _staged(path) as staging:
        staging.mkdir()
        yield staging


def write(path: str | Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file that appears whole or not at all; an existing file is replaced, and keeps its permissions.

    The parent folders of `path` are made; on Windows, no process may have the file open. Text is written as UTF-8.
    `durable` waits until the content is on the disk, so that a power cut leaves the old file or the new one. It raises
    `NotEnoughDisk` if the disk becomes full meanwhile.
    """
    path = Path(os.path.realpath(path))  # a link stays a link, and its target is replaced
    with _staged(path) as staging:
        with open(staging, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        with suppress(OSError):  # there is no file yet, or it is another user's
            shutil.copymode(path, staging)
        staging.replace(path)


def read(path: str | Path, most: int = LARGEST) -> bytes:
    """Return the content of a file of at most `most` bytes; raises OSError for others, and for a pipe or a device."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "expected a regular file, found a folder, pipe or device", str(path))
    if path.stat().st_size > most:
        raise OSError(errno.EFBIG, f"expected a file of at most {most >> 20} MiB", str(path))
    return path.read_bytes()


def is_staging(path: Path) -> bool:
    """Whether a path is, or lies in, a staging folder or file, or is the lock file of one."""
    return any(map(_STAGING.fullmatch, path.parts))


def clean(folder: Path) -> None:
    """Remove leftovers of killed processes in `folder`, except another user's files if they cannot be removed."""
    try:
        names = os.listdir(folder)
    except OSError:  # the folder does not exist, or this user may write to it but not list it
        return
    for name in names:
        if _STAGING.fullmatch(name) and name.endswith(".lock"):
            with suppress(OSError), _locked(folder / name.removesuffix(".lock"), timeout=0):
                pass  # no TimeoutError, so its process has ended; `_locked` now removes the leftovers


def check_free(folder: Path, images: int, bytes_per_image: int) -> None:
    """Raise NotEnoughDisk unless `images` files fit on the disk of `folder`, which must exist."""
    needed, free = images * bytes_per_image, shutil.disk_usage(folder).free
    if free < needed:
        raise NotEnoughDisk(
            errno.ENOSPC, f"{folder}: {images:,} images need {needed / 1e6:,.0f} MB, found {free / 1e6:,.0f} MB free"
        )


@contextmanager
def _staged(path: str | Path) -> Iterator[Path]:
    """Give the path of a staging folder or file to make; if it exists at the end of the block, it is removed."""
    path = Path(os.path.abspath(path))
    staging = path.with_name(f".{path.name[:_SHOWN_CHARACTERS]}.staging-{uuid.uuid4().hex[:8]}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not is_staging(path.parent):  # leftovers within a staging folder are removed with that folder
            clean(path.parent)
        with _locked(staging):
            yield staging
    except OSError as error:
        if error.errno not in _FULL or isinstance(error, NotEnoughDisk):
            raise
        raise NotEnoughDisk(
            error.errno, f"the disk of {path.parent} became full while writing {path.name}; free some space, run again"
        ) from error


@contextmanager
def _locked(staging: Path, timeout: float = -1) -> Iterator[None]:
    """Hold the lock of a staging folder or file; at the end of the block remove it and the lock file."""
    from filelock import FileLock

    file = staging.with_name(f"{staging.name}.lock")
    with FileLock(file, mode=0o666).acquire(timeout=timeout):
        try:
            yield
        finally:
            if staging.is_dir():
                shutil.rmtree(staging, ignore_errors=True)
            else:
                with suppress(OSError):
                    staging.unlink(missing_ok=True)
            # Before the lock is released: then a process that waited for it sees that the file is gone, and takes a new
            # one. Windows removes no open file; there FileLock removes the file a moment later.
            if not os.path.lexists(staging):
                with suppress(PermissionError):
                    file.unlink(missing_ok=True)


def _renamed(staging: Path, path: Path) -> bool:
    """Give a staging folder its name, or return False if the name is taken; an empty folder may be replaced.

    Windows renames no folder while a program, such as a virus scanner, has one of its new files open for a moment.
    """
    patience = _RENAME_AGAIN_S if os.name == "nt" else ()
    for pause in (*patience, None):
        try:
            staging.rename(path)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            if pause is None:
                raise
            time.sleep(pause)
        else:
            break
    return True


def _refuse_existing(path: Path) -> None:
    if os.path.lexists(path):
        raise TargetExists(f"{path}: expected nothing here, but it exists. Delete it, or choose another name.")
