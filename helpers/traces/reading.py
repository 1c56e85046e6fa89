"""Reads trace files into tables of events."""

from __future__ import annotations

import gc
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pandas as pd

CATEGORIES = ["Kernel", "Memcpy", "Memset", "Communication", "Runtime", "DataLoader", "CPU Exec", "Other"]
KINDS = [*CATEGORIES, "step", "dropped"]

TRACE_FILE = re.compile(r"(?P<worker>.*?)(?P<span>\.\d+)?\.pt\.trace\.json(\.gz)?")  # as TensorBoard recognizes them


class TraceError(ValueError):
    """A trace that cannot be read, or that does not tell what was asked."""


class NoTraces(TraceError):
    """There is no trace at this place."""


class EmptyTrace(TraceError):
    """The file has no content, or no events."""


class TruncatedTrace(TraceError):
    """The file ends too early, or is damaged."""


class ForeignFile(TraceError):
    """The file is no trace of PyTorch's profiler."""


class NoSteps(TraceError):
    """The trace marks no training steps."""


class SeveralRecordings(TraceError):
    """The folder holds the traces of several workers or recordings."""


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
        it launches.
    kernels : DataFrame
        The kernels among them, in the order of their start: `name`, `kind` ("Kernel" or "Communication"), `start`,
        `end`, `external` and `correlation` as above; `device` and `stream`, numbers; and of their launch, NaN or None
        where the trace does not tell: `grid` and `block`, lists of three int; `registers` per thread;
        `shared_memory` per block in bytes; `blocks_per_sm`; `occupancy` in %, as estimated by the profiler.
    devices : tuple of dict
        Properties of each accelerator as they stand in the trace: name, computeMajor, numSms, and so on.
    rank : int or None
        Rank of the process among those that train together.
    """

    events: pd.DataFrame
    kernels: pd.DataFrame
    devices: tuple[dict, ...]
    rank: int | None


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


def load(path: str | Path | Trace) -> Trace:
    """Read a trace.

    Parameters
    ----------
    path : str, Path or Trace
        A trace file, plain or gzip, or the folder of a run, whose spans are then put one after the other. A `Trace`
        is returned as it is, so that every function here takes either.

    Raises
    ------
    NoTraces, EmptyTrace, TruncatedTrace, ForeignFile
        If there is no trace, or none that can be read.
    SeveralRecordings
        If the folder holds the traces of more than one worker.

    Examples
    --------
    >>> traces.breakdown(traces.load("runs/01-first-profile")).mean()  # doctest: +SKIP
    """
    if isinstance(path, Trace):
        return path
    path = Path(path)
    with _no_garbage_collection():
        spans = [_read(file) for file in _files(path)]
    spans.sort(key=lambda span: span.events["start"].iat[0])
    origin = spans[0].events["start"].iat[0]
    for span in spans:
        for table in (span.events, span.kernels):
            table[["start", "end"]] -= origin
    return Trace(path, tuple(spans))


def _files(path: Path) -> list[Path]:
    """Return the trace files of one worker at `path`."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NoTraces(f"There is no file or folder {path}. Record a profile there first, or correct the path.")
    matches = {file: TRACE_FILE.fullmatch(file.name) for file in sorted(path.iterdir()) if file.is_file()}
    files = {file: match["worker"] for file, match in matches.items() if match}
    if not files:
        inside = sorted({str(file.parent) for file in path.rglob("*.pt.trace.json*")})
        hint = f"Name one of the runs in it: {', '.join(inside)}." if inside else "Record a profile there first."
        raise NoTraces(f"The folder {path} holds no *.pt.trace.json or *.pt.trace.json.gz file. {hint}")
    workers = sorted(set(files.values()))
    if len(workers) > 1:
        raise SeveralRecordings(
            f"The folder {path} holds traces of {len(workers)} workers or recordings: {', '.join(workers)}. "
            "Which one is meant cannot be told: name one file, or remove the older ones."
        )
    return list(files)


def _read(path: Path) -> Span:
    """Return the span of one file; times as they stand in it."""
    data = _content(path)
    accelerated = b'"correlation"' in data
    try:
        try:
            span = _span((orjson.loads(piece) for piece in _pieces(data)), accelerated)
        except orjson.JSONDecodeError:
            span = _span([_parse_leniently(data, path)], accelerated)
    except TraceError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ForeignFile(
            f"{path} is JSON, but no trace of PyTorch's profiler: {type(error).__name__} {error}. "
            "Name a file that torch.profiler wrote."
        ) from error
    if span.events.empty:
        raise EmptyTrace(f"{path} holds no operator, kernel or step. Record it again, with at least one active step.")
    return span


def _pieces(data: bytes, size: int = 1 << 20) -> Iterator[bytes]:
    """Cut a trace as Kineto lays it out into traces of about `size` bytes; yield any other JSON as a whole.

    A megabyte's objects take the memory of those before them. Parsing 66 MB at once takes twice the time, most of it
    for the system to grant 500 MB of memory.
    """
    between, head, tail = b'},\n  {\n    "ph":', b'{"traceEvents": [{\n    "ph":', b"}]}"
    start, cut = 0, data.find(between, size)
    while cut >= 0:
        yield (head if start else b"") + data[start:cut] + tail
        start = cut + len(between)
        cut = data.find(between, start + size)
    yield head + data[start:] if start else data


def _span(documents: Iterable[dict], accelerated: bool) -> Span:
    """Turn events as they stand in the file into tables with categories; drops the annotations that have none."""
    keys = _Numbering()  # there are few different names: classify each of them once
    columns, kernels, head = defaultdict(list), [], {}
    for document in documents:
        events = [event for event in document["traceEvents"] if event["ph"] == "X" and event["cat"] in CLASSIFIERS]
        head |= {key: document[key] for key in ("deviceProperties", "distributedInfo") if key in document}
        count = len(events)
        columns["code"].append(np.fromiter((keys[event["cat"], event["name"]] for event in events), int, count))
        columns["start"].append(np.fromiter((event["ts"] for event in events), float, count))
        columns["duration"].append(np.fromiter((event["dur"] for event in events), float, count))
        columns["thread"].append(np.array([event["tid"] for event in events], object))
        if accelerated:  # without an accelerator these say nothing
            arguments = [event.get("args") or {} for event in events]
            external = [each.get("External id", each.get("external id")) for each in arguments]
            columns["external"].append(np.array(external, object))
            columns["correlation"].append(np.array([each.get("correlation") for each in arguments], object))
            kernels += [_kernel(event) for event in events if event["cat"] in KERNELS]
    table = pd.DataFrame({name: np.concatenate(arrays) for name, arrays in columns.items()})
    kinds = [CLASSIFIERS[category](name) for category, name in keys]
    code = table.pop("code").to_numpy()
    table["end"] = table["start"] + table.pop("duration")
    table["name"] = np.array([name for _, name in keys], object)[code]
    table["kind"] = pd.Categorical.from_codes([KINDS.index(kind) for kind in kinds] if kinds else [], KINDS)[code]
    table["host"] = np.array([CLASSIFIERS[category] in (_of_host, _of_annotation) for category, _ in keys], bool)[code]
    table["operator"] = np.array([category in OPERATORS for category, _ in keys], bool)[code]
    launched = pd.DataFrame(kernels, columns=KERNEL_COLUMNS)
    if accelerated:
        exchanging = table.loc[table["kind"] == "Communication", "external"].dropna()
        table.loc[(table["kind"] == "Kernel") & table["external"].isin(exchanging), "kind"] = "Communication"
        launched.loc[launched["external"].isin(exchanging), "kind"] = "Communication"
    table = table[table["kind"] != "dropped"].sort_values("start", kind="stable", ignore_index=True)
    launched = launched.sort_values("start", kind="stable", ignore_index=True)
    rank = (head.get("distributedInfo") or {}).get("rank")
    return Span(table, launched, tuple(head.get("deviceProperties") or ()), rank)


KERNEL_COLUMNS = ["name", "kind", "start", "end", "external", "correlation", "device", "stream"]
KERNEL_COLUMNS += ["grid", "block", "registers", "shared_memory", "blocks_per_sm", "occupancy"]


def _kernel(event: dict) -> tuple:
    """Return a row of `Span.kernels`."""
    launch = event.get("args") or {}
    return (
        event["name"],
        _of_kernel(event["name"]),
        float(event["ts"]),
        float(event["ts"] + event["dur"]),
        launch.get("External id", launch.get("external id")),
        launch.get("correlation"),
        launch.get("device"),
        launch.get("stream"),
        launch.get("grid"),
        launch.get("block"),
        launch.get("registers per thread"),
        launch.get("shared memory"),
        launch.get("blocks per SM"),
        launch.get("est. achieved occupancy %"),
    )


def _of_kernel(name: str) -> str:
    """Tell NCCL's kernels by their name: today they do not carry the number of the operation that launched them."""
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


# What a trace calls its events, and how to tell their category; the names in capitals are those of torch 1.12.
OPERATORS = ["cpu_op", "operator", "Operator"]
KERNELS = ["kernel", "Kernel"]
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

    def __missing__(self, key: tuple[str, str]) -> int:
        self[key] = len(self)
        return self[key]


def _content(path: Path) -> bytes:
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TruncatedTrace(
            f"{path} is a gzip file that ends too early or is damaged ({error}). Copy it or record it again."
        ) from error
    if not data or data.isspace():
        raise EmptyTrace(f"{path} is empty. Did the profiler's process end while it wrote? Record it again.")
    return data


def _parse_leniently(data: bytes, path: Path) -> dict:
    """Parse what Kineto writes now and then, though it is no JSON: raw control characters, a bare N/A."""
    text = re.sub(r'(?<!")\bN/A\b(?!")', '"N/A"', data.decode("utf-8", errors="replace"))
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith(("{", "[")):
            raise ForeignFile(f"{path} is no trace: it is not JSON. Name a file that torch.profiler wrote.") from error
        raise TruncatedTrace(
            f"{path} ends too early or is damaged: {error}. Was the profiler's process ended while it wrote, "
            "or the copy broken off? Copy it or record it again."
        ) from error


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the search for reference cycles: JSON has none, and searching doubles the time of parsing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
