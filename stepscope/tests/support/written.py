"""Traces written by hand, whose truth is known."""

import gzip
import json


def event(category, name, start, end, *, thread=1, **arguments):
    return {
        "ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": thread,
        "args": arguments,
    }  # fmt: skip


def step(number, start, end):
    return event("user_annotation", f"ProfilerStep#{number}", start, end)


def loading(start, end):
    return event("user_annotation", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, end)


def write(path, events, **head):
    content = json.dumps({"schemaVersion": 1, **head, "traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def two_steps():
    return [
        step(7, 1000, 2000),
        loading(1000, 1300),
        event("cpu_op", "aten::mul", 1100, 1200),  # a transform, inside loading
        event("cpu_op", "aten::conv2d", 1400, 1600),
        event("cpu_op", "aten::_convolution", 1450, 1550),
        event("cpu_op", "autograd::engine", 1550, 1700, thread=2),  # overlaps the forward pass
        event("user_annotation", "Optimizer.step#SGD.step", 1800, 1900),
        event("user_annotation", "of the reader's own", 1900, 1980),
        step(8, 2000, 2500),
        event("cpu_op", "aten::mm", 1990, 2100),  # straddles the steps
    ]


def on_a_gpu():
    """Training steps on a GPU, as torch writes them today."""
    link = {"External id": 5, "correlation": 1, "device": 0, "stream": 7}
    return [
        step(1, 0, 100),
        event("gpu_user_annotation", "ProfilerStep#1", 20, 150),
        event("cpu_op", "aten::mm", 10, 30, **{"External id": 5}),
        event("cuda_runtime", "cudaLaunchKernel", 15, 20, **link),
        event("kernel", "gemm", 60, 140, **link),
        event("cuda_runtime", "cudaMemcpyAsync", 30, 35, correlation=2, **{"External id": 0}),
        event("gpu_memcpy", "HtoD", 130, 150, correlation=2, **{"External id": 0}),
        step(2, 100, 220),
        event("cuda_driver", "cuLaunchKernel", 120, 125, correlation=3, **{"External id": 0}),
        event("kernel", "triton", 160, 170, correlation=3, **{"External id": 0}),
        event("cuda_runtime", "cudaMemsetAsync", 180, 185, correlation=4, **{"External id": 0}),
        event("gpu_memset", "Memset", 190, 195, correlation=4, **{"External id": 0}),
        step(3, 220, 300),  # launched nothing, so the profiler may have missed what it launched
    ]
