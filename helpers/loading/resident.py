"""A data set that lives where it is used: in the memory of the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class OnDevice:
    """Batches of images that lie on a device, in a new random order each time; what is left over is left out.

    Parameters
    ----------
    images, labels : Tensor
        All of them, on the device.
    batch : int
        Images in a batch.
    """

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, batch: int):
        self.images, self.labels, self.batch = images, labels, batch

    def __len__(self) -> int:
        return len(self.images) // self.batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.images), device=self.images.device)
        for chosen in order[: len(self) * self.batch].split(self.batch):
            # The same as images[chosen]; for bytes on a CPU that took seven times as long
            yield self.images.index_select(0, chosen), self.labels[chosen]
