"""Corrects traces as data, so that TensorBoard's profiler tab reads them as they were meant.

Traces on disk stay as PyTorch wrote them. `corrections` applies `correct` in memory as the plugin reads a trace; `fix`
writes corrected copies, for people with a plain TensorBoard. Each correction is a function from a trace, parsed from
its JSON, to its corrected events, with the fault that it fixes in its docstring. What is wrong in the plugin itself
cannot be corrected in a trace: see `corrections`.
"""

from __future__ import annotations

import gzip
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from stepscope.base import staging
from stepscope.base.staging import TargetExists
from stepscope.traces import TraceError, columns, files, occupancy
from stepscope.traces.columns import numbers
from stepscope.traces.memory import shared_with_workers

Event = dict  # as it stands in the JSON

COUNTED = re.compile(r"enumerate\(DataLoader\)#.*\.__next__$|enumerate\(DataPipe\)#|Optimizer\.", re.DOTALL)


def correct(trace: dict) -> dict:
    """Return `trace` with all corrections; the one given stays as it is.

    Parameters
    ----------
    trace : dict
        A trace of PyTorch's profiler, parsed from its JSON.
    """
    for correction in CORRECTIONS:
        trace = trace | {"traceEvents": list(correction(trace))}
    return trace


def ignore_steps_without_a_number(trace: dict) -> Iterator[Event]:
    """All views: a `record_function` of the reader's own, named like a step, makes the plugin refuse the trace."""
    for event in trace["traceEvents"]:
        name = event.get("name", "")
        if not (name.startswith("ProfilerStep#") and not re.fullmatch(r"ProfilerStep#\d+", name)):
            yield event


def rename_categories(trace: dict) -> Iterator[Event]:
    """Overview, Operator, Kernel: today's categories are not those that the plugin knows.

    - The DataLoader's time is 0, and added to others: the plugin expects waiting for a batch and the optimizer's step
      among the operators, and drops annotations. The reader's own `record_function` stay out.
    - CUDA: every step is there twice, once more for its copy on the GPU's time line. In a category that the plugin does
      not know, the copies stay in the Trace view alone.
    - CUDA: Runtime is 0, device times are 0, kernels have lost their operators. The plugin expects runtime calls in the
      category `runtime`; today they are `cuda_runtime`, and `cuda_driver` where Triton or nvjet launch.
    """
    renamed = {"gpu_user_annotation": "annotation_on_gpu", "cuda_runtime": "runtime", "cuda_driver": "runtime"}
    for event in trace["traceEvents"]:
        category = event.get("cat")
        counted = category == "user_annotation" and COUNTED.match(event.get("name", ""))
        new = "cpu_op" if counted else renamed.get(category)
        yield event | {"cat": new} if new else event


def link_calls_to_their_operators(trace: dict) -> Iterator[Event]:
    """Operator, Kernel, Module, CUDA: operators are charged with calls of others, down to negative times.

    In some traces a runtime call's `External id` is but its own number, which an operator happens to have, too. A call
    belongs to an operator only if that was running. Calls of no operator come without an `External id`, as modules do,
    and the plugin charges the first module with them. 0 says: linked to nobody.
    """
    events = trace["traceEvents"]
    operators = [event for event in events if event.get("cat") in ("cpu_op", "user_annotation") and "dur" in event]
    known = {files.external_id(event) for event in operators} - {0, None}
    calls = [event for event in events if event.get("cat") == "runtime" and files.external_id(event) in known]
    starts = np.array([event["ts"] for event in operators], float)
    ends = starts + np.array([event["dur"] for event in operators], float)
    moments = np.array([event["ts"] for event in calls], float)
    made_by = columns.callers(_external_ids(calls), moments, _external_ids(operators), starts, ends)
    by_chance = {id(call) for call, operator in zip(calls, made_by, strict=True) if operator < 0}
    for event in events:
        unlinked = event.get("cat") == "runtime" and files.external_id(event) is None
        if unlinked or id(event) in by_chance:
            event = event | {"args": (event.get("args") or {}) | {"External id": 0}}
        yield event


def _external_ids(events: list[Event]) -> np.ndarray:
    return numbers([files.external_id(event) for event in events])


def ignore_memory_shared_with_workers(trace: dict) -> Iterator[Event]:
    """Memory, CPU: with workers the curve drops to 0 again and again.

    To map and unmap batches that workers share is recorded like allocations and releases: see `shared_with_workers`.
    """
    events = [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    events = [event for event in events if (event.get("args") or {}).get("Device Type") == 0]
    events.sort(key=lambda event: event["ts"])
    names = ("Addr", "Bytes", "Total Allocated", "Total Reserved")
    shared = shared_with_workers([event["args"].get(name, 0) for name in names] for event in events)
    ignored = {id(event) for event in itertools.compress(events, shared)}
    return (event for event in trace["traceEvents"] if id(event) not in ignored)


def estimate_missing_occupancy(trace: dict) -> Iterator[Event]:
    """GPU Summary, Kernel: the occupancy is 0 for every kernel with more than 48 KiB of shared memory.

    PyTorch's profiler writes it so; `traces.occupancy` estimates what it left out.
    """
    name = "est. achieved occupancy %"
    devices = {device.get("id"): device for device in trace.get("deviceProperties") or []}
    for event in trace["traceEvents"]:
        launch = event.get("args") or {}
        if launch.get(name) == 0:
            needed = (launch.get(key) for key in ("grid", "block", "registers per thread", "shared memory"))
            estimated = occupancy.estimate(*needed, devices.get(launch.get("device")))
            if estimated >= 0.5:  # else the writer rounded to 0, or it is unknown
                event = event | {"args": launch | {name: estimated}}
        yield event


def add_call_stacks(trace: dict) -> Iterator[Event]:
    """Operator: the call stacks stay empty, though they were recorded.

    With `with_stack` the Python frames are events of their own; the plugin expects them as text in each operator.
    """
    events = trace["traceEvents"]
    frames = {event["args"]["Python id"]: event for event in events if _is_frame(event)}
    around = _innermost_frames(events) if frames else {}
    for event in events:
        frame = around.get(id(event))
        if frame is None or "Call stack" in event["args"]:
            yield event
        else:
            stack = sys.intern(_call_stack(frame, frames))  # each step calls the same: keep one copy
            yield event | {"args": event["args"] | {"Call stack": stack}}


def _call_stack(number: int, frames: dict[int, Event]) -> str:
    """Return the names of the frame and of those that called it, innermost first, as torch writes them."""
    names = []
    while (frame := frames.get(number)) is not None:
        names.append(f"{frame['name']};")
        number = frame["args"].get("Python parent id")
    return "".join(names)


def _is_frame(event: Event) -> bool:
    return event.get("cat") == "python_function" and "Python id" in (event.get("args") or {})


def _innermost_frames(events: list[Event]) -> dict[int, int]:
    """Return for each operator, by its `id`, the number of the innermost Python frame around it in its thread."""
    nested = [event for event in events if _is_frame(event) or (event.get("cat") == "cpu_op" and "args" in event)]
    nested.sort(key=lambda event: (str(event["tid"]), event["ts"], -event["dur"]))
    around, open_frames, thread = {}, [], None
    for event in nested:
        if event["tid"] != thread:
            thread, open_frames = event["tid"], []
        while open_frames and open_frames[-1][0] < event["ts"] + event["dur"]:
            open_frames.pop()
        if _is_frame(event):
            open_frames.append((event["ts"] + event["dur"], event["args"]["Python id"]))
        elif open_frames:
            around[id(event)] = open_frames[-1][1]
    return around


CORRECTIONS = (
    ignore_steps_without_a_number,
    rename_categories,
    link_calls_to_their_operators,
    ignore_memory_shared_with_workers,
    estimate_missing_occupancy,
    add_call_stacks,
)


def fix(logdir: str | Path, out: str | Path) -> tuple[list[Path], list[TraceError]]:
    """Write a corrected copy of every trace in `logdir` into `out`, in folders of the same names, as gzip files.

    Returns
    -------
    written : list of Path
        The corrected copies.
    refused : list of TraceError
        Why other traces could not be copied; each names its file.

    Raises
    ------
    NoTraces
        If there are no traces in `logdir`.
    TargetExists
        If `out` lies in `logdir`, where TensorBoard would show both, or a file of a copy's name is there.
    """
    logdir, out = Path(logdir).resolve(), Path(out).resolve()
    originals = [file for run in files.runs(logdir) for file in files.of_run(run)]
    if out.is_relative_to(logdir):
        raise TargetExists(f"The copies would lie in {out}, among the traces in {logdir}. Name a folder outside of it.")
    names = {file: f"{file.name.removesuffix('.gz')}.gz" for file in originals}
    targets = {file: out / file.relative_to(logdir).with_name(name) for file, name in names.items()}
    for target in targets.values():
        if target.exists():
            raise TargetExists(f"There is a file {target} already. Name another folder, or remove that one.")
    written, refused = [], []
    for file, target in targets.items():
        try:
            trace = files.document(file)
        except TraceError as error:
            refused.append(error)
        else:
            staging.write(target, gzip.compress(orjson.dumps(correct(trace)), 6))
            written.append(target)
    return written, refused
