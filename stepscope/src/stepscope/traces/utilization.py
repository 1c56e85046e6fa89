"""How much of an accelerator was used, and which kernels used it."""

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.base.wording import percent
from stepscope.traces.columns import Columns, capped_sum, named, objects, places, stacked, union
from stepscope.traces.events import Span, Trace, load, once
from stepscope.traces.files import NoAccelerator
from stepscope.traces.kernel_properties import estimated_occupancy, kernel_class, uses_tensor_cores
from stepscope.traces.operators import host_events, linked_calls
from stepscope.traces.step_times import window

GRAPH_LAUNCH = re.compile("GraphLaunch")  # in the name of a call of the runtime or of the driver
LAUNCH = re.compile("Launch(Cooperative)?Kernel")  # in the name of a call of the runtime or of the driver
LOST = 0.01  # share of the launches: a smaller loss is not reported
AMD_WARP = 64  # threads; NVIDIA's are 32


def accelerators(path: str | Path | Trace) -> pd.DataFrame:
    """Return how much of each accelerator was used: the GPU Summary of TensorBoard's Overview.

    All shares refer to the time from the start of the first step to the end of the last step. If the trace marks no
    steps, they refer to the time from its first event to the end of its last event.

    Returns
    -------
    DataFrame
        Index `device`, the profiler's number; columns

        - `name`, None if unknown
        - `utilization`, the share of the time in which at least one kernel ran; copies do not count
        - `sm_efficiency`, the share of the multiprocessors that had a block to run, on average over the time,
          estimated: ∫ min(1, blocks per multiprocessor of the running kernels) dt, divided by the time
        - `occupancy`, the share of a multiprocessor's threads that a kernel keeps resident, on average over the
          kernels weighted with their durations; where the profiler falsely records 0, estimated from the launch
        - `tensor_core_share`, the share of all kernels' durations that is spent in kernels known to use Tensor Cores
        - `kernels`, int, their number in the trace, and `kernel_time`, the sum of their durations in µs

        Shares are floats from 0 to 1, NaN if unknown; ``attrs["unknown"]`` is a list of sentences with the reasons.

    Raises NoAccelerator if the trace has no kernels.
    """
    trace = load(path)
    table, inside, length = kernels_of(trace), in_steps(trace), time_of_steps(trace)
    rows = {
        device: _use(trace, table.rows(table["device"] == device), inside.rows(inside["device"] == device), length)
        for device in np.unique(table["device"]).tolist()
    }
    result = pd.DataFrame.from_dict(rows, orient="index").rename_axis("device")
    result.attrs["unknown"] = _unknown(trace, table, result)
    return result


def kernels(path: str | Path | Trace, count: int = 10) -> pd.DataFrame:
    """Return the `count` kernels that took most time, with the operator that launched each: the Kernel view's table.

    Kernels of all devices count, also outside the steps. One kernel launched by two operators makes two rows.

    Returns
    -------
    DataFrame
        Index `Name`, the kernel's; columns `Operator`, the innermost one that launched it, NaN if unknown
        (of a CUDA graph the name that ``torch.cuda.graph_annotations`` gave, or the call that launched the graph);
        `Calls`, int; `Total Duration (us)`, `Mean Duration (us)`, `Min Duration (us)`, `Max Duration (us)`;
        `Share` of all kernels' durations, 0 to 1; and `Tensor Cores Used`, whether the kernel's name shows it (see
        `uses_tensor_cores`). Sorted by total duration.

    Raises NoAccelerator if the trace has no kernels.
    """
    groups = kernels_of(load(path)).table().groupby(["name", "operator"], dropna=False, sort=False)
    result = groups["duration"].agg(["size", "sum", "mean", "min", "max"])
    result.columns = ["Calls", *(f"{word} Duration (us)" for word in ("Total", "Mean", "Min", "Max"))]
    result["Share"] = result["Total Duration (us)"] / result["Total Duration (us)"].sum()
    result["Tensor Cores Used"] = groups["tensor_cores"].first()
    result = result.reset_index("operator").rename_axis("Name").rename(columns={"operator": "Operator"})
    return result.sort_values("Total Duration (us)", ascending=False, kind="stable").head(count)


def kernel_time(path: str | Path | Trace, chosen: Callable[[str], bool]) -> float:
    """Return the time in the steps in which at least one kernel ran whose name `chosen` accepts, in µs.

    Kernels that exchange data with other processes do not count. The times of several devices are added. Raises
    NoAccelerator if the trace has no kernels.
    """
    table = _computing(load(path))
    return _busy_time(table.rows(named(table["name"], chosen)))


def kernel_classes(path: str | Path | Trace) -> pd.DataFrame:
    """Return the time and number of the kernels in the steps, by what they do.

    Returns
    -------
    DataFrame
        Index `class`, as `kernel_class` names it; columns `time`, in which a kernel of the class ran, in µs, added over
        the devices; `share` of the time in which any kernel computed; and `kernels`, their number. Longest time first.

    Raises NoAccelerator if the trace has no kernels.
    """
    table = _computing(load(path))
    names = objects([kernel_class(name) for name in table["name"]])
    classes = {name: table.rows(names == name) for name in sorted(set(names))}
    rows = {name: (_busy_time(of_class), of_class.height) for name, of_class in classes.items()}
    result = pd.DataFrame.from_dict(rows, orient="index", columns=["time", "kernels"]).rename_axis("class")
    result.insert(1, "share", result["time"] / (_busy_time(table) or 1.0))
    return result.sort_values("time", ascending=False, kind="stable")


def fill(path: str | Path | Trace) -> float:
    """Return the share of the multiprocessors that have a block to run, on average while kernels run in the steps.

    It is SM efficiency divided by utilization, without the kernels that exchange data, which use few blocks on purpose.
    Near 1 for large batches; small if a kernel has fewer blocks than the device has multiprocessors.

    From 0 to 1; NaN if the trace does not record the number of blocks of a kernel. Raises NoAccelerator if the trace
    has no kernels.
    """
    table = _computing(load(path))
    busy = _busy_time(table.rows(table["blocks_per_sm"] > 0))
    return _working_time(table) / busy if busy else math.nan


def _computing(trace: Trace) -> Columns:
    """Return the kernels that compute, cut to the steps."""
    table = in_steps(trace)
    return table.rows(table["kind"] == "Kernel")


def of_each_device(table: Columns) -> list[Columns]:
    """Return the kernels of each device in each span."""
    devices, spans = np.unique(table["device"]), np.unique(table["span"])
    tables = [table.rows((table["device"] == device) & (table["span"] == span)) for device in devices for span in spans]
    return [each for each in tables if each.height]


def lost_kernels(trace: Trace) -> str:
    """Return a sentence on launches whose kernels are not in the trace; "" if fewer than 1% of the launches.

    CUPTI 12.6 to 13.0 loses kernels after pauses (https://github.com/pytorch/pytorch/issues/192021), and kernels that
    are captured for a CUDA graph do not run.
    """
    launches = lost = 0
    for span in trace.spans:
        calls = span.events.rows(span.events["kind"] == "Runtime")
        launching = named(calls["name"], LAUNCH.search)
        found = np.isin(calls["correlation"][launching], span.kernels["correlation"])
        if found.any():  # otherwise this accelerator's kernels are not linked to their launches
            launches, lost = launches + len(found), lost + int((~found).sum())
    if lost < max(1, LOST * launches):
        return ""
    return (
        f"The trace lacks the kernels of {lost:,} of {launches:,} launches, so the GPU seems to idle: the profiler "
        "lost them, or they were captured for a CUDA graph. Record it again, after the capture."
    )


def time_of_steps(trace: Trace) -> float:
    """Return the length of the `window` of all spans in µs, NaN if it is 0."""
    return sum(end - start for start, end in map(window, trace.spans)) or math.nan


@once
def in_steps(trace: Trace) -> Columns:
    """Return the parts of `kernels_of` within the `window` of their spans."""
    rows = kernels_of(trace)
    begins, closes = np.array([window(span) for span in trace.spans])[rows["span"]].T
    starts, ends = np.maximum(rows["start"], begins), np.minimum(rows["end"], closes)
    return Columns({**rows, "start": starts, "end": ends, "duration": ends - starts}).rows(ends > starts)


@once
def kernels_of(trace: Trace) -> Columns:
    """Return the kernels of all spans, with `span`, `operator`, `duration`, `tensor_cores`; `occupancy` corrected."""
    table = stacked([_of_span(number, span) for number, span in enumerate(trace.spans)])
    if not table.height:
        names = sorted({str(device["name"]) for span in trace.spans for device in span.devices if "name" in device})
        raise NoAccelerator(
            f"{trace.path} has no kernels: it was recorded without a GPU, or without ProfilerActivity.CUDA"
            + (f", or on an accelerator that stepscope does not know ({', '.join(names)})" if names else "")
            + ". The work of an accelerator is unknown. Record it with activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA] on a machine with a GPU."
        )
    return table


def _of_span(number: int, span: Span) -> Columns:
    """Return the kernels of one span that ran on a device, with the computed columns."""
    kernels = span.kernels
    table = Columns(
        {name: kernels[name] for name in ("name", "start", "end", "blocks_per_sm", "device", "correlation")},
        kind=np.asarray(kernels["kind"]),
        duration=kernels["end"] - kernels["start"],
        operator=_operators(span),
        tensor_cores=named(kernels["name"], uses_tensor_cores),
        occupancy=_occupancy(span),
        span=np.full(kernels.height, number),
    ).rows(np.isfinite(kernels["device"]))
    return Columns(table, device=table["device"].astype(int))


def _operators(span: Span) -> np.ndarray:
    """Return for each kernel the name of the operator that launched it, or None.

    For a kernel of a CUDA graph: the name that ``mark_kernels`` gave it, or the call that launched the graph.
    """
    calls, host, correlations = linked_calls(span), host_events(span), span.kernels["correlation"]
    calls = calls.rows((host["kind"] != "step")[calls["operator"]])
    runtime = span.events.rows(span.events["kind"] == "Runtime")
    graphs = runtime.rows(named(runtime["name"], GRAPH_LAUNCH.search))

    def of_kernels(names: np.ndarray, launched: np.ndarray) -> np.ndarray:
        found: np.ndarray = np.r_[names, np.array([None])][places(correlations, launched)]
        return found

    operators = of_kernels(host["name"][calls["operator"]], calls["correlation"])
    launches = of_kernels(graphs["name"], graphs["correlation"])
    ways = zip(span.kernels["annotation"], launches, operators, strict=True)
    return objects([annotation or launch or operator for annotation, launch, operator in ways])


def _occupancy(span: Span) -> np.ndarray:
    """Return the occupancy of each kernel in %, estimated if it is falsely 0: a kernel that ran was resident."""
    kernels = span.kernels
    occupancies = np.where(kernels["occupancy"] < 0, math.nan, kernels["occupancy"])
    doubtful = np.flatnonzero(occupancies == 0)
    properties = {device.get("id"): device for device in span.devices}
    launches = (kernels[name][doubtful] for name in ("grid", "block", "registers", "shared_memory", "device"))
    for row, grid, block, registers, shared, device in zip(doubtful, *launches, strict=True):
        estimated = estimated_occupancy(grid, block, registers, shared, properties.get(device))
        occupancies[row] = 0.0 if estimated < 0.5 else estimated  # the profiler rounds to whole percents
    return occupancies


def _use(trace: Trace, rows: Columns, inside: Columns, length: float) -> dict[str, object]:
    """Return a row of `accelerators` from the kernels of one device, and their parts `inside` the steps."""
    device = rows["device"][0]
    properties = [each for span in trace.spans for each in span.devices if each.get("id") == device]
    of_amd = any(each.get("warpSize") == AMD_WARP for each in properties)
    return {
        "name": properties[0].get("name") if properties else None,
        "utilization": _busy_time(inside) / length,
        "sm_efficiency": math.nan if np.isnan(rows["blocks_per_sm"]).all() else _working_time(inside) / length,
        "occupancy": _weighted_mean(inside["occupancy"], inside["duration"]) / 100,
        "tensor_core_share": math.nan if of_amd else _weighted_mean(rows["tensor_cores"], rows["duration"]),
        "kernels": rows.height,
        "kernel_time": rows["duration"].sum(),
    }


def _busy_time(table: Columns) -> float:
    """Return the time in µs in which at least one kernel ran, added over the devices."""
    parts = [union(each["start"], each["end"]) for each in of_each_device(table)]
    return float(sum((ends - starts).sum() for starts, ends in parts))


def _working_time(table: Columns) -> float:
    """Return ∫ min(1, blocks per multiprocessor of the running kernels) dt, added over the devices."""
    known = table.rows(table["blocks_per_sm"] > 0)
    return sum(capped_sum(each["start"], each["end"], each["blocks_per_sm"]) for each in of_each_device(known))


def _weighted_mean(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean of the known values."""
    known = ~np.isnan(values)
    if not weights[known].sum():
        return math.nan
    return float(np.average(values[known], weights=weights[known]))


def _unknown(trace: Trace, table: Columns, result: pd.DataFrame) -> list[str]:
    """Return a sentence for each unknown value of `accelerators`, with the reason."""
    reasons = []
    if result["sm_efficiency"].isna().any():
        reasons.append("SM efficiency: the trace lacks the kernels' numbers of blocks. Only CUDA's profiler has them.")
    missing = _weighted_mean(np.isnan(table["occupancy"]), table["duration"])
    if missing == 1:
        reasons.append("Occupancy: the trace lacks it. Only CUDA's profiler records it.")
    elif missing > 0:
        reasons.append(
            f"Occupancy of {percent(missing)} of the kernels' time: falsely recorded as 0, and without the device's "
            "properties no estimate is possible. The mean is over the other kernels."
        )
    if result["tensor_core_share"].isna().any():
        reasons.append("Tensor Cores: stepscope does not know the names of AMD's kernels.")
    if lost := lost_kernels(trace):
        reasons.append(f"The work of some kernels. {lost}")
    return reasons
