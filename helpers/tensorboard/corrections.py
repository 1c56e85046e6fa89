"""Corrects TensorBoard's profiler tab in memory, so that it is right on today's traces and draws without internet.

The plugin, torch-tb-profiler, has left its repository; 0.4.3 is its last release, and what is corrected here. Each
correction is a function of a few lines, with the fault it mends in its docstring. Files stay as they are: those of
the plugin, and the traces.
"""

from __future__ import annotations

import functools
import gc
import re
from collections.abc import Callable
from importlib import metadata

from helpers.tensorboard import pages

CORRECTED_VERSION = "0.4.3"


def uncorrectable() -> str | None:
    """Return why the installed plugin cannot be corrected, or None if it can."""
    found = metadata.version("torch-tb-profiler")
    if found == CORRECTED_VERSION:
        return None
    return (
        f"torch-tb-profiler {found} is installed, but the corrections of this course are for {CORRECTED_VERSION}: none "
        "is applied, so loading may be shown as 0. Install torch-tb-profiler=="
        f"{CORRECTED_VERSION} for the corrected profiler tab."
    )


@functools.cache
def apply() -> None:
    """Apply all corrections to the plugin in this process, once; none if it is of another version."""
    if uncorrectable() is None:
        for correction in CORRECTIONS:
            correction()


def count_loader_and_optimizer() -> None:
    """Overview: the DataLoader's time is 0, and added to others.

    Since torch 1.12 waiting for a mini-batch and the optimizer's step are `user_annotation` events, which the plugin
    drops; it still expects them among the operators. Other annotations stay out, or the reader's own
    `record_function` would count as CPU time as a whole.
    """
    from torch_tb_profiler.profiler import trace

    counted = re.compile(r"enumerate\(DataLoader\)#.*\.__next__$|enumerate\(DataPipe\)#|Optimizer\.", re.DOTALL)
    stock = trace.create_trace_event

    def create_trace_event(event: dict, is_pytorch_lightning: bool):
        if event.get("cat") == "user_annotation" and counted.match(event.get("name", "")):
            event = event | {"cat": "cpu_op"}
        return stock(event, is_pytorch_lightning)

    trace.create_trace_event = create_trace_event


def ignore_annotations_on_the_gpu() -> None:
    """Overview, CUDA: every step is there twice, once more for its copy on the GPU's time line."""
    from torch_tb_profiler.profiler import trace

    del trace.EventTypeMap["gpu_user_annotation"]


def know_runtime_calls() -> None:
    """Overview, Operator, Kernel, CUDA: Runtime is 0, device times are 0, kernels have lost their operators.

    The plugin expects runtime calls in the category `runtime`; today they are `cuda_runtime`, and `cuda_driver`
    where Triton or nvjet launch.
    """
    from torch_tb_profiler.profiler import trace

    trace.EventTypeMap |= dict.fromkeys(["cuda_runtime", "cuda_driver"], trace.EventTypes.RUNTIME)


def correct_the_parsing_processes() -> None:
    """All views: the plugin parses each trace in a process of its own, and a spawned one has the stock plugin."""
    from torch_tb_profiler.profiler import loader

    stock = loader.Process

    def process(target: Callable, args: tuple):
        return stock(target=_parse_corrected, args=(target, *args))

    loader.Process = process


def _parse_corrected(target: Callable, *args) -> None:
    apply()
    gc.disable()  # parses in 8.4 s what takes 10.5 s with it; the process ends right after
    target(*args)


CORRECTIONS = (
    count_loader_and_optimizer,
    ignore_annotations_on_the_gpu,
    know_runtime_calls,
    correct_the_parsing_processes,
    pages.draw_without_internet,
)
