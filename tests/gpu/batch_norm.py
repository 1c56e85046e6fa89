"""Run 6: batch normalization alone, in ResNet-50's shapes, by number format and layout."""

import csv
import io
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from helpers import config
from helpers.training import calculated
from stepscope import timing
from tests.gpu.measuring import Figures, Run
from tests.gpu.resnet import LAYOUTS, workload

# Bytes that must be moved: forward reads and writes an image, backward reads it and a gradient, and writes another one
_TENSORS = 5
_METRIC = "dram__throughput.avg.pct_of_peak_sustained_elapsed"


def alone(run: Run) -> None:
    """Measure forward and backward of all batch normalizations of a step, one after the other."""
    variants = {
        f"{name}, {layout}": partial(variant, run.small, getattr(torch, name), LAYOUTS[layout])
        for layout in LAYOUTS
        for name in ("float32", "bfloat16", "float16")
    }
    run.compare("batch norm", variants)
    if shutil.which("ncu"):
        run.compare("statistics kernel", {"bfloat16, channels_last": lambda: partial(by_counters, run)}, rounds=1)
    elif not run.small:
        run.missing["statistics kernel"] = "ncu is not installed"


def shapes(images: int, side: int) -> Counter[torch.Size]:
    """Return how often ResNet-50 normalizes a batch of each shape; nothing is computed."""
    import torchvision  # here: it takes seconds

    found: Counter[torch.Size] = Counter()
    with torch.device("meta"):
        model = torchvision.models.resnet50(num_classes=10)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_pre_hook(lambda layer, inputs: found.update([inputs[0].shape]))
        model(torch.empty(images, 3, side, side))
    return found


def variant(small: bool, dtype: torch.dtype, layout: torch.memory_format) -> Callable[[], Figures]:
    """Return what measures all batch normalizations of a step in a number format and a layout."""
    images, side, _ = workload(small)
    counts = shapes(images, side)
    sheet = next((gpu for name, gpu in calculated.GPUS.items() if name in torch.cuda.get_device_name()), None)
    moved = sum(_TENSORS * shape.numel() * dtype.itemsize * count for shape, count in counts.items())

    def measure() -> Figures:
        ms = sum(count * layer_ms(shape, dtype, layout, small) for shape, count in counts.items())
        figures = {"batch_norm_ms": ms, "gb_per_second": moved / ms / 1e6}
        return figures | ({"share_of_bandwidth": moved / ms / 1e6 / sheet.gb_per_second} if sheet else {})

    return measure


def layer_ms(shape: torch.Size, dtype: torch.dtype, layout: torch.memory_format, small: bool = False) -> float:
    """Return the milliseconds of one batch normalization, forward and backward; weights are float32, as in autocast."""
    layer = nn.BatchNorm2d(shape[1], device="cuda")
    images = torch.randn(shape, device="cuda").to(dtype, memory_format=layout).requires_grad_()
    gradient = torch.randn_like(images)

    def call() -> None:
        torch.autograd.grad(layer(images), [images, *layer.parameters()], gradient)

    return timing.call_ms(call, repeats=1 if small else 5)


def by_counters(run: Run) -> Figures:
    """Return how much of the memory's bandwidth a kernel of bfloat16's statistics reaches, by the counters of ncu."""
    words = "ncu --clock-control none --launch-count 1 --kernel-name regex:batch_norm_collect_statistics --csv".split()
    command = [*words, "--metrics", f"{_METRIC},gpu__time_duration.sum"]
    command += [sys.executable, "-c", "from tests.gpu import batch_norm; batch_norm.one()"]
    done = subprocess.run(command, cwd=config.PROJECT, capture_output=True, text=True, timeout=run.left + 60)
    (run.folder / "ncu.txt").write_text(done.stdout + done.stderr)
    rows = list(csv.DictReader(io.StringIO(done.stdout[done.stdout.find('"ID"') :])))
    found = {row["Metric Name"]: float(row["Metric Value"].replace(",", "")) for row in rows if row.get("Metric Name")}
    if _METRIC not in found:
        raise RuntimeError(f"Expected {_METRIC} in ncu's output, found: {(done.stderr or done.stdout).strip()[-200:]}")
    return {"percent_of_bandwidth": found[_METRIC], "kernel_ns": found["gpu__time_duration.sum"]}


def one() -> None:
    """Run the first batch normalization of ResNet-50 once, for ncu."""
    shape = next(iter(shapes(256, 224)))
    layer = nn.BatchNorm2d(shape[1], device="cuda")
    layer(torch.randn(shape, device="cuda").to(torch.bfloat16, memory_format=torch.channels_last))
    torch.cuda.synchronize()
