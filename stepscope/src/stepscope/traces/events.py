"""Reads traces into tables of events."""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from stepscope.traces import files
from stepscope.traces.columns import Columns, numbers, objects
from stepscope.traces.files import Json, SeveralRecordings, TraceError

CATEGORIES = ["Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other"]
KINDS = [*CATEGORIES, "step", "dropped"]


@dataclass(frozen=True, eq=False)
class Span:
    """The content of one trace file. Times are in µs since the trace's first event, missing numbers are NaN.

    Attributes
    ----------
    events : Columns
        The events in the order of their start: `name`; `kind`, a Categorical of `KINDS`; `host`, whether it ran on the
        CPU and is not a call of the accelerator's runtime; `operator`, whether it is an operator of PyTorch; `start`;
        `end`; `thread`, a Categorical; `sequence`, a number that an operator shares with its backward counterpart, and
        with earlier operators without a counterpart; `external`, a number that an operator shares with the runtime
        calls it makes; `correlation`, a number that a runtime call shares with the work it launches.
    kernels : Columns
        The kernels among the events, in the order of their start: `name`, `kind` ("Kernel" or "Communication"),
        `start`, `end`, `external` and `correlation` as above; `device` and `stream`, numbers; and for the launch `grid`
        and `block`, lists of three int or None; `registers` per thread; `shared_memory` per block in bytes;
        `blocks_per_sm`; `occupancy` in %, as estimated by the profiler; `annotation`, the name that
        ``torch.cuda.graph_annotations.mark_kernels`` gave a kernel of a CUDA graph, or None.
    memory : Columns
        Each allocation and release, in the order of time: `start`; `device_type` and `device`, the profiler's numbers;
        `address`; `change` in bytes, negative for a release; `allocated` and `reserved`, total bytes afterwards. Empty
        unless the profile was recorded with ``profile_memory=True``.
    exchanges : Columns
        Each event of an exchange with other processes, on the host and on accelerators, in the order of their start:
        `name`; `start`; `end`; `thread`, a number; `kernel`, whether it ran on an accelerator; `arguments`, a dict.
    devices : tuple of dict
        Properties of each accelerator in the trace: name, computeMajor, numSms, and so on.
    rank, world : int or None
        Rank of the process in its job, and the number of ranks in the job.
    host : str or None
        Name of the machine.
    origin : float
        Time of the trace's first event, in µs on the clock of its machine.
    settings : frozenset of str
        The `SETTINGS` that were on.
    counts : Counter
        Number of events of each category in the file, including those not in `events`.
    """

    events: Columns
    kernels: Columns
    memory: Columns
    exchanges: Columns
    devices: tuple[Json, ...]
    rank: int | None
    world: int | None
    host: str | None
    origin: float
    settings: frozenset[str]
    counts: Counter[str]


@dataclass(frozen=True)
class Trace:
    """A recording of the profiler: the file or folder it was read from, and its spans in the order of their start."""

    path: Path
    spans: tuple[Span, ...]


# Caches the last tables of spans and traces. Callers must not write to these tables.
once = functools.lru_cache(maxsize=8)


def load(path: str | Path | Trace) -> Trace:
    """Read a trace. The last few traces are cached: an unchanged trace is not parsed again.

    `path` is a trace file, plain or gzip, or the folder of a run, whose files become the spans. A `Trace` is returned
    unchanged, so that every function here takes a path or a `Trace`.

    Raises NoTraces if there is no trace, TraceError if a file cannot be read, and SeveralRecordings if the folder holds
    the traces of more than one worker, or a file has steps that overlap or repeat.
    """
    if isinstance(path, Trace):
        return path
    path = Path(path)
    workers = files.by_worker(path)
    if len(workers) > 1:
        raise SeveralRecordings(
            f"The folder {path} holds traces of {len(workers)} workers or recordings: {', '.join(workers)}. "
            "Name one file, remove the older ones, or read them all with traces.ranks, if they trained together."
        )
    (found,) = workers.values()
    return of_worker(path, found)


def of_worker(path: Path, files_of_it: list[Path]) -> Trace:
    """Read the files of one worker: its spans, in the order of their start."""
    return Trace(path, recorded(tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files_of_it)))


@functools.lru_cache(maxsize=4)  # an event takes 64 to 200 bytes, its rows in tables as much again
def recorded(files_of_it: tuple[tuple[Path, int, int], ...]) -> tuple[Span, ...]:
    """Parse the files of one worker into spans in the order of their start; times are in µs since the first event.

    Each file comes with its size in bytes and its modification time in ns: when these change, it is parsed again.
    """
    spans = [_checked(files.read(file, parsed), file) for file, _, _ in files_of_it]
    spans.sort(key=lambda span: span.events["start"][0])
    origin = float(spans[0].events["start"][0])
    for span in spans:
        for table in (span.events, span.kernels, span.memory, span.exchanges):
            for name in table.keys() & {"start", "end"}:
                table[name] -= origin
    return tuple(replace(span, origin=span.origin + origin) for span in spans)


# From the events of a file to tables.

OPERATORS = ["cpu_op", "operator", "Operator"]
KERNELS = ["kernel", "Kernel"]
SETTINGS = ["record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops"]  # 1 in the metadata if on
NEEDED = {"name", "ts", "dur", "tid"}  # an event that was open when the profiler stopped lacks some of these
HEAD = ["deviceProperties", "distributedInfo", "baseTimeNanoseconds", "host_name", *SETTINGS]
LAUNCH = {  # columns of a kernel's launch, and their names in its arguments
    "device": "device",
    "stream": "stream",
    "grid": "grid",
    "block": "block",
    "registers": "registers per thread",
    "shared_memory": "shared memory",
    "blocks_per_sm": "blocks per SM",
    "occupancy": "est. achieved occupancy %",
    "annotation": "name",
}
MEMORY = {  # columns of an allocation or release, and their names in its arguments
    "device_type": "Device Type",
    "device": "Device Id",
    "address": "Addr",
    "change": "Bytes",
    "allocated": "Total Allocated",
    "reserved": "Total Reserved",
}


def parsed(parts: Iterable[Json]) -> Span:
    """Convert the events of a file into tables with categories; annotations without a category are dropped."""
    reader = _Reader()
    for part in parts:
        reader.add(part)
    return reader.span()


_Numbering = defaultdict[Any, int]


def _numbering() -> _Numbering:
    """Return a dict that numbers its keys in the order of their first access."""
    numbers = _Numbering()
    numbers.default_factory = numbers.__len__
    return numbers


class _Reader:
    """Collects the content of a span from the parts of its file, one after the other."""

    def __init__(self) -> None:
        self.keys, self.threads = _numbering(), _numbering()  # few different names: classify each name once
        self.columns: dict[str, list[np.ndarray]] = defaultdict(list)
        self.launches: dict[str, list[object]] = defaultdict(list)
        self.memory: dict[str, list[object]] = defaultdict(list)
        self.head: Json = {}
        self.counts: Counter[object] = Counter()
        self.exchanges: list[Json] = []

    def add(self, part: Json) -> None:
        everything = part["traceEvents"]
        self.head |= {key: part[key] for key in HEAD if key in part}
        self.counts.update([each.get("cat") for each in everything])
        events = [
            each
            for each in everything
            if each.get("ph") == "X" and each.get("cat") in CLASSIFIERS and each.keys() >= NEEDED
        ]
        arrays = _arrays(events, self.keys, self.threads)
        for name, values in arrays.items():
            self.columns[name].append(values)
        self.exchanges += [each for each in events if _exchanges_data(each["cat"], each["name"])]
        _collect(self.launches, [each for each in events if each["cat"] in KERNELS], LAUNCH)
        memory = [each for each in everything if each.get("name") == "[memory]"]
        self.memory["start"] += [each["ts"] for each in memory]
        _collect(self.memory, memory, MEMORY)

    def span(self) -> Span:
        if not all(isinstance(name, str) for _, name in self.keys):
            raise TypeError("the name of an event is not text")
        events, kernels = self._events()
        memory = Columns({name: numbers(self.memory[name]) for name in ("start", *MEMORY)})
        job, head = self.head.get("distributedInfo") or {}, self.head
        rank, world, host = job.get("rank"), job.get("world_size"), head.get("host_name")
        if not (isinstance(rank, int | None) and isinstance(world, int | None) and isinstance(host, str | None)):
            raise TypeError("a rank or number of ranks is not a whole number, or a host's name is not text")
        devices = tuple(head.get("deviceProperties") or ())
        if not all(isinstance(device.get("name"), str | None) for device in devices):
            raise TypeError("the name of a device is not text")
        return Span(
            events,
            kernels,
            memory.rows(np.argsort(memory["start"], kind="stable")),
            self._exchanges(),
            devices,
            rank,
            world,
            host,
            head.get("baseTimeNanoseconds", 0) / 1e3,
            frozenset(name for name in SETTINGS if head.get(name) == 1),
            Counter({str(category): count for category, count in self.counts.items()}),
        )

    def _events(self) -> tuple[Columns, Columns]:
        """Return `Span.events` and `Span.kernels`."""
        import pandas as pd

        keys = list(self.keys)
        read = Columns({name: np.concatenate(values) for name, values in self.columns.items()})
        launched = np.array([category in KERNELS for category, _ in keys], bool)[read["code"]]
        read["launch"] = np.where(launched, np.cumsum(launched) - 1, -1)
        kinds = np.array([KINDS.index(CLASSIFIERS[category](name)) for category, name in keys], np.int8)
        order = np.argsort(read["start"], kind="stable")
        order = order[kinds[read["code"][order]] != KINDS.index("dropped")]
        order = order[~(read["duration"][order] < 0)]  # Kineto sometimes writes this for an event without an end
        read = read.rows(order)
        code, kind, external = read["code"], kinds[read["code"]], read["external"]
        exchanging = external[kind == KINDS.index("Communication")]
        kind[(kind == KINDS.index("Kernel")) & np.isin(external, exchanging)] = KINDS.index("Communication")
        table = Columns(
            name=np.array([name for _, name in keys], object)[code],
            kind=pd.Categorical.from_codes(kind, KINDS),
            host=np.array([CLASSIFIERS[category] in (_of_host, _of_annotation) for category, _ in keys], bool)[code],
            operator=np.array([category in OPERATORS for category, _ in keys], bool)[code],
            start=read["start"],
            end=read["start"] + read["duration"],
            thread=pd.Categorical.from_codes(read["thread"], list(self.threads)),
            sequence=read["sequence"],
            external=external,
            correlation=read["correlation"],
        )
        of_kernels = read["launch"] >= 0
        shared = ("name", "kind", "start", "end", "external", "correlation")
        kernels = Columns({name: table[name][of_kernels] for name in shared})
        for name, recorded in self.launches.items():
            values = objects(recorded) if name in ("grid", "block", "annotation") else numbers(recorded)
            kernels[name] = values[read["launch"][of_kernels]]
        return table, kernels

    def _exchanges(self) -> Columns:
        """Return the columns of `Span.exchanges`."""
        events = sorted((each for each in self.exchanges if not each["dur"] < 0), key=itemgetter("ts"))
        starts = np.array([event["ts"] for event in events], float)
        return Columns(
            name=objects([event["name"] for event in events]),
            start=starts,
            end=starts + np.array([event["dur"] for event in events], float),
            thread=np.array([self.threads[event["tid"]] for event in events], int),
            kernel=np.array([event["cat"] in KERNELS for event in events], bool),
            arguments=objects([event.get("args") or {} for event in events]),
        )


def _collect(columns: dict[str, list[object]], events: list[Json], keys: dict[str, str]) -> None:
    """Append the values in the events' arguments to the columns, None if the version or device records none."""
    arguments = [event.get("args") or {} for event in events]
    for name, key in keys.items():
        columns[name] += [each.get(key) for each in arguments]


def _arrays(events: list[Json], keys: _Numbering, threads: _Numbering) -> dict[str, np.ndarray]:
    """Return the columns of the events: one value for each event."""

    def column(values: Iterable[float], dtype: type) -> np.ndarray:
        return np.fromiter(values, dtype, len(events))

    links = [event.get("args") or {} for event in events]
    return {
        "code": column(map(keys.__getitem__, map(itemgetter("cat", "name"), events)), np.int32),
        "start": column(map(itemgetter("ts"), events), float),
        "duration": column(map(itemgetter("dur"), events), float),
        "thread": column(map(threads.__getitem__, map(itemgetter("tid"), events)), np.int32),
        "external": numbers([link.get("External id", link.get("external id", math.nan)) for link in links]),
        "correlation": numbers([link.get("correlation", math.nan) for link in links]),
        "sequence": numbers([link.get("Sequence number", math.nan) for link in links]),
    }


@functools.lru_cache(maxsize=100_000)
def _exchanges_data(category: str, name: str) -> bool:
    """Return whether an event belongs to an exchange between processes: see `alignment`."""
    return name.startswith("nccl") if category in KERNELS else EXCHANGES.fullmatch(name) is not None


EXCHANGES = re.compile(r"(nccl|gloo):.+|c10d::\w+|record_param_comms")


# The category of an event.


def _of_kernel(name: str) -> str:
    """Recognize NCCL's kernels by name: current traces do not link them to the operation that launched them."""
    return "Communication" if name.startswith("nccl") else "Kernel"


def _of_host(name: str) -> str:
    """Classify an event of the CPU by its name."""
    if re.fullmatch(r"ProfilerStep#\d+", name):
        return "step"
    if re.fullmatch(r"enumerate\(DataLoader\)#.*\.__next__|enumerate\(DataPipe\)#.*", name):
        return "DataLoader"
    if re.fullmatch(r"(nccl|gloo):(broadcast|reduce|all_reduce|all_gather|reduce_scatter)", name):
        return "Communication"
    return "CPU Exec"


def _of_annotation(name: str) -> str:
    """Classify a `record_function`: the user's are dropped, the profiler's and the optimizer's are not."""
    kind = _of_host(name)
    return "dropped" if kind == "CPU Exec" and not name.startswith("Optimizer.") else kind


# By the "cat" of an event, the function from its name to its category. torch 1.12 writes "cat" with a capital.
CLASSIFIERS: dict[str, Callable[[str], str]] = {
    **dict.fromkeys([*OPERATORS, "python", "Python"], _of_host),
    "user_annotation": _of_annotation,
    **dict.fromkeys(KERNELS, _of_kernel),
    **dict.fromkeys(["gpu_memcpy", "memcpy", "Memcpy"], lambda name: "Memcpy"),
    **dict.fromkeys(["gpu_memset", "memset", "Memset"], lambda name: "Memset"),
    # cuda_driver: launches by Triton and nvjet
    **dict.fromkeys(["cuda_runtime", "cuda_driver", "runtime", "Runtime"], lambda name: "Runtime"),
}


# Faults of a file that can be parsed.


def _checked(span: Span, path: Path) -> Span:
    """Return `span` if its times and steps are plausible."""
    events = span.events
    if not events.height:
        raise TraceError(f"{path} holds no operator, kernel or step. Record it again, with at least one active step.")
    if not (np.isfinite(events["start"]) & np.isfinite(events["end"])).all():
        raise TraceError(f"{path} is damaged: a time in it is not a number. Copy it or record it again.")
    steps = marks(span)
    # Older versions of PyTorch write whole µs, so a step may seem to end 1 µs after the start of the next.
    again = (steps["start"][1:] < steps["end"][:-1] - 2) | (np.diff(steps["step"]) <= 0)
    if again.any():
        twice = steps["name"][1:][again][0]
        raise SeveralRecordings(
            f"{path} holds steps that repeat or overlap, such as {twice}: steps of several recordings, processes or "
            "threads in one file. Name the trace of one recording, and call profiler.step() in one thread only."
        )
    return span


# The host's marks of the steps.


def marks(span: Span) -> Columns:
    """Return the host's marks of the steps: the columns of `events`, and `step`, int, the profiler's number."""
    events = span.events
    table = events.rows(events["kind"] == "step")
    return Columns(table, step=np.array([int(name.removeprefix("ProfilerStep#")) for name in table["name"]], int))
