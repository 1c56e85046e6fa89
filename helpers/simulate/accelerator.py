"""A simulated accelerator: a step that takes its time and no CPU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from helpers.simulate.waiting import wait_until


@dataclass(frozen=True)
class SimulatedAccelerator:
    """A training step that takes a fixed time and no CPU time, as seen from the processor that feeds a GPU.

    It learns nothing. The wait is an operator of its own, ``simulate::simulated_accelerator_step``, so that it is
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
        return f"simulated accelerator ({self.step_ms:g} ms a step{images})"

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        longer = max(len(images) / self.full_at, 1) if self.full_at else 1
        torch.ops.simulate.simulated_accelerator_step(images, self.step_ms * longer)


@torch.library.custom_op("simulate::simulated_accelerator_step", mutates_args=())
def _simulated_accelerator_step(images: torch.Tensor, step_ms: float) -> None:
    wait_until(time.perf_counter() + step_ms / 1e3)
