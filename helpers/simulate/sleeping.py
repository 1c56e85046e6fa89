"""A wait, a training step and a layer that take no CPU time."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import nn

from stepscope.base.wording import counted


def wait_until(moment: float) -> None:
    """Sleep until ``time.perf_counter()`` reaches `moment` (seconds); no CPU time is used meanwhile."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


#: Images per second that a GPU needs to train ResNet-50: the emulated accelerators of MLPerf Storage 1.0 take 0.435 and
#: 0.224 s for a step of 400 images (github.com/mlcommons/storage, v1.0, storage-conf/workload).
DEMANDS = {"A100": 400 / 0.435, "H100": 400 / 0.224}


def feeds(images_per_second: float) -> str:
    """Say how many GPUs, as in `DEMANDS`, a loader feeds, and how many such loaders feed one."""
    parts = []
    for gpu, demand in DEMANDS.items():
        fed = images_per_second / demand
        share, loaders = f"{fed:.2g}" if fed < 10 else f"{fed:,.0f}", ""
        if fed < 0.95:  # 0.2 of a GPU: five loaders
            loaders = f", about {counted(math.ceil(1 / fed - 0.05), 'such loader')}"
        parts.append(f"{share} {'of' if loaders else 'times the demand of'} an {gpu} ({demand:,.0f} images/s{loaders})")
    return f"{images_per_second:,.0f} images/s feed {' and '.join(parts)}, as MLPerf Storage assumes for ResNet-50."


@dataclass(frozen=True)
class SimulatedGPU:
    """A training step that takes a fixed time and no CPU time, like a GPU's step as its host sees it.

    It learns nothing. The wait is an operator of its own, so that a trace has its name,
    ``simulate::simulated_gpu_step``.

    Parameters
    ----------
    step_ms : float
        Duration of a step in milliseconds.
    full_at : int, optional
        Images that keep all its multiprocessors busy: fewer take the same time, more take proportionally longer. By
        default a step takes the same time with every batch.
    gpu : str, optional
        The GPU whose demand it has; see `of`.
    """

    step_ms: float = 5.0
    full_at: int | None = None
    gpu: str | None = None

    @classmethod
    def of(cls, gpu: str) -> SimulatedGPU:
        """Return one that takes as many images per second as ``"A100"`` or ``"H100"`` at ResNet-50; see `DEMANDS`."""
        return cls(1e3 / DEMANDS[gpu], full_at=1, gpu=gpu)

    def __str__(self) -> str:
        if self.gpu:
            return f"simulated GPU (takes {DEMANDS[self.gpu]:,.0f} images/s, as an {self.gpu} at ResNet-50)"
        images = f" of up to {self.full_at} images" if self.full_at else ""
        return f"simulated GPU ({self.step_ms:g} ms a step{images})"

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        longer = max(len(images) / self.full_at, 1) if self.full_at else 1
        torch.ops.simulate.simulated_gpu_step(images, self.step_ms * longer)


@torch.library.custom_op("simulate::simulated_gpu_step", mutates_args=())
def _simulated_gpu_step(images: torch.Tensor, step_ms: float) -> None:
    wait_until(time.perf_counter() + step_ms / 1e3)


class SleepingLayer(nn.Module):
    """A layer that sleeps instead of computing: cores stay free, so ranks can overlap on any machine.

    It returns its input times (1 + the mean of its parameter), which begins at 0. So the gradient of a weight is the
    sum of input times incoming gradient, over the number of weights, and differs by batch and rank. In a trace the
    sleeps are operators, ``simulate::sleeping_layer_forward`` and ``simulate::sleeping_layer_backward``.

    Parameters
    ----------
    megabytes : float
        Size of the parameter, float32: 1 is 1e6 bytes.
    forward_ms, backward_ms : float
        Their durations, with the little that they compute.
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
