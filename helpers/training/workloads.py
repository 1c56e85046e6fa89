"""What a step trains on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from helpers import config

# What ResNet-50 keeps of an image at 224 × 224 between forward and backward, in float32: 86 MB, summed over the tensors
# that autograd saves. Weights, gradients, workspaces and a second model must find room beside it.
_RESNET_BYTES_PER_IMAGE = 86e6
_SHARE_FOR_ACTIVATIONS = 0.5
_LARGEST_BATCH = 256  # a data-centre GPU has enough to compute with these; more only makes each measurement longer


@dataclass(frozen=True)
class Workload:
    """What a step trains on.

    Attributes
    ----------
    batch : int
        Images in a batch.
    side : int
        Height and width in pixels at which the network computes; see `models.resnet50`.
    why : str
        What the choice goes by.
    """

    batch: int
    side: int
    why: str

    def __str__(self) -> str:
        return f"{self.batch} images at {self.side} × {self.side} pixels a step ({self.why})"


def resnet_workload(batch: int | None = None) -> Workload:
    """Return what ResNet-50 trains on here, so that a step is long enough to be worth making faster.

    On a GPU at 224 × 224 pixels, where computing dominates. The batch is the largest power of two, up to 256, whose
    activations in float32 take at most half of the memory that others leave free there: 86 MB an image. That makes 32
    with 8 GB free, 64 with 16 GB, 256 from 48 GB on. On a CPU images stay as they are, 32 × 32, and the preset says how
    many: 32 take 0.15 s on two cores with units for matrices, and 0.65 s on two threads of an older one.

    Parameters
    ----------
    batch : int, optional
        Another batch, if memory is short.
    """
    if config.device().type == "cpu":
        return Workload(batch or config.preset().cpu_batch, 32, "for a CPU" if batch is None else "as you chose")
    free, _ = torch.cuda.mem_get_info(config.device())
    memory = free + torch.cuda.memory_reserved(config.device())  # what this process holds it can use again
    fitting = max(int(memory * _SHARE_FOR_ACTIVATIONS / _RESNET_BYTES_PER_IMAGE), 1)
    largest = min(2 ** (fitting.bit_length() - 1), _LARGEST_BATCH)
    return Workload(batch or largest, 224, f"for {memory / 1e9:.0f} GB free" if batch is None else "as you chose")


def launch_bound_workload() -> Workload:
    """Return a workload whose kernels are so short that starting them takes longer than running them, on a GPU.

    A CPU starts nothing elsewhere; there it is small, to be quick.
    """
    return Workload(16 if config.device().type == "cuda" else 4, 32, "small on purpose")
