"""How much of an accelerator was used: its kernels, and the gaps between them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from helpers.traces import occupancy
from helpers.traces.columns import Columns
from helpers.traces.files import NoAccelerator
from helpers.traces.intervals import capped_sum, coverage, union
from helpers.traces.keeping import once
from helpers.traces.linking import places
from helpers.traces.operators import host_events, linked_calls
from helpers.traces.reading import Span, Trace, load
from helpers.traces.tensor_cores import uses_tensor_cores
from helpers.traces.timeline import window
from helpers.wording import percent

if TYPE_CHECKING:
    import pandas as pd

# Runtime calls that return when the accelerator has done its work; the last one is AMD's blocking copy
WAITS = r"Synchronize|^(?:cuda|hip)Memcpy$|^hipMemcpyWithStream$"
MEANWHILE = ["copying", "waiting", "launching", "loading", "operators", "other"]


def accelerators(path: str | Path | Trace) -> pd.DataFrame:
    """Return how much of each accelerator was used: the GPU Summary of TensorBoard's Overview.

    All shares are of the time from the start of the first step to the end of the last one. If the trace marks no
    steps, they are of the time from its first operator to the end of the last one and what they launched.

    Returns
    -------
    DataFrame
        Index `device`, the profiler's number; columns

        - `name`, None if unknown
        - `utilization`, the share of the time in which at least one kernel ran; copies do not count
        - `sm_efficiency`, the share of the multiprocessors that had a block to run, on average over the time,
          estimated: ∫ min(1, blocks per multiprocessor of the kernels running) dt, by the time
        - `occupancy`, the share of a multiprocessor's threads that a kernel keeps resident, on average over the
          kernels weighted with their durations; where the profiler falsely says 0, estimated from the launch
        - `tensor_core_share`, the share of all kernels' durations that is spent in kernels known to use Tensor Cores
        - `kernels`, int, how many the trace holds, and `kernel_time`, the sum of their durations in µs

        Shares are floats from 0 to 1, NaN where unknown; ``attrs["unknown"]`` says why, as a list
        of sentences.

    Raises
    ------
    NoAccelerator
        If the trace has no kernels.
    """
    return _accelerators(load(path))


@once
def _accelerators(trace: Trace) -> pd.DataFrame:
    import pandas as pd

    table = _kernels(trace)
    windows, length = _windows(trace)
    rows = {device: _use(trace, each, windows, length) for device, each in _by("device", table)}
    result = pd.DataFrame.from_dict(rows, orient="index").rename_axis("device")
    result.attrs["unknown"] = _unknown(trace, table, result, length)
    return result


def kernels(path: str | Path | Trace, count: int = 10) -> pd.DataFrame:
    """Return the kernels that took most time, with the operator that launched each: the Kernel view's table.

    Kernels of all devices count, and those outside the steps. One kernel launched by two operators makes two rows.

    Parameters
    ----------
    path : str, Path or Trace
    count : int
        How many to return.

    Returns
    -------
    DataFrame
        Index `Name`, the kernel's; columns `Operator`, the innermost one that launched it, NaN where unknown;
        `Calls`, int; `Total Duration (us)`, `Mean Duration (us)`, `Min Duration (us)`, `Max Duration (us)`;
        `Share` of all kernels' durations, 0 to 1; `Mean Blocks Per SM` and `Mean Est. Achieved Occupancy (%)`,
        weighted with the durations, NaN where not recorded; and `Tensor Cores Used`, whether its name says so (see
        `uses_tensor_cores`). Sorted by total duration.

    Raises
    ------
    NoAccelerator
        If the trace has no kernels.
    """
    return _by_name(load(path)).head(count)


@once
def _by_name(trace: Trace) -> pd.DataFrame:
    kernels = _kernels(trace)
    means = {"blocks_per_sm": "Mean Blocks Per SM", "occupancy": "Mean Est. Achieved Occupancy (%)"}
    for column in means:
        kernels[f"{column}, weight"] = np.where(np.isnan(kernels[column]), math.nan, kernels["duration"])
        kernels[f"{column}, sum"] = kernels[column] * kernels["duration"]
    table = kernels.table()
    groups = table.groupby(["name", "operator"], dropna=False, sort=False)
    result = groups["duration"].agg(["size", "sum", "mean", "min", "max"])
    result.columns = ["Calls", *(f"{word} Duration (us)" for word in ("Total", "Mean", "Min", "Max"))]
    result["Share"] = result["Total Duration (us)"] / result["Total Duration (us)"].sum()
    sums = groups[[f"{column}, {part}" for column in means for part in ("weight", "sum")]].sum()
    for column, name in means.items():
        result[name] = sums[f"{column}, sum"] / sums[f"{column}, weight"]
    result["Tensor Cores Used"] = groups["tensor_cores"].first()
    result = result.reset_index("operator").rename_axis("Name").rename(columns={"operator": "Operator"})
    return result.sort_values("Total Duration (us)", ascending=False, kind="stable")


def kernel_time(path: str | Path | Trace, chosen: Callable[[str], bool]) -> float:
    """Return how long at least one of the kernels ran in the steps whose name `chosen` accepts, in µs.

    Those that exchange data with other processes do not count. On several devices the times are added.

    Raises
    ------
    NoAccelerator
        If the trace has no kernels.
    """
    trace = load(path)
    table = _computing(trace)
    accepted = {name for name in set(table["name"]) if chosen(name)}
    table = table.rows(np.array([name in accepted for name in table["name"]], bool))
    return float(sum(_busy(each) for _, each in _by("device", table) for _, each in _by("span", each)))


def fill(path: str | Path | Trace) -> float:
    """Return the share of the multiprocessors that have a block to run, on average while kernels run in the steps.

    It is SM efficiency by utilization, without the kernels that exchange data: those take few blocks on purpose. Near
    1 for large batches; small where a kernel has fewer blocks than the device has multiprocessors.

    Returns
    -------
    float
        From 0 to 1; NaN where the trace does not say how many blocks a kernel has.

    Raises
    ------
    NoAccelerator
        If the trace has no kernels.
    """
    table = _computing(load(path))
    table = table.rows(table["blocks_per_sm"] > 0)
    groups = [each for _, each in _by("device", table) for _, each in _by("span", each)]
    working = sum(capped_sum(each["start"], each["end"], each["blocks_per_sm"]) for each in groups)
    return working / sum(map(_busy, groups)) if groups else math.nan


def idle(path: str | Path | Trace) -> pd.DataFrame:
    """Return each gap between kernels, as `gaps` counts them: `device`, `start`, `end`, and its parts, all in µs.

    Raises
    ------
    NoAccelerator
        If the trace has no kernels.
    """
    import pandas as pd

    trace = load(path)
    windows, _ = _windows(trace)
    tables = []
    for device, found in _gaps_of_devices(trace, windows):
        for span, each in zip(trace.spans, found, strict=True):
            parts = _meanwhile(span.event_columns, _ways(span.event_columns), each)
            device_of_each = np.full(len(each["start"]), device)
            tables.append(Columns({**each, "device": device_of_each, **parts}).table())
    return pd.concat(tables, ignore_index=True)


def gaps(path: str | Path | Trace) -> pd.DataFrame:
    """Return the times in which no kernel ran on an accelerator, and what happened meanwhile.

    A gap lies between two kernels of the steps, whichever their streams. While memory is copied or filled there may be
    a gap, too: the multiprocessors are idle. Many short gaps, filled with launching, operators and other, say that the
    host cannot launch as fast as the accelerator computes.

    Returns
    -------
    DataFrame
        Index `device`; columns `count`; `total`, `median` and `longest` in µs; `share` of the time as in
        `accelerators`, NaN if that is unknown; and the parts of `total` in µs, in which moment by moment the first
        that applies was going on:

        - `copying`: an accelerator copied or filled memory
        - `waiting`: the host waited for the accelerator
        - `launching`: it made another call of the accelerator's runtime
        - `loading`: it waited for the next batch
        - `operators`: it ran operators
        - `other`: anything else; Python, mostly

        `in_longest` names what took most of the longest gap: the call or operator, or one of the words above.

    Raises
    ------
    NoAccelerator
        If the trace has no kernels.
    """
    return _gaps_of_all(load(path))


@once
def _gaps_of_all(trace: Trace) -> pd.DataFrame:
    import pandas as pd

    windows, length = _windows(trace)
    ways = [_ways(span.event_columns) for span in trace.spans]
    rows = {device: _gaps_row(trace, ways, found, length) for device, found in _gaps_of_devices(trace, windows)}
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("device")


def _computing(trace: Trace) -> Columns:
    """Return the kernels that compute, cut to the steps."""
    windows, _ = _windows(trace)
    table = _kernels(trace)
    return _clip(table.rows(table["kind"] == "Kernel"), windows)


def _by(name: str, table: Columns) -> Iterator[tuple[int, Columns]]:
    """Yield each number that stands in a column, with its rows."""
    for number in np.unique(table[name]).tolist():
        yield number, table.rows(table[name] == number)


def _windows(trace: Trace) -> tuple[list, float]:
    """Return the time of the steps in each span, and their length in all, NaN if it is unknown."""
    windows = [window(span) for span in trace.spans]
    return windows, sum(end - start for start, end in filter(None, windows)) or math.nan


@once
def _kernels(trace: Trace) -> Columns:
    """Return the kernels of all spans, with their `span`, `operator`, `duration`, `tensor_cores`; `occupancy` right."""
    spans = [_of_span(span) for span in trace.spans]
    table = Columns({name: np.concatenate([each[name] for each in spans]) for name in spans[0]})
    table["span"] = np.repeat(np.arange(len(spans)), [len(each["start"]) for each in spans])
    if not len(table["start"]):
        names = sorted({name for span in trace.spans for device in span.devices if (name := _name(device))})
        raise NoAccelerator(
            f"{trace.path} has no kernels: it was recorded without a GPU, or without ProfilerActivity.CUDA"
            + (f", or on an accelerator whose events are unknown here ({', '.join(names)})" if names else "")
            + ". What an accelerator did is unknown. Record it with activities=[ProfilerActivity.CPU, "
            "ProfilerActivity.CUDA] on a machine with a GPU."
        )
    return table


@once
def _of_span(span: Span) -> Columns:
    """Return the kernels of one span that ran on a device, with what is computed of each."""
    kernels = span.kernel_columns
    names = {name: uses_tensor_cores(name) for name in set(kernels["name"])}
    table = Columns(
        {name: kernels[name] for name in ("name", "start", "end", "blocks_per_sm")},
        kind=np.asarray(kernels["kind"]),
        duration=kernels["end"] - kernels["start"],
        operator=_operators(span),
        tensor_cores=np.array([names[name] for name in kernels["name"]], bool),
        occupancy=_occupancy(span),
    )
    known = np.isfinite(kernels["device"])
    table = table.rows(known)
    table["device"] = kernels["device"][known].astype(int)
    return table


def _operators(span: Span) -> np.ndarray:
    """Return for each kernel the name of the operator that launched it, or None."""
    calls, host = linked_calls(span), host_events(span)
    calls = calls.rows((host["kind"] != "step")[calls["operator"]])
    launching = places(span.kernel_columns["correlation"], calls["correlation"])
    return np.r_[host["name"][calls["operator"]], np.array([None])][launching]


def _occupancy(span: Span) -> np.ndarray:
    """Return the occupancy of each kernel in %, corrected where falsely 0."""
    kernels = span.kernel_columns
    found = kernels["occupancy"].copy()
    doubtful = np.flatnonzero(found <= 0)
    launches = (kernels[name][doubtful] for name in ("grid", "block", "registers", "shared_memory", "device"))
    for row, *launch, device in zip(doubtful, *launches, strict=True):
        found[row] = occupancy.corrected(found[row], *launch, _properties(span, device))
    return found


def _properties(span: Span, device: float) -> dict | None:
    return next((each for each in span.devices if isinstance(each.get("id"), Real) and each["id"] == device), None)


def _name(properties: dict) -> str | None:
    """Return the name of a device, None if it has none."""
    name = properties.get("name")
    return name if isinstance(name, str) else None


def _use(trace: Trace, rows: Columns, windows: list[tuple[float, float] | None], length: float) -> dict:
    """Return a row of `accelerators`: `rows` are the kernels of one device."""
    device = rows["device"][0]
    properties = [each for span in trace.spans if (each := _properties(span, device)) is not None]
    inside = _clip(rows, windows)
    by_span = [each for _, each in _by("span", inside.rows(inside["blocks_per_sm"] > 0))]
    working = sum(capped_sum(each["start"], each["end"], each["blocks_per_sm"]) for each in by_span)
    of_amd = any(each.get("warpSize") == AMD_WARP for each in properties)
    return {
        "name": _name(properties[0]) if properties else None,
        "utilization": sum(_busy(each) for _, each in _by("span", inside)) / length,
        "sm_efficiency": math.nan if np.isnan(rows["blocks_per_sm"]).all() else working / length,
        "occupancy": _weighted_mean(inside["occupancy"], inside["duration"]) / 100,
        "tensor_core_share": math.nan if of_amd else _share(rows["duration"], rows["tensor_cores"]),
        "kernels": len(rows["start"]),
        "kernel_time": rows["duration"].sum(),
    }


AMD_WARP = 64  # threads; NVIDIA's are 32


def _clip(rows: Columns, windows: list[tuple[float, float] | None]) -> Columns:
    """Return what of the kernels lies in the window of their span."""
    limits = np.array([(math.inf, -math.inf) if each is None else each for each in windows])
    begins, closes = limits[rows["span"]].T
    starts, ends = np.maximum(rows["start"], begins), np.minimum(rows["end"], closes)
    return Columns({**rows, "start": starts, "end": ends, "duration": ends - starts}).rows(ends > starts)


def _busy(rows: Columns) -> float:
    starts, ends = union(rows["start"], rows["end"])
    return float((ends - starts).sum())


def _share(durations: np.ndarray, chosen: np.ndarray) -> float:
    total = durations.sum()
    return durations[chosen].sum() / total if total else math.nan


def _weighted_mean(values: np.ndarray, weights: np.ndarray) -> float:
    """Return the weighted mean of the values that are known."""
    known = ~np.isnan(values)
    if not weights[known].sum():
        return math.nan
    return float(np.average(values[known], weights=weights[known]))


def _unknown(trace: Trace, table: Columns, result: pd.DataFrame, length: float) -> list[str]:
    """Say what of `accelerators` is unknown, and why."""
    reasons = []
    if math.isnan(length):
        reasons.append("Utilization and SM efficiency: the trace has neither steps nor operators, so no total time.")
    elif not any((span.event_columns["kind"] == "step").any() for span in trace.spans):
        reasons.append("Which part was training: the trace marks no steps, so shares are of the whole recording.")
    if result["sm_efficiency"].isna().any() and not math.isnan(length):
        reasons.append("SM efficiency: the trace does not say how many blocks a kernel has. Only CUDA's profiler does.")
    missing = _share(table["duration"], np.isnan(table["occupancy"]))
    if missing == 1:
        reasons.append("Occupancy: the trace does not state it. Only CUDA's profiler does.")
    elif missing > 0:
        reasons.append(
            f"Occupancy of {percent(missing)} of the kernels' time: stated as 0, which is false, and without the "
            "device's properties it cannot be estimated. The mean is that of the other kernels."
        )
    if result["tensor_core_share"].isna().any():
        reasons.append("Tensor Cores: the kernels of AMD's libraries are not known by name here.")
    if not any(span.devices for span in trace.spans):
        reasons.append("The device's name: the trace holds no device properties.")
    return reasons


def _gaps_of_devices(trace: Trace, windows: list[tuple[float, float] | None]) -> Iterator[tuple[int, list[Columns]]]:
    """Yield for each device the gaps in each span."""
    for device, kernels in _by("device", _kernels(trace)):
        yield device, [_gaps(kernels.rows(kernels["span"] == number), each) for number, each in enumerate(windows)]


def _gaps(rows: Columns, window: tuple[float, float] | None) -> Columns:
    """Return the `start` and `end` of the gaps between one span's kernels on one device."""
    if window is not None:
        rows = _clip(Columns({**rows, "span": np.zeros_like(rows["span"])}), [window])
    starts, ends = union(rows["start"], rows["end"])
    return Columns(start=ends[:-1], end=starts[1:])


def _gaps_row(trace: Trace, ways: list[np.ndarray], found: list[Columns], length: float) -> dict:
    """Return a row of `gaps`: `ways` are those of the events in each span, `found` the gaps in it on one device."""
    import pandas as pd

    lengths = pd.Series(np.concatenate([each["end"] - each["start"] for each in found]))
    parts = [_meanwhile(span.event_columns, *each) for span, *each in zip(trace.spans, ways, found, strict=True)]
    return {
        "count": len(lengths),
        "total": lengths.sum(),
        "share": lengths.sum() / length,
        "median": lengths.median(),
        "longest": lengths.max(),
        **{name: np.concatenate([each[name] for each in parts]).sum() for name in MEANWHILE},
        "in_longest": _in_longest(trace, ways, found, parts) if len(lengths) else None,
    }


def _meanwhile(events: Columns, ways: np.ndarray, found: Columns) -> Columns:
    """Return what of each gap was spent in which way: a row a gap, a column for each of `MEANWHILE`, in µs."""
    covered = np.zeros(len(found["start"]))
    columns = Columns()
    for number, name in enumerate(MEANWHILE[:-1]):
        chosen = ways <= number
        now = coverage(events["start"][chosen], events["end"][chosen], found)
        columns[name] = now - covered
        covered = now
    columns["other"] = found["end"] - found["start"] - covered
    return Columns({name: values.round(3) + 0.0 for name, values in columns.items()})  # in ns; no −0.0


def _ways(events: Columns) -> np.ndarray:
    """Return the place in `MEANWHILE` of what each event does, or 99 for what does not count."""
    kind, host, names = events["kind"], events["host"], events["name"]
    runtime = kind == "Runtime"
    waiting = {name for name in set(names[runtime]) if re.search(WAITS, name)}
    waits = runtime.copy()
    waits[runtime] = [name in waiting for name in names[runtime]]
    copying = (kind == "Memcpy") | (kind == "Memset")
    operators = host & ((kind == "CPU Exec") | (kind == "Communication"))
    ways = [copying, waits, runtime, kind == "DataLoader", operators]
    return np.select(ways, range(len(ways)), default=99)


def _in_longest(trace: Trace, ways: list[np.ndarray], found: list[Columns], parts: list[Columns]) -> str:
    """Name what took most of the longest gap."""
    lengths = [each["end"] - each["start"] for each in found]
    number = int(np.argmax([each.max(initial=-1.0) for each in lengths]))
    row = int(lengths[number].argmax())
    start, end = found[number]["start"][row], found[number]["end"][row]
    way = int(np.argmax([parts[number][name][row] for name in MEANWHILE]))
    events = trace.spans[number].event_columns
    events = events.rows((ways[number] == way) & (events["start"] < end) & (events["end"] > start))
    if not len(events["start"]):
        return MEANWHILE[way]
    inside = np.minimum(events["end"], end) - np.maximum(events["start"], start)
    length = events["end"] - events["start"]
    return str(events["name"][np.lexsort((length, -inside))[0]])  # the innermost of those that took most of it
