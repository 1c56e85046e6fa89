"""Reads traces into tables of events."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stepscope.traces import files
from stepscope.traces.columns import Columns, numbers, objects
from stepscope.traces.files import SeveralRecordings, TraceError

if TYPE_CHECKING:
    import pandas as pd

CATEGORIES = ["Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other"]
KINDS = [*CATEGORIES, "step", "dropped"]


@dataclass(frozen=True)
class Span:
    """What one trace file holds.

    Attributes
    ----------
    events : DataFrame
        The events in the order of their start: `name`; `kind`, a category or "step"; `host`, whether it ran on the
        CPU and is no call of the accelerator's runtime; `operator`, whether it is an operator of PyTorch; `start` and
        `end` in µs since the trace's first event; `thread`. With an accelerator also `external`, a number that an
        operator shares with the runtime calls it makes, and `correlation`, one that a runtime call shares with what
        it launches; NaN where there is none.
    kernels : DataFrame
        The kernels among them, in the order of their start: `name`, `kind` ("Kernel" or "Communication"), `start`,
        `end`, `external` and `correlation` as above; `device` and `stream`, numbers; and of their launch, NaN or None
        where the trace has no such number: `grid` and `block`, lists of three int; `registers` per thread;
        `shared_memory` per block in bytes; `blocks_per_sm`; `occupancy` in %, as estimated by the profiler.
    devices : tuple of dict
        Properties of each accelerator as they stand in the trace: name, computeMajor, numSms, and so on.
    rank : int or None
        Rank of the process among those that train together.
    world : int or None
        How many processes train together.
    host : str or None
        Name of the machine.
    origin : float
        When the trace's first event was, in µs on the clock of its machine; the times above count from there.
    settings : frozenset of str
        Which of `SETTINGS` were on.
    counts : Counter
        How many events of each category the file has, those that are not in `events` as well.
    event_columns, kernel_columns : Columns
        What `events` and `kernels` are made of; nobody writes to them.
    memory : Columns
        Each allocation and release, in the order of time: `start` as above; `device_type` and `device`, the
        profiler's numbers; `address`; `change` in bytes, negative for a release; `allocated` and `reserved`, bytes in
        all afterwards. Empty unless the profile was recorded with ``profile_memory=True``.
    communication : Columns
        Each event of an exchange with other processes, on the host and on accelerators, in the order of their start:
        `name`, `start` and `end` as above; `thread`, a number; `kernel`, whether it ran on an accelerator;
        `correlation` as above; and what was recorded of the exchange: `collective`, its name, or None; `bytes`, what
        the rank puts in, NaN if unknown; `group`, the name of the process group and its ranks, or ""; `sequence`,
        the number of the operation in its group, or NaN.
    """

    event_columns: Columns
    kernel_columns: Columns
    memory: Columns
    communication: Columns
    devices: tuple[dict, ...]
    rank: int | None
    world: int | None
    host: str | None
    origin: float
    settings: frozenset[str]
    counts: Counter
    computed: dict = field(default_factory=dict, repr=False, compare=False)  # by `once`

    @property
    def events(self) -> pd.DataFrame:
        return self.event_columns.table()

    @property
    def kernels(self) -> pd.DataFrame:
        return self.kernel_columns.table()


@dataclass(frozen=True)
class Trace:
    """What the profiler recorded, in one or several spans.

    Attributes
    ----------
    path : Path
        The file or folder it was read from.
    spans : tuple of Span
        In the order of their start.
    """

    path: Path
    spans: tuple[Span, ...]
    computed: dict = field(default_factory=dict, repr=False, compare=False)  # by `once`


def load(path: str | Path | Trace) -> Trace:
    """Read a trace. The spans of the last few are kept: a trace that has not changed since is not parsed again.

    `path` is a trace file, plain or gzip, or the folder of a run, whose spans are then put one after the other. A
    `Trace` is returned as it is, so that every function here takes either.

    Raises
    ------
    NoTraces
        If there is no trace.
    TraceError
        If it cannot be read: the message says why.
    SeveralRecordings
        If the folder holds the traces of more than one worker, or a file has steps that overlap or repeat.

    Examples
    --------
    >>> traces.breakdown(traces.load("runs/01-first-profile")).mean()  # doctest: +SKIP
    """
    if isinstance(path, Trace):
        return path
    path = Path(path)
    workers = files.by_worker(path)
    if len(workers) > 1:
        raise SeveralRecordings(
            f"The folder {path} holds traces of {len(workers)} workers or recordings: {', '.join(workers)}. "
            "Which one do you mean? Name one file, remove the older ones, or read them all with traces.ranks, if they "
            "trained together."
        )
    (found,) = workers.values()
    return of_worker(path, found)


# Spans of the traces used last, by the path, size and time of change of their files; and what `once` computed of them.
_cache: dict[tuple, tuple[tuple[Span, ...], dict]] = {}
EVENTS = 1_000_000  # in all of them, at 64 to 200 bytes, and as much for tables of them; a larger trace is kept alone


def of_worker(path: Path, files_of_it: list[Path]) -> Trace:
    """Read the files of one worker: its spans, in the order of their start."""
    key = tuple((file.resolve(), (status := file.stat()).st_size, status.st_mtime_ns) for file in files_of_it)
    entry = _cache.pop(key, None) or (_spans(files_of_it), {})
    _cache[key] = entry  # the last of them: a dict keeps the order
    while len(_cache) > 1 and sum(_size(spans) for spans, _ in [*_cache.values()]) > EVENTS:
        _cache.pop(next(iter(_cache)), None)
    return Trace(path, *entry)


def _size(spans: tuple[Span, ...]) -> int:
    return sum(len(span.event_columns["start"]) + len(span.memory["start"]) for span in spans)


def clear() -> None:
    """Forget the traces that were read."""
    _cache.clear()


def once(compute: Callable) -> Callable:
    """Let `compute` compute its table of a span or trace only once; each caller gets a copy."""

    @functools.wraps(compute)
    def computed(recorded: Span | Trace) -> pd.DataFrame | Columns:
        if compute not in recorded.computed:
            recorded.computed[compute] = compute(recorded)
        table = recorded.computed[compute]
        return Columns(table) if isinstance(table, Columns) else table.copy()

    return computed


def _spans(files_of_worker: list[Path]) -> tuple[Span, ...]:
    """Parse the files of one worker, in the order of their start; times count from the first event of all."""
    with files.no_garbage_collection():
        spans = [_checked(files.read(file, parsed), file) for file in files_of_worker]
    spans.sort(key=lambda span: span.event_columns["start"][0])
    origin = spans[0].event_columns["start"][0].copy()
    for span in spans:
        for columns in (span.event_columns, span.kernel_columns, span.memory, span.communication):
            for name in columns.keys() & {"start", "end"}:
                columns[name] -= origin
    return tuple(replace(span, origin=span.origin + float(origin)) for span in spans)


# From the events of a file to tables.

OPERATORS = ["cpu_op", "operator", "Operator"]
KERNELS = ["kernel", "Kernel"]
SETTINGS = ["record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops"]  # 1 in the head if on
HEAD = ["deviceProperties", "distributedInfo", "baseTimeNanoseconds", "host_name", *SETTINGS]
LAUNCH = {  # columns of a kernel's launch, and where they stand in its arguments
    "device": "device",
    "stream": "stream",
    "grid": "grid",
    "block": "block",
    "registers": "registers per thread",
    "shared_memory": "shared memory",
    "blocks_per_sm": "blocks per SM",
    "occupancy": "est. achieved occupancy %",
}
MEMORY = {  # columns of an allocation or release, and where they stand in its arguments
    "device_type": "Device Type",
    "device": "Device Id",
    "address": "Addr",
    "change": "Bytes",
    "allocated": "Total Allocated",
    "reserved": "Total Reserved",
}


def parsed(parts: Iterable[dict]) -> Span:
    """Turn events as they stand in the file into tables with categories; drops the annotations that have none."""
    reader = _Reader()
    for part in parts:
        reader.add(part)
    return reader.span()


class _Reader:
    """Collects what a span holds of the parts of its file, one after the other."""

    def __init__(self) -> None:
        self.keys, self.threads = _Numbering(), _Numbering()  # few different names: classify each of them once
        self.columns, self.launches, self.memory = defaultdict(list), defaultdict(list), defaultdict(list)
        self.head: dict = {}
        self.counts: Counter = Counter()
        self.exchanging: list[bool] = []  # for each key
        self.exchanges: list[tuple[int, dict]] = []  # thread and event

    def add(self, part: dict) -> None:
        everything = part["traceEvents"]
        self.head |= {key: part[key] for key in HEAD if key in part}
        self.counts.update([each.get("cat") for each in everything])
        events = [each for each in everything if each.get("ph") == "X" and each.get("cat") in CLASSIFIERS]
        try:
            arrays = _arrays(events, self.keys, self.threads)
        except KeyError:  # an event was still open when the profiler stopped, or others than PyTorch wrote it
            events = [event for event in events if {"name", "ts", "dur", "tid"} <= event.keys()]
            arrays = _arrays(events, self.keys, self.threads)
        for name, values in arrays.items():
            self.columns[name].append(values)
        self.exchanging += [exchanges_data(*key) for key in [*self.keys][len(self.exchanging) :]]
        of_exchange = np.flatnonzero(np.array(self.exchanging, bool)[arrays["code"]]).tolist()
        self.exchanges += [(int(arrays["thread"][place]), events[place]) for place in of_exchange]
        _collect(self.launches, [each for each in events if each["cat"] in KERNELS], LAUNCH)
        memory = [each for each in everything if each.get("name") == "[memory]"]
        self.memory["start"] += [each["ts"] for each in memory]
        _collect(self.memory, memory, MEMORY)

    def span(self) -> Span:
        if not all(isinstance(name, str) for _, name in self.keys):
            raise TypeError("the name of an event is no text")
        columns = {name: np.concatenate(self.columns.pop(name)) for name in list(self.columns)}
        events, launch = _in_order(columns, list(self.keys), list(self.threads))
        kernels = _kernels(events, launch, self.launches)
        if np.isnan(events["correlation"]).all():
            del events["external"], events["correlation"]
        memory = Columns({name: numbers(self.memory[name]) for name in ("start", *MEMORY)})
        job, head = self.head.get("distributedInfo") or {}, self.head
        return Span(
            events,
            kernels,
            memory.rows(np.argsort(memory["start"], kind="stable")),
            _communication(self.exchanges),
            tuple(head.get("deviceProperties") or ()),
            job.get("rank"),
            job.get("world_size"),
            head.get("host_name"),
            head.get("baseTimeNanoseconds", 0) / 1e3,
            frozenset(name for name in SETTINGS if head.get(name) == 1),
            Counter({str(category): count for category, count in self.counts.items()}),
        )


def _collect(columns: dict[str, list], events: list[dict], keys: dict[str, str]) -> None:
    """Append to each column what stands in the events' arguments, None where a version or a device has none."""
    arguments = [event.get("args") or {} for event in events]
    for name, key in keys.items():
        columns[name] += [each.get(key) for each in arguments]


def _arrays(events: list[dict], keys: _Numbering, threads: _Numbering) -> dict[str, np.ndarray]:
    """Return a value for each event and column."""

    def column(values: Iterable, dtype: type) -> np.ndarray:
        return np.fromiter(values, dtype, len(events))

    links = [event.get("args") or {} for event in events]
    return {
        "code": column(map(keys.__getitem__, map(itemgetter("cat", "name"), events)), np.int32),
        "start": column(map(itemgetter("ts"), events), float),
        "duration": column(map(itemgetter("dur"), events), float),
        "thread": column(map(threads.__getitem__, map(itemgetter("tid"), events)), np.int32),
        "external": numbers([link.get("External id", link.get("external id", math.nan)) for link in links]),
        "correlation": numbers([link.get("correlation", math.nan) for link in links]),
    }


def _in_order(columns: dict[str, np.ndarray], keys: list[tuple[str, str]], threads: list) -> tuple[Columns, np.ndarray]:
    """Return the columns of `Span.events`, and which one of the file's kernels each event is, or −1.

    `columns` has the number of each event's category and name in `keys`, and of its thread.
    """
    import pandas as pd

    code = columns["code"]
    launched = np.array([category in KERNELS for category, _ in keys], bool)[code]
    launch = np.where(launched, np.cumsum(launched) - 1, -1)
    kinds = np.array([KINDS.index(CLASSIFIERS[category](name)) for category, name in keys], np.int8)
    order = np.argsort(columns["start"], kind="stable")
    order = order[kinds[code[order]] != KINDS.index("dropped")]
    order = order[~(columns["duration"][order] < 0)]  # as Kineto writes now and then of an event that it saw no end of
    code, start, duration, thread, external, correlation = (values[order] for values in columns.values())
    kind = kinds[code]
    exchanging = external[kind == KINDS.index("Communication")]
    kind[(kind == KINDS.index("Kernel")) & np.isin(external, exchanging)] = KINDS.index("Communication")
    table = Columns(
        start=start,
        thread=pd.Categorical.from_codes(thread, threads),
        end=start + duration,
        name=np.array([name for _, name in keys], object)[code],
        kind=pd.Categorical.from_codes(kind, KINDS),
        host=np.array([CLASSIFIERS[category] in (_of_host, _of_annotation) for category, _ in keys], bool)[code],
        operator=np.array([category in OPERATORS for category, _ in keys], bool)[code],
        external=external,
        correlation=correlation,
    )
    return table, launch[order]


def _kernels(events: Columns, launch: np.ndarray, launches: dict[str, list]) -> Columns:
    """Return the columns of `Span.kernels`."""
    launched = launch >= 0
    names = ("name", "kind", "start", "end", "external", "correlation")
    kernels = Columns({name: events[name][launched] for name in names})
    for name, values in launches.items():
        values = objects(values) if name in ("grid", "block") else numbers(values)
        kernels[name] = values[launch[launched]]
    return kernels


# What is recorded of the exchange of data between processes, by NCCL on accelerators and by gloo on CPUs. An operation
# leaves several events. On the host its issue, c10d::allreduce_, in it record_param_comms and nccl:all_reduce, whose
# arguments describe it, and the launch of a kernel; the kernel is the exchange itself. With gloo the exchange is
# gloo:all_reduce, on one of gloo's own threads, and its issue is on the thread that computes.

EXCHANGES = re.compile(r"(nccl|gloo):.+|c10d::\w+|record_param_comms")
WIDTHS = {  # bytes of an element, by the names that stand in traces: those of C++ and of c10::ScalarType
    **dict.fromkeys(["double", "long", "long int", "unsigned long", "c10::complex<float>", "complexfloat"], 8),
    **dict.fromkeys(["float", "int", "unsigned int", "uint32"], 4),
    **dict.fromkeys(["c10::half", "half", "c10::bfloat16", "bfloat16", "short", "short int", "unsigned short"], 2),
    **dict.fromkeys(["signed char", "unsigned char", "char", "byte", "bool"], 1),
    **dict.fromkeys(["float8_e4m3fn", "float8_e5m2", "c10::float8_e4m3fn", "c10::float8_e5m2"], 1),
}


def exchanges_data(category: str, name: str) -> bool:
    """Return whether an event belongs to an exchange, by its category and name."""
    return name.startswith("nccl") if category in KERNELS else EXCHANGES.fullmatch(name) is not None


def _communication(events: list[tuple[int, dict]]) -> Columns:
    """Return the columns of `Span.communication`, of the numbers of the threads and the events as they stand there."""
    events = [(thread, event) for thread, event in events if not event["dur"] < 0]
    events.sort(key=lambda each: each[1]["ts"])
    arguments = [event.get("args") or {} for _, event in events]
    starts = np.array([event["ts"] for _, event in events], float)
    return Columns(
        name=objects([event["name"] for _, event in events]),
        start=starts,
        end=starts + np.array([event["dur"] for _, event in events], float),
        thread=np.array([thread for thread, _ in events], int),
        kernel=np.array([event["cat"] in KERNELS for _, event in events], bool),
        correlation=numbers([each.get("correlation", math.nan) for each in arguments]),
        collective=objects([each.get("Collective name") for each in arguments]),
        bytes=np.array([_bytes(each) for each in arguments], float),
        group=objects([_group(each) for each in arguments]),
        sequence=numbers([each.get("Seq", math.nan) for each in arguments]),
    )


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


# The category of an event.


def _of_kernel(name: str) -> str:
    """Know NCCL's kernels by their name: today they do not carry the number of the operation that launched them."""
    return "Communication" if name.startswith("nccl") else "Kernel"


def _of_host(name: str) -> str:
    """Classify what ran on the CPU by its name."""
    if re.fullmatch(r"ProfilerStep#\d+", name):
        return "step"
    if re.fullmatch(r"enumerate\(DataLoader\)#.*\.__next__|enumerate\(DataPipe\)#.*", name):
        return "DataLoader"
    if re.fullmatch(r"(nccl|gloo):(broadcast|reduce|all_reduce|all_gather|reduce_scatter)", name):
        return "Communication"
    return "CPU Exec"


def _of_annotation(name: str) -> str:
    """Classify a `record_function`: the profiler's and the optimizer's own count, those of the reader do not."""
    kind = _of_host(name)
    return "dropped" if kind == "CPU Exec" and not name.startswith("Optimizer.") else kind


# What a trace calls its events, and how to find the category of each name; those in capitals are of torch 1.12.
CLASSIFIERS: dict[str, Callable[[str], str]] = {
    **dict.fromkeys([*OPERATORS, "python", "Python"], _of_host),
    "user_annotation": _of_annotation,
    **dict.fromkeys(KERNELS, _of_kernel),
    **dict.fromkeys(["gpu_memcpy", "memcpy", "Memcpy"], lambda name: "Memcpy"),
    **dict.fromkeys(["gpu_memset", "memset", "Memset"], lambda name: "Memset"),
    # cuda_driver: launches by Triton and nvjet
    **dict.fromkeys(["cuda_runtime", "cuda_driver", "runtime", "Runtime"], lambda name: "Runtime"),
}


class _Numbering(dict):
    """Numbers its keys in the order in which they are first asked for."""

    def __missing__(self, key: object) -> int:
        self[key] = len(self)
        return self[key]


# What is wrong with a file, though it can be parsed.


def _checked(span: Span, path: Path) -> Span:
    """Return `span` if its times and steps can be right."""
    events = span.event_columns
    if not len(events["start"]):
        raise TraceError(f"{path} holds no operator, kernel or step. Record it again, with at least one active step.")
    if not (np.isfinite(events["start"]) & np.isfinite(events["end"])).all():
        raise TraceError(f"{path} is damaged: a time in it is no number. Copy it or record it again.")
    steps = marks(span)
    # Older versions of PyTorch write whole µs, so that a step may seem to end one after the start of the next.
    again = (steps["start"][1:] < steps["end"][:-1] - 2) | (np.diff(steps["step"]) <= 0)
    if again.any():
        twice = steps["name"][1:][again][0]
        raise SeveralRecordings(
            f"{path} holds steps that repeat or overlap, such as {twice}: those of several recordings, processes or "
            "threads in one file. Name the trace of one of them, and call profiler.step() in one thread only."
        )
    return span


# The steps as the host marked them.


def marks(span: Span) -> Columns:
    """Return the host's marks of the steps: the columns of `events`, and `step`, int, the profiler's number."""
    events = span.event_columns
    table = events.rows(events["kind"] == "step")
    return Columns(table, step=np.array([int(name.removeprefix("ProfilerStep#")) for name in table["name"]], int))


def step_at(span: Span, moments: np.ndarray) -> np.ndarray:
    """Return the number of the step on the host in which each moment lies, −1 outside of all."""
    steps = marks(span)
    place = np.searchsorted(steps["start"], moments, side="right") - 1
    inside = (place >= 0) & (moments <= np.r_[steps["end"], -math.inf][place])
    return np.where(inside, np.r_[steps["step"], -1][place], -1)
