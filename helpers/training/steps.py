"""A training step. Nothing in it waits for the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from helpers import config, simulate
from helpers.timing import Step


class OutOfMemory(RuntimeError):
    """A batch does not fit into the GPU's memory.

    Parameters
    ----------
    batch : int
        Images in it.
    found : Exception
        What PyTorch raised; says how much memory there is, and what takes it.
    """

    def __init__(self, batch: int, found: Exception):
        half = max(batch // 2, 1)
        super().__init__(
            f"A step with {batch} images does not fit into the GPU's memory: {found}\n"
            f"Try {half} images: give batch={half} where this notebook chooses its workload (or to its DataLoader), "
            "restart the kernel, which frees the memory, and run all cells again. If another program uses this GPU, "
            "nvidia-smi shows it."
        )


class set_tf32:  # a function to its user, as torch.set_grad_enabled, which is a class for the same reason
    """Let a GPU round what it multiplies to TF32, or not; in a ``with`` statement until its end, or else for good.

    Concerns matrix multiplications and convolutions in float32. PyTorch's own setting is a mixture: convolutions use
    TF32, matrix multiplications do not. Without a GPU nothing changes.

    Parameters
    ----------
    enabled : bool
    """

    def __init__(self, enabled: bool):
        self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        _set_tf32("high" if enabled else "highest", enabled)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        _set_tf32(*self._before)


def _set_tf32(matmul: str, convolutions: bool) -> None:
    # These two set the newer fp32_precision of torch.backends as well. Set by itself, the newer one makes torch.compile
    # raise ("mix of the legacy and new APIs") where it reads the older: in 2.15 in convolutions and batched products
    # (pytorch issue 166387).
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = convolutions


def new_accuracy(device: torch.device) -> MulticlassAccuracy:
    """Return an accuracy that stays on `device` until its ``compute()`` is asked for."""
    # validate_args looks at the labels' values in every update, which makes the host wait for a GPU
    return MulticlassAccuracy(num_classes=10, average="micro", validate_args=False).to(device)


@dataclass(frozen=True)
class TrainingStep:
    """Trains `model` on one batch whenever it is called with images and labels, as a loader yields them.

    They are copied to the model's device. The loss comes back as a tensor without gradient on that device: reading
    its value is what would make the host wait for it.

    Parameters
    ----------
    model : Module
    optimizer : Optimizer
    accuracy : MulticlassAccuracy, optional
        Gets the logits and labels of every batch.
    autocast : torch.dtype, optional
        Runs the forward pass in mixed precision: in this type where that is fast and safe enough, else in float32.
    scaler : GradScaler, optional
        Multiplies the loss, so that no gradient becomes 0 in float16, and divides the gradients again.
    memory_format : torch.memory_format
        How the images shall lie in the device's memory; by default as they come.

    Raises
    ------
    OutOfMemory
        If the batch is too large for the GPU's memory.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    accuracy: MulticlassAccuracy | None = None
    autocast: torch.dtype | None = None
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))
    memory_format: torch.memory_format = torch.preserve_format

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        try:
            return self._train(images, labels)
        except torch.cuda.OutOfMemoryError as error:
            raise OutOfMemory(len(images), error) from error

    def _train(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        device = device_of(self.model)
        images = images.to(device, non_blocking=True, memory_format=self.memory_format)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            logits = self.model(images)
            loss = nn.functional.cross_entropy(logits, labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.accuracy is not None:
            self.accuracy.update(logits, labels)
        return loss.detach()

    def __str__(self) -> str:
        device = device_of(self.model)
        place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        types = f", autocast to {str(self.autocast).removeprefix('torch.')}" if self.autocast else ""
        return f"{name_of(self.model)} on {place}{types}"


@dataclass(frozen=True)
class WithTF32:
    """A step with TF32 or without, whatever the steps do that are timed interleaved with it.

    Attributes
    ----------
    step : callable
    enabled : bool
    """

    step: Step
    enabled: bool

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> object:
        with set_tf32(self.enabled):
            return self.step(images, labels)

    def __str__(self) -> str:
        return str(self.step)


def accelerator_step(model: nn.Module) -> Step:
    """Return a step that leaves the host's cores as free as an accelerator does.

    With a GPU that is a true training step of `model` there, by stochastic gradient descent. Without one it is a
    `simulate.SimulatedAccelerator`: a network on the CPU would compete with the loader for the same cores, which is
    another bottleneck than the one that people with a GPU have.
    """
    device = config.device()
    if device.type == "cpu":
        return simulate.SimulatedAccelerator()
    model = model.to(device)
    return TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05))


def name_of(model: nn.Module) -> str:
    """Return what figures and results call `model`: its ``name``, or that of its class."""
    return getattr(model, "name", type(model).__name__)


def device_of(model: nn.Module) -> torch.device:
    """Return the device that the weights of `model` are on."""
    return next(model.parameters()).device
