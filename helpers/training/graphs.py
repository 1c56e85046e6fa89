"""A training step as a CUDA graph."""

from __future__ import annotations

import torch

from helpers.timing import Step
from helpers.training.steps import TrainingStep, device_of


def graphed(step: TrainingStep, images: torch.Tensor, labels: torch.Tensor) -> Step:
    """Record one training step as a CUDA graph, and return a step that replays it: one launch instead of thousands.

    First `step` trains three times on the batch that is given, on a stream of its own, as PyTorch's notes on CUDA
    graphs ask for: what libraries set up in their first calls must not be recorded. The recording itself trains
    nothing.

    A graph runs the same kernels on the same memory every time. So each batch is copied to where the first one
    lay, all batches have the same shape, and nothing in the step may depend on a tensor's value: no enabled
    gradient scaler, no ``.item()``. Adam and AdamW need ``capturable=True``.

    Parameters
    ----------
    step : TrainingStep
        Of a model on a GPU.
    images, labels : Tensor
        A batch.

    Raises
    ------
    ValueError
        If the model is not on a GPU, and by the step that is returned, if a batch has another shape.
    """
    device = device_of(step.model)
    if device.type != "cuda":
        raise ValueError(f"Expected a model on a GPU, found it on the {device.type}: only CUDA has graphs to record.")
    its_images, its_labels = images.to(device, copy=True), labels.to(device, copy=True)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        for _ in range(3):
            step(its_images, its_labels)
    torch.cuda.current_stream().wait_stream(other)
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
