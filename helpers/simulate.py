"""Two dials that make the lessons visible on any machine: slow storage, and a pretend accelerator.

Neither is a measurement of real hardware. Whatever uses one of them says so: in the notebook's text, in the
figure, and in the scoreboard's line.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch


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
            raise ValueError(f"Storage needs a time of 0 s or more and a throughput above 0 bytes/s, not {self}.")

    def __str__(self) -> str:
        return f"simulated storage ({self.seconds_per_open * 1e3:g} ms per open, {self.bytes_per_second / 1e6:g} MB/s)"

    def read(self, path: str | Path) -> bytes:
        """Return the content of the file `path`, not before this storage would have delivered it."""
        start = time.perf_counter()
        content = Path(path).read_bytes()
        wait_until(start + self.seconds(1, len(content)))
        return content

    def seconds(self, requests: int, size: float) -> float:
        """How long `requests`, one after the other, for `size` bytes together take. To open a file is one."""
        return requests * self.seconds_per_open + size / self.bytes_per_second


#: A file server that a whole class reads from at once: one network round trip and one metadata look-up an open.
#: Assumed figures, not measured ones; turn the dials to those of your own server.
SHARED_FILE_SYSTEM = SlowStorage(seconds_per_open=2e-3, bytes_per_second=50e6)


@dataclass(frozen=True)
class PretendAccelerator:
    """A training step that takes a fixed time and no processor, as seen from the processor that feeds a GPU.

    It learns nothing. The wait is an operator of its own, ``simulate::pretend_accelerator_step``, so that it is
    found by name in a trace.

    Parameters
    ----------
    step_ms : float
        Duration of a step in milliseconds.
    full_at : int, optional
        Images that keep all its multiprocessors busy: fewer take as long, more take proportionally longer. By default a
        step takes as long whatever the batch.
    """

    step_ms: float = 5.0
    full_at: int | None = None

    def __str__(self) -> str:
        images = f" of up to {self.full_at} images" if self.full_at else ""
        return f"pretend accelerator ({self.step_ms:g} ms a step{images})"

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        longer = max(len(images) / self.full_at, 1) if self.full_at else 1
        torch.ops.simulate.pretend_accelerator_step(images, self.step_ms * longer)


def wait_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` reaches `moment` (seconds); no processor is used meanwhile."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


@torch.library.custom_op("simulate::pretend_accelerator_step", mutates_args=())
def _pretend_accelerator_step(images: torch.Tensor, step_ms: float) -> None:
    wait_until(time.perf_counter() + step_ms / 1e3)
