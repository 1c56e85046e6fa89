"""Finds trace files, and parses them piece by piece, so that the whole text of a file need not be in memory.

It needs neither NumPy nor pandas, so that code without tables, such as `stepscope.tensorboard`, starts without pandas.
"""

import gc
import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import orjson

from stepscope.base import staging

Result = TypeVar("Result")
Json = dict[str, Any]  # a trace, an event or its arguments

TRACE_FILE = re.compile(r"(?P<worker>.*?)(?P<span>\.\d+)?\.pt\.trace\.json(\.gz)?")  # as in TensorBoard
BESIDE = ("stopwatch.json", "facts.json")  # the traces; for a rank, its name comes first: rank_0.facts.json
STOPWATCH = BESIDE[0]
PERFETTO = (
    "Perfetto's own format, which the second backend of PyTorch's profiler writes: ui.perfetto.dev shows it, but "
    "stepscope cannot read it. Record JSON: with tensorboard_trace_handler(…), or "
    "export_chrome_trace(…) to a path that ends with .pt.trace.json.gz."
)


class TraceError(ValueError):
    """A trace cannot be read, or lacks the requested data. The message names the fault and a remedy."""


class NoTraces(TraceError):
    """There is no trace at this path."""


class NoSteps(TraceError):
    """The trace marks no training steps."""


class NoAccelerator(TraceError):
    """The trace holds no kernels of an accelerator."""


class SeveralRecordings(TraceError):
    """The folder, or the file, holds the traces of several workers or recordings."""


# From a folder to trace files.


def runs(path: str | Path) -> list[Path]:
    """Return the folders that hold traces, at or below a folder; staging folders and their content do not count.

    Raises NoTraces if there are none.
    """
    path = Path(path)
    folders = {file.parent for file in path.rglob("*.pt.trace.json*") if _is_trace(file)}
    found = sorted(folder for folder in folders if not staging.is_staging(folder.relative_to(path)))
    if not found:
        problem = "holds no *.pt.trace.json or *.pt.trace.json.gz file" if path.is_dir() else "does not exist"
        if other := next(path.rglob("*.pftrace"), None):
            with other.open("rb") as file:
                if file.read(1) == b"{":  # the profiler's usual backend writes JSON, whatever the name
                    raise NoTraces(f"The folder {path} {problem}, but {other.name} is JSON: name that file.")
            raise NoTraces(f"The folder {path} {problem}, and {other.name} is in {PERFETTO}")
        raise NoTraces(f"The folder {path} {problem}. Record a profile first, or name the folder it was written to.")
    return found


def of_run(folder: Path) -> list[Path]:
    """Return the trace files directly in a folder, by name."""
    return [file for file in sorted(folder.iterdir()) if _is_trace(file)]


def by_worker(path: Path) -> dict[str, list[Path]]:
    """Return the trace files at `path`, a file or the folder of a run, by worker.

    Raises NoTraces if there are none, TraceError if the folder cannot be read.
    """
    try:
        if path.is_file():
            return {path.name: [path]}
        if not path.is_dir():
            raise NoTraces(
                f"There is no file or folder {path}. Record a profile there first, or correct the path. A profiler "
                "with a schedule writes nothing if the loop has fewer steps than wait + warmup + active."
            )
        found = of_run(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not found:
        names = ", ".join(map(str, runs(path)))  # raises NoTraces if there are none below either
        raise NoTraces(f"The folder {path} holds no trace itself. Name one of the runs in it: {names}.")
    workers = defaultdict(list)
    for file in found:
        if match := TRACE_FILE.fullmatch(file.name):
            workers[match["worker"]].append(file)
    return dict(sorted(workers.items()))


def _is_trace(file: Path) -> bool:
    return TRACE_FILE.fullmatch(file.name) is not None and file.is_file()


def refuse_others(folder: Path) -> None:
    """Raise `staging.TargetExists` if a folder holds files that do not belong to an earlier recording."""
    names = sorted(file.name for file in folder.glob("[!.]*"))  # without hidden files of the system
    foreign = [name for name in names if not (name.endswith(BESIDE) or TRACE_FILE.fullmatch(name))]
    if foreign:
        raise staging.TargetExists(
            f"{folder}: expected a new folder for the recording, or one with only an earlier recording, "
            f"found {', '.join(foreign[:3])} in it. Name another folder, or move these files."
        )


# From a file to pieces of JSON.

PIECE = 1 << 16  # bytes, whose objects fit the CPU's cache; 256 KiB take up to 1.4 × the time, a whole file 2.3 ×
_BETWEEN_EVENTS = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|pid|tid|ts|dur|args)"\s*:)')


def joined(parts: Iterable[Json]) -> Json:
    """Return the parts of a trace as one dict: the metadata and, in "traceEvents", all events."""
    trace: Json = {}
    events = []
    for part in parts:
        events += part["traceEvents"]
        trace |= part
    return trace | {"traceEvents": events}


class _CannotBeCut(Exception):
    """A piece was not cut at the end of an event."""


def read(path: Path, build: Callable[[Iterable[Json]], Result]) -> Result:
    """Return the result of `build` for the parts of a trace file. Raises TraceError if the file cannot be read."""
    try:
        with _no_garbage_collection():
            try:
                return build(parts(path, PIECE))
            except _CannotBeCut:
                return build(parts(path, None))
    except TraceError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"{path} is a gzip file that ends too early or is damaged ({error}). Copy it or record it again."
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise TraceError(
            f"{path} is JSON, but not a trace of PyTorch's profiler, or damaged: {type(error).__name__} {error}. "
            "Name a file that torch.profiler wrote."
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


def parts(path: Path, size: int | None) -> Iterator[Json]:
    """Parse a trace file; yield dicts with a part of the events each. The first or the last has the metadata."""
    pieces = _pieces(path, size)
    piece = next(pieces, b"")
    if not piece or piece.isspace():
        raise TraceError(f"{path} is empty. Did the profiler's process end while it wrote? Record it again.")
    if not piece.lstrip().startswith(b"{"):
        if path.suffix == ".pftrace":
            raise TraceError(f"{path} is in {PERFETTO}")
        raise TraceError(f"{path} is not a trace: it holds no JSON object. Name a file that torch.profiler wrote.")
    before = b""
    while piece:
        following = next(pieces, b"")
        part = _parse(before + piece + (b"]}" if following else b""), path, last=not following)
        if following and next(reversed(part), None) != "traceEvents":
            raise _CannotBeCut  # the cut is in another list
        yield part
        before, piece = b'{"traceEvents": [', following


def _pieces(path: Path, size: int | None) -> Iterator[bytes]:
    """Cut JSON between two events, into pieces of about `size` bytes; leave it whole if `size` is None.

    Parsing then needs only the memory of a piece, and half the time: the objects of a piece replace the previous ones
    in the CPU's cache.
    """
    text = bytearray()
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        content = gzip.GzipFile(fileobj=file) if packed else file
        while chunk := content.read(PIECE):
            unsearched = max(0, len(text) - 100)  # the text between two events may span two chunks
            text += chunk
            cut = _BETWEEN_EVENTS.search(text, unsearched) if size and len(text) >= size else None
            if cut:
                yield bytes(text[: cut.start() + 1])
                del text[: cut.end()]
    if text:
        yield bytes(text)


def _parse(piece: bytes, path: Path, last: bool) -> Json:
    with suppress(orjson.JSONDecodeError):
        return cast(Json, orjson.loads(piece))
    # Kineto sometimes writes invalid JSON: raw control characters, bytes that are not UTF-8, a bare N/A.
    text = re.sub(r"([:\[,]\s*)N/A(?=\s*[,\]}])", r'\1"N/A"', piece.decode("utf-8", errors="replace"))
    try:
        # As in orjson, a whole number of more than 64 bits is a float
        return cast(Json, json.loads(text, strict=False, parse_int=lambda n: int(n) if len(n) < 19 else float(n)))
    except json.JSONDecodeError as error:
        if not last:
            raise _CannotBeCut from error
        raise TraceError(
            f"{path} ends too early or is damaged: {error.msg}. Did the profiler's process end while it wrote, "
            "or was copying interrupted? Copy it or record it again."
        ) from error


def _unreadable(path: Path, error: OSError) -> TraceError:
    return TraceError(f"{path} cannot be read: {error.strerror or error}. Check its permissions and its disk.")


def external_id(event: Json) -> int | None:
    """Return the number that an operator shares with its calls of an accelerator's runtime."""
    arguments = event.get("args") or {}
    return arguments.get("External id", arguments.get("external id"))
