"""The training loop: one step, one epoch, evaluation. Nothing in a step waits for the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy
from tqdm import tqdm

from helpers import config, simulate

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class Epoch:
    """What one pass over a loader gave.

    Attributes
    ----------
    losses : ndarray of float32, shape (steps,)
        Mean cross-entropy of each mini-batch, in nats.
    accuracy : float
        Share of images classified correctly, 0 to 1.
    """

    losses: np.ndarray
    accuracy: float


def seed_everything(seed: int) -> None:
    """Make the weights and the order of the images the same in every run."""
    torch.manual_seed(seed)
    np.random.seed(seed)


def new_accuracy(device: torch.device) -> MulticlassAccuracy:
    """Return an accuracy that stays on `device` until its ``compute()`` is asked for."""
    # validate_args looks at the labels' values in every update, which makes the host wait for a GPU
    return MulticlassAccuracy(num_classes=10, average="micro", validate_args=False).to(device)


@dataclass(frozen=True)
class TrainingStep:
    """Trains `model` on one mini-batch whenever it is called with images and labels, as a loader yields them.

    They are copied to the model's device. The loss comes back as a tensor without gradient on that device: reading
    its value is what would make the host wait for it.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    accuracy: MulticlassAccuracy | None = None

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        device = device_of(self.model)
        images = images.to(device, non_blocking=True)
        labels = labels.to(device, non_blocking=True)
        logits = self.model(images)
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.accuracy is not None:
            self.accuracy.update(logits, labels)
        return loss.detach()

    def __str__(self) -> str:
        device = device_of(self.model)
        return f"{type(self.model).__name__} on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}"


def accelerator_step(model: nn.Module) -> Step:
    """Return a step that keeps the processor as free as an accelerator does.

    With a GPU that is a true training step of `model` there, by stochastic gradient descent. Without one it is a
    `simulate.PretendAccelerator`: a network on the CPU would compete with the loader for the same cores, which is
    another bottleneck than the one that people with a GPU have.
    """
    device = config.device()
    if device.type == "cpu":
        return simulate.PretendAccelerator()
    model = model.to(device)
    return TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05))


def device_of(model: nn.Module) -> torch.device:
    """Return the device that the weights of `model` are on."""
    return next(model.parameters()).device


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable, progress: bool = True) -> Epoch:
    """Train `model` once on every mini-batch of `loader`."""
    model.train()
    accuracy = new_accuracy(device_of(model))
    step = TrainingStep(model, optimizer, accuracy)
    bar = tqdm(loader, "training", unit="step", file=sys.stdout, disable=not progress)
    losses = [step(images, labels) for images, labels in bar]
    return Epoch(torch.stack(losses).cpu().numpy(), accuracy.compute().item())


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Iterable) -> Epoch:
    """Classify every mini-batch of `loader` without training on it."""
    model.eval()
    device = device_of(model)
    accuracy, losses = new_accuracy(device), []
    for images, labels in loader:
        logits, labels = model(images.to(device)), labels.to(device)
        losses.append(nn.functional.cross_entropy(logits, labels))
        accuracy.update(logits, labels)
    return Epoch(torch.stack(losses).cpu().numpy(), accuracy.compute().item())


def endless(loader: Iterable) -> Iterator:
    """Yield mini-batches for ever, epoch after epoch.

    Raises
    ------
    ValueError
        If the loader yields no mini-batch at all.
    """
    while True:
        batches = iter(loader)
        try:
            yield next(batches)  # without a name, which would keep it from being freed by who has it
        except StopIteration:
            raise ValueError(
                "The loader yields no mini-batch: is the dataset smaller than one batch (drop_last)?"
            ) from None
        yield from batches
