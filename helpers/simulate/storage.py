"""Simulated storage: files that arrive late."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from helpers.simulate.waiting import wait_until


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
        """Return how long `requests` take, one after the other, for `size` bytes in all; to open a file is one."""
        return requests * self.seconds_per_open + size / self.bytes_per_second


#: A file server that a whole class reads from at once: one network round trip and one metadata look-up an open.
#: Assumed figures, not measured ones; turn the dials to those of your own server.
SHARED_FILE_SYSTEM = SlowStorage(seconds_per_open=2e-3, bytes_per_second=50e6)
