"""Writes calculated time lines as a trace like that of PyTorch's profiler on a GPU. Every name says so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.base import staging

if TYPE_CHECKING:
    import pandas as pd

PROCESS, THREAD, DEVICE = 1, 1, 0
LOADING = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"  # readers of traces know this name
WITHIN = 0.3  # a share of a launch: where in its operator the runtime's call begins


def write(spans: pd.DataFrame, title: str, folder: Path, how: str = "simulated") -> Path:
    """Write the spans of a `SimulatedRun` as a trace that `stepscope.traces` and TensorBoard read; return its folder.

    A launch becomes an operator with a call of the CUDA runtime inside, and an arrow to the launched work. With two
    streams and fewer than four kernels a step, readers take the last step for a truncated one. The `folder` belongs to
    this run only; an earlier trace in it is replaced. The word `how` is in every name.
    """
    name = f"{how}.pt.trace.json"
    content = {
        "schemaVersion": 1,
        how: title,
        "deviceProperties": [{"id": DEVICE, "name": f"{how} GPU"}],
        "displayTimeUnit": "ms",
        "traceName": name,
        "traceEvents": [*_names(spans, how), *_events(spans, how)],
    }
    staging.write(folder / name, json.dumps(content).encode())
    return folder


def _names(spans: pd.DataFrame, how: str) -> Iterator[dict]:
    names = [("process_name", PROCESS, 0, f"{how} host"), ("process_name", DEVICE, 0, f"{how} GPU")]
    names.append(("thread_name", PROCESS, THREAD, f"thread {THREAD} ({how})"))
    streams = sorted({int(lane.split()[1]) for lane in spans["lane"] if lane != "host"})
    names += [("thread_name", DEVICE, stream, f"stream {stream} ({how})") for stream in streams]
    for kind, process, thread, name in names:
        yield {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": {"name": name}}


def _events(spans: pd.DataFrame, how: str) -> Iterator[dict]:
    for step, own in spans[spans["lane"] == "host"].groupby("step"):
        yield _event("user_annotation", f"ProfilerStep#{step}", own["start"].min(), own["end"].max())
    kinds = dict(zip(spans["launch"], spans["kind"], strict=True))  # the last span of a launch is on the device
    for span in spans.itertuples():
        ids = {"External id": span.launch, "correlation": span.launch}
        copies = kinds[span.launch] == "copy"
        if span.lane != "host":
            stream = int(span.lane.split()[1])
            category, name = "kernel", f"{span.name} ({how})"
            if copies:
                category, name = "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)"
            place = {"device": DEVICE, "context": 1, "stream": stream}
            yield _event(category, name, span.start, span.end, DEVICE, stream, **ids, **place)
            yield _arrow("f", span.launch, span.start, DEVICE, stream) | {"bp": "e"}
        elif span.kind == "loading":
            yield _event("user_annotation", LOADING, span.start, span.end)
        elif span.kind == "wait":
            for name in ("aten::item", "aten::_local_scalar_dense"):
                yield _event("cpu_op", name, span.start, span.end)
            yield _event("cuda_runtime", "cudaStreamSynchronize", span.start, span.end)
        else:
            call = "cudaMemcpyAsync" if copies else "cudaLaunchKernel"
            if span.name == "graph":
                call = "cudaGraphLaunch"
            begin = span.start + WITHIN * (span.end - span.start)
            operator = "aten::copy_" if copies else f"{how}::{span.name}"
            yield _event("cpu_op", operator, span.start, span.end, **{"External id": span.launch})
            yield _event("cuda_runtime", call, begin, span.end, **ids)
            yield _arrow("s", span.launch, begin, PROCESS, THREAD)


def _event(
    category: str, name: str, start: float, end: float, process: int = PROCESS, thread: int = THREAD, **arguments
) -> dict:
    return {
        "ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": start, "dur": end - start,
        "args": arguments,
    }  # fmt: skip


def _arrow(end: str, number: int, time: float, process: int, thread: int) -> dict:
    return {"ph": end, "id": number, "pid": process, "tid": thread, "ts": time, "cat": "ac2g", "name": "ac2g"}
