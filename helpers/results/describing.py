"""What was timed, in words, read from the loader and the step themselves: what differs in them differs in the words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, default_collate

from helpers import training, wording
from helpers.loading import datasets
from helpers.training import models


def describe(loader: Iterable, step: Callable) -> str:
    """Return how batches are made and what a step does with them.

    Left out are the machine, where the images come from and how many there are: a result has them anyway.

    Parameters
    ----------
    loader : iterable
        Of a DataLoader dataset, transform, order, workers and other settings are named, of anything else its type and
        its `batch`, if it has one.
    step : callable
        Of a `training.TrainingStep` network, optimizer, number formats, memory formats and compilation are named; any
        other speaks for itself, by ``str()``. On a GPU it counts whether TF32 is on at this moment, or in a
        `training.WithTF32` what that asks for.

    Examples
    --------
    >>> describe(DataLoader([1, 2], batch_size=2), simulate.SimulatedAccelerator(5))
    'list, in batches of 2, in order, 0 workers; simulated accelerator (5 ms a step)'
    """
    return f"{', '.join(_of_loader(loader))}; {_of_step(step)}"


def _of_loader(loader: Iterable) -> Iterator[str]:
    if not isinstance(loader, DataLoader):
        yield type(loader).__name__
        if batch := getattr(loader, "batch", None):
            yield f"in batches of {batch}"
        return
    yield _of_dataset(loader.dataset)
    yield from _of_order(loader)
    yield wording.counted(loader.num_workers, "worker")
    if loader.collate_fn is not default_collate:
        yield f"collated by {getattr(loader.collate_fn, '__qualname__', type(loader.collate_fn).__name__)}"
    if loader.pin_memory:
        yield "in pinned memory"
    if loader.persistent_workers:
        yield "workers stay"
    if loader.prefetch_factor not in (None, 2):  # 2 is PyTorch's own
        yield f"prefetch factor {loader.prefetch_factor}"


def _of_dataset(dataset: Dataset) -> str:
    settings = {name: getattr(dataset, name, None) for name in ("format", "decoder", "draft", "storage")}
    words = [type(dataset).__name__, *(f"{name} {value}" for name, value in settings.items() if value is not None)]
    if isinstance(dataset, datasets.Transformed):
        words.append(f"of {_of_dataset(dataset.dataset)}")
    transforms = " → ".join(_of_transform(getattr(dataset, "transform", None)))
    return f"{' '.join(words)} ({transforms})" if transforms else " ".join(words)


def _of_transform(transform: object) -> Iterator[str]:
    """Name each transform, those inside of compositions one by one."""
    if transform is None:
        return
    if type(transform).__name__ != "Compose":  # torchvision has two classes of this name
        yield repr(transform)
        return
    for each in transform.transforms:
        yield from _of_transform(each)


def _of_order(loader: DataLoader) -> Iterator[str]:
    if loader.batch_sampler is None:
        yield "in batches of its own"
        return
    if type(loader.batch_sampler) is not BatchSampler:
        size = getattr(loader.batch_sampler, "batch_size", "its own size")
        yield f"{type(loader.batch_sampler).__name__} of {size}"
        return
    yield f"in batches of {loader.batch_size}"
    if loader.drop_last:
        yield "only full ones"
    if not isinstance(loader.sampler, RandomSampler):
        yield "in order"
        return
    epochs = loader.sampler.num_samples / len(loader.dataset)
    yield "shuffled" if epochs == 1 else f"shuffled, {epochs:g} epochs without a pause"
    if loader.sampler.generator is not None:
        yield f"seed {loader.sampler.generator.initial_seed()}"


def _of_step(step: Callable) -> str:
    if isinstance(step, training.WithTF32):
        with training.set_tf32(step.enabled):
            return _of_step(step.step)
    if isinstance(step, training.TrainingStep):
        return ", ".join(_of_training(step))
    if isinstance(step, training.Augmented):
        return f"{step.augment.__name__}, then {_of_step(step.step)}"
    if isinstance(recorded := getattr(step, "step", None), training.TrainingStep):  # by `training.graphed`
        return f"{_of_step(recorded)}, replayed as a CUDA graph"
    return str(step)


def _of_training(step: training.TrainingStep) -> Iterator[str]:
    yield training.name_of(step.model)
    if any(isinstance(layer, models.Normalize) for layer in step.model.modules()):
        yield "normalizing"
    yield f"weights {_layout(step.model)}"
    yield f"images {str(step.memory_format).removeprefix('torch.')}"
    yield _of_optimizer(step.optimizer)
    if torch.cuda.is_tf32_supported() and torch.backends.cudnn.allow_tf32:
        yield "TF32"
    if step.autocast is not None:
        yield f"autocast to {str(step.autocast).removeprefix('torch.')}"
    if step.scaler.is_enabled():
        yield "loss scaled"
    yield from _of_compilation(step.model)


def _layout(model: nn.Module) -> str:
    """Return how the weights of convolutions lie in memory; those of 1 × 1 lie both ways at once."""
    weights = [weight for weight in model.parameters() if weight.dim() == 4]
    return "contiguous_format" if all(weight.is_contiguous() for weight in weights) else "channels_last"


def _of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Name an optimizer with its learning rate and all else that is not as PyTorch has it by default."""
    usual = {name: each.default for name, each in inspect.signature(type(optimizer)).parameters.items()}
    options = {"lr": optimizer.defaults.get("lr")}
    options |= {name: value for name, value in optimizer.defaults.items() if name in usual and value != usual[name]}
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})"


def _of_compilation(model: nn.Module) -> Iterator[str]:
    """Say whether `torch.compile` was given the whole network or layers of it, and whether it makes CUDA graphs."""
    compiled = [layer for layer in model.modules() if hasattr(layer, "_orig_mod")]
    if not compiled:
        return
    yield "compiled" if model in compiled else f"{wording.counted(len(compiled), 'layer')} compiled"
    if (compiled[0].dynamo_ctx.compiler_config or {}).get("triton.cudagraphs"):
        yield "into CUDA graphs"
