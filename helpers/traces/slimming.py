"""Writes copies of traces without what the views of this course do not show."""

from __future__ import annotations

import gzip
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import orjson

from helpers import staging
from helpers.traces import files, reading

_PRIVATE = {"host_name", "traceName"}

# µs. With everything on, two thirds of the Python frames outside of loading are shorter, and a third of the text that
# loading leaves goes with them; 20 µs would take 3% more.
SHORT = 5.0


def slim(path: str | Path, out: str | Path) -> Path:
    """Write a copy of a trace without what happened inside loading, and without short Python frames.

    What is left shows the same Overview, Kernel view and Trace view, and the same operators and modules outside of
    loading. What is dropped:

    - inside the calls of the DataLoader's ``__next__``, in the same thread: operators, annotations, Python frames, and
      memory that is allocated and freed there. Calls of an accelerator's runtime stay, and operators that made some.
    - Python frames of less than 5 µs, save those of an ``nn.Module``. Call stacks skip them.
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
    UnreadableFile, EmptyTrace, TruncatedTrace, ForeignFile
        As `load`; there is no copy then.
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
    loading: dict[tuple, list] = field(default_factory=lambda: defaultdict(list))  # (start, end) by thread
    launching: set = field(default_factory=set)  # the numbers of operators that called an accelerator's runtime
    around: dict = field(default_factory=dict)  # the number of the frame around a short one, by its own
    kept_memory: set = field(default_factory=set)  # memory that loading allocates and leaves, or frees

    def loading_around(self, event: dict) -> tuple | None:
        """Return the thread and start of the loading in which an event lies."""
        thread = _thread(event)
        calls = self.loading.get(thread)
        if not calls:
            return None
        start = float(event["ts"])
        call = calls[max(0, bisect_right(calls, (start, float("inf"))) - 1)]
        return (thread, call[0]) if call[0] <= start and start + float(event.get("dur", 0)) <= call[1] else None


def _plan(parts: Iterable[dict]) -> _Plan:
    plan, memory = _Plan(), []
    for part in parts:
        plan.head |= {key: value for key, value in part.items() if key not in _PRIVATE | {"traceEvents"}}
        for event in part["traceEvents"]:
            kind = _kind(event)
            arguments = event.get("args") or {}
            if kind == "DataLoader":
                start = float(event["ts"])
                plan.loading[_thread(event)].append((start, start + float(event["dur"])))
            elif kind == "Memory":
                memory.append({"ts": event["ts"], "pid": event["pid"], "tid": event["tid"], "args": arguments})
            elif kind == "Frame" and _is_short(event):
                plan.around[arguments.get("Python id")] = arguments.get("Python parent id")
            elif kind in ("Runtime", "Kernel", "Memcpy", "Memset"):
                plan.launching.add(_external(arguments))
    plan.launching.discard(None)
    for thread, calls in plan.loading.items():
        plan.loading[thread] = _outermost(sorted(calls))
    balance = defaultdict(int)
    for event in memory:
        balance[_block(event, plan)] += event["args"]["Bytes"]
    plan.kept_memory = {block for block, left in balance.items() if left}
    return plan


def _outermost(calls: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Leave out calls inside others: of a loader that reads another one."""
    outermost = calls[:1]
    outermost += [call for before, call in pairwise(calls) if call[1] > before[1]]
    return outermost


def _slimmed(parts: Iterable[dict], plan: _Plan) -> Iterator[bytes]:
    """Yield the JSON of the trace with the events that are kept, metadata first, one event a line."""
    head = orjson.dumps(plan.head).removesuffix(b"}")
    yield head + (b"," if plan.head else b"") + b'"traceEvents":[\n'
    between = b""
    for part in parts:
        kept = [orjson.dumps(_bridged(event, plan)) for event in part["traceEvents"] if _is_kept(event, plan)]
        if kept:
            yield between + b",\n".join(kept)
            between = b",\n"
    yield b"\n]}\n"


def _is_kept(event: dict, plan: _Plan) -> bool:
    kind = _kind(event)
    if kind == "Frame":
        return not (_is_short(event) or plan.loading_around(event))
    if kind == "CPU Exec":
        return not plan.loading_around(event) or _external(event.get("args") or {}) in plan.launching
    if kind == "Memory":
        return not plan.loading_around(event) or _block(event, plan) in plan.kept_memory
    return True


def _bridged(event: dict, plan: _Plan) -> dict:
    """Return the event without the names of files, and below the nearest frame around it that is kept."""
    arguments = event.get("args") or {}
    if "kernel_file" in arguments:
        arguments = {key: value for key, value in arguments.items() if key != "kernel_file"}
        event = event | {"args": arguments}
    parent = arguments.get("Python parent id")
    if parent not in plan.around:
        return event
    while parent in plan.around:
        parent = plan.around[parent]
    return event | {"args": arguments | {"Python parent id": parent}}


def _kind(event: dict) -> str | None:
    """Return the category of an event, "Frame", "Memory", or None for others."""
    if event.get("name") == "[memory]" and event.get("ph") == "i":
        return "Memory"
    if event.get("ph") != "X" or not {"name", "ts", "dur", "tid"} <= event.keys():
        return None
    category = event.get("cat")
    if category == "python_function":
        return "Frame"
    if category not in reading.CLASSIFIERS:
        return None
    kind = reading.CLASSIFIERS[category](event["name"])
    return "CPU Exec" if kind == "dropped" else kind


def _is_short(frame: dict) -> bool:
    return float(frame["dur"]) < SHORT and not frame["name"].startswith("nn.Module:")


def _external(arguments: dict) -> int | None:
    """Return the number that an operator shares with the runtime calls it makes."""
    return arguments.get("External id", arguments.get("external id"))


def _thread(event: dict) -> tuple:
    return event.get("pid"), event["tid"]


def _block(event: dict, plan: _Plan) -> tuple:
    """Return what identifies a block of memory in one call of loading."""
    arguments = event.get("args") or {}
    return (plan.loading_around(event), *(arguments.get(key) for key in ("Device Type", "Device Id", "Addr")))
