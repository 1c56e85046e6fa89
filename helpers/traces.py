"""Reads a profiler trace into tables: where each step's time went, the top operators, two runs compared.

It needs no torch and no TensorBoard, and reads the traces of torch 1.12 and newer as they are. All definitions are
those of TensorBoard's profiler tab (torch-tb-profiler 0.4.3, with the corrections of `helpers.tensorboard`), so that
a table here and the page there show the same numbers.

==============  =======================================================================================
category        what the step did, while it did nothing of a line further up
==============  =======================================================================================
Kernel          ran kernels on an accelerator
Memcpy          copied memory to, from or on an accelerator
Memset          filled memory of an accelerator
Communication   exchanged data with other processes (NCCL, Gloo)
Runtime         called the accelerator's runtime: launched, allocated, waited
DataLoader      waited for the next mini-batch
CPU Exec        ran operators on the CPU
Other           anything else: Python, mostly
==============  =======================================================================================
"""

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
PLAIN_NAMES = {
    "Kernel": "kernels",
    "Memcpy": "copies",
    "Memset": "memory fills",
    "Communication": "communication",
    "Runtime": "runtime calls",
    "DataLoader": "loading",
    "CPU Exec": "operators on the CPU",
    "Other": "other",
}

KINDS = [*CATEGORIES, "step", "dropped"]
NO_ROW = r"Optimizer\.|(Distributed)?DataParallel\.forward$"  # what the Operator view leaves out

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
class Trace:
    """What the profiler recorded, in one or several spans.

    Attributes
    ----------
    path : Path
        The file or folder it was read from.
    spans : tuple of DataFrame
        The events of each span in the order of their start: `name`; `kind`, a category or "step"; `host`, whether
        it ran on the CPU and is no call of the accelerator's runtime; `operator`, whether it is an operator of
        PyTorch; `start` and `end` in µs since the first event; `thread`. With an accelerator also `external`, a
        number that an operator shares with the runtime calls it makes, and `correlation`, one that a runtime call
        shares with what it launches.
    """

    path: Path
    spans: tuple[pd.DataFrame, ...]


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
    spans.sort(key=lambda events: events["start"].iat[0])
    origin = spans[0]["start"].iat[0]
    for events in spans:
        events[["start", "end"]] -= origin
    return Trace(path, tuple(spans))


def steps(path: str | Path | Trace) -> pd.DataFrame:
    """Return when each training step started and ended.

    With an accelerator a step ends when all that it launched has ended, and the next one starts no earlier.

    Returns
    -------
    DataFrame
        Index `step`, the profiler's number of the step; columns `start` and `end` in µs since the first event.

    Raises
    ------
    NoSteps
        If the profiler was not told of steps by ``profiler.step()``.
    SeveralRecordings
        If two spans hold the same step.
    """
    trace = load(path)
    return _concatenate(trace, [_steps(events) for events in trace.spans])


def breakdown(path: str | Path | Trace) -> pd.DataFrame:
    """Return where the time of each step went.

    Returns
    -------
    DataFrame
        Index `step`; one column a category (see the table at the top), float, in µs. The columns sum to the length
        of the step. ``attrs["total"]`` is the length of all steps in µs.

    Raises
    ------
    NoSteps, SeveralRecordings
        As `steps`.
    """
    trace = load(path)
    table = _concatenate(trace, [_breakdown(events) for events in trace.spans])
    table.attrs = {"unit": "µs", "total": float(table.to_numpy().sum())}
    return table


def loading_share(path: str | Path | Trace) -> float:
    """Return the share of the steps' time in which they waited for loading, from 0 to 1."""
    table = breakdown(path)
    return float(table["DataLoader"].sum() / table.attrs["total"])


def top_operators(path: str | Path | Trace, count: int = 10) -> pd.DataFrame:
    """Return the operators that took most time on the CPU: the Operator view's table.

    Parameters
    ----------
    path : str, Path or Trace
    count : int
        How many to return.

    Returns
    -------
    DataFrame
        Index `Name`, the operator's; columns `Calls`, int; `Host Self Duration (us)`, without the operators and
        runtime calls inside it, and `Host Total Duration (us)`, with them, float. Sorted by self duration. Operators
        outside the steps and in all threads count, too.
    """
    trace = load(path)
    table = pd.concat([_operators(events) for events in trace.spans]).groupby("Name").sum()
    return table.sort_values("Host Self Duration (us)", ascending=False, kind="stable").head(count)


def difference(before: str | Path | Trace, after: str | Path | Trace) -> pd.DataFrame:
    """Compare two runs: the mean step of each, category by category.

    Returns
    -------
    DataFrame
        Index `category`; columns `before`, `after` and `change` in ms a step.
    """
    table = pd.DataFrame({"before": breakdown(before).mean() / 1e3, "after": breakdown(after).mean() / 1e3})
    table["change"] = table["after"] - table["before"]
    return table.rename_axis("category")


def sentence(change: pd.DataFrame) -> str:
    """Say a `difference` in words: "loading −61 ms, copies +2 ms".

    The largest change comes first. Changes below 2 % of the longer mean step are left out: two traces of the same
    code differ by as much.
    """
    visible = 0.02 * max(change["before"].sum(), change["after"].sum())
    ordered = change["change"].sort_values(key=abs, ascending=False, kind="stable")
    parts = [f"{PLAIN_NAMES[name]} {_milliseconds(value)}" for name, value in ordered.items() if abs(value) >= visible]
    return ", ".join(parts) or f"no change above {visible:.2g} ms a step"


def _milliseconds(value: float) -> str:
    digits = 0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 2
    return f"{value:+.{digits}f} ms".replace("-", "−")


# ---------------------------------------------------------------------------------------------- from file to events


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


def _read(path: Path) -> pd.DataFrame:
    """Return the events of one file, by start; times as they stand in it."""
    data = _content(path)
    accelerated = b'"correlation"' in data
    try:
        try:
            table = _table((orjson.loads(piece) for piece in _pieces(data)), accelerated)
        except orjson.JSONDecodeError:
            table = _table([_parse_leniently(data, path)], accelerated)
    except TraceError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ForeignFile(
            f"{path} is JSON, but no trace of PyTorch's profiler: {type(error).__name__} {error}. "
            "Name a file that torch.profiler wrote."
        ) from error
    if table.empty:
        raise EmptyTrace(f"{path} holds no operator, kernel or step. Record it again, with at least one active step.")
    return table


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


def _table(documents: Iterable[dict], accelerated: bool) -> pd.DataFrame:
    """Turn events as they stand in the file into a table with categories; drops the annotations that have none."""
    keys = _Numbering()  # there are few different names: classify each of them once
    columns = defaultdict(list)
    for document in documents:
        events = [event for event in document["traceEvents"] if event["ph"] == "X" and event["cat"] in CLASSIFIERS]
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
    table = pd.DataFrame({name: np.concatenate(arrays) for name, arrays in columns.items()})
    kinds = [CLASSIFIERS[category](name) for category, name in keys]
    code = table.pop("code").to_numpy()
    table["end"] = table["start"] + table.pop("duration")
    table["name"] = np.array([name for _, name in keys], object)[code]
    table["kind"] = pd.Categorical.from_codes([KINDS.index(kind) for kind in kinds] if kinds else [], KINDS)[code]
    table["host"] = np.array([CLASSIFIERS[category] in (_of_host, _of_annotation) for category, _ in keys], bool)[code]
    table["operator"] = np.array([category in OPERATORS for category, _ in keys], bool)[code]
    if accelerated:
        exchanging = table.loc[table["kind"] == "Communication", "external"].dropna()
        table.loc[(table["kind"] == "Kernel") & table["external"].isin(exchanging), "kind"] = "Communication"
    return table[table["kind"] != "dropped"].sort_values("start", kind="stable", ignore_index=True)


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
CLASSIFIERS: dict[str, Callable[[str], str]] = {
    **dict.fromkeys([*OPERATORS, "python", "Python"], _of_host),
    "user_annotation": _of_annotation,
    **dict.fromkeys(["kernel", "Kernel"], lambda name: "Kernel"),
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


# --------------------------------------------------------------------------------------------- from events to tables


def _concatenate(trace: Trace, tables: list[pd.DataFrame]) -> pd.DataFrame:
    table = pd.concat([table for table in tables if len(table)] or tables[:1])
    if table.empty:
        raise NoSteps(
            f"{trace.path} marks no training steps, so its time cannot be told step by step. "
            "Call profiler.step() after every step, inside `with torch.profiler.profile(...)`, and record it again."
        )
    if table.index.has_duplicates:
        twice = table.index[table.index.duplicated()][0]
        raise SeveralRecordings(
            f"{trace.path} holds step {twice} more than once: traces of several recordings. Name one file, or remove "
            "the older ones."
        )
    return table


def _steps(events: pd.DataFrame) -> pd.DataFrame:
    marks = events[events["kind"] == "step"]
    numbers = marks["name"].str.removeprefix("ProfilerStep#").astype(int)
    table = marks[["start", "end"]].set_index(numbers.rename("step"))
    return _with_device_work(table, events)


def _breakdown(events: pd.DataFrame) -> pd.DataFrame:
    """Cover the steps with one category after the other: each is charged what it adds to those before it."""
    table = _steps(events)
    rank, starts, ends = events["kind"].cat.codes.to_numpy(), events["start"].to_numpy(), events["end"].to_numpy()
    covered = np.zeros(len(table))
    columns = {}
    for number, category in enumerate(CATEGORIES[:-1]):
        now = covered
        if (rank == number).any():
            now = _coverage(starts[rank <= number], ends[rank <= number], table)
        columns[category] = now - covered
        covered = now
    columns["Other"] = (table["end"] - table["start"]).to_numpy() - covered
    return pd.DataFrame(columns, index=table.index).round(3) + 0.0  # the profiler counts in ns; no −0.0


def _coverage(starts: np.ndarray, ends: np.ndarray, spans: pd.DataFrame) -> np.ndarray:
    """Return how much of each span lies in at least one of the intervals.

    Parameters
    ----------
    starts, ends : ndarray of float, shape (intervals,)
        In the order of the starts.
    spans : DataFrame
        Columns `start` and `end`, one row a span.

    Returns
    -------
    ndarray of float, shape (spans,)
    """
    reach = np.maximum.accumulate(ends)
    first = np.r_[True, starts[1:] > reach[:-1]]  # where an interval touches none of those before it
    starts, ends = starts[first], reach[np.r_[first[1:], True]]
    before = np.r_[0.0, np.cumsum(ends - starts)]  # covered before each of the now disjoint intervals

    def covered_until(moment: pd.Series) -> np.ndarray:
        index = np.searchsorted(starts, moment, side="right")
        overshoot = np.r_[0.0, ends][index] - moment.to_numpy()
        return before[index] - np.where(index > 0, np.maximum(overshoot, 0), 0)

    return covered_until(spans["end"]) - covered_until(spans["start"])


def _with_device_work(table: pd.DataFrame, events: pd.DataFrame) -> pd.DataFrame:
    """Let each step end when what it launched on an accelerator has ended, and the next one start no earlier.

    As in TensorBoard, the last step is dropped if it launched less than 80 % of what the one before it did: the
    profiler may have ended before its kernels did.
    """
    if table.empty or "correlation" not in events:
        return table
    known = events[~events["host"] & events["correlation"].notna()]
    calls, device = known[known["kind"] == "Runtime"], known[known["kind"] != "Runtime"]
    starts, ends = table["start"].to_numpy(), table["end"].to_numpy()
    step = np.searchsorted(starts, calls["start"], side="right") - 1
    inside = (step >= 0) & (calls["end"].to_numpy() <= ends[step])
    launched_in = pd.Series(step[inside], index=calls["correlation"][inside].to_numpy())
    launched_in = launched_in[~launched_in.index.duplicated()]
    owner = device["correlation"].map(launched_in)
    owned = device[owner.notna()].groupby(owner.dropna().astype(int))
    if not len(owned):
        return table
    count = owned.size().reindex(range(len(table)), fill_value=0).to_numpy()
    ends = np.fmax(ends, owned["end"].max().reindex(range(len(table))).to_numpy())
    # What was launched before the first step may delay it.
    earlier = device["end"][owner.isna() & (device["end"] < owned["start"].min().get(0, -np.inf))]
    ends = np.maximum.accumulate(np.r_[np.fmax(starts[0], earlier.max()), ends])
    result = pd.DataFrame({"start": np.maximum(starts, ends[:-1]), "end": ends[1:]}, index=table.index)
    last = int(np.flatnonzero(count)[-1])
    incomplete = last > 0 and 0.8 * count[last - 1] > count[last]
    return result.iloc[: last if incomplete else last + 1] if len(table) > 1 else result


def _operators(events: pd.DataFrame) -> pd.DataFrame:
    """Return the calls, self and total time of each operator in one span, as the plugin counts them."""
    host = events[events["host"]]
    host = host.assign(later_end_first=-host["end"]).sort_values(["thread", "start", "later_end_first"])
    parent = _parents(host)
    inner = parent >= 0
    around = np.where(inner, parent, 0)
    name = host["name"].to_numpy()
    operator = host["operator"].to_numpy() & ~host["kind"].isin(["step", "DataLoader"]).to_numpy()
    duration = (host["end"] - host["start"]).to_numpy()

    # An operator whose only child has its own name is one call, not two: a dispatcher that calls itself.
    children = np.bincount(parent[inner], minlength=len(host))
    same = inner & operator & operator[around] & (children[around] == 1) & (name == name[around])
    for row in np.flatnonzero(inner & same[around]):  # the outer ones come first, so theirs are final
        parent[row] = parent[parent[row]]
    charged = inner & ~same
    inside = np.bincount(parent[charged], weights=duration[charged], minlength=len(host))

    rows = operator & ~same
    self_duration = duration - inside - _runtime_inside(host, events)
    table = pd.DataFrame(
        {"Calls": 1, "Host Self Duration (us)": self_duration[rows], "Host Total Duration (us)": duration[rows]},
        index=pd.Index(name[rows], name="Name"),
    )
    table = table.groupby("Name").sum()
    return table[~table.index.str.match(NO_ROW)]


def _parents(host: pd.DataFrame) -> np.ndarray:
    """Return for each event the row of the innermost event around it in its thread, or −1."""
    parents = np.full(len(host), -1)
    stack: list[int] = []
    threads, starts, ends = (host[column].to_list() for column in ("thread", "start", "end"))
    for row, (thread, start, end) in enumerate(zip(threads, starts, ends, strict=True)):
        while stack and (threads[stack[-1]] != thread or ends[stack[-1]] <= start):
            stack.pop()
        if stack:
            parents[row] = stack[-1]
        stack.append(row)
    return parents


def _runtime_inside(host: pd.DataFrame, events: pd.DataFrame) -> np.ndarray:
    """Return the µs of runtime calls that each operator made itself."""
    if "external" not in events:
        return np.zeros(len(host))
    calls = events[(events["kind"] == "Runtime") & events["external"].notna()]
    total = defaultdict(float)
    for external, start, end in zip(calls["external"], calls["start"], calls["end"], strict=True):
        total[external] += end - start
    return np.array([total.pop(external, 0.0) for external in host["external"]])
