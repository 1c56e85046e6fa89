"""Reads traces into tables of events."""

from __future__ import annotations

import copyreg
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from helpers.traces import files, keeping
from helpers.traces.columns import Columns
from helpers.traces.exchanging import exchanged, exchanges_data
from helpers.traces.files import EmptyTrace, SeveralRecordings, TruncatedTrace
from helpers.traces.linking import numbers

if TYPE_CHECKING:
    import pandas as pd

CATEGORIES = ["Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other"]
KINDS = [*CATEGORIES, "step", "dropped"]


def _read_only(mapping: dict) -> Mapping:
    return MappingProxyType(mapping)


copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (mapping.copy(),)))  # so that a Trace can be pickled


@dataclass(frozen=True)
class Span:
    """What one trace file holds. Its tables are kept for the next who load the trace: each caller gets a copy.

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
    memory : DataFrame
        Each allocation and release, in the order of time: `start` as above; `device_type` and `device`, the
        profiler's numbers; `address`; `change` in bytes, negative for a release; `allocated` and `reserved`, bytes in
        all afterwards. Empty unless the profile was recorded with ``profile_memory=True``.
    communication : DataFrame
        Each event of an exchange with other processes, on the host and on accelerators, in the order of their start:
        `name`, `start` and `end` as above; `thread`, a number; `kernel`, whether it ran on an accelerator;
        `correlation` as above; and what was recorded of the exchange: `collective`, its name, or None; `bytes`, what
        the rank puts in, NaN if unknown; `group`, the name of the process group and its ranks, or ""; `sequence`,
        the number of the operation in its group, or NaN.
    devices : tuple of mapping
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
    counts : mapping of str to int
        How many events of each category the file has, those that are not in `events` as well; 0 for others.
    event_columns, kernel_columns, memory_columns, communication_columns : Columns
        What `events`, `kernels`, `memory` and `communication` are made of.
    """

    event_columns: Columns
    kernel_columns: Columns
    memory_columns: Columns
    communication_columns: Columns
    devices: tuple[Mapping, ...]
    rank: int | None
    world: int | None
    host: str | None
    origin: float
    settings: frozenset[str]
    counts: Mapping[str, int]
    computed: dict = field(default_factory=dict, repr=False, compare=False)  # by `keeping.once`

    @property
    def events(self) -> pd.DataFrame:
        return keeping.copy(self._events)

    @property
    def kernels(self) -> pd.DataFrame:
        return keeping.copy(self._kernels)

    @property
    def memory(self) -> pd.DataFrame:
        return keeping.copy(self._memory)

    @property
    def communication(self) -> pd.DataFrame:
        return keeping.copy(self._communication)

    @cached_property
    def _events(self) -> pd.DataFrame:
        return self.event_columns.table()

    @cached_property
    def _kernels(self) -> pd.DataFrame:
        return self.kernel_columns.table()

    @cached_property
    def _memory(self) -> pd.DataFrame:
        return self.memory_columns.table()

    @cached_property
    def _communication(self) -> pd.DataFrame:
        return self.communication_columns.table()


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
    computed: dict = field(default_factory=dict, repr=False, compare=False)  # by `keeping.once`


def load(path: str | Path | Trace) -> Trace:
    """Read a trace. The spans of the last few are kept: a trace that has not changed since is not parsed again.

    Parameters
    ----------
    path : str, Path or Trace
        A trace file, plain or gzip, or the folder of a run, whose spans are then put one after the other. A `Trace`
        is returned as it is, so that every function here takes either.

    Raises
    ------
    NoTraces, UnreadableFile, EmptyTrace, TruncatedTrace, ForeignFile
        If there is no trace, or none that can be read.
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


def of_worker(path: Path, files_of_it: list[Path]) -> Trace:
    """Read the files of one worker: its spans, in the order of their start."""
    return Trace(path, *keeping.spans(files_of_it, _spans))


def _spans(files_of_worker: list[Path]) -> tuple[Span, ...]:
    """Parse the files of one worker, in the order of their start; times count from the first event of all."""
    with files.no_garbage_collection():
        found = [_checked(files.read(file, _span), file) for file in files_of_worker]
    found.sort(key=lambda span: span.event_columns["start"][0])
    origin = found[0].event_columns["start"][0].copy()
    for span in found:
        of_span = (span.event_columns, span.kernel_columns, span.memory_columns, span.communication_columns)
        for columns in of_span:
            for name in columns.keys() & {"start", "end"}:
                columns[name] -= origin
    return tuple(replace(span, origin=span.origin + float(origin)) for span in found)


# From the events of a file to tables.

OPERATORS = ["cpu_op", "operator", "Operator"]
KERNELS = ["kernel", "Kernel"]
HEAD = ["deviceProperties", "distributedInfo", "baseTimeNanoseconds", "host_name"]
SETTINGS = ["record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops"]  # 1 in the head if on
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


def _span(parts: Iterable[dict]) -> Span:
    """Turn events as they stand in the file into tables with categories; drops the annotations that have none."""
    keys, threads = _Numbering(), _Numbering()  # there are few different names: classify each of them once
    columns, launches, memory, head, counts = defaultdict(list), defaultdict(list), defaultdict(list), {}, Counter()
    exchanging, exchanges = np.zeros(0, bool), []
    for part in parts:
        head |= {key: part[key] for key in (*HEAD, *SETTINGS) if key in part}
        counts.update([each.get("cat") for each in part["traceEvents"]])
        events = [each for each in part["traceEvents"] if each.get("ph") == "X" and each.get("cat") in CLASSIFIERS]
        try:
            arrays = _arrays(events, keys, threads)
        except KeyError:  # an event was still open when the profiler stopped, or others than PyTorch wrote it
            events = [event for event in events if {"name", "ts", "dur", "tid"} <= event.keys()]
            arrays = _arrays(events, keys, threads)
        for name, values in arrays.items():
            columns[name].append(values)
        if len(keys) > len(exchanging):
            exchanging = np.array([*exchanging, *(exchanges_data(*key) for key in [*keys][len(exchanging) :])], bool)
        of_exchange = np.flatnonzero(exchanging[arrays["code"]]).tolist()
        exchanges += [(int(arrays["thread"][place]), events[place]) for place in of_exchange]
        _collect(launches, [event for event in events if event["cat"] in KERNELS], LAUNCH)
        _collect(memory, [event for event in part["traceEvents"] if event.get("name") == "[memory]"], MEMORY)
    if not all(isinstance(name, str) for _, name in keys):
        raise TypeError("the name of an event is no text")
    events = _in_order({name: np.concatenate(columns.pop(name)) for name in list(columns)}, list(keys), list(threads))
    kernels, memory = _kernels(events, launches), _memory(memory)
    distributed = head.get("distributedInfo") or {}
    unneeded = ["launch"] if not np.isnan(events["correlation"]).all() else ["launch", "external", "correlation"]
    return Span(
        Columns({name: values for name, values in events.items() if name not in unneeded}),
        kernels,
        memory,
        exchanged(exchanges),
        tuple(_read_only(dict(device)) for device in head.get("deviceProperties") or ()),
        distributed.get("rank"),
        distributed.get("world_size"),
        head.get("host_name"),
        head.get("baseTimeNanoseconds", 0) / 1e3,
        frozenset(name for name in SETTINGS if head.get(name) == 1),
        _read_only(Counter({str(category): count for category, count in counts.items()})),
    )


def _collect(columns: dict[str, list], events: list[dict], keys: dict[str, str]) -> None:
    """Append to each column what stands in the events' arguments, and to "start" when they began."""
    if not events:
        return
    arguments = [event.get("args") or {} for event in events]
    columns["start"] += [event["ts"] for event in events]
    try:
        found = zip(*map(itemgetter(*keys.values()), arguments), strict=True)
    except KeyError:  # by a version of the profiler, or for a device, without some of them
        found = ([each.get(key) for each in arguments] for key in keys.values())
    for name, values in zip(keys, found, strict=True):
        columns[name] += values


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


def _in_order(columns: dict[str, np.ndarray], keys: list[tuple[str, str]], threads: list) -> Columns:
    """Return the columns of `Span.events`, and `launch`: which one of the file's kernels an event is, or −1.

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
    return Columns(
        start=start,
        thread=pd.Categorical.from_codes(thread, threads),
        end=start + duration,
        name=np.array([name for _, name in keys], object)[code],
        kind=pd.Categorical.from_codes(kind, KINDS),
        host=np.array([CLASSIFIERS[category] in (_of_host, _of_annotation) for category, _ in keys], bool)[code],
        operator=np.array([category in OPERATORS for category, _ in keys], bool)[code],
        external=external,
        correlation=correlation,
        launch=launch[order],
    )


def _kernels(events: Columns, launches: dict[str, list]) -> Columns:
    """Return the columns of `Span.kernels`."""
    launched = events["launch"] >= 0
    places = events["launch"][launched]
    kernels = Columns({name: events[name] for name in ("name", "kind", "start", "end", "external", "correlation")})
    kernels = kernels.rows(launched)
    for name in LAUNCH:
        values = launches[name]
        values = np.fromiter(values, object, len(values)) if name in ("grid", "block") else numbers(values)
        kernels[name] = values[places]
    return kernels


def _memory(columns: dict[str, list]) -> Columns:
    """Return the columns of `Span.memory`."""
    memory = Columns({name: numbers(columns[name]) for name in ("start", *MEMORY)})
    return memory.rows(np.argsort(memory["start"], kind="stable"))


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
        raise EmptyTrace(f"{path} holds no operator, kernel or step. Record it again, with at least one active step.")
    if not (np.isfinite(events["start"]) & np.isfinite(events["end"])).all():
        raise TruncatedTrace(f"{path} is damaged: a time in it is no number. Copy it or record it again.")
    steps = events.rows(events["kind"] == "step")
    # Older versions of PyTorch write whole µs, so that a step may seem to end one after the start of the next.
    overlap = steps["start"][1:] < steps["end"][:-1] - 2
    if len(set(steps["name"])) < len(steps["name"]) or overlap.any():
        repeats = steps.table()["name"].duplicated().to_numpy()
        twice = steps["name"][1:][overlap | repeats[1:]][0]
        raise SeveralRecordings(
            f"{path} holds steps that repeat or overlap, such as {twice}: those of several recordings, processes or "
            "threads in one file. Name the trace of one of them, and call profiler.step() in one thread only."
        )
    return span
