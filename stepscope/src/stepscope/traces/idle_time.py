"""Waits of host and accelerator for each other: gaps between kernels, synchronizing calls, exposed copies."""

import re
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.traces.columns import Columns, named, objects, places, shares, stacked, union
from stepscope.traces.events import Span, Trace, load, once
from stepscope.traces.operators import nested, parents
from stepscope.traces.step_times import by_step, step_at, steps, steps_of
from stepscope.traces.utilization import in_steps, kernels_of, of_each_device, time_of_steps

# Runtime calls that return when the accelerator has finished its work; the last of them is AMD's blocking copy
WAITS = re.compile(r"Synchronize|^(?:cuda|hip)Memcpy$|^hipMemcpyWithStream$")
MEANWHILE = ["copying", "waiting", "launching", "loading", "operators", "other"]
# In the name of a copy, except AMD's, which have Host for any memory. Copies from and to pageable memory wait for the
# accelerator, even asynchronous ones: "API synchronization behavior" in the documentation of the CUDA Runtime API.
PAGEABLE = "Pageable"
DIRECTIONS = {"HtoD": "to the device", "DtoH": "from the device", "DtoD": "within the device"}


def idle(path: str | Path | Trace) -> pd.DataFrame:
    """Return each gap between kernels that `gaps` counts: `device`, `start`, `end`, and its parts, all in µs.

    `late` is how long into the gap, in µs, the host had not yet launched the next kernel. For the rest of the gap the
    accelerator was late by itself: the kernel waited for another stream, or kernels before it were not recorded. So it
    is in a CUDA graph, whose kernels have one launch. Without a recorded launch the host counts as late.

    Raises NoAccelerator if the trace has no kernels.
    """
    return _idle(load(path)).table().drop(columns="span")


@once
def _idle(trace: Trace) -> Columns:
    """Return the rows of `idle`, with the position of their `span`."""
    inside = in_steps(trace)
    return stacked([_between(kernels, trace) for kernels in of_each_device(inside) or [inside]])


def _between(kernels: Columns, trace: Trace) -> Columns:
    """Return the gaps between the kernels of one device in one span."""
    starts, ends = union(kernels["start"], kernels["end"])
    gaps = Columns(device=kernels["device"][1 : len(ends)], span=kernels["span"][1 : len(ends)])  # constant columns
    gaps |= {"start": ends[:-1], "end": starts[1:]}
    span = trace.spans[kernels["span"][0] if kernels.height else 0]
    gaps["late"] = _late(gaps, kernels, span)
    parts = shares(span.events["start"], span.events["end"], _ways(span), len(MEANWHILE) - 1, gaps)
    return Columns(gaps | dict(zip(MEANWHILE, parts, strict=True)))


def _late(gaps: Columns, kernels: Columns, span: Span) -> np.ndarray:
    """Return the `late` of `idle`."""
    calls = span.events.rows((span.events["kind"] == "Runtime") & (span.events["correlation"] > 0))
    before, after = places(gaps["start"], kernels["end"]), places(gaps["end"], kernels["start"])
    launch = kernels["correlation"]
    launched = np.r_[calls["end"], np.inf][places(launch[after], calls["correlation"])]
    together = (launch[before] == launch[after]) & (launch[after] > 0)  # without a launch some profilers write 0
    launched = np.where(together, -np.inf, launched)
    late: np.ndarray = np.clip(launched - gaps["start"], 0.0, gaps["end"] - gaps["start"])
    return late


def gaps(path: str | Path | Trace) -> pd.DataFrame:
    """Return the time in which an accelerator ran no kernel, by the activity of accelerator and host.

    A gap lies between two kernels of the steps, in any streams. It may include copies and memory fills, during which
    the multiprocessors are idle. Many short gaps, filled with `launching`, `operators` and `other`, show that the host
    launches kernels more slowly than the accelerator runs them.

    Returns
    -------
    DataFrame
        Index `device`; columns `count`; `total`, `median` and `longest` in µs; `share` of the time as in
        `accelerators`; and the parts of `total` in µs. Each moment counts for the first part that applies:

        - `copying`: an accelerator copied or filled memory
        - `waiting`: the host waited for the accelerator
        - `launching`: the host made another call of the accelerator's runtime
        - `loading`: the host waited for the next batch
        - `operators`: the host ran operators
        - `other`: anything else; Python, mostly

        `in_longest` names the call or operator that took most of the longest gap, or one of the parts above.

    Raises NoAccelerator if the trace has no kernels.
    """
    trace = load(path)
    table, length = _idle(trace), time_of_steps(trace)
    rows = {}
    for device in np.unique(kernels_of(trace)["device"]):
        of_device = table.rows(table["device"] == device)
        lengths = pd.Series(of_device["end"] - of_device["start"])
        rows[device] = {
            "count": len(lengths),
            "total": lengths.sum(),
            "share": lengths.sum() / length,
            "median": lengths.median(),
            "longest": lengths.max(),
            **{name: of_device[name].sum() for name in MEANWHILE},
            "in_longest": _filling(trace, of_device, lengths.argmax()) if len(lengths) else None,
        }
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("device")


def waits(path: str | Path | Trace) -> pd.DataFrame:
    """Return the runtime calls in which the host waited for the accelerator, in the steps.

    Only threads that run operators count: the thread that pins memory may wait without delaying the training.

    Returns
    -------
    DataFrame
        A row a call: `step`, the profiler's number; `call`, its name; `operator`, the outermost operator of PyTorch
        around it (``aten::item``), None if there is none; `copy`, the direction if the innermost operator copies: "to
        the device", "from the device" or "within the device", or None; `start` and `end` in µs.

    Raises NoSteps and SeveralRecordings like `steps`.
    """
    trace = load(path)
    marked = steps(trace).index
    table = pd.concat([_waits(span).table() for span in trace.spans], ignore_index=True)
    return table[table["step"].isin(marked)].reset_index(drop=True)


def exposed_copies(path: str | Path | Trace) -> pd.DataFrame:
    """Return for each step how long the accelerator copied and ran no kernel, by the kind of copy.

    Returns
    -------
    DataFrame
        Index `step`; a column for each name of a copy ("Memcpy HtoD (Pageable -> Device)"), in µs. If copies overlap,
        the first by name counts.

    Raises NoSteps and SeveralRecordings like `steps`.
    """
    trace = load(path)
    return by_step(trace, map(_exposed_copies, trace.spans)).fillna(0.0)


def direction(copy: str) -> str | None:
    """Return the direction in the name of a copy, one of `DIRECTIONS`, or None."""
    match = re.search("HtoD|DtoH|DtoD", copy)
    return DIRECTIONS[match[0]] if match else None


def _waits(span: Span) -> Columns:
    """Return the `waits` of one span, including those outside of the steps, with step −1."""
    events = span.events
    threads, of_runtime = events["thread"].codes, events["kind"] == "Runtime"
    of_operators = np.isin(threads, threads[events["operator"]])
    calls = nested(events.rows((events["host"] | of_runtime) & of_operators))
    copies = events.rows(events["kind"] == "Memcpy")
    copied = np.r_[copies["name"], np.array([""], object)][places(calls["correlation"], copies["correlation"])]
    around, directions = parents(calls), dict[int, str]()
    for row in np.flatnonzero(named(copied, direction)):
        directions.setdefault(around[row], str(direction(copied[row])))  # the call that waits may be a different one
    directions.pop(-1, None)
    waiting = named(calls["name"], WAITS.search) | named(copied, lambda name: PAGEABLE in name)
    rows = np.flatnonzero((calls["kind"] == "Runtime") & waiting)
    rows = rows[np.argsort(calls["start"][rows], kind="stable")]
    return Columns(
        step=step_at(span, calls["start"][rows]),
        call=calls["name"][rows],
        operator=objects([_outermost(calls["name"], around, around[row]) for row in rows]),
        copy=objects([directions.get(around[row]) for row in rows]),
        start=calls["start"][rows],
        end=calls["end"][rows],
    )


def _outermost(names: np.ndarray, around: np.ndarray, row: int) -> str | None:
    """Return the name of the outermost operator of PyTorch around a row, including the row."""
    outermost = None
    while row >= 0:
        if names[row].startswith("aten::"):
            outermost = names[row]
        row = around[row]
    return outermost


def _exposed_copies(span: Span) -> Columns:
    """Return the `exposed_copies` of one span: each name counts time not covered by kernels and earlier names."""
    table, events = steps_of(span), span.events
    names = sorted(set(events["name"][events["kind"] == "Memcpy"]))
    kinds = np.where(events["kind"] == "Kernel", 0, len(names) + 1)
    copies = np.flatnonzero(events["kind"] == "Memcpy")
    kinds[copies] = [1 + names.index(name) for name in events["name"][copies]]
    _, *parts, _ = shares(events["start"], events["end"], kinds, 1 + len(names), table)
    return Columns(zip(names, parts, strict=True), step=table["step"])


@once
def _ways(span: Span) -> np.ndarray:
    """Return for each event its position in `MEANWHILE`, or 99 if it does not count."""
    events = span.events
    kind, runtime = events["kind"], events["kind"] == "Runtime"
    waits = runtime & named(events["name"], WAITS.search)
    copying = (kind == "Memcpy") | (kind == "Memset")
    operators = events["host"] & ((kind == "CPU Exec") | (kind == "Communication"))
    ways = [copying, waits, runtime, kind == "DataLoader", operators]
    return np.select(ways, range(len(ways)), default=99)


def _filling(trace: Trace, table: Columns, row: int) -> str:
    """Return the name of the event that took most of a gap, a row of `_idle`, or of a part in `MEANWHILE`."""
    gap = {name: values[row] for name, values in table.items()}
    span, way = trace.spans[gap["span"]], int(np.argmax([gap[name] for name in MEANWHILE]))
    events = span.events
    events = events.rows((_ways(span) == way) & (events["start"] < gap["end"]) & (events["end"] > gap["start"]))
    if not events.height:
        return MEANWHILE[way]
    inside = np.minimum(events["end"], gap["end"]) - np.maximum(events["start"], gap["start"])
    length = events["end"] - events["start"]
    return str(events["name"][np.lexsort((length, -inside))[0]])  # of equal shares, the innermost event
