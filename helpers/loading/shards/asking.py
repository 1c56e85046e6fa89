"""Asking a store: again where that may help; where it does not, an error that says why."""

from __future__ import annotations

import concurrent.futures.thread
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from obstore import exceptions

PATIENCE = 120.0  # seconds
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds
_MAY_PASS = (0, 408, 429)  # no answer at all, or: too slow, too many requests; and all from 500 on

T = TypeVar("T")


class StoreFailed(OSError):
    """The store did not answer, for longer than we wait."""


class StoreRefused(PermissionError):
    """The store refuses our credentials, or what we ask."""


class MissingShard(FileNotFoundError):
    """A shard of the index is not in the store."""


class ForkedAfterUse(RuntimeError):
    """A process that had used a store was forked: requests of its child would hang."""


_user: int | None = None  # the process that used a store first; a forked child inherits the number


def connect(bucket: Any) -> Any:
    """Return the store of a bucket, for this process alone.

    Parameters
    ----------
    bucket : stores.Bucket or stores.Folder, or anything with their `connect`

    Raises
    ------
    ForkedAfterUse
        If this process is a fork of one that had used a store. The client's threads stay behind in a fork, and every
        request of the child would wait for them forever.
    """
    global _user
    if _user not in (None, os.getpid()):
        raise ForkedAfterUse(
            f"{bucket}: expected a process that began without an object store, found a fork of process {_user}, which "
            "had used one: its requests would hang. Start the workers anew: DataLoader(…, "
            "multiprocessing_context='forkserver'), or 'spawn', the only one on Windows."
        )
    _user = os.getpid()
    return bucket.connect()


def _note_use() -> None:
    """Before a fork: note whether this process has used a store, by whatever call, as the client's threads show.

    Only Linux lists them; elsewhere fork is not the default, and only streams are noticed.
    """
    global _user
    for thread in Path("/proc/self/task").glob("*/comm") if _user is None else ():
        with suppress(OSError):  # a thread that has just ended
            if thread.read_text().startswith("tokio"):
                _user = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_use)


def ask(request: Callable[[], T], what: str, *, patience: float = PATIENCE, stop: threading.Event | None = None) -> T:
    """Return what a request returns.

    One that fails for a reason that may pass is sent again after 0.1 s, then after twice as long each time, up to 5 s,
    each less up to a half at random so that many readers do not return together.

    Parameters
    ----------
    request : callable
        Called without arguments, in this thread.
    what : str
        What is asked for, and where, for messages.
    patience : float
        Seconds after the first failure until we give up.
    stop : threading.Event, optional
        Ends the waiting when it is set.

    Raises
    ------
    StoreFailed, StoreRefused
    FileNotFoundError
        If there is no such object.
    """
    stop, pause, until = stop or threading.Event(), _SHORTEST_PAUSE, None
    while True:
        if stop.is_set() or _exiting():
            raise StoreFailed(f"{what}: nobody waits for it any more.")
        try:
            return request()
        except (exceptions.BaseError, OSError) as error:
            status, said = _status(error), _said(error)
            if status == 404:
                raise FileNotFoundError(f"{what}: not in the store. It says: {said}") from error
            if status not in _MAY_PASS and status < 500:
                raise StoreRefused(
                    f"{what}: the store refuses this. Expected the keys of a user who may do it, and the bucket's own "
                    f"endpoint and region. It says: {said}"
                ) from error
            now = time.monotonic()
            if until is None:
                until = now + patience
                warnings.warn(f"{what}: asking again, since: {said}", stacklevel=2)
            if now >= until:
                raise StoreFailed(
                    f"{what}: expected an answer of the store, found none for {patience:g} s. Is it running? It says: "
                    f"{said}"
                ) from error
        stop.wait(min(pause * random.uniform(0.5, 1), until - now))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _status(error: Exception) -> int:
    """Return the status of HTTP that an error stands for; 0 if there was no answer."""
    if isinstance(error, FileNotFoundError):
        return 404
    if isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        return 403
    found = re.search(r"status code: (\d{3})", str(error))
    return int(found[1]) if found else 0


def _said(error: Exception) -> str:
    """Return what the store says, in one line."""
    text = str(error).strip() or type(error).__name__
    message = re.search(r"<Message>(.+?)</Message>", text)
    return message[1] if message else text.splitlines()[0]


def _exiting() -> bool:
    """Whether the interpreter waits for its threads to end: a thread that goes on asking would keep it from that."""
    return getattr(concurrent.futures.thread, "_shutdown", False)
