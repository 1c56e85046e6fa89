"""Writes small copies of traces, without the events inside loading."""

import gzip
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orjson

from stepscope.base import staging
from stepscope.traces import events, files
from stepscope.traces.columns import union

_PRIVATE = {"host_name", "traceName"}


def slim(path: str | Path, out: str | Path) -> Path:
    """Write a copy of a trace without the events inside loading.

    The copy shows the same Overview, Kernel view and Trace view, and the same operators and modules outside of loading.
    It lacks:

    - inside the calls of the DataLoader's ``__next__``, in the same thread: operators, annotations and Python frames.
      Calls of an accelerator's runtime stay, and so do the operators that made them.
    - the names of the machine, of the file and of files with compiled kernels: the copy may be published

    `path` is a trace file, plain or gzip; it does not change, unless it equals `out`. `out` is a gzip file, whose name
    must end with ".json.gz"; it appears whole, or not at all, replaces a file of this name, and is returned.

    Raises ValueError if `out` has another ending, TraceError if the trace cannot be read.
    """
    path, out = Path(path), Path(out)
    if not out.name.endswith(".json.gz"):
        raise ValueError(f"Expected a path that ends with .json.gz for the slim trace, a gzip file; found {out}.")
    content = files.read(path, lambda parts: _slimmed(files.joined(parts)))
    staging.write(out, gzip.compress(content, 6))
    return out


def _slimmed(trace: files.Json) -> bytes:
    slim = {key: value for key, value in trace.items() if key not in _PRIVATE}
    slim["traceEvents"] = [_unnamed(event) for event in _outside_of_loading(trace["traceEvents"])]
    return orjson.dumps(slim)


def _outside_of_loading(everything: list[files.Json]) -> Iterator[files.Json]:
    """Yield the events, except events inside loading, in the same thread, that called no accelerator's runtime."""
    calls = defaultdict(list)
    launching: set[int | None] = {None}
    for event in everything:
        if (kind := _kind(event)) == "DataLoader":
            start = float(event["ts"])
            calls[_thread(event)].append((start, start + float(event["dur"])))
        elif kind in ("Runtime", "Kernel", "Memcpy", "Memset"):
            launching.add(files.external_id(event))
    launching.remove(None)
    loading = {thread: union(*np.array(intervals).T) for thread, intervals in calls.items()}
    for event in everything:
        if _kind(event) in ("CPU Exec", "dropped", "Frame") and files.external_id(event) not in launching:
            starts, ends = loading.get(_thread(event), ((), ()))
            start = float(event["ts"])
            place = bisect_right(starts, start) - 1
            if place >= 0 and start + float(event["dur"]) <= ends[place]:
                continue
        yield event


def _unnamed(event: files.Json) -> files.Json:
    """Return the event without names of files."""
    arguments = event.get("args") or {}
    if "kernel_file" not in arguments:
        return event
    return event | {"args": {key: value for key, value in arguments.items() if key != "kernel_file"}}


def _kind(event: files.Json) -> str | None:
    """Return the category of an event, "dropped" for an annotation, "Frame" for a Python frame, or None."""
    if event.get("ph") != "X" or not event.keys() >= events.NEEDED:
        return None
    category = event.get("cat")
    if category == "python_function":
        return "Frame"
    return events.CLASSIFIERS[category](event["name"]) if category in events.CLASSIFIERS else None


def _thread(event: files.Json) -> tuple[object, object]:
    return event.get("pid"), event["tid"]
