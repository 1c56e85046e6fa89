"""The networks that the course trains."""

from __future__ import annotations

import torch
from torch import nn

from helpers import cifar10


class Normalize(nn.Module):
    """Normalization as a layer: runs where the model runs, on the whole mini-batch at once.

    Parameters
    ----------
    mean, std : sequence of float
        One of each for every channel, for images between 0 and 1.
    """

    def __init__(self, mean=cifar10.MEAN, std=cifar10.STD):
        super().__init__()
        mean, std = torch.tensor(mean), torch.tensor(std)
        # (x - mean) / std as one multiplication and one addition, for bytes with the division by 255 in it
        self.register_buffer("scale", (1 / std).view(-1, 1, 1))
        self.register_buffer("shift", (-mean / std).view(-1, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize `images` of shape (N, C, H, W): float from 0 to 1, or uint8 from 0 to 255."""
        scale = self.scale / 255 if images.dtype == torch.uint8 else self.scale
        return images * scale + self.shift


class SmallCNN(nn.Sequential):
    """Four convolutions and two linear layers, 5 million weights: takes images of shape (N, 3, 32, 32).

    Parameters
    ----------
    normalize : bool
        Begin with a `Normalize` layer; the images may then be uint8, or float between 0 and 1.
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
