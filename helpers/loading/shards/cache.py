"""A copy of the pieces on this machine's own disk, in a folder and up to a size that you choose."""

from __future__ import annotations

import os
import warnings
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import google_crc32c
from filelock import FileLock

from stepscope.base import staging

_KEPT = 0.9  # of the limit, after a removal: listing 15,000 pieces takes 0.1 s, too long for each new one


class Cache:
    """Pieces on a local disk, shared by all processes of this machine: each is downloaded once.

    A piece is a file whose name has the index's fingerprint, so pieces of two versions of the data are never confused.
    A file appears whole or not at all, so a killed process leaves no partial piece. If all files together exceed the
    limit, those that were read longest ago are removed, until a tenth of the limit is free. If the disk is full,
    reading goes on without keeping.

    Parameters
    ----------
    folder : path
        On a disk of this machine; created if missing. To empty the cache, delete it while nobody reads.
    limit_bytes : float
        For all files together; files that are written at the same moment may exceed it. A larger piece is not kept.
    """

    def __init__(self, folder: str | Path, limit_bytes: float):
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes

    def get(self, name: str, crc32c: int, download: Callable[[], bytes]) -> bytes:
        """Return the content of a piece, from the disk or downloaded; if several want it at once, one downloads.

        A copy with another `crc32c` is downloaded anew. Errors of `download` are raised.
        """
        path = self.folder / "pieces" / f"{zlib.crc32(name.encode()) % 256:02x}" / name  # `staging` lists its folder
        content = _read(path, crc32c)
        if content is None:
            with _lock(self.folder / "locks" / name):
                content = _read(path, crc32c)  # another process may have been faster
                if content is None:
                    content = download()
                    self._keep(path, content)
        return content

    def size(self) -> int:
        """Return the bytes of all pieces."""
        return sum(size for _, size, _ in self._files())

    def _keep(self, path: Path, content: bytes) -> None:
        if len(content) > self.limit_bytes:
            return
        try:
            self._make_room(len(content))
            staging.write(path, content)
        except OSError as error:
            warnings.warn(
                f"{self.folder}: a piece could not be kept ({os.strerror(error.errno or 0)}). Reading goes on without. "
                "Free some space, or choose another folder or a smaller limit.",
                stacklevel=2,
            )

    def _make_room(self, size: int) -> None:
        """Count a piece before it is written; if that exceeds the limit, remove those that were read longest ago."""
        count = self.folder / "bytes"
        with _lock(self.folder / "bytes.lock").acquire(poll_interval=0.005):  # seconds; held for a tenth of that
            try:
                total = size + int(count.read_text())
            except (FileNotFoundError, ValueError):  # a new cache; or the disk was full, or its process killed
                total = size + self.size()
            if total > self.limit_bytes:
                files = sorted(self._files())
                total = size + sum(bytes_ for _, bytes_, _ in files)
                for _, bytes_, path in files:
                    if total > _KEPT * self.limit_bytes and not staging.is_staging(path.relative_to(self.folder)):
                        with suppress(OSError):  # on Windows, while somebody reads it
                            path.unlink()
                            total -= bytes_
                            (self.folder / "locks" / path.name).unlink()
            count.write_text(str(total))

    def _files(self) -> list[tuple[float, int, Path]]:
        """Return when each piece was read last, its bytes, its path."""
        files = []
        for path in (self.folder / "pieces").glob("*/*"):
            with suppress(FileNotFoundError):
                state = path.stat()
                files.append((state.st_mtime, state.st_size, path))
        return files


def _read(path: Path, crc32c: int) -> bytes | None:
    """Return the content of an intact copy, and note that it was read now."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    with suppress(OSError):  # another user's file, or removed meanwhile
        os.utime(path)
    return content if google_crc32c.value(content) == crc32c else None


def _lock(path: Path) -> FileLock:
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path, mode=0o666)  # for other users of the folder, too
