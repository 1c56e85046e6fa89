"""Run 12: what DDP costs on one rank, by layout; and attention as one operator or written out."""

import itertools
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from helpers import config, training
from helpers.training import models
from tests.gpu import materials, measuring
from tests.gpu.measuring import Run, Steps
from tests.gpu.resnet import LAYOUTS, new_step, unchanged, workload


def ddp_and_attention(run: Run) -> None:
    """Measure DDP, then attention."""
    dist.init_process_group("gloo" if run.small else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp(run)
    finally:
        dist.destroy_process_group()
    if measuring.is_gpu():  # a simulated one cannot compute attention
        attention(run)


def ddp(run: Run) -> None:
    """Measure the step of ResNet-50 in bfloat16 with DDP and without, and count the warnings of strides."""
    images, side, count = workload(run.small)
    batch = measuring.batch(images // 2)

    def distributed(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)

    def variant(layout: str, change: Callable[[nn.Module], nn.Module]) -> Steps:
        step = new_step(side, "bfloat16", LAYOUTS[layout], change)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(*batch)
        warned = sum("stride" in str(warning.message).lower() for warning in caught)
        return Steps(step, [batch], count, {"stride_warnings": warned})

    changes = {"plain": unchanged, "DDP": distributed}
    pairs = itertools.product(changes, LAYOUTS)
    run.compare("DDP", {f"{title}, {layout}": partial(variant, layout, changes[title]) for title, layout in pairs})


def attention(run: Run) -> None:
    """Measure notebook 12's vision transformer with both kinds of attention."""
    images, _, count = workload(run.small)
    batch = measuring.batch(images)
    known = {"torch": torch, "models": models, "training": training, "config": config, "device": config.device()}
    vit_step = materials.defined("12-fewer-launches.ipynb", "12-transformer-2", "12-transformer-3", **known)["vit_step"]

    def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (query @ key.transpose(2, 3) / query.shape[3] ** 0.5).softmax(3) @ value

    def variant(attend: Callable) -> Steps:
        return Steps(vit_step(autocast=torch.bfloat16, attention=attend), [batch], 2 * count)

    run.compare("ViT in bfloat16", {
        "written out": partial(variant, written_out),
        "one operator": partial(variant, scaled_dot_product_attention),
    })  # fmt: skip
