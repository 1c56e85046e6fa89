"""What traces tell, as text for a shell: ``python -m helpers traces PATH``."""

from __future__ import annotations

import math
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from helpers.traces.accelerators import MEANWHILE, NoAccelerator, accelerators, gaps, kernels
from helpers.traces.comparison import PLAIN_NAMES
from helpers.traces.operators import top_operators
from helpers.traces.reading import TRACE_FILE, NoSteps, NoTraces, SeveralRecordings, Trace, TraceError, load, ranks
from helpers.traces.timeline import breakdown

WIDTH = 110  # of a line, in characters
TOP = 5  # kernels or operators


def show(path: str | Path, tell: Callable[[Trace], str] | None = None) -> bool:
    """Print what each trace at `path` tells, and what each that cannot be read has wrong.

    Parameters
    ----------
    path : str or Path
        A trace file, the folder of a run, or a folder of such folders. Of processes that trained together each is told
        on its own.
    tell : callable, optional
        What to print of a trace; `text` by default. It may raise a TraceError.

    Returns
    -------
    bool
        Whether all of them could be read.

    Raises
    ------
    NoTraces
        If there are none.
    """
    readable = True
    for place in _places(Path(path)):
        for title, trace in _traces(place, Path(path)):
            try:
                if isinstance(trace, TraceError):
                    raise trace
                told = (tell or text)(trace)
            except TraceError as error:
                readable = False
                told = "\n".join(_paragraph(f"{type(error).__name__}: {error}"))
            print(f"{title}\n{textwrap.indent(told, '  ')}\n", flush=True)
    return readable


def text(trace: Trace) -> str:
    """Return what a trace tells, in lines of text that a terminal can show as they are."""
    return "\n".join(line.rstrip() for line in [*_steps(trace), *_accelerators(trace)])


def printable(name: str) -> str:
    """Return a name with each character replaced that a terminal would obey and not show.

    Names in a trace are anyone's text: escape sequences in them could clear the screen, or hide a line.
    """
    return "".join("?" if unicodedata.category(each) in _OBEYED else each for each in name)


def short(kernel: str, width: int = 44) -> str:
    """Return a kernel's name, printable, without result, arguments and PyTorch's namespaces, and cut to `width`."""
    for prefix in ("void ", "at::native::", "(anonymous namespace)::"):
        kernel = kernel.removeprefix(prefix)
    depth = 0
    for place in range(len(kernel) - 1, 0, -1) if kernel.endswith(")") else ():
        depth += (kernel[place] == ")") - (kernel[place] == "(")
        if depth == 0:
            return _name(kernel[:place], width)
    return _name(kernel, width)


_OBEYED = {"Cc", "Cf", "Co", "Cn", "Cs", "Zl", "Zp"}  # of Unicode: control, format, private, unassigned, separators


def _places(path: Path) -> list[Path]:
    """Return what to load: a file, or each folder with traces in `path`."""
    if not path.is_dir():
        return [path]
    places = sorted({file.parent for file in path.rglob("*.pt.trace.json*") if TRACE_FILE.fullmatch(file.name)})
    if not places:
        raise NoTraces(
            f"The folder {path} holds no *.pt.trace.json or *.pt.trace.json.gz file. Record a profile there first, or "
            "name another folder."
        )
    return places


def _traces(place: Path, root: Path) -> Iterator[tuple[str, Trace | TraceError]]:
    """Yield the title and the trace of each rank or recording in one place, or why it cannot be read."""
    title = printable(str(place.relative_to(root) if place != root else place.resolve().name))
    try:
        trace = load(place)
    except SeveralRecordings as error:
        if place.is_dir():
            yield from _ranks(place, root, title)
        else:
            yield title, error
    except TraceError as error:
        yield title, error
    else:
        told = sorted({span.rank for span in trace.spans} - {None})
        yield title + "".join(f", rank {rank}" for rank in told), trace


def _ranks(place: Path, root: Path, title: str) -> Iterator[tuple[str, Trace | TraceError]]:
    """Yield each rank of a folder, or each file if the ranks cannot be told apart or one of them cannot be read."""
    try:
        found = ranks(place)
    except TraceError:
        for file in sorted(place.iterdir()):
            if TRACE_FILE.fullmatch(file.name):
                yield from _traces(file, root)
    else:
        for name, trace in found.items():
            yield f"{title}, {printable(name)}", trace


def _steps(trace: Trace) -> list[str]:
    try:
        table = breakdown(trace)
    except NoSteps:
        return ["It marks no training steps, so its time cannot be told step by step: profiler.step() was not called."]
    except SeveralRecordings as error:
        return _paragraph(f"{type(error).__name__}: {error}")
    total = table.attrs["total"]
    times = table.sum(axis="columns")
    shares = ", ".join(
        f"{PLAIN_NAMES[name]} {_percent(value / total)}" for name, value in table.sum().items() if value > 0
    )
    spread = f" ({_time(times.min())} to {_time(times.max())})" if times.max() > times.min() else ""
    return [
        f"steps      {len(table)}, on average {_time(times.mean())}{spread}; loading took "
        f"{_percent(table['DataLoader'].sum() / total)} of the time",
        *_wrapped("in a step  ", shares.split(", ")),
    ]


def _accelerators(trace: Trace) -> list[str]:
    try:
        used, idle, top = accelerators(trace), gaps(trace), kernels(trace, TOP)
    except NoAccelerator as error:
        of_machine = any(span.devices for span in trace.spans)
        return [*_operators(trace), *(["", *_paragraph(f"Cannot tell: {error}")] if of_machine else [])]
    rows = [
        [f"{device}  {_name(row['name']) if isinstance(row['name'], str) else ''}", *(_percent(row[name]) for name in _SHARES), f"{row['kernels']:,}"]
        for device, row in used.iterrows()
    ]
    lines = ["", *_aligned(["GPU", "utilization", "SM efficiency", "occupancy", "Tensor Cores", "kernels"], rows)]
    for device, row in idle.iterrows():
        of_device = f" of GPU {device}" if len(idle) > 1 else ""
        lines += [""] if device == idle.index[0] else []
        lengths = [f"{row['count']:,}{of_device}", f"{_percent(row['share'])} of the time", *_lengths(row)]
        lines += _wrapped("gaps       ", lengths)
        parts = row[MEANWHILE].sort_values(ascending=False)
        told = [f"{name} {_percent(value / row['total'])}" for name, value in parts.items() if value > 0]
        lines += _wrapped("meanwhile  ", told)
    rows = [
        [
            short(name), _time(row["Total Duration (us)"]), _percent(row["Share"]), f"{row['Calls']:,}",
            "yes" if row["Tensor Cores Used"] else "no",
            _name(row["Operator"], 26) if isinstance(row["Operator"], str) else "cannot be told",
        ]
        for name, row in top.iterrows()
    ]  # fmt: skip
    lines += ["", *_aligned(["kernel", "total", "share", "calls", "Tensor Cores", "launched by"], rows, left=(0, 5))]
    reasons = [line for reason in used.attrs["cannot_tell"] for line in _paragraph(f"Cannot tell: {reason}")]
    return [*lines, *([""] if reasons else []), *reasons]


_SHARES = ["utilization", "sm_efficiency", "occupancy", "tensor_core_share"]


def _lengths(row: pd.Series) -> list[str]:
    if not row["count"]:
        return []
    longest = f"the longest {_time(row['longest'])}: {_name(row['in_longest'], 60)}"
    return [f"half of them up to {_time(row['median'])}", longest]


def _operators(trace: Trace) -> list[str]:
    table = top_operators(trace, TOP)
    durations = ["Host Self Duration (us)", "Host Total Duration (us)"]
    rows = [
        [_name(name), *(_time(row[column]) for column in durations), f"{row['Calls']:,.0f}"]
        for name, row in table.iterrows()
    ]
    return ["", *_aligned(["operator", "by itself", "in total", "calls"], rows)] if rows else []


def _aligned(head: Sequence[str], rows: Iterable[Sequence[str]], left: tuple[int, ...] = (0,)) -> list[str]:
    """Return lines of columns, those in `left` flush left."""
    table = [head, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return [
        "  ".join(
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]


def _wrapped(head: str, parts: Sequence[str]) -> list[str]:
    """Return the parts, separated by commas, in lines that begin below each other."""
    lines = [head]
    for number, part in enumerate(parts):
        piece = part + ("," if number < len(parts) - 1 else "")
        if len(lines[-1]) + len(piece) > WIDTH and len(lines[-1]) > len(head):
            lines.append(" " * len(head))
        lines[-1] += piece + " "
    return lines


def _name(name: str, width: int = 44) -> str:
    """Return a printable name, a long one cut in the middle: both ends tell kernels apart."""
    name = printable(name)
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[head + 1 - width :]}"


def _paragraph(text: str) -> list[str]:
    """Return printable lines of a text, the further ones indented."""
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _time(us: float) -> str:
    value, unit = (us, "µs") if us < 1e3 else (us / 1e3, "ms") if us < 1e6 else (us / 1e6, "s")
    return f"{value:.{0 if value >= 100 or unit == 'µs' and value >= 10 else 1}f} {unit}"


def _percent(share: float) -> str:
    if math.isnan(share):
        return "–"
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{share * 100:.{0 if share >= 0.0995 or share == 0 else 1}f} %"
