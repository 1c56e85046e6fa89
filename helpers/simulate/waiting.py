"""To wait without using the CPU."""

from __future__ import annotations

import time


def wait_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` reaches `moment` (seconds); no CPU time is used meanwhile."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
