"""Reads a profiler trace into tables: where each step's time went, the top operators, what accelerators did, two runs.

It needs no torch and no TensorBoard, and reads the traces of torch 1.12 and newer as they are. All definitions are
those of TensorBoard's profiler tab (torch-tb-profiler 0.4.3, with the corrections of `helpers.tensorboard`), so that
a table here and the page there show the same numbers.

==============  =======================================================================================
category        what the step did, while it did nothing of a line further up
==============  =======================================================================================
Kernel          ran kernels on an accelerator
Memcpy          copied memory to, from or on an accelerator
Memset          filled memory of an accelerator
Communication   exchanged data with other processes (NCCL, Gloo)
Runtime         called the accelerator's runtime: launched, allocated, waited
DataLoader      waited for the next mini-batch
CPU Exec        ran operators on the CPU
Other           anything else: Python, mostly
==============  =======================================================================================
"""

from helpers.traces.accelerators import NoAccelerator, accelerators, fill, gaps, idle, kernel_time, kernels
from helpers.traces.comparison import PLAIN_NAMES, difference, sentence
from helpers.traces.kernel_names import converts_layout, multiplies_float32
from helpers.traces.memory import NoMemory, memory_curve
from helpers.traces.operators import top_operators
from helpers.traces.reading import (
    CATEGORIES,
    TRACE_FILE,
    EmptyTrace,
    ForeignFile,
    NoSteps,
    NoTraces,
    SeveralRecordings,
    Span,
    Trace,
    TraceError,
    TruncatedTrace,
    UnreadableFile,
    load,
    ranks,
)
from helpers.traces.slimming import slim
from helpers.traces.timeline import breakdown, loading_share, steps
from helpers.traces.waiting import exposed_copies, waits

__all__ = [
    "CATEGORIES",
    "PLAIN_NAMES",
    "TRACE_FILE",
    "EmptyTrace",
    "ForeignFile",
    "NoAccelerator",
    "NoMemory",
    "NoSteps",
    "NoTraces",
    "SeveralRecordings",
    "Span",
    "Trace",
    "TraceError",
    "TruncatedTrace",
    "UnreadableFile",
    "accelerators",
    "breakdown",
    "converts_layout",
    "difference",
    "exposed_copies",
    "fill",
    "gaps",
    "idle",
    "kernel_time",
    "kernels",
    "load",
    "loading_share",
    "memory_curve",
    "multiplies_float32",
    "ranks",
    "sentence",
    "slim",
    "steps",
    "top_operators",
    "waits",
]
