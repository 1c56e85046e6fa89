"""Random crops and flips of whole batches, on the device that they are on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from helpers import config
from helpers.timing import Step


def crop_and_flip(images: torch.Tensor, padding: int = 4) -> torch.Tensor:
    """Shift each image by its own random offset, and mirror half of them: notebook 07 explains it line by line.

    The distribution is that of torchvision's ``RandomCrop(size, padding=padding)`` and ``RandomHorizontalFlip()``,
    applied image by image: 2 · `padding` + 1 offsets each way, all as likely.

    Parameters
    ----------
    images : Tensor
        Of shape (N, C, H, W), any dtype, on any device. What is shifted in from outside is 0.
    padding : int
        Pixels on each side.

    Returns
    -------
    Tensor
        Of the same shape and dtype, on the same device.
    """
    count, channels, height, width = images.shape
    device = images.device
    padded = nn.functional.pad(images, 4 * [padding])
    top, left = torch.randint(2 * padding + 1, (2, count, 1), device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    flipped = torch.rand(count, 1, device=device) < 0.5
    columns = torch.where(flipped, columns.flip(1), columns)
    pixels = rows.unsqueeze(2) * padded.shape[3] + columns.unsqueeze(1)  # numbered row by row
    pixels = pixels.flatten(1).unsqueeze(1).expand(-1, channels, -1)  # the same for all channels
    return padded.flatten(2).gather(2, pixels).view_as(images)


@dataclass(frozen=True)
class Augmented:
    """A step that augments its batch first, on the device that it trains on.

    Attributes
    ----------
    step : callable
    augment : callable
        Gets the images of a batch, on the device, and returns as many.
    device : torch.device
        The one to train on, by default; to ask for it in each step would take time of the step.
    """

    step: Step
    augment: Callable[[torch.Tensor], torch.Tensor]
    device: torch.device = field(default_factory=config.device)

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> object:
        images = images.to(self.device, non_blocking=True)
        return self.step(self.augment(images), labels)

    def __str__(self) -> str:
        return f"{self.step}, after {self.augment.__name__}"
