"""The content of traces as text for a shell: ``stepscope traces PATH``."""

import math
import textwrap
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import pandas as pd

from stepscope.base.wording import milliseconds, percent, printable
from stepscope.traces.alignment import Ranks, ranks
from stepscope.traces.events import Trace
from stepscope.traces.exposed_communication import communication
from stepscope.traces.files import NoAccelerator, NoSteps, SeveralRecordings, TraceError, of_run, runs
from stepscope.traces.idle_time import MEANWHILE, gaps
from stepscope.traces.operators import top_operators
from stepscope.traces.step_times import PLAIN_NAMES, breakdown
from stepscope.traces.utilization import accelerators, kernels

Result = TypeVar("Result")

WIDTH = 110  # characters in a line
TOP = 5  # kernels or operators


def show(path: str | Path, describe: Callable[[Trace | Ranks], str] | None = None) -> bool:
    """Print the content of each trace at `path`, and why others cannot be read.

    `path` is a trace file, the folder of a run, or a folder of such folders. Processes that trained together are
    printed one by one, and then the cost of their communication. `describe` returns the text for a trace, or for all
    ranks, by default `text` and `together`, and may raise a TraceError.

    Returns whether all traces could be read. Raises NoTraces if there are none.
    """
    readable = True
    for title, described in each(
        path, describe or (lambda trace: together(trace) if isinstance(trace, Ranks) else text(trace))
    ):
        if isinstance(described, TraceError):
            readable, described = False, _paragraph(f"{type(described).__name__}: {described}")
        print(f"{title}\n{textwrap.indent(described, '  ')}\n", flush=True)
    return readable


def each(path: str | Path, describe: Callable[[Trace | Ranks], Result]) -> Iterator[tuple[str, Result | TraceError]]:
    """Yield a title for each trace at `path` and what `describe` returns for it, or the TraceError that it raises.

    `path` is that of `show`, and it raises the same errors.
    """
    path = Path(path)
    for place in runs(path) if path.is_dir() else [path]:
        for title, trace in _traces(place, path):
            try:
                if isinstance(trace, TraceError):
                    raise trace
                yield title, describe(trace)
            except TraceError as error:
                yield title, error


def text(trace: Trace) -> str:
    """Return the content of a trace in lines of text that are safe for a terminal."""
    lines = "\n".join([*_steps(trace), *_accelerators(trace)]).splitlines()
    return "\n".join(line.rstrip() for line in lines)


def together(job: Ranks) -> str:
    """Return the cost of communication for each rank in a step, and the rank that others wait for, in lines of text."""
    try:
        table = communication(job)
    except NoSteps as error:
        return _paragraph(str(error))
    if not table["collectives"].any():
        return _paragraph("The steps hold no record of communication, so its cost is unknown.")
    times = ["step", "compute", "overlapped", "transfer", "waiting"]
    shown = table[times].map(lambda ms: _time(ms * 1e3) if ms > 5e-4 else "0")
    shown = shown.set_axis(["all of it", "computing", *times[2:]], axis="columns")
    shown["efficiency"] = table["efficiency"].map(percent)
    shown["operations"] = table["collectives"].map("{:,.3g}".format)
    shown["MB"] = table["megabytes"].map(lambda size: "–" if math.isnan(size) else f"{size:,.3g}")
    late, waits = table.attrs["straggler"], milliseconds(table.attrs["late_ms"])
    said = [f"The others have {waits} more exposed communication in a step than {late}, which is late: see its part."]
    if late is None:
        said = ["No rank is late by more than chance."] if len(table) > 1 else []
    said += [f"Not all ranks took part in the same operations. {sentence}" for sentence in table.attrs["unequal"]]
    return "\n".join([_table("in a step", shown.rename(printable)), "", *map(_paragraph, said)])


def short(kernel: str, width: int = 44) -> str:
    """Return a kernel's name, printable, without result, arguments and PyTorch's namespaces, and cut to `width`."""
    for part in ("at::native::", "(anonymous namespace)::"):
        kernel = kernel.replace(part, "")
    return _name(kernel.removeprefix("void ").partition("(")[0].strip() or kernel, width)


def _traces(place: Path, root: Path) -> Iterator[tuple[str, Trace | Ranks | TraceError]]:
    """Yield the title and the trace of each rank, then all together; or each file, if not all can be read as ranks."""
    title = printable(str(place.relative_to(root) if place != root else place.resolve().name))
    try:
        job = ranks(place)
    except TraceError as error:
        files = of_run(place) if place.is_dir() else []
        if len(files) < 2:
            yield title, error
        else:
            yield from (each for file in files for each in _traces(file, root))
        return
    ranked = all(trace.spans[0].rank is not None for trace in job.values())
    for name, trace in job.items():
        yield f"{title}, {printable(name)}" if ranked or len(job) > 1 else title, trace
    if ranked and len(job) > 1:
        yield f"{title}, {len(job)} ranks together", job


def _steps(trace: Trace) -> list[str]:
    try:
        table = breakdown(trace)
    except NoSteps:
        return ["The trace marks no training steps, so their content is unknown: profiler.step() was not called."]
    except SeveralRecordings as error:
        return [_paragraph(f"{type(error).__name__}: {error}")]
    total = table.attrs["total"]
    times = table.sum(axis="columns")
    spread = f" ({_time(times.min())} to {_time(times.max())})" if times.max() > times.min() else ""
    loading = percent(table["DataLoader"].sum() / total)
    shares = [f"{PLAIN_NAMES[name]} {percent(value / total)}" for name, value in table.sum().items() if value > 0]
    return [
        f"steps      {len(table)}, on average {_time(times.mean())}{spread}; loading took {loading} of the time",
        _paragraph(f"in a step  {', '.join(shares)}", " " * 11),
    ]


def _accelerators(trace: Trace) -> list[str]:
    """Return the paragraphs on the accelerators; without accelerators, on the operators."""
    try:
        used = accelerators(trace)
    except NoAccelerator as error:
        table = top_operators(trace, TOP)
        unknown = [str(error)] if any(span.devices for span in trace.spans) else []
        return [*([] if table.empty else ["", _operators(table)]), *_unknown(unknown)]
    tables = [_used(used), _gaps(gaps(trace)), _kernels(kernels(trace, TOP))]
    return [*(line for table in tables for line in ("", table)), *_unknown(used.attrs["unknown"])]


def _used(table: pd.DataFrame) -> str:
    titles = ["utilization", "SM efficiency", "occupancy", "Tensor Cores"]
    shown = table[["utilization", "sm_efficiency", "occupancy", "tensor_core_share"]].map(percent)
    shown = shown.set_axis(titles, axis="columns").assign(kernels=table["kernels"].map("{:,}".format))
    names = table["name"].fillna("").items()
    return _table("GPU", shown.set_axis([f"{device}  {_name(name)}" for device, name in names]))


def _gaps(table: pd.DataFrame) -> str:
    columns = {
        "of the time": table["share"].map(percent),
        "median": table["median"].map(_time),
        "longest": table["longest"].map(_time),
        **{name: (table[name] / table["total"]).map(percent) for name in MEANWHILE},
        "in the longest": table["in_longest"].fillna("").map(lambda name: _name(name, 21)),
    }
    names = [f"GPU {device}: {count:,}" for device, count in table["count"].items()]
    return _table("gaps", pd.DataFrame(columns).set_axis(names))


def _kernels(table: pd.DataFrame) -> str:
    columns = {
        "total": table["Total Duration (us)"].map(_time),
        "share": table["Share"].map(percent),
        "calls": table["Calls"].map("{:,}".format),
        "Tensor Cores": table["Tensor Cores Used"].map({True: "yes", False: "no"}),
        "launched by": table["Operator"].astype(object).fillna("unknown").map(lambda name: _name(name, 26)),
    }
    return _table("kernel", pd.DataFrame(columns).rename(short))


def _operators(table: pd.DataFrame) -> str:
    columns = {
        "by itself": table["Host Self Duration (us)"].map(_time),
        "in total": table["Host Total Duration (us)"].map(_time),
        "calls": table["Calls"].map("{:,.0f}".format),
    }
    return _table("operator", pd.DataFrame(columns).rename(_name))


def _unknown(reasons: Iterable[str]) -> list[str]:
    lines = [_paragraph(f"Unknown: {reason}") for reason in reasons]
    return ["", *lines] if lines else []


def _table(head: str, shown: pd.DataFrame) -> str:
    """Return a table as text; its index has the title `head`."""
    return str(shown.rename(columns=" {}".format).rename_axis(index=None, columns=head).to_string())


def _name(name: str, width: int = 44) -> str:
    """Return a printable name; a long name is cut in the middle, since kernels differ at both ends."""
    name = printable(name)
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[head + 1 - width :]}"


def _paragraph(text: str, indent: str = "  ") -> str:
    """Return a text in printable lines, the further ones indented."""
    return textwrap.fill(
        printable(text), WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _time(us: float) -> str:
    """Return a time with its unit: "8.5 µs", "85 µs", "85.0 ms", "850 ms"; "–" for NaN."""
    if math.isnan(us):
        return "–"
    if us < 1e3:
        return f"{us:.0f} µs" if us >= 10 else f"{us:.1f} µs"
    value, unit = (us / 1e3, "ms") if us < 1e6 else (us / 1e6, "s")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
