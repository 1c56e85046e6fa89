"""A training step, in which nothing waits for the device, and a step that augments its batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from helpers import config, simulate
from stepscope.base import terminal
from stepscope.timing import Step


class OutOfMemory(RuntimeError):
    """A batch does not fit into the GPU's memory; the message says which batch to try."""


class set_tf32:  # used as a function, like torch.set_grad_enabled, which is a class for the same reason
    """Let a GPU round factors to TF32, or not: until the end of a ``with`` statement, or else for good.

    Concerns matrix multiplications and convolutions in float32. By PyTorch's default, convolutions use TF32, and matrix
    multiplications do not. Without a GPU nothing changes.
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


@dataclass(frozen=True)
class TrainingStep:
    """Trains `model` on one batch whenever it is called with images and labels, as a loader yields them.

    They are copied to the model's device. The loss comes back as a tensor without gradient on that device: only reading
    its value makes the host wait. Raises `OutOfMemory` if the batch is too large for the GPU's memory.

    Parameters
    ----------
    model : Module
    optimizer : Optimizer
    autocast : torch.dtype, optional
        Runs the forward pass in mixed precision: in this type where that is fast and safe enough, else in float32.
    scaler : GradScaler, optional
        Multiplies the loss, so that no gradient becomes 0 in float16, and divides the gradients again.
    memory_format : torch.memory_format
        The images' layout in the device's memory; by default unchanged.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    autocast: torch.dtype | None = None
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler(enabled=False))
    memory_format: torch.memory_format = torch.preserve_format

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        try:
            return self._train(images, labels)
        except RuntimeError as error:  # the second is what cuDNN says where no engine's memory fits
            if not isinstance(error, torch.OutOfMemoryError) and "unable to find an engine" not in str(error):
                raise
            half = max(len(images) // 2, 1)
            raise OutOfMemory(
                f"A step with {len(images)} images does not fit into the GPU's memory: {error}\n"
                f"Try {half} images: give batch={half} where this notebook chooses its workload (or to its "
                "DataLoader), restart the kernel, which frees the memory, and run all cells again. If another program "
                "uses this GPU, nvidia-smi shows it."
            ) from error

    def _train(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        device = device_of(self.model)
        images = images.to(device, non_blocking=True, memory_format=self.memory_format)
        labels = labels.to(device, non_blocking=True)
        with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
            loss = nn.functional.cross_entropy(self.model(images), labels)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def __str__(self) -> str:
        device = device_of(self.model)
        place = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        types = f", autocast to {str(self.autocast).removeprefix('torch.')}" if self.autocast else ""
        name = getattr(self.model, "name", type(self.model).__name__)
        return f"{name} on {place}{types}"


@dataclass(frozen=True)
class WithTF32:
    """A step with TF32 or without, whatever the steps interleaved with it use."""

    step: Step
    enabled: bool

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> object:
        with set_tf32(self.enabled):
            return self.step(images, labels)

    def __str__(self) -> str:
        return str(self.step)


def gpu_step(model: nn.Module) -> Step:
    """Return a step that leaves the host's cores as free as a GPU does.

    With a GPU it is a real training step of `model` there, by stochastic gradient descent. Without one it is a
    `simulate.SimulatedGPU`: a network on the CPU would compete with the loader for the same cores, which is
    not the bottleneck that people with a GPU have.
    """
    device = config.device()
    if device.type == "cpu":
        return simulate.SimulatedGPU()
    model = model.to(device)
    return TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.05))


def losses(step: Callable[..., torch.Tensor], batches: Sequence[tuple]) -> np.ndarray:
    """Train on each batch, and return the losses in nats, shape (number of batches,). The host waits for each.

    A bar appears after three seconds.
    """
    found = []
    with terminal.bar("training", "step", len(batches), delay=3) as bar:
        for batch in batches:
            found.append(step(*batch).item())
            bar.update()
    return np.array(found)


def device_of(model: nn.Module) -> torch.device:
    """Return the device that the weights of `model` are on."""
    return next(model.parameters()).device


def crop_and_flip(images: torch.Tensor, padding: int = 4) -> torch.Tensor:
    """Shift each image by its own random offset, and mirror half of them: notebook 07 explains it line by line.

    Returns a tensor of the same shape and dtype, on the same device. The distribution is that of torchvision's
    ``RandomCrop(size, padding=padding)`` and ``RandomHorizontalFlip()``, applied image by image: 2 · `padding` + 1
    offsets each way, all equally likely.

    Parameters
    ----------
    images : Tensor
        Of shape (N, C, H, W), any dtype, on any device. Pixels shifted in from outside are 0.
    padding : int
        Pixels on each side.
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
    """A step that augments its batch first, on the device that it trains on."""

    step: Step
    augment: Callable[[torch.Tensor], torch.Tensor]  #: gets the images of a batch, on the device, and returns as many
    device: torch.device = field(default_factory=config.device)  #: not asked for in each step, which would take time

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> object:
        images = images.to(self.device, non_blocking=True)
        return self.step(self.augment(images), labels)

    def __str__(self) -> str:
        return f"{self.step}, after {self.augment.__name__}"


def seed_everything(seed: int) -> None:
    """Make the weights and the order of the images the same in every run."""
    torch.manual_seed(seed)
    np.random.seed(seed)
