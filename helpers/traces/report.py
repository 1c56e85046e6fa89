"""What is recorded in traces, as text for a shell: ``python -m helpers traces PATH``."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.traces.aligning import Ranks, ranks
from helpers.traces.comparison import PLAIN_NAMES
from helpers.traces.exposure import communication
from helpers.traces.files import NoAccelerator, NoSteps, SeveralRecordings, TraceError, of_run, runs
from helpers.traces.operators import top_operators
from helpers.traces.reading import Trace, load
from helpers.traces.timeline import breakdown
from helpers.traces.utilization import MEANWHILE, accelerators, gaps, kernels
from helpers.wording import milliseconds, percent, printable

if TYPE_CHECKING:
    import pandas as pd

WIDTH = 110  # of a line, in characters
TOP = 5  # kernels or operators


def show(path: str | Path, describe: Callable[[Trace], str] | None = None) -> bool:
    """Print what is recorded in each trace at `path`, and what each that cannot be read has wrong.

    Parameters
    ----------
    path : str or Path
        A trace file, the folder of a run, or a folder of such folders. Each of several processes that trained together
        is printed on its own, and then what they cost each other.
    describe : callable, optional
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
    path = Path(path)
    places = runs(path) if path.is_dir() else [path]
    readable = True
    for title, trace in (each for place in places for each in _traces(place, path)):
        if describe and isinstance(trace, Ranks):
            continue
        try:
            if isinstance(trace, TraceError):
                raise trace
            described = together(trace) if isinstance(trace, Ranks) else (describe or text)(trace)
        except TraceError as error:
            readable = False
            described = "\n".join(_paragraph(f"{type(error).__name__}: {error}"))
        print(f"{title}\n{textwrap.indent(described, '  ')}\n", flush=True)
    return readable


def text(trace: Trace) -> str:
    """Return what is recorded in a trace, in lines of text that a terminal can show as they are."""
    return "\n".join(line.rstrip() for line in [*_steps(trace), *_accelerators(trace)])


def together(found: Ranks) -> str:
    """Return what exchanging data costs each rank in a step, and for which rank the others wait, in lines of text."""
    try:
        table = communication(found)
    except NoSteps as error:
        return "\n".join(_paragraph(str(error)))
    if not table["collectives"].any():
        return "\n".join(_paragraph("No exchange of data is recorded in their steps, so what it costs is unknown."))
    times = ["step", "compute", "overlapped", "transfer", "waiting"]
    rows = [
        [
            printable(rank),
            *(_time(row[column] * 1e3) if row[column] > 5e-4 else "0" for column in times),
            percent(row["efficiency"]),
            f"{row['collectives']:,.3g}",
            "–" if math.isnan(row["megabytes"]) else f"{row['megabytes']:,.3g}",
        ]
        for rank, row in table.iterrows()
    ]
    head = [
        "in a step",
        "all of it",
        "computing",
        "overlapped",
        "transfer",
        "waiting",
        "efficiency",
        "operations",
        "MB",
    ]
    lines = [*_aligned(head, rows), ""]
    late = table.attrs["straggler"]
    if late is not None:
        waits = milliseconds(table.attrs["late_ms"])
        lines += _paragraph(
            f"The other ranks lose {waits} of each step to {late}, which is late: look at its part above."
        )
    elif len(table) > 1:
        lines += _paragraph("No rank is late by more than chance.")
    for sentence in table.attrs["unequal"]:
        lines += _paragraph(f"Not all ranks took part in the same operations. {sentence}")
    return "\n".join(line.rstrip() for line in lines)


def short(kernel: str, width: int = 44) -> str:
    """Return a kernel's name, printable, without result, arguments and PyTorch's namespaces, and cut to `width`."""
    for prefix in ("void ", "at::native::", "(anonymous namespace)::"):
        kernel = kernel.removeprefix(prefix)
    return _name(_without_arguments(kernel), width)


def _without_arguments(name: str) -> str:
    """Return a name without the parentheses at its end and what they hold."""
    if not name.endswith(")"):
        return name
    open_parentheses = 0
    for place in range(len(name) - 1, 0, -1):
        if name[place] == ")":
            open_parentheses += 1
        elif name[place] == "(":
            open_parentheses -= 1
        if open_parentheses == 0:
            return name[:place]
    return name


def _traces(place: Path, root: Path) -> Iterator[tuple[str, Trace | Ranks | TraceError]]:
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
        recorded = sorted({span.rank for span in trace.spans} - {None})
        yield title + "".join(f", rank {rank}" for rank in recorded), trace


def _ranks(place: Path, root: Path, title: str) -> Iterator[tuple[str, Trace | Ranks | TraceError]]:
    """Yield each rank of a folder, then all together; or each file, if two have one rank or one cannot be read."""
    try:
        found = ranks(place)
    except TraceError:
        for file in of_run(place):
            yield from _traces(file, root)
    else:
        for name, trace in found.items():
            yield f"{title}, {printable(name)}", trace
        yield f"{title}, {len(found)} ranks together", found


def _steps(trace: Trace) -> list[str]:
    try:
        table = breakdown(trace)
    except NoSteps:
        return ["It marks no training steps, so what each step did is unknown: profiler.step() was not called."]
    except SeveralRecordings as error:
        return _paragraph(f"{type(error).__name__}: {error}")
    total = table.attrs["total"]
    times = table.sum(axis="columns")
    spread = f" ({_time(times.min())} to {_time(times.max())})" if times.max() > times.min() else ""
    loading = percent(table["DataLoader"].sum() / total)
    shares = [f"{PLAIN_NAMES[name]} {percent(value / total)}" for name, value in table.sum().items() if value > 0]
    return [
        f"steps      {len(table)}, on average {_time(times.mean())}{spread}; loading took {loading} of the time",
        *_wrapped("in a step  ", shares),
    ]


def _accelerators(trace: Trace) -> list[str]:
    try:
        used = accelerators(trace)
    except NoAccelerator as error:
        unknown = _unknown([str(error)]) if any(span.devices for span in trace.spans) else []
        return [*_operators(trace), *unknown]
    return [*_used(used), *_gaps(gaps(trace)), *_kernels(kernels(trace, TOP)), *_unknown(used.attrs["unknown"])]


def _used(table: pd.DataFrame) -> list[str]:
    shares = ["utilization", "sm_efficiency", "occupancy", "tensor_core_share"]
    rows = [
        [f"{device}  {_or(row['name'], '')}", *(percent(row[share]) for share in shares), f"{row['kernels']:,}"]
        for device, row in table.iterrows()
    ]
    return ["", *_aligned(["GPU", "utilization", "SM efficiency", "occupancy", "Tensor Cores", "kernels"], rows)]


def _gaps(table: pd.DataFrame) -> list[str]:
    lines = [""]
    for device, row in table.iterrows():
        of_device = f" of GPU {device}" if len(table) > 1 else ""
        lengths = [f"{row['count']:,}{of_device}", f"{percent(row['share'])} of the time", *_lengths(row)]
        parts = row[MEANWHILE].sort_values(ascending=False)
        shares = [f"{name} {percent(value / row['total'])}" for name, value in parts.items() if value > 0]
        lines += [*_wrapped("gaps       ", lengths), *_wrapped("meanwhile  ", shares)]
    return lines


def _lengths(row: pd.Series) -> list[str]:
    if not row["count"]:
        return []
    longest = f"the longest {_time(row['longest'])}: {_name(row['in_longest'], 60)}"
    return [f"half of them up to {_time(row['median'])}", longest]


def _kernels(table: pd.DataFrame) -> list[str]:
    rows = [
        [
            short(name),
            _time(row["Total Duration (us)"]),
            percent(row["Share"]),
            f"{row['Calls']:,}",
            "yes" if row["Tensor Cores Used"] else "no",
            _or(row["Operator"], "unknown", 26),
        ]
        for name, row in table.iterrows()
    ]
    head = ["kernel", "total", "share", "calls", "Tensor Cores", "launched by"]
    return ["", *_aligned(head, rows, left=(0, 5))]


def _unknown(reasons: Iterable[str]) -> list[str]:
    lines = [line for reason in reasons for line in _paragraph(f"Unknown: {reason}")]
    return ["", *lines] if lines else []


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
    for piece in [*(f"{part}," for part in parts[:-1]), *parts[-1:]]:
        if len(lines[-1]) + len(piece) > WIDTH and len(lines[-1]) > len(head):
            lines.append(" " * len(head))
        lines[-1] += piece + " "
    return lines


def _name(name: str, width: int = 44) -> str:
    """Return a printable name, a long one cut in the middle: kernels differ at both ends."""
    name = printable(name)
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[head + 1 - width :]}"


def _or(name: object, otherwise: str, width: int = 44) -> str:
    """Return a name as `_name` does, or `otherwise` if there is none."""
    return _name(name, width) if isinstance(name, str) else otherwise


def _paragraph(text: str) -> list[str]:
    """Return printable lines of a text, the further ones indented."""
    return textwrap.wrap(printable(text), WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _time(us: float) -> str:
    """Return a time with its unit: "8.5 µs", "85 µs", "85.0 ms", "850 ms"."""
    if us < 1e3:
        return f"{us:.0f} µs" if us >= 10 else f"{us:.1f} µs"
    value, unit = (us / 1e3, "ms") if us < 1e6 else (us / 1e6, "s")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
