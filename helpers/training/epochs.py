"""One epoch of training, and evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from helpers.training.steps import TrainingStep, device_of, new_accuracy


@dataclass(frozen=True)
class Epoch:
    """What one pass over a loader gave.

    Attributes
    ----------
    losses : ndarray of float32, shape (steps,)
        Mean cross-entropy of each batch, in nats.
    accuracy : float
        Share of images classified correctly, 0 to 1.
    """

    losses: np.ndarray
    accuracy: float


def seed_everything(seed: int) -> None:
    """Make the weights and the order of the images the same in every run."""
    torch.manual_seed(seed)
    np.random.seed(seed)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable, progress: bool = True) -> Epoch:
    """Train `model` once on every batch of `loader`."""
    model.train()
    accuracy = new_accuracy(device_of(model))
    step = TrainingStep(model, optimizer, accuracy)
    bar = tqdm(loader, "training", unit="step", file=sys.stdout, disable=not progress)
    losses = [step(images, labels) for images, labels in bar]
    return Epoch(torch.stack(losses).cpu().numpy(), accuracy.compute().item())


@torch.inference_mode()
def evaluate(model: nn.Module, loader: Iterable) -> Epoch:
    """Classify every batch of `loader` without training on it."""
    model.eval()
    device = device_of(model)
    accuracy, losses = new_accuracy(device), []
    for images, labels in loader:
        logits, labels = model(images.to(device)), labels.to(device)
        losses.append(nn.functional.cross_entropy(logits, labels))
        accuracy.update(logits, labels)
    return Epoch(torch.stack(losses).cpu().numpy(), accuracy.compute().item())
