"""Simulated storage: files that arrive late, and stores that are far away."""

import copy
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from helpers.simulate.sleeping import wait_until

_TRIAL, _TRIAL_BYTES, _TRIALS = "course-12/trial", 8_000_000, 3  # to measure a store elsewhere


@dataclass(frozen=True)
class SlowStorage:
    """Storage that answers late: reads a file, then waits until a slow disk would have delivered it.

    Parameters
    ----------
    seconds_per_open : float
        Time until the first byte arrives: a seek, or a round trip to a file server.
    bytes_per_second : float
        Throughput from then on.
    """

    seconds_per_open: float
    bytes_per_second: float

    def __str__(self) -> str:
        return f"simulated storage ({self.seconds_per_open * 1e3:g} ms per open, {self.bytes_per_second / 1e6:g} MB/s)"

    def read(self, path: str | Path) -> bytes:
        """Return the content of the file `path`, not before this storage would have delivered it."""
        start = time.perf_counter()
        content = Path(path).read_bytes()
        wait_until(start + self.seconds(1, len(content)))
        return content

    def seconds(self, requests: int, size: float) -> float:
        """Return how long `requests` take, one after the other, for `size` bytes in all; opening a file is one."""
        return requests * self.seconds_per_open + size / self.bytes_per_second


#: A file server that a whole class reads from at once: one network round trip and one metadata look-up per open.
#: Assumed figures, not measured ones; set those of your own server.
SHARED_FILE_SYSTEM = SlowStorage(seconds_per_open=2e-3, bytes_per_second=50e6)


class Counts(NamedTuple):
    """What passed so far: requests, and bytes that came back."""

    requests: int
    bytes: int

    def since(self, before: Self) -> Self:
        """Return what passed after `before`."""
        return type(self)(*(now - then for now, then in zip(self, before, strict=True)))


class SlowStore:
    """Reads a store of obstore at the end of a slow link: an answer is complete when the link would have delivered it.

    The first byte of an answer arrives `first_byte_ms` after the request; then every thread, which is a connection, has
    `mb_per_s` for itself. If the store itself is slower, the answer comes later. Opening a connection costs nothing.
    With a `buckets.Bucket` or `Folder` as `store` it can be pickled, and needs `connect` in each process, as that does.
    A `measured` store is slow by itself, so its requests are only counted.

    Parameters
    ----------
    store : obstore store, buckets.Bucket or buckets.Folder
    first_byte_ms, mb_per_s : float
        Assumed. AWS names 100 to 200 ms and 85 to 90 MB/s for S3 (notebook 14 has the sources).
    """

    def __init__(self, store: Any, first_byte_ms: float = 30, mb_per_s: float = 90, measured: bool = False):
        self.store, self.first_byte_ms, self.mb_per_s, self.measured = store, first_byte_ms, mb_per_s, measured
        self._passed: list[int] = []  # the bytes that came back, for each request

    def __str__(self) -> str:
        if self.measured:
            return f"your store (measured: {self.first_byte_ms:.3g} ms to the first byte, {self.mb_per_s:.3g} MB/s)"
        return f"simulated link ({self.first_byte_ms:g} ms to the first byte, {self.mb_per_s:g} MB/s a connection)"

    def seconds(self, requests: int, size: float, connections: int = 1) -> float:
        """Return how long `requests` of equal size take for `size` bytes in all: first bytes, and size ÷ bandwidth."""
        one = self.first_byte_ms / 1e3 + size / max(requests, 1) / (self.mb_per_s * 1e6)
        return math.ceil(requests / connections) * one

    def connect(self) -> Self:
        """Return a copy for the connected store; in one process, both count together."""
        connected = copy.copy(self)
        connected.store = self.store.connect()
        return connected

    def get(self, path: str):
        """As obstore does, but late: the content is complete when this returns."""
        content = self._late(lambda: self.store.get(path).bytes())
        return SimpleNamespace(bytes=lambda: content, meta={"size": len(content)})

    def get_range(self, path: str, **where: int):
        """As obstore does, but late; `where` is `start`, and `end` or `length`."""
        return self._late(lambda: self.store.get_range(path, **where))

    def counts(self) -> Counts:
        """Return what passed so far in this process."""
        return Counts(len(self._passed), sum(self._passed))

    def _late(self, request: Callable) -> Any:
        start = time.perf_counter()
        content = request()
        self._passed.append(len(content))
        if not self.measured:
            wait_until(start + self.seconds(1, len(content)))
        return content


def far_away(place: Any, first_byte_ms: float = 30, mb_per_s: float = 90) -> tuple[SlowStore, SlowStore]:
    """Return a `buckets.Bucket` or `Folder` at the end of a slow link, to connect to, and that link: they are one.

    The link of a server on this machine and of a folder is simulated. A store elsewhere is far away already: its
    latency and bandwidth are measured, and its requests are only counted.
    """
    endpoint = getattr(place, "endpoint", None)
    if endpoint is None or urlsplit(endpoint).hostname in ("127.0.0.1", "localhost"):
        slow = SlowStore(place, first_byte_ms, mb_per_s)
    else:
        slow = SlowStore(place, *_dials(place.connect()), measured=True)
    return slow, slow


def _dials(store: Any) -> tuple[float, float]:
    """Return the ms to the first byte, and the MB/s of a connection, each the median of three."""
    store.put(_TRIAL, bytes(_TRIAL_BYTES))
    try:
        first, whole = (statistics.median(_seconds(store, size) for _ in range(_TRIALS)) for size in (1, _TRIAL_BYTES))
    finally:
        store.delete(_TRIAL)
    return first * 1e3, _TRIAL_BYTES / max(whole - first, 1e-6) / 1e6


def _seconds(store: Any, size: int) -> float:
    begin = time.perf_counter()
    store.get_range(_TRIAL, start=0, end=size)
    return time.perf_counter() - begin
