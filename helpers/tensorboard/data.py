"""Corrects a trace as data, so that TensorBoard's profiler tab reads it as it was meant.

Traces on disk stay as PyTorch wrote them: other tools need them so. `corrections` applies these in memory as the
plugin reads a trace; `fix` writes corrected copies, for people with a plain TensorBoard. Each correction is a function
from a trace, parsed from its JSON, to its corrected events, with the fault that it fixes in its docstring.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator

import numpy as np

from helpers.traces import linking, occupancy
from helpers.traces.linking import numbers
from helpers.traces.sharing import shared_with_workers

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


def count_loader_and_optimizer(trace: dict) -> Iterator[Event]:
    """Overview: the DataLoader's time is 0, and added to others.

    Since torch 1.12 waiting for a batch and the optimizer's step are annotations, which the plugin drops; it
    still expects them among the operators. Other annotations stay out, or the reader's own `record_function` would
    count as CPU time as a whole.
    """
    for event in trace["traceEvents"]:
        counted = event.get("cat") == "user_annotation" and COUNTED.match(event.get("name", ""))
        yield event | {"cat": "cpu_op"} if counted else event


def ignore_steps_without_a_number(trace: dict) -> Iterator[Event]:
    """All views: a `record_function` of the reader's own, named like a step, makes the plugin refuse the trace."""
    for event in trace["traceEvents"]:
        name = event.get("name", "")
        if not (name.startswith("ProfilerStep#") and not re.fullmatch(r"ProfilerStep#\d+", name)):
            yield event


def ignore_annotations_on_the_gpu(trace: dict) -> Iterator[Event]:
    """Overview, CUDA: every step is there twice, once more for its copy on the GPU's time line.

    In a category that the plugin does not know, the copies stay in the Trace view and nowhere else.
    """
    for event in trace["traceEvents"]:
        yield event | {"cat": "annotation_on_gpu"} if event.get("cat") == "gpu_user_annotation" else event


def know_runtime_calls(trace: dict) -> Iterator[Event]:
    """Overview, Operator, Kernel, CUDA: Runtime is 0, device times are 0, kernels have lost their operators.

    The plugin expects runtime calls in the category `runtime`; today they are `cuda_runtime`, and `cuda_driver`
    where Triton or nvjet launch.
    """
    for event in trace["traceEvents"]:
        yield event | {"cat": "runtime"} if event.get("cat") in ("cuda_runtime", "cuda_driver") else event


def charge_no_module_with_unlinked_calls(trace: dict) -> Iterator[Event]:
    """Module, CUDA: the first module is charged with all runtime calls that belong to no operator.

    They come without an `External id`, as modules do, and the plugin takes the two for linked. 0 says: to nobody.
    """
    for event in trace["traceEvents"]:
        unlinked = event.get("cat") == "runtime" and _external_id(event) is None
        yield _linked_to_nobody(event) if unlinked else event


def link_no_call_by_chance(trace: dict) -> Iterator[Event]:
    """Operator, Kernel, CUDA: operators are charged with calls of others, down to negative times.

    In some traces a runtime call's `External id` is but its own number, which an operator happens to have, too. A call
    belongs to an operator only if that was running.
    """
    events = trace["traceEvents"]
    operators = [each for each in events if each.get("cat") in ("cpu_op", "user_annotation") and "dur" in each]
    known = {_external_id(each) for each in operators} - {0, None}
    calls = [each for each in events if each.get("cat") == "runtime" and _external_id(each) in known]
    starts = np.array([each["ts"] for each in operators], float)
    ends = starts + np.array([each["dur"] for each in operators], float)
    moments = np.array([each["ts"] for each in calls], float)
    made_by = linking.makers(_external_ids(calls), moments, _external_ids(operators), starts, ends)
    by_chance = {id(call) for call, operator in zip(calls, made_by, strict=True) if operator < 0}
    for event in events:
        yield _linked_to_nobody(event) if id(event) in by_chance else event


def _linked_to_nobody(event: Event) -> Event:
    return event | {"args": (event.get("args") or {}) | {"External id": 0}}


def _external_ids(events: list[Event]) -> np.ndarray:
    return numbers([_external_id(event) for event in events])


def _external_id(event: Event) -> int | None:
    arguments = event.get("args") or {}
    return arguments.get("External id", arguments.get("external id"))


def ignore_memory_shared_with_workers(trace: dict) -> Iterator[Event]:
    """Memory, CPU: with workers the curve drops to 0 again and again.

    To map and unmap batches that workers share is recorded like allocations and releases: see `shared_with_workers`.
    """
    events = sorted(filter(_is_memory_of_cpu, trace["traceEvents"]), key=lambda event: event["ts"])
    names = ("Addr", "Bytes", "Total Allocated", "Total Reserved")
    shared = shared_with_workers([event["args"].get(name, 0) for name in names] for event in events)
    ignored = {id(event) for event in itertools.compress(events, shared)}
    return (event for event in trace["traceEvents"] if id(event) not in ignored)


def _is_memory_of_cpu(event: Event) -> bool:
    return event.get("name") == "[memory]" and (event.get("args") or {}).get("Device Type") == 0


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

    With `with_stack` the Python frames are events of their own, and the plugin expects them as text beside each
    operator. torch writes that text only with a private option, and traces two to three times as large.
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
    count_loader_and_optimizer,
    ignore_annotations_on_the_gpu,
    know_runtime_calls,
    charge_no_module_with_unlinked_calls,
    link_no_call_by_chance,
    ignore_memory_shared_with_workers,
    estimate_missing_occupancy,
    add_call_stacks,
)
