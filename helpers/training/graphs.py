"""A training step as a CUDA graph."""

from __future__ import annotations

import inspect

import torch

from helpers.timing import Step
from helpers.training.steps import TrainingStep, device_of

# Look before each replay whether all that the graph uses still exists: 0.1 ms of the host's time for a ResNet-50
_MAY_CHECK = "check_input_liveness" in inspect.signature(torch.cuda.graph).parameters
_CHECKED = {"check_input_liveness": True} if _MAY_CHECK else {}


def graphed(step: TrainingStep, images: torch.Tensor, labels: torch.Tensor) -> Step:
    """Record one training step as a CUDA graph, and return a step that replays it: one launch instead of thousands.

    First `step` trains three times on the batch that is given, on a stream of its own, as PyTorch's notes on CUDA
    graphs ask for: what libraries set up in their first calls must not be recorded. The recording itself trains
    nothing.

    A graph runs the same kernels on the same memory every time. So each batch is copied to where the first one
    lay, all batches have the same shape, and nothing in the step may depend on a tensor's value: no enabled
    gradient scaler, no ``.item()``. Adam and AdamW need ``capturable=True``.

    A graph knows addresses, and keeps no tensor alive. So what is returned keeps `step`: otherwise its weights would
    be freed with it, and replays would go on writing to memory that belongs to others by then. What the step itself
    replaces by a new tensor is lost all the same, as an accuracy replaces its sums.

    Parameters
    ----------
    step : TrainingStep
        Of a model on a GPU, without an accuracy.
    images, labels : Tensor
        A batch.

    Returns
    -------
    callable
        Its attribute ``step`` is the step that was recorded.

    Raises
    ------
    ValueError
        If the model is not on a GPU or the step has an accuracy, and by the step that is returned, if a batch has
        another shape.
    RuntimeError
        By the step that is returned, from PyTorch 2.13 on: if a tensor that the graph uses has been freed, for
        instance since the optimizer has loaded another state.
    """
    device = device_of(step.model)
    if device.type != "cuda":
        raise ValueError(f"Expected a model on a GPU, found it on the {device.type}: only CUDA has graphs to record.")
    if step.accuracy is not None:
        raise ValueError(
            "Expected a step without an accuracy, found one that has it: a replay would add each batch to the same old "
            "sums. Record the step without it."
        )
    its_images, its_labels = images.to(device, copy=True), labels.to(device, copy=True)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            step(its_images, its_labels)
    torch.cuda.current_stream().wait_stream(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **_CHECKED):
        loss = step(its_images, its_labels)

    def replay(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if images.shape != its_images.shape:
            raise ValueError(f"Expected images of shape {tuple(its_images.shape)}, found {tuple(images.shape)}.")
        its_images.copy_(images, non_blocking=True)
        its_labels.copy_(labels, non_blocking=True)
        graph.replay()
        return loss.clone()  # the next replay writes where this one's lies

    replay.step = step  # keeps the weights, the optimizer and its state
    return replay
