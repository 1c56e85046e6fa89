"""A place for objects, seen from far away."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from helpers.simulate.link import Link, SlowStore

_TRIAL = "course-12/trial"
_TRIAL_BYTES = 8_000_000
_TRIALS = 3


def far_away(place: Any, first_byte_ms: float = 30, mb_per_s: float = 90) -> tuple[Any, Link | Slow]:
    """Return a bucket as it would be at the end of a slow link, and that link.

    Parameters
    ----------
    place : stores.Bucket or stores.Folder
        Before a server on this machine there is a `Link` then, and before a folder a `SlowStore`. A store elsewhere is
        far away as it is: its own dials are measured, and it is only counted what passes.
    first_byte_ms, mb_per_s : float
        The dials; not used for a store elsewhere.

    Returns
    -------
    place : stores.Bucket or Slow
        To connect to.
    link : Link or Slow
        With `seconds`, `counts` and `stop`.
    """
    endpoint = getattr(place, "endpoint", None)
    if endpoint is None:
        slow = Slow(place, first_byte_ms, mb_per_s)
        return slow, slow
    if urlsplit(endpoint).hostname in ("127.0.0.1", "localhost"):
        link = Link(endpoint, first_byte_ms, mb_per_s)
        return place.through(link), link
    counted = Counted(place, *_dials(place.connect()))
    return counted, counted


class Slow(SlowStore):
    """A `SlowStore` that can be stopped as a `Link` can."""

    def stop(self) -> None:
        """Do nothing: there is no process."""


class Counted(Slow):
    """A store that is far away as it is: its dials are those that were measured, and what passes is only counted."""

    def __str__(self) -> str:
        return f"your store (measured: {self.first_byte_ms:.3g} ms to the first byte, {self.mb_per_s:.3g} MB/s)"

    def _late(self, request: Callable, size: Callable = lambda _: 0, sent: int = 0) -> Any:
        answer = request()
        self._passed.append((threading.get_ident(), size(answer)))
        return answer


def _dials(store: Any) -> tuple[float, float]:
    """Return the ms to the first byte, and the MB/s of a connection, each the median of three."""
    store.put(_TRIAL, bytes(_TRIAL_BYTES))
    try:
        first = statistics.median(_seconds(store, 1) for _ in range(_TRIALS))
        whole = statistics.median(_seconds(store, _TRIAL_BYTES) for _ in range(_TRIALS))
    finally:
        store.delete(_TRIAL)
    return first * 1e3, _TRIAL_BYTES / max(whole - first, 1e-6) / 1e6


def _seconds(store: Any, size: int) -> float:
    begin = time.perf_counter()
    store.get_range(_TRIAL, start=0, end=size)
    return time.perf_counter() - begin
