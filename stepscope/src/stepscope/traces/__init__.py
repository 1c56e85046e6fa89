"""Reads profiler traces into tables: time of each step by category, top operators, use of accelerators, two runs.

It needs neither torch nor TensorBoard, and reads the traces of torch 1.12 and newer. All definitions follow
TensorBoard's profiler tab (torch-tb-profiler 0.4.3, with the corrections of `stepscope.tensorboard`), so that the
tables and the tab show the same numbers.

==============  =======================================================================================
category        activity of the step, while no category further up applied
==============  =======================================================================================
Kernel          kernels on an accelerator
Memcpy          copies of memory to, from or on an accelerator
Memset          memory fills on an accelerator
Communication   data exchange with other processes (NCCL, Gloo)
Runtime         calls of the accelerator's runtime: launches, allocations, waits
DataLoader      waiting for the next batch
CPU Exec        operators on the CPU
Other           everything else, mostly Python
==============  =======================================================================================
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.traces.alignment import Ranks, ranks
    from stepscope.traces.events import CATEGORIES, Span, Trace, load
    from stepscope.traces.exposed_communication import (
        collectives,
        communication,
        communication_by_kind,
        communication_by_step,
    )
    from stepscope.traces.files import NoAccelerator, NoSteps, NoTraces, SeveralRecordings, TraceError, runs
    from stepscope.traces.idle_time import exposed_copies, gaps, idle, waits
    from stepscope.traces.kernel_properties import converts_layout, kernel_class, multiplies_float32
    from stepscope.traces.memory import memory_curve
    from stepscope.traces.operators import top_operators
    from stepscope.traces.slimming import slim
    from stepscope.traces.step_times import breakdown, difference, sentence, steps, without_step
    from stepscope.traces.utilization import accelerators, fill, kernel_classes, kernel_time, kernels, lost_kernels

__all__ = [
    "CATEGORIES", "NoAccelerator", "NoSteps", "NoTraces", "Ranks", "SeveralRecordings", "Span", "Trace", "TraceError",
    "accelerators", "breakdown", "collectives", "communication", "communication_by_kind", "communication_by_step",
    "converts_layout", "difference", "exposed_copies", "fill", "gaps", "idle", "kernel_class", "kernel_classes",
    "kernel_time", "kernels", "load", "lost_kernels", "memory_curve", "multiplies_float32", "ranks", "runs",
    "sentence", "slim", "steps", "top_operators", "waits", "without_step",
]  # fmt: skip


# The modules that define the names; only the first two work without pandas
_MODULES = [
    "files", "events", "step_times", "operators", "utilization", "idle_time", "memory", "kernel_properties", "slimming",
    "alignment", "exposed_communication",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a function's module at the first access to the function.

    Tables need NumPy and pandas, which take longer to import than this package; code without tables needs neither.
    """
    for module in _MODULES if name in __all__ else ():
        found = vars(importlib.import_module(f"{__name__}.{module}"))
        if name in found:
            return globals().setdefault(name, found[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
