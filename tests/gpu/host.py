"""Run 8: who waits for whom: a value that is asked for in each step, copies, and a second stream."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from helpers import training
from helpers.training import models
from stepscope import timing
from tests.gpu import materials, measuring
from tests.gpu.measuring import Figures, Run, Steps
from tests.gpu.resnet import new_step


def waiting(run: Run) -> None:
    """Measure copies, ``.item()`` in each step by batch size, and copies in a second stream."""
    size = 10**6 if run.small else 256 * 10**6
    on_device = torch.empty(size, dtype=torch.uint8, device="cuda")

    def copying(host: torch.Tensor) -> Figures:
        ms = timing.call_ms(lambda: on_device.copy_(host, non_blocking=True), repeats=5)
        return {"gb_per_second": size / ms / 1e6}

    run.compare("copies", {
        "pageable": lambda: partial(copying, torch.ones(size, dtype=torch.uint8)),
        "pinned": lambda: partial(copying, torch.ones(size, dtype=torch.uint8).pin_memory()),
    })  # fmt: skip
    step = new_step(32, "float32", torch.contiguous_format)  # notebook 08 has PyTorch's defaults: TF32 in convolutions
    count = 2 if run.small else 50

    def asks(*batch: torch.Tensor) -> float:
        return step(*batch).item()

    for images in (16, 64, 256, 1024)[: 1 if run.small else None]:
        loader = [measuring.batch(images)]
        run.compare("item", {
            f"never asks, {images} images": lambda loader=loader: Steps(step, loader, count),
            f"asks, {images} images": lambda loader=loader: Steps(asks, loader, count),
        })  # fmt: skip
    for name in ("uint8", "float32"):
        two_streams(run, getattr(torch, name), f"{name} photos")


def two_streams(run: Run, dtype: torch.dtype, name: str) -> None:
    """Measure a light step on photos that are copied in the usual stream, or one batch ahead in a second one."""
    images, side = (4, 32) if run.small else (128, 224)
    photos = torch.randint(256, (4, images, 3, side, side), dtype=torch.uint8)
    photos = (photos / 255 if dtype.is_floating_point else photos).pin_memory()
    labels, repeats = torch.zeros(images, dtype=torch.long).pin_memory(), 1 if run.small else 8
    batches = [(each, labels) for each in photos] * repeats
    device, ahead = torch.device("cuda"), materials.recipes().one_ahead
    convolution = nn.Sequential(models.Normalize(), nn.Conv2d(3, 16, 7, 4), nn.ReLU())
    model = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).to(device)
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.01))

    def epoch(order: Callable) -> Figures:
        def train() -> None:
            for batch in order(batches):
                step(*batch)

        ms = timing.call_ms(train, repeats=3) / len(batches)
        return {"images_per_second": images / ms * 1e3, "step_ms": ms}

    run.compare(name, {
        "one stream": lambda: partial(epoch, iter),
        "two streams": lambda: partial(epoch, lambda loader: ahead(loader, device)),
    })  # fmt: skip
