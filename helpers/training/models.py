"""The networks that the course trains, and their workloads."""

from dataclasses import dataclass

import torch
from torch import nn

from helpers import config
from helpers.data import cifar10

# Bytes that ResNet-50 keeps per image at 224 × 224 between forward and backward, in float32: the sum over the tensors
# that autograd saves. Weights, gradients, workspaces and a second model need room, too.
_RESNET_BYTES_PER_IMAGE = 86e6
_SHARE_FOR_ACTIVATIONS = 0.3  # notebook 12 keeps them three times: each kind of CUDA graph has memory of its own
_LARGEST_BATCH = 256  # enough work for a data-centre GPU; more only makes each measurement longer


class Normalize(nn.Module):
    """Normalization as a layer: runs where the model runs, on the whole batch at once.

    `mean` and `std` are sequences with a number for every channel, for images between 0 and 1.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, mean=cifar10.MEAN, std=cifar10.STD):
        super().__init__()
        mean, std = torch.tensor(mean), torch.tensor(std)
        # (x - mean) / std as one multiplication and one addition, which for bytes include the division by 255
        self.register_buffer("scale", (1 / std).view(-1, 1, 1))
        self.register_buffer("shift", (-mean / std).view(-1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize `images` of shape (N, C, H, W): float from 0 to 1, or uint8 from 0 to 255."""
        scale = self.scale / 255 if images.dtype == torch.uint8 else self.scale
        return images * scale + self.shift


class SmallCNN(nn.Sequential):
    """Four convolutions and two linear layers, 5 million weights: takes images of shape (N, 3, 32, 32).

    With `normalize` a `Normalize` layer comes first; the images may then be uint8, or float between 0 and 1.
    """

    def __init__(self, normalize: bool = False):
        super().__init__(
            Normalize() if normalize else nn.Identity(),
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
            nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, 2048), nn.ReLU(),
            nn.Linear(2048, 10),
        )  # fmt: skip


def resnet50(side: int = 32) -> nn.Sequential:
    """Return torchvision's ResNet-50 for ten classes, with new weights: it takes images of shape (N, 3, 32, 32).

    Normalization is its first layer, so the images may be uint8, or float between 0 and 1. Then the device enlarges
    them, if `side` asks for it: the convolutions compute as much as with photos of that size, while the loader still
    delivers 3 kB an image.

    Parameters
    ----------
    side : int
        Height and width of the convolutions' input images in pixels. The network was designed for 224: He,
        Zhang, Ren, Sun, "Deep residual learning for image recognition", 2016.
    """
    import torchvision  # here: it takes 2 s of CPU time, since it imports torch._dynamo, and few need it

    enlarge = nn.Identity() if side == 32 else nn.Upsample((side, side), mode="bilinear")
    # Each block begins as the identity (Goyal et al., "Accurate, large minibatch SGD", 2017). Otherwise training starts
    # so unsteadily that rounding changes the loss as much as other weights: by 1.8 nats with 32 images and a learning
    # rate of 0.01.
    network = torchvision.models.resnet50(weights=None, num_classes=10, zero_init_residual=True)
    model = nn.Sequential(Normalize(), enlarge, network)
    model.name = f"ResNet-50 at {side} × {side}"  # type: ignore[assignment]  # in figures, also when it is compiled
    return model


@dataclass(frozen=True)
class Workload:
    """What a step trains on: images in a batch, the side in pixels at which `resnet50` computes, and why so many."""

    batch: int
    side: int
    why: str

    def __str__(self) -> str:
        return f"{self.batch} images at {self.side} × {self.side} pixels a step ({self.why})"


def resnet_workload(batch: int | None = None) -> Workload:
    """Return what ResNet-50 trains on here, so that a step is long enough to be worth making faster.

    On a GPU images have 224 × 224 pixels, so that computing dominates. The batch is the largest power of two, up to
    256, whose activations in float32, 86 MB an image, take at most 30% of the memory that others leave free. On a CPU
    images stay at 32 × 32, and the preset says how many. Give another `batch` if memory is short.
    """
    if config.device().type == "cpu":
        return Workload(batch or config.preset().cpu_batch, 32, "for a CPU" if batch is None else "as you chose")
    free, _ = torch.cuda.mem_get_info(config.device())
    memory = free + torch.cuda.memory_reserved(config.device())  # this process can reuse its own
    fitting = max(int(memory * _SHARE_FOR_ACTIVATIONS / _RESNET_BYTES_PER_IMAGE), 1)
    largest = min(2 ** (fitting.bit_length() - 1), _LARGEST_BATCH)
    return Workload(batch or largest, 224, f"for {memory / 1e9:.0f} GB free" if batch is None else "as you chose")


def launch_bound_workload() -> Workload:
    """Return a workload whose kernels are so short that, on a GPU, launching takes longer than running them.

    A CPU launches nothing; there the workload is small, to be quick.
    """
    return Workload(16 if config.device().type == "cuda" else 4, 32, "small on purpose")
