"""The training loop: one step, one epoch, evaluation; what is trained. Nothing in a step waits for the device."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing import connection

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torchmetrics.classification import MulticlassAccuracy
from tqdm import tqdm

from helpers import config, simulate

Step = Callable[..., object]
"""Trains on one mini-batch. It is called as `call` does, and what it returns is not looked at."""

# What ResNet-50 keeps of an image at 224 × 224 between forward and backward, in float32: 86 MB, summed over the tensors
# that autograd saves. Weights, gradients, workspaces and a second model must find room beside it.
_RESNET_BYTES_PER_IMAGE = 86e6
_SHARE_FOR_ACTIVATIONS = 0.5
_LARGEST_BATCH = 256  # a data-centre GPU has enough to compute with these; more only makes each measurement longer


class OutOfMemory(RuntimeError):
    """A mini-batch does not fit into the GPU's memory.

    Parameters
    ----------
    batch : int
        Images in it.
    found : Exception
        What PyTorch raised; says how much memory there is, and what takes it.
    """

    def __init__(self, batch: int, found: Exception):
        super().__init__(
            f"A step with {batch} images does not fit into the GPU's memory: {found}\n"
            f"Try {max(batch // 2, 1)} images: give batch={max(batch // 2, 1)} where this notebook chooses its workload "
            "(or to its DataLoader), restart the kernel, which frees the memory, and run all cells again. If another "
            "program uses this GPU, nvidia-smi shows it."
        )


class WorkerDied(RuntimeError):
    """A worker process of a loader was ended from outside, or ended itself; what a dataset *raises* keeps its own type.

    Parameters
    ----------
    found : str
        Which worker, and how it ended.
    """

    def __init__(self, found: str):
        super().__init__(
            f"Expected a mini-batch, but a worker of the loader died: {found}\n"
            "It did not end by an exception, so it left no traceback. SIGKILL (Killed) mostly means that memory ran out: "
            "take fewer workers, a smaller prefetch_factor, or arrays instead of lists (notebook 03). SIGSEGV and SIGBUS "
            "come from compiled code, or from a full /dev/shm. To see where it happens, load with num_workers=0."
        )


@dataclass(frozen=True)
class Workload:
    """What a step trains on.

    Attributes
    ----------
    batch : int
        Images in a mini-batch.
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


def resnet_workload(batch: int | None = None) -> Workload:
    """Return what ResNet-50 trains on here, so that a step is long enough to be worth making faster.

    On a GPU at 224 × 224 pixels, where computing dominates. The mini-batch is the largest power of two, up to 256, whose
    activations in float32 take at most half of the GPU's memory: 86 MB an image. That makes 32 with 8 GB, 64 with 16 GB,
    256 from 48 GB on. On a CPU images stay as they are, 32 × 32, and the preset says how many; 32 take 0.15 s on two cores
    with units for matrices, and 0.65 s on two threads of an older one.

    Parameters
    ----------
    batch : int, optional
        Another mini-batch, if memory is short.
    """
    if config.device().type == "cpu":
        return Workload(batch or config.preset().cpu_batch, 32, "for a CPU" if batch is None else "as you chose")
    memory = torch.cuda.get_device_properties(config.device()).total_memory
    fitting = max(int(memory * _SHARE_FOR_ACTIVATIONS / _RESNET_BYTES_PER_IMAGE), 1)
    largest = min(2 ** (fitting.bit_length() - 1), _LARGEST_BATCH)
    return Workload(batch or largest, 224, f"for {memory / 1e9:.0f} GB" if batch is None else "as you chose")


def launch_bound_workload() -> Workload:
    """Return a workload whose kernels are so short that starting them takes longer than running them, on a GPU.

    A CPU starts nothing elsewhere; there it is small, to be quick.
    """
    return Workload(16 if config.device().type == "cuda" else 4, 32, "small on purpose")


class set_tf32:  # noqa: N801 a function to its user, as torch.set_grad_enabled, which is a class for the same reason
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
    """Trains `model` on one mini-batch whenever it is called with images and labels, as a loader yields them.

    They are copied to the model's device. The loss comes back as a tensor without gradient on that device: reading
    its value is what would make the host wait for it.

    Parameters
    ----------
    model : Module
    optimizer : Optimizer
    accuracy : MulticlassAccuracy, optional
        Is told of every mini-batch.
    autocast : torch.dtype, optional
        Runs the forward pass in mixed precision: in this type where that is fast and safe enough, else in float32.
    scaler : GradScaler, optional
        Multiplies the loss, so that no gradient becomes 0 in float16, and divides the gradients again.
    memory_format : torch.memory_format
        How the images shall lie in the device's memory; by default as they come.

    Raises
    ------
    OutOfMemory
        If the mini-batch is too large for the GPU's memory.
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
        device, name = device_of(self.model), getattr(self.model, "name", type(self.model).__name__)
        types = f", autocast to {str(self.autocast).removeprefix('torch.')}" if self.autocast else ""
        return f"{name} on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}{types}"


def graphed(step: TrainingStep, images: torch.Tensor, labels: torch.Tensor) -> Step:
    """Record one training step as a CUDA graph, and return a step that replays it: one launch instead of thousands.

    First `step` trains three times on the mini-batch that is given, on a stream of its own, as PyTorch's notes on CUDA
    graphs ask for: what libraries set up in their first calls must not be recorded. The recording itself trains nothing.

    A graph runs the same kernels on the same memory every time. So each mini-batch is copied to where the first one
    lay, all mini-batches have the same shape, and nothing in the step may depend on a tensor's value: no enabled
    gradient scaler, no ``.item()``. Adam and AdamW need ``capturable=True``.

    Parameters
    ----------
    step : TrainingStep
        Of a model on a GPU.
    images, labels : Tensor
        A mini-batch.

    Raises
    ------
    ValueError
        If the model is not on a GPU, and by the step that is returned, if a mini-batch has another shape.
    """
    device = device_of(step.model)
    if device.type != "cuda":
        raise ValueError(f"Expected a model on a GPU, found it on the {device.type}: only CUDA has graphs to record.")
    its_images, its_labels = images.to(device, copy=True), labels.to(device, copy=True)
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            step(its_images, its_labels)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(its_images, its_labels)

    def replay(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if images.shape != its_images.shape:
            raise ValueError(f"Expected images of shape {tuple(its_images.shape)}, found {tuple(images.shape)}.")
        its_images.copy_(images, non_blocking=True)
        its_labels.copy_(labels, non_blocking=True)
        graph.replay()
        return loss.clone()  # the next replay writes where this one's lies

    return replay


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


def call(step: Step, batch: object) -> object:
    """Give a mini-batch to a step: a tuple or list as ``step(*batch)``, anything else, such as a dict, as ``step(batch)``."""
    return step(*batch) if isinstance(batch, (tuple, list)) else step(batch)


def batch_size(batch: object) -> int:
    """Items in a mini-batch, however it is nested: the length of the first tensor in it. Without a tensor it counts as one."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return next((len(tensor) for tensor in tensors), 1)


@contextmanager
def batches(loader: Iterable) -> Iterator[Iterator]:
    """Give mini-batches for ever, as `endless` does, and end the workers with the block, also when it raises.

    Raises
    ------
    WorkerDied
        If a worker is killed or exits.
    ValueError
        If the loader yields no mini-batch at all.
    """
    try:
        with closing(endless(loader)) as endlessly:
            yield endlessly
    except RuntimeError as error:
        # PyTorch has no type for it, and raises it wherever this process is: in a step, or while the workers are ended
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise WorkerDied(str(error)) from error


def endless(loader: Iterable) -> Iterator:
    """Yield mini-batches for ever, epoch after epoch. When it is closed or raises, no worker of the loader is left.

    Raises
    ------
    ValueError
        If the loader yields no mini-batch at all.
    """
    epoch = None
    try:
        while True:
            epoch = iter(loader)
            try:
                yield next(epoch)  # without a name, which would keep it from being freed by who has it
            except StopIteration:
                raise ValueError(
                    "The loader yields no mini-batch: is the dataset smaller than one batch (drop_last)? Or is it a "
                    "generator, which can be gone through only once? Then give the DataLoader itself."
                ) from None
            yield from epoch
    except Exception as error:
        if dead := _dead_workers(epoch):  # PyTorch's error may then be any: what a dead worker offered is not there
            raise WorkerDied(dead) from error
        raise
    finally:
        # Not left to the garbage collector: a notebook keeps its last error, which keeps the iterator and so the
        # workers; and persistent ones, which the loader keeps, would load on while the next clock runs.
        getattr(epoch, "_shutdown_workers", lambda: None)()
        if isinstance(loader, torch.utils.data.DataLoader):
            loader._iterator = None


def _dead_workers(epoch: object) -> str:
    """Say which workers of a DataLoader's iterator ended otherwise than they should, and how."""
    workers = getattr(epoch, "_workers", [])
    ending = connection.wait([worker.sentinel for worker in workers], timeout=0.2 if workers else 0)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join(1)  # its files are closed a moment before it has an exit code
    ended = {worker.pid: worker.exitcode for worker in workers if worker.exitcode}
    how = {pid: signal.Signals(-code).name if code < 0 else f"exit code {code}" for pid, code in ended.items()}
    return ", ".join(f"process {pid} by {way}" for pid, way in how.items())
