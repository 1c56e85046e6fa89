"""Reads trace files into tables of events, a piece at a time: the text is never in memory as a whole."""

from __future__ import annotations

import gc
import gzip
import json
import math
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
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


class UnreadableFile(TraceError):
    """The system does not let the file be read."""


class EmptyTrace(TraceError):
    """The file has no content, or no events."""


class TruncatedTrace(TraceError):
    """The file ends too early, or is damaged."""


class ForeignFile(TraceError):
    """The file is no trace of PyTorch's profiler."""


class NoSteps(TraceError):
    """The trace marks no training steps."""


class SeveralRecordings(TraceError):
    """The folder, or the file, holds the traces of several workers or recordings."""


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
        where the trace does not tell: `grid` and `block`, lists of three int; `registers` per thread;
        `shared_memory` per block in bytes; `blocks_per_sm`; `occupancy` in %, as estimated by the profiler.
    devices : tuple of dict
        Properties of each accelerator as they stand in the trace: name, computeMajor, numSms, and so on.
    rank : int or None
        Rank of the process among those that train together.
    settings : frozenset of str
        What of `SETTINGS` the profiler was told to record as well.
    counts : Counter of str
        How many events of each category the file has, those that are not in `events` as well.
    """

    events: pd.DataFrame
    kernels: pd.DataFrame
    devices: tuple[dict, ...]
    rank: int | None
    settings: frozenset[str] = frozenset()
    counts: Counter = field(default_factory=Counter)


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
    workers = _files(path)
    if len(workers) > 1:
        raise SeveralRecordings(
            f"The folder {path} holds traces of {len(workers)} workers or recordings: {', '.join(workers)}. "
            "Which one is meant cannot be told: name one file, remove the older ones, or read them all with "
            "traces.ranks, if they trained together."
        )
    (files,) = workers.values()
    return _trace(path, files)


def ranks(path: str | Path) -> dict[str, Trace]:
    """Read the traces of processes that trained together: one trace a rank, or a worker.

    Parameters
    ----------
    path : str or Path
        The folder of a run, or a trace file.

    Returns
    -------
    dict of str to Trace
        By "rank 0" and so on, as the traces themselves tell, in this order; then by the first part of the file's name
        those that do not tell. Times count from the first event of each.

    Raises
    ------
    NoTraces, UnreadableFile, EmptyTrace, TruncatedTrace, ForeignFile
        As `load`.
    SeveralRecordings
        If two workers say that they are the same rank.
    """
    found = {}
    for worker, files in _files(Path(path)).items():
        trace = _trace(Path(path) if Path(path).is_file() else files[0].with_name(worker), files)
        rank = trace.spans[0].rank
        key = (rank is None, rank or 0, worker if rank is None else f"rank {rank}")
        if key in found:
            raise SeveralRecordings(
                f"In {path} both {found[key].path.name} and {worker} say that they are rank {rank}: "
                "these are several recordings. Remove the older ones, or move them to a folder of their own."
            )
        found[key] = trace
    return {name: found[_, number, name] for _, number, name in sorted(found)}


def document(path: Path) -> dict:
    """Return a trace file as it stands: the metadata and, in "traceEvents", all events.

    Raises
    ------
    UnreadableFile, EmptyTrace, TruncatedTrace, ForeignFile
        As `load`.
    """
    with _no_garbage_collection():
        return _read(path, _joined)


def _trace(path: Path, files: list[Path]) -> Trace:
    with _no_garbage_collection():
        spans = [_checked(_read(file, _span), file) for file in files]
    spans.sort(key=lambda span: span.events["start"].iat[0])
    origin = spans[0].events["start"].iat[0]
    for span in spans:
        for table in (span.events, span.kernels):
            table[["start", "end"]] -= origin
    return Trace(path, tuple(spans))


def _files(path: Path) -> dict[str, list[Path]]:
    """Return the trace files at `path`, by worker."""
    try:
        if path.is_file():
            return {path.name: [path]}
        if not path.is_dir():
            raise NoTraces(f"There is no file or folder {path}. Record a profile there first, or correct the path.")
        found = [file for file in sorted(path.iterdir()) if TRACE_FILE.fullmatch(file.name) and file.is_file()]
    except OSError as error:
        raise _unreadable(path, error) from error
    if not found:
        inside = sorted({str(file.parent) for file in path.rglob("*.pt.trace.json*")})
        hint = f"Name one of the runs in it: {', '.join(inside)}." if inside else "Record a profile there first."
        raise NoTraces(f"The folder {path} holds no *.pt.trace.json or *.pt.trace.json.gz file. {hint}")
    workers = defaultdict(list)
    for file in found:
        workers[TRACE_FILE.fullmatch(file.name)["worker"]].append(file)
    return dict(sorted(workers.items()))


# From a file to pieces of JSON.

PIECE = 1 << 18  # bytes: a smaller one fits the processor's cache; 1 MiB takes 1.6 times the time, the whole 2.5 times
_BETWEEN_EVENTS = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args)"\s*:)')


class _CannotBeCut(Exception):
    """What looks like the end of an event is none."""


def _read(path: Path, build: Callable[[Iterable[dict]], Span | dict]) -> Span | dict:
    """Return what `build` makes of the parts of a trace file."""
    try:
        try:
            return build(_parts(path, PIECE))
        except _CannotBeCut:
            return build(_parts(path, None))
    except TraceError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TruncatedTrace(
            f"{path} is a gzip file that ends too early or is damaged ({error}). Copy it or record it again."
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise ForeignFile(
            f"{path} is JSON, but no trace of PyTorch's profiler, or it is damaged: {type(error).__name__} {error}. "
            "Name a file that torch.profiler wrote."
        ) from error


def _parts(path: Path, size: int | None) -> Iterator[dict]:
    """Parse a trace file; yield it as traces with a part of the events each, the metadata in the first or last."""
    pieces = _pieces(_chunks(path), size)
    piece = next(pieces, b"")
    if not piece or piece.isspace():
        raise EmptyTrace(f"{path} is empty. Did the profiler's process end while it wrote? Record it again.")
    bare = piece.lstrip().startswith(b"[")  # a list of events, as Chrome once wrote
    if not bare and not piece.lstrip().startswith(b"{"):
        raise ForeignFile(f"{path} is no trace: it is not JSON. Name a file that torch.profiler wrote.")
    opening, closing = (b"[", b"]") if bare else (b'{"traceEvents": [', b"]}")
    before = b""
    while piece:
        following = next(pieces, b"")
        part = _parse(before + piece + (closing if following else b""), path, last=not following)
        part = {"traceEvents": part} if bare else part
        if following and next(reversed(part), None) != "traceEvents":
            raise _CannotBeCut  # what was cut is another list
        yield part
        before, piece = opening, following


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        content = gzip.GzipFile(fileobj=file) if packed else file
        while chunk := content.read(PIECE):
            yield chunk


def _pieces(chunks: Iterable[bytes], size: int | None) -> Iterator[bytes]:
    """Cut JSON between two events, into pieces of about `size` bytes; leave it whole if `size` is None.

    Parsing needs no more memory than a piece does, and half the time: the objects of one piece take the place, in the
    processor's cache, of those before them.
    """
    text = bytearray()
    for chunk in chunks:
        unsearched = max(0, len(text) - 100)  # what stands between two events may lie in two chunks
        text += chunk
        cut = _BETWEEN_EVENTS.search(text, unsearched) if size and len(text) >= size else None
        if cut:
            yield bytes(text[: cut.start() + 1])
            del text[: cut.end()]
    if text:
        yield bytes(text)


def _parse(piece: bytes, path: Path, last: bool) -> dict | list:
    try:
        return orjson.loads(piece)
    except orjson.JSONDecodeError:
        pass
    # Kineto now and then writes what is no JSON: raw control characters, bytes that are no UTF-8, a bare N/A.
    text = re.sub(r"([:\[,]\s*)N/A(?=\s*[,\]}])", r'\1"N/A"', piece.decode("utf-8", errors="replace"))
    try:
        return json.loads(text, strict=False)
    except RecursionError as error:
        raise ForeignFile(f"{path} is no trace: lists in lists in lists. Name a file torch.profiler wrote.") from error
    except json.JSONDecodeError as error:
        if not last:
            raise _CannotBeCut from error
        raise TruncatedTrace(
            f"{path} ends too early or is damaged: {error.msg}. Was the profiler's process ended while it wrote, "
            "or the copy broken off? Copy it or record it again."
        ) from error


def _joined(parts: Iterable[dict]) -> dict:
    trace, events = {}, []
    for part in parts:
        events += part["traceEvents"]
        trace |= part
    return trace | {"traceEvents": events}


# From the events of a file to tables.

OPERATORS = ["cpu_op", "operator", "Operator"]
KERNELS = ["kernel", "Kernel"]
SETTINGS = ["record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops"]  # 1 in the head if on
LAUNCH = {  # what a kernel's arguments tell of its launch
    "device": "device",
    "stream": "stream",
    "grid": "grid",
    "block": "block",
    "registers": "registers per thread",
    "shared_memory": "shared memory",
    "blocks_per_sm": "blocks per SM",
    "occupancy": "est. achieved occupancy %",
}


def _span(parts: Iterable[dict]) -> Span:
    """Turn events as they stand in the file into tables with categories; drops the annotations that have none."""
    keys, threads = _Numbering(), _Numbering()  # there are few different names: classify each of them once
    columns, launches, head, counts = defaultdict(list), {name: [] for name in LAUNCH}, {}, Counter()
    for part in parts:
        head |= {key: part[key] for key in ("deviceProperties", "distributedInfo", *SETTINGS) if key in part}
        counts.update([str(each.get("cat")) for each in part["traceEvents"]])
        events = [each for each in part["traceEvents"] if each.get("ph") == "X" and each.get("cat") in CLASSIFIERS]
        try:
            arrays = _arrays(events, keys, threads)
        except KeyError:  # an event was still open when the profiler stopped, or others than PyTorch wrote it
            events = [event for event in events if {"name", "ts", "dur", "tid"} <= event.keys()]
            arrays = _arrays(events, keys, threads)
        for name, values in arrays.items():
            columns[name].append(values)
        arguments = [event.get("args") or {} for event in events if event["cat"] in KERNELS]
        for name, key in LAUNCH.items():
            launches[name] += [each.get(key) for each in arguments]
    if not all(isinstance(name, str) for _, name in keys):
        raise TypeError("the name of an event is no text")
    table = _table({name: np.concatenate(columns.pop(name)) for name in list(columns)}, list(keys), list(threads))
    exchanging = table.loc[table["kind"] == "Communication", "external"].dropna()
    table.loc[(table["kind"] == "Kernel") & table["external"].isin(exchanging), "kind"] = "Communication"
    launched = table[table["launch"] >= 0]
    kernels = launched[["name", "kind", "start", "end", "external", "correlation"]].reset_index(drop=True)
    for name, values in launches.items():
        values = [*values, None]  # or numpy makes a matrix of lists of three
        values = np.array(values, object) if name in ("grid", "block") else _numbers(values)
        kernels[name] = values[launched["launch"]]
    unneeded = ["launch"] if table["correlation"].notna().any() else ["launch", "external", "correlation"]
    rank = (head.get("distributedInfo") or {}).get("rank")
    devices = tuple(dict(device) for device in head.get("deviceProperties") or ())
    settings = frozenset(name for name in SETTINGS if head.get(name) == 1)
    return Span(table.drop(columns=unneeded), kernels, devices, rank, settings, counts)


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
        "external": _numbers([link.get("External id", link.get("external id", math.nan)) for link in links]),
        "correlation": _numbers([link.get("correlation", math.nan) for link in links]),
    }


def _numbers(values: list) -> np.ndarray:
    """Return `values` as float, NaN for what is no number."""
    try:
        return np.array(values, float)
    except (TypeError, ValueError):
        return np.array([value if isinstance(value, (int, float)) else math.nan for value in values], float)


def _table(columns: dict[str, np.ndarray], keys: list[tuple[str, str]], threads: list) -> pd.DataFrame:
    """Return `Span.events`; `columns` has the number of each event's category and name in `keys`, and of its thread."""
    classified = [CLASSIFIERS[category](name) for category, name in keys]
    kind = np.array([KINDS.index(each) for each in classified], np.int8)
    host = np.array([CLASSIFIERS[category] in (_of_host, _of_annotation) for category, _ in keys], bool)
    operator = np.array([category in OPERATORS for category, _ in keys], bool)
    name = np.array([name for _, name in keys], object)
    launched = np.array([category in KERNELS for category, _ in keys], bool)[columns["code"]]
    columns["launch"] = np.where(launched, np.cumsum(launched) - 1, -1).astype(np.int32)
    order = np.argsort(columns["start"], kind="stable")
    order = order[kind[columns["code"][order]] != KINDS.index("dropped")]
    order = order[~(columns["duration"][order] < 0)]  # as Kineto writes now and then of an event that it saw no end of
    columns = {column: values[order] for column, values in columns.items()}
    code = columns["code"]
    return pd.DataFrame(
        {
            "start": columns["start"],
            "thread": pd.Categorical.from_codes(columns["thread"], threads),
            "end": columns["start"] + columns["duration"],
            "name": pd.Series(name[code], dtype=object),
            "kind": pd.Categorical.from_codes(kind[code], KINDS),
            "host": host[code],
            "operator": operator[code],
            "external": columns["external"],
            "correlation": columns["correlation"],
            "launch": columns["launch"],
        }
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
    events = span.events
    if events.empty:
        raise EmptyTrace(f"{path} holds no operator, kernel or step. Record it again, with at least one active step.")
    if not np.isfinite(events[["start", "end"]].to_numpy()).all():
        raise TruncatedTrace(f"{path} is damaged: a time in it is no number. Copy it or record it again.")
    steps = events[events["kind"] == "step"]
    # Older versions of PyTorch write whole µs, so that a step may seem to end one after the start of the next.
    overlap = steps["start"].to_numpy()[1:] < steps["end"].to_numpy()[:-1] - 2
    if steps["name"].duplicated().any() or overlap.any():
        twice = steps["name"][1:][overlap | steps["name"].duplicated().to_numpy()[1:]].iat[0]
        raise SeveralRecordings(
            f"{path} holds steps that repeat or overlap, such as {twice}: those of several recordings, processes or "
            "threads in one file. Name the trace of one of them, and call profiler.step() in one thread only."
        )
    return span


def _unreadable(path: Path, error: OSError) -> UnreadableFile:
    return UnreadableFile(f"{path} cannot be read: {error.strerror or error}. May you read it, and is the disk there?")


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
