"""What takes its time and no CPU: a wait, a training step, a layer."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn


def wait_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` reaches `moment` (seconds); no CPU time is used meanwhile."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


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


class SleepingLayer(nn.Module):
    """A layer that sleeps instead of computing: with cores to spare, ranks can overlap on any machine.

    It returns its input times (1 + the mean of its parameter), which begins at 0. So the gradient of each weight is
    the mean of the input times what comes from the next layer, and differs by batch and rank. The sleeps are operators
    of their own in a trace, ``simulate::sleeping_layer_forward`` and ``simulate::sleeping_layer_backward``.

    Parameters
    ----------
    megabytes : float
        Of the parameter, float32: 1 is 1e6 bytes.
    forward_ms, backward_ms : float
        How long they take, with what little they compute.
    """

    def __init__(self, megabytes: float, forward_ms: float, backward_ms: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(round(megabytes * 1e6 / 4)))
        self.forward_ms, self.backward_ms = forward_ms, backward_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `x`, any shape of float32, after `forward_ms`."""
        return torch.ops.simulate.sleeping_layer_forward(x, self.weight, self.forward_ms, self.backward_ms)


@torch.library.custom_op("simulate::sleeping_layer_forward", mutates_args=())
def _sleeping_layer_forward(
    x: torch.Tensor, weight: torch.Tensor, forward_ms: float, backward_ms: float
) -> torch.Tensor:
    end = time.perf_counter() + forward_ms / 1e3
    y = x * (1 + weight.mean())
    wait_until(end)
    return y


@torch.library.custom_op("simulate::sleeping_layer_backward", mutates_args=())
def _sleeping_layer_backward(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, backward_ms: float
) -> tuple[torch.Tensor, torch.Tensor]:
    end = time.perf_counter() + backward_ms / 1e3
    of_x = gradient * (1 + weight.mean())
    of_weight = torch.full_like(weight, float((gradient * x).sum()) / weight.numel())
    wait_until(end)
    return of_x, of_weight


def _keep(ctx, inputs, output) -> None:
    x, weight, _, ctx.backward_ms = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, gradient: torch.Tensor) -> tuple:
    x, weight = ctx.saved_tensors
    return *torch.ops.simulate.sleeping_layer_backward(gradient, x, weight, ctx.backward_ms), None, None


_sleeping_layer_forward.register_autograd(_backward, setup_context=_keep)
