"""What is recorded in a trace of the exchange of data between processes, by NCCL on accelerators and by gloo on CPUs.

An operation leaves several events. On the host its issue, ``c10d::allreduce_``, in it ``record_param_comms`` and
``nccl:all_reduce``, whose arguments describe it, and the launch of a kernel; the kernel is the exchange itself. With
gloo the exchange is ``gloo:all_reduce``, on one of gloo's own threads, and its issue is on the thread that computes.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict, deque
from typing import TYPE_CHECKING

import numpy as np

from helpers.traces.columns import Columns
from helpers.traces.keeping import once
from helpers.traces.linking import numbers, places

if TYPE_CHECKING:
    from helpers.traces.reading import Span

OPERATIONS = {  # by what a name holds, its letters only: the first that fits; the names of c10d, NCCL and gloo differ
    "barrier": "barrier",
    "sendrecv": "send_recv",  # NCCL's kernel for both, and for an all-to-all
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
}
KERNELS = ["kernel", "Kernel"]
HOST = re.compile(r"(nccl|gloo):.+|c10d::\w+|record_param_comms")
WIDTHS = {  # bytes of an element, by the names that stand in traces: those of C++ and of c10::ScalarType
    **dict.fromkeys(["double", "long", "long int", "unsigned long", "c10::complex<float>", "complexfloat"], 8),
    **dict.fromkeys(["float", "int", "unsigned int", "uint32"], 4),
    **dict.fromkeys(["c10::half", "half", "c10::bfloat16", "bfloat16", "short", "short int", "unsigned short"], 2),
    **dict.fromkeys(["signed char", "unsigned char", "char", "byte", "bool"], 1),
    **dict.fromkeys(["float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2"], 1),
}


def exchanges_data(category: str, name: str) -> bool:
    """Return whether an event belongs to an exchange, by its category and name."""
    return name.startswith("nccl") if category in KERNELS else HOST.fullmatch(name) is not None


def exchanged(events: list[tuple[int, dict]]) -> Columns:
    """Return the columns of `Span.communication`, of the numbers of the threads and the events as they stand there."""
    events = [(thread, event) for thread, event in events if not event["dur"] < 0]
    events.sort(key=lambda each: each[1]["ts"])
    arguments = [event.get("args") or {} for _, event in events]
    starts = np.array([event["ts"] for _, event in events], float)
    return Columns(
        name=_objects([event["name"] for _, event in events]),
        start=starts,
        end=starts + np.array([event["dur"] for _, event in events], float),
        thread=np.array([thread for thread, _ in events], int),
        kernel=np.array([event["cat"] in KERNELS for _, event in events], bool),
        correlation=numbers([each.get("correlation", math.nan) for each in arguments]),
        collective=_objects([each.get("Collective name") for each in arguments]),
        bytes=np.array([_bytes(each) for each in arguments], float),
        group=_objects([_group(each) for each in arguments]),
        sequence=numbers([each.get("Seq", math.nan) for each in arguments]),
    )


def _objects(values: list) -> np.ndarray:
    return np.fromiter(values, object, len(values))


def _group(arguments: dict) -> str:
    """Return a name for the process group that no other one has; that in the trace is not always its own."""
    name = arguments.get("Process Group Name", arguments.get("Process Group ID", ""))
    ranks = arguments.get("Process Group Ranks", "")
    return f"{name} {ranks}".strip()


def _bytes(arguments: dict) -> float:
    """Return how many bytes of tensors the rank puts in; with ``record_shapes`` only, unless NCCL has noted it."""
    elements = arguments.get("In msg nelems") or arguments.get("Out msg nelems")
    if isinstance(elements, int):
        return elements * WIDTHS.get(str(arguments.get("dtype")).lower(), math.nan)
    shapes, types = arguments.get("Input Dims") or (), arguments.get("Input type") or ()
    sizes = [
        _elements(shape) * WIDTHS.get(str(each).lower(), math.nan) for shape, each in zip(shapes, types, strict=False)
    ]
    return float(sum(sizes)) if sizes else math.nan


def _elements(shape: object) -> float:
    known = isinstance(shape, list) and all(isinstance(size, int) for size in shape)
    return math.prod(shape) if known else math.nan


# From events to operations.


def operation(name: str) -> str:
    """Return the operation, as `torch.distributed` calls it, that an event's or a collective's name stands for."""
    letters = re.sub("[^a-z]", "", re.sub(r"\(.*|.*:", "", name).lower())
    return next((found for part, found in OPERATIONS.items() if part in letters), name)


@once
def operations(span: Span) -> Columns:
    """Return the operations in which the rank of a span exchanged data, in the order in which it issued them.

    Returns
    -------
    Columns
        `operation` and `backend`, "nccl" or "gloo"; `group`, `sequence` and `bytes` as `Span.communication`; `step`,
        the number of the step that issued it, or NaN; `issued`, `start` and `end` in µs since the first event.
    """
    events = span.communication_columns
    found = [*_by_nccl(span, events), *_by_gloo(events, span.world or 1)]
    found.sort(key=lambda each: (each["issued"], each["start"]))
    names = ("operation", "backend", "group", "sequence", "bytes", "issued", "start", "end")
    texts = ("operation", "backend", "group")
    columns = {name: [each[name] for each in found] for name in names}
    table = Columns(
        {name: _objects(each) if name in texts else np.array(each, float) for name, each in columns.items()}
    )
    table["step"] = _steps(span.event_columns, table["issued"])
    return table


def _by_nccl(span: Span, events: Columns) -> list[dict]:
    """Return NCCL's kernels, each with what the events around its launch say of it."""
    kernels, host = _rows(events, events["kernel"]), events.rows(~events["kernel"])
    if not kernels:
        return []
    calls = span.event_columns.rows(span.event_columns["kind"] == "Runtime")
    launches = places(np.array([each["correlation"] for each in kernels]), calls.get("correlation", np.zeros(0)))
    for kernel, launch in zip(kernels, launches, strict=True):
        issued = float(calls["start"][launch]) if launch >= 0 else kernel["start"]
        around = _around(host, calls["thread"].codes[launch], issued) if launch >= 0 else []
        titles = [each["name"] for each in around if each["name"].startswith("nccl:")]
        names = [kernel["collective"], *titles, *(each["collective"] for each in around), kernel["name"]]
        kernel |= {
            "backend": "nccl",
            "issued": issued,
            "operation": operation(next(filter(None, names))),
            "group": next((each["group"] for each in (kernel, *around) if each["group"]), ""),
            "bytes": _known(each["bytes"] for each in (kernel, *around)),
            "sequence": _known(each["sequence"] for each in (kernel, *around)),
        }
    return kernels


def _around(host: Columns, thread: int, moment: float) -> list[dict]:
    """Return the events of an exchange that a thread is in, the innermost first; there are four at most."""
    last = int(np.searchsorted(host["start"], moment, side="right"))
    near = host.rows(np.flatnonzero((host["thread"][:last] == thread) & (host["end"][:last] >= moment))[-4:])
    return _rows(near, np.ones(len(near["start"]), bool))[::-1]


def _by_gloo(events: Columns, world: int) -> list[dict]:
    """Return gloo's operations, each with its issue: gloo begins them in the order in which they were issued."""
    is_gloo = np.array([name.startswith("gloo:") for name in events["name"]], bool)
    waiting = defaultdict(deque)
    for issue in _rows(events, np.array([name.startswith("c10d::") for name in events["name"]], bool)):
        name = operation(issue["name"])
        # gloo has no reduce-scatter of a list: an all-reduce for each rank
        waiting[name].extend([issue] * (world if issue["name"] == "c10d::reduce_scatter_" else 1))
    found = _rows(events, is_gloo)
    for each in found:
        name = operation(each["name"])
        queues = [waiting[kind] for kind in {name, "reduce_scatter" if name == "all_reduce" else name} if waiting[kind]]
        queue = min(queues, key=lambda queue: queue[0]["start"], default=None)
        issue = queue.popleft() if queue and queue[0]["start"] <= each["start"] else None
        each |= {
            "backend": "gloo",
            "issued": issue["start"] if issue else each["start"],
            "operation": operation(issue["name"]) if issue else name,
            "bytes": 0.0 if name in ("barrier", "recv") else each["bytes"],
        }
    return found


def _rows(table: Columns, chosen: np.ndarray) -> list[dict]:
    rows = table.rows(chosen)
    return [dict(zip(rows, row, strict=True)) for row in zip(*(each.tolist() for each in rows.values()), strict=True)]


def _known(values) -> float:
    return next((value for value in values if not math.isnan(value)), math.nan)


def _steps(events: Columns, moments: np.ndarray) -> np.ndarray:
    """Return the number of the step on the host in which each moment lies, or NaN."""
    marks = events.rows(events["kind"] == "step")
    steps = np.array([int(name.removeprefix("ProfilerStep#")) for name in marks["name"]], float)
    place = np.searchsorted(marks["start"], moments, side="right") - 1
    if not len(steps):
        return np.full(len(moments), math.nan)
    return np.where((place >= 0) & (moments <= marks["end"][place]), steps[place], math.nan)
