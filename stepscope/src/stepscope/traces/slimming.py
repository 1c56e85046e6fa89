"""Writes copies of traces without what the views of this course do not show."""

from __future__ import annotations

import gzip
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson

from stepscope.base import staging
from stepscope.traces import events, files
from stepscope.traces.columns import union

_PRIVATE = {"host_name", "traceName"}


def slim(path: str | Path, out: str | Path) -> Path:
    """Write a copy of a trace without what happened inside loading.

    What is left shows the same Overview, Kernel view and Trace view, and the same operators and modules outside of
    loading. What is dropped:

    - inside the calls of the DataLoader's ``__next__``, in the same thread: operators, annotations and Python frames.
      Calls of an accelerator's runtime stay, and operators that made some.
    - the names of the machine, of the file and of files with compiled kernels: a copy may be for others to see

    Parameters
    ----------
    path : str or Path
        A trace file, plain or gzip. It stays as it is, unless it is `out`, too.
    out : str or Path
        The copy, a gzip file: its name must end so. It appears whole, or not at all, and then replaces a file of this
        name.

    Returns
    -------
    Path
        `out`.

    Raises
    ------
    ValueError
        If the name of `out` does not end with ".json.gz".
    TraceError
        If the trace cannot be read; there is no copy then.
    """
    path, out = Path(path), Path(out)
    if not out.name.endswith(".json.gz"):
        raise ValueError(f"A slim trace is a gzip file, and {out} is not named like one. Let it end with .json.gz.")
    with staging.scratch(out) as folder, files.no_garbage_collection():
        plan = files.read(path, _plan)
        copy = folder / "copy"  # a TensorBoard that looks here meanwhile must not take it for a trace
        with gzip.open(copy, "wb", compresslevel=6) as file:
            files.read(path, lambda parts: file.writelines(_slimmed(parts, plan)))
        copy.replace(out)
    return out


@dataclass
class _Plan:
    """What must be known of the whole trace before an event can be judged."""

    head: dict = field(default_factory=dict)  # the metadata
    loading: dict[tuple, tuple] = field(default_factory=dict)  # starts and ends by thread
    launching: set = field(default_factory=set)  # the numbers of operators that called an accelerator's runtime

    def drops(self, event: dict) -> bool:
        if _kind(event) not in ("CPU Exec", "dropped", "Frame") or files.external_id(event) in self.launching:
            return False
        starts, ends = self.loading.get(_thread(event), ((), ()))
        start = float(event["ts"])
        place = bisect_right(starts, start) - 1
        return place >= 0 and start + float(event["dur"]) <= ends[place]


def _plan(parts: Iterable[dict]) -> _Plan:
    plan, loading = _Plan(), defaultdict(list)
    for part in parts:
        plan.head |= {key: value for key, value in part.items() if key not in _PRIVATE | {"traceEvents"}}
        for event in part["traceEvents"]:
            kind = _kind(event)
            if kind == "DataLoader":
                start = float(event["ts"])
                loading[_thread(event)].append((start, start + float(event["dur"])))
            elif kind in ("Runtime", "Kernel", "Memcpy", "Memset"):
                plan.launching.add(files.external_id(event))
    plan.launching.discard(None)
    plan.loading = {thread: union(*np.array(calls).T) for thread, calls in loading.items()}
    return plan


def _slimmed(parts: Iterable[dict], plan: _Plan) -> Iterator[bytes]:
    """Yield the JSON of the trace with the events that are kept, metadata first, one event a line."""
    head = orjson.dumps(plan.head).removesuffix(b"}")
    yield head + (b"," if plan.head else b"") + b'"traceEvents":[\n'
    between = b""
    for part in parts:
        kept = [orjson.dumps(_unnamed(event)) for event in part["traceEvents"] if not plan.drops(event)]
        if kept:
            yield between + b",\n".join(kept)
            between = b",\n"
    yield b"\n]}\n"


def _unnamed(event: dict) -> dict:
    """Return the event without the names of files."""
    arguments = event.get("args") or {}
    if "kernel_file" not in arguments:
        return event
    return event | {"args": {key: value for key, value in arguments.items() if key != "kernel_file"}}


def _kind(event: dict) -> str | None:
    """Return the category of an event, "dropped" for an annotation, "Frame", or None for others."""
    if event.get("ph") != "X" or not {"name", "ts", "dur", "tid"} <= event.keys():
        return None
    category = event.get("cat")
    if category == "python_function":
        return "Frame"
    return events.CLASSIFIERS[category](event["name"]) if category in events.CLASSIFIERS else None


def _thread(event: dict) -> tuple:
    return event.get("pid"), event["tid"]
