"""Puts the traces of processes that trained together on one clock, by the times of their collective operations.

Each rank's trace has the clock of its machine. No rank ends an all-reduce before the last rank has begun it, so each
all-reduce bounds the difference of two clocks from both sides. All ranks end at nearly the same moment, so the median
difference of the end times estimates the difference of the clocks. On a busy machine ranks end milliseconds apart, so
ranks of one machine keep the machine's clock, if the bounds allow it.
"""

import math
import re
from collections import defaultdict, deque
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from stepscope.traces import files
from stepscope.traces.columns import Columns, named, numbers, places
from stepscope.traces.events import Span, Trace, of_worker
from stepscope.traces.files import SeveralRecordings
from stepscope.traces.step_times import step_at

OPERATIONS = {  # by a part of the name in c10d, NCCL or gloo, letters only; the first match counts
    "barrier": "barrier",
    "sendrecv": "send_recv",  # NCCL's kernel for send, recv and all-to-all
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
SYMMETRIC = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"]  # end after all ranks have begun
BETWEEN_TWO = ["send", "recv", "send_recv"]  # point to point: not on all ranks of the group
SAME_SIZE = ["all_reduce", "reduce", "broadcast"]  # the ranks' inputs have the same number of bytes
BLOCK = ["group", "operation", "size", "counted"]  # operations with equal values here match by their order


class Ranks(dict[str, Trace]):
    """Traces by the names of their ranks ("rank 0" and so on), in the order of the ranks."""

    @cached_property
    def clock(self) -> dict[str, float]:
        """µs to add to the times of each rank's trace, to convert them to the clock of the first rank.

        Estimated from collective operations; ranks on one machine, or without common operations, keep recorded times.
        """
        first = [trace.spans[0] for trace in self.values()]
        recorded = np.array([span.origin - first[0].origin for span in first])
        return dict(zip(self, _aligned(self.operations, recorded, [span.host for span in first]).tolist(), strict=True))

    @cached_property
    def operations(self) -> pd.DataFrame:
        """A row for each operation on each rank: the columns of `operations`, times on the clock of the rank's trace.

        Also `rank` and `span`, int, the positions of the rank and of its span; `number`, int, equal for the same
        operation on all ranks; `size`, the bytes of the input if they must be equal on all ranks, otherwise −1.
        """
        tables = [
            operations(span).assign(rank=rank, span=place)
            for rank, trace in enumerate(self.values())
            for place, span in enumerate(trace.spans)
        ]
        return _numbered(pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True))


def ranks(path: str | Path) -> Ranks:
    """Read the traces of processes that trained together, one trace for each rank.

    `path` is the folder of a run, or a trace file. Traces with a recorded rank come first, in the order of ranks; then
    traces without a rank, by the first part of the file's name. Times are in µs since the first event of each trace.

    Raises NoTraces and TraceError like `load`, SeveralRecordings if two workers have the same rank.
    """
    path = Path(path)
    traces: dict[tuple[bool, int, str], Trace] = {}
    for worker, of_it in files.by_worker(path).items():
        trace = of_worker(path if path.is_file() else of_it[0].with_name(worker), of_it)
        rank = trace.spans[0].rank
        key = (rank is None, rank or 0, worker if rank is None else f"rank {rank}")
        if key in traces:
            raise SeveralRecordings(
                f"In {path} both {traces[key].path.name} and {worker} are recorded as rank {rank}: "
                "they belong to different recordings. Remove the older one, or move it to another folder."
            )
        traces[key] = trace
    return Ranks({name: traces[_, number, name] for _, number, name in sorted(traces)})


def _numbered(table: pd.DataFrame) -> pd.DataFrame:
    """Return the operations of all ranks with `size` and `number`.

    Operations of different ranks match if their group, name, size and sequence number are equal. Without sequence
    numbers, their order in the step must be equal; if a rank lacks one of them in a step, none of them match there.
    """
    kinds = table.groupby(["group", "operation"])
    sized = table["operation"].isin(SAME_SIZE) & (kinds["bytes"].transform("count") == kinds["bytes"].transform("size"))
    sequenced = kinds["sequence"].transform("count") == kinds["sequence"].transform("size")
    table["size"] = table["bytes"].where(sized, -1.0)
    table["counted"] = table["sequence"].where(sequenced, table["step"].fillna(-1.0))
    table["place"] = table.groupby([*BLOCK, "rank"]).cumcount()
    table["number"] = table.groupby([*BLOCK, "place"], sort=False).ngroup()
    blocks = table.groupby(BLOCK)
    expected = (blocks["place"].transform("max") + 1) * blocks["rank"].transform("nunique")
    alone = table["operation"].isin(BETWEEN_TWO) | (blocks["place"].transform("size") < expected)
    table.loc[alone, "number"] = -1 - np.arange(alone.sum())
    return table.drop(columns="place")


# The difference of the clocks.


def _aligned(table: pd.DataFrame, recorded: np.ndarray, hosts: list[str | None]) -> np.ndarray:
    """Return the µs to add to each rank's times; `recorded` is each trace's start on its machine's clock, in µs."""
    tying = table[table["operation"].isin(SYMMETRIC)]
    starts, ends = (  # float [operations, ranks], NaN if the rank lacks the operation
        tying.pivot(index="number", columns="rank", values=column).reindex(columns=range(len(recorded))).to_numpy(float)
        for column in ("start", "end")
    )
    clock = np.zeros(len(recorded))
    for rank in range(1, len(recorded)):
        neighbours = [other for other in range(rank) if hosts[other] is not None and hosts[other] == hosts[rank]]
        nearest = (neighbours or [0])[0]
        clock[rank] = clock[nearest] + recorded[rank] - recorded[nearest]
        rows = ~np.isnan(starts[:, :rank]).all(axis=1) & ~np.isnan(starts[:, rank])
        if not rows.any():
            continue
        begun, ended = (each[rows, :rank] + clock[:rank] for each in (starts, ends))
        lowest = (np.nanmax(begun, axis=1) - ends[rows, rank]).max()
        highest = (np.nanmin(ended, axis=1) - starts[rows, rank]).min()
        if not (neighbours and lowest <= clock[rank] <= highest):
            estimate = float(np.median(np.nanmedian(ended, axis=1) - ends[rows, rank]))
            clock[rank] = np.clip(estimate, lowest, highest) if lowest <= highest else estimate
    return clock


# The operations of one rank, from `Span.exchanges`. An operation has several events. The computing thread issues it:
# c10d::allreduce_. With NCCL, the issue contains record_param_comms and nccl:all_reduce, whose arguments describe the
# operation, and the launch of the kernel that exchanges the data. With gloo, gloo:all_reduce on one of gloo's own
# threads exchanges the data.


def operation(name: str) -> str:
    """Return the operation in the name of an event or a collective, as `torch.distributed` names it."""
    letters = re.sub("[^a-z]", "", re.sub(r"\(.*|.*:", "", name).lower())
    return next((operation for part, operation in OPERATIONS.items() if part in letters), name)


def operations(span: Span) -> pd.DataFrame:
    """Return the operations in which the rank of a span exchanged data, in the order of their issue.

    Columns: `operation` and `backend`, "nccl" or "gloo"; `group`, the name of the process group and its ranks, or "";
    `sequence`, the number of the operation in its group, or NaN; `bytes` of the rank's input, NaN if unknown;
    `step`, the number of the step that issued it, or NaN; `issued`, `start` and `end` in µs since the first event.
    """
    rows = [*_by_nccl(span, span.exchanges), *_by_gloo(span.exchanges, span.world or 1)]
    types = dict.fromkeys(["operation", "backend", "group"], object)
    types |= dict.fromkeys(["sequence", "bytes", "issued", "start", "end"], float)
    table = pd.DataFrame(rows, columns=[*types]).astype(types)
    table = table.sort_values(["issued", "start"], kind="stable", ignore_index=True)
    step = step_at(span, table["issued"].to_numpy())
    return table.assign(step=np.where(step < 0, math.nan, step))


def _by_nccl(span: Span, events: Columns) -> list[files.Json]:
    """Return NCCL's kernels, each with its description from the events around its launch."""
    kernels, host = events.rows(events["kernel"]).records(), events.rows(~events["kernel"])
    calls = span.events.rows(span.events["kind"] == "Runtime")
    numbered = numbers([kernel["arguments"].get("correlation") for kernel in kernels])
    launches = places(numbered, calls["correlation"])
    rows = []
    for kernel, launch in zip(kernels, launches, strict=True):
        issued = calls["start"][launch] if launch >= 0 else kernel["start"]
        around = _around(host, calls["thread"].codes[launch], issued) if launch >= 0 else []
        described = [event["arguments"] for event in (kernel, *around)]
        titles = [event["name"] for event in around if event["name"].startswith("nccl:")]
        names = [str(each.get("Collective name") or "") for each in described]
        name = next(filter(None, [names[0], *titles, *names[1:], kernel["name"]]))
        rows.append({"backend": "nccl", "issued": issued, **_described(operation(name), described, kernel)})
    return rows


def _described(name: str, arguments: list[files.Json], exchange: files.Json) -> files.Json:
    """Return a row of `operations`: a description from the arguments of its events, the times of its exchange."""
    return {
        "operation": name,
        "group": next(filter(None, map(_group, arguments)), ""),
        "bytes": _first_known(map(_bytes, arguments)),
        "sequence": _first_known(numbers([each.get("Seq") for each in arguments])),
        "start": exchange["start"],
        "end": exchange["end"],
    }


def _around(host: Columns, thread: int, moment: float) -> list[files.Json]:
    """Return the events of an exchange that enclose a moment in a thread, the innermost first; at most four."""
    last = int(np.searchsorted(host["start"], moment, side="right"))
    near = np.flatnonzero((host["thread"][:last] == thread) & (host["end"][:last] >= moment))[-4:]
    return host.rows(near[::-1]).records()


def _by_gloo(events: Columns, world: int) -> list[files.Json]:
    """Return gloo's operations, each with its issue: gloo begins operations in the order of issue."""
    waiting: dict[str, deque[files.Json]] = defaultdict(deque)
    for issue in events.rows(named(events["name"], lambda name: name.startswith("c10d::"))).records():
        # gloo reduce-scatters a list by one all-reduce for each rank
        times = world if issue["name"] == "c10d::reduce_scatter_" else 1
        waiting[operation(issue["name"])].extend([issue] * times)
    rows = []
    for event in events.rows(named(events["name"], lambda name: name.startswith("gloo:"))).records():
        name = operation(event["name"])
        queues = [waiting[kind] for kind in {name, "reduce_scatter" if name == "all_reduce" else name} if waiting[kind]]
        queue = min(queues, key=lambda queue: queue[0]["start"], default=None)
        issue = queue.popleft() if queue and queue[0]["start"] <= event["start"] else event
        row = _described(operation(issue["name"]), [event["arguments"]], event)
        sends_nothing = {"bytes": 0.0} if name in ("barrier", "recv") else {}
        rows.append({"backend": "gloo", "issued": issue["start"], **row, **sends_nothing})
    return rows


def _first_known(values: Iterable[float]) -> float:
    return next((value for value in values if not math.isnan(value)), math.nan)


# The properties of an operation, from the arguments of an event.

WIDTHS = {  # bytes of an element, by the name of its dtype in traces, from C++ or c10::ScalarType
    **dict.fromkeys(["double", "long", "long int", "unsigned long", "c10::complex<float>", "complexfloat"], 8),
    **dict.fromkeys(["float", "int", "unsigned int", "uint32"], 4),
    **dict.fromkeys(["c10::half", "half", "c10::bfloat16", "bfloat16", "short", "short int", "unsigned short"], 2),
    **dict.fromkeys(["signed char", "unsigned char", "char", "byte", "bool"], 1),
    **dict.fromkeys(["float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2"], 1),
}


def _group(arguments: files.Json) -> str:
    """Return a unique name for the process group; the name in the trace is not always unique."""
    name = arguments.get("Process Group Name", arguments.get("Process Group ID", ""))
    return f"{name} {arguments.get('Process Group Ranks', '')}".strip()


def _bytes(arguments: files.Json) -> float:
    """Return the bytes of the rank's input tensors; known only with ``record_shapes``, or if NCCL recorded them."""
    elements = arguments.get("In msg nelems") or arguments.get("Out msg nelems")
    if isinstance(elements, int):
        return elements * WIDTHS.get(str(arguments.get("dtype")).lower(), math.nan)
    shapes, types = (arguments.get(name) for name in ("Input Dims", "Input type"))
    if not (isinstance(shapes, list) and isinstance(types, list)):
        return math.nan
    widths = [WIDTHS.get(str(each).lower(), math.nan) for each in types]
    sizes = [_elements(shape) * width for shape, width in zip(shapes, widths, strict=False)]
    return float(sum(sizes)) if sizes else math.nan


def _elements(shape: object) -> float:
    if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
        return math.prod(map(float, shape))
    return math.nan
