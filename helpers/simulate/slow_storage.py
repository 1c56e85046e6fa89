"""Simulated storage: files that arrive late, and stores that are far away."""

import copy
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from helpers.simulate.sleeping import wait_until
from helpers.simulate.slow_link import Counts, Dials, Link

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

    def __post_init__(self):
        if self.seconds_per_open < 0 or self.bytes_per_second <= 0:
            raise ValueError(f"Expected a time of 0 s or more and a throughput above 0 bytes/s, found {self}.")

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


class SlowStore(Dials):
    """Delays a store of obstore as a `Link` would, for machines without the server: each thread is a connection.

    With a `buckets.Folder` it can be pickled, and needs `connect` in each process, as the folder does. A `measured`
    store is slow by itself, so its requests are only counted.
    """

    def __init__(self, store: Any, first_byte_ms: float = 30, mb_per_s: float = 90, measured: bool = False):
        super().__init__(first_byte_ms, mb_per_s)
        self.store, self.measured = store, measured
        self._passed: list[tuple[int, int]] = []  # the thread of each request, and the bytes that came back

    def __str__(self) -> str:
        if self.measured:
            return f"your store (measured: {self.first_byte_ms:.3g} ms to the first byte, {self.mb_per_s:.3g} MB/s)"
        return super().__str__()

    def connect(self) -> Self:
        """Return a copy for the connected folder; in one process, both count together."""
        connected = copy.copy(self)
        connected.store = self.store.connect()
        return connected

    def get(self, path: str):
        """As obstore does, but late: the content is complete when this returns."""
        return self._late(lambda: self.store.get(path), lambda result: result.meta["size"])

    def get_range(self, path: str, **where: int):
        """As obstore does, but late; `where` is `start`, and `end` or `length`."""
        return self._late(lambda: self.store.get_range(path, **where), len)

    def list(self, prefix: str | None = None):
        """As obstore does, but late."""
        return self._late(lambda: self.store.list(prefix))

    def put(self, path: str, content: bytes, **options):
        """As obstore does, but late."""
        return self._late(lambda: self.store.put(path, content, **options), sent=len(content))

    def counts(self) -> Counts:
        """Return what passed so far in this process."""
        passed = list(self._passed)
        return Counts(len(passed), len({thread for thread, _ in passed}), sum(size for _, size in passed))

    def stop(self) -> None:
        """Do nothing: unlike a `Link`, this has no process."""

    def _late(self, request: Callable, size: Callable = lambda _: 0, sent: int = 0) -> Any:
        start = time.perf_counter()
        answer = request()
        self._passed.append((threading.get_ident(), size(answer)))
        if not self.measured:
            wait_until(start + self.seconds(1, sent + size(answer)))
        return answer


def far_away(place: Any, first_byte_ms: float = 30, mb_per_s: float = 90) -> tuple[Any, Link | SlowStore]:
    """Return a `buckets.Bucket` or `Folder` at the end of a slow link, to connect to, and that link.

    A server on this machine gets a `Link`, and a folder a `SlowStore`; each has `seconds`, `counts` and `stop`. A
    store elsewhere is far away already: its latency and bandwidth are measured, and its requests are only counted.
    """
    endpoint = getattr(place, "endpoint", None)
    if endpoint is not None and urlsplit(endpoint).hostname in ("127.0.0.1", "localhost"):
        link = Link(endpoint, first_byte_ms, mb_per_s)
        return replace(place, endpoint=link.endpoint), link
    if endpoint is None:
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
