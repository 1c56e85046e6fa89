"""The content of traces as text for a shell: ``stepscope traces PATH``."""

import math
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd

from stepscope.base.wording import PLAIN_NAMES, milliseconds, percent, printable
from stepscope.traces.alignment import Ranks, ranks
from stepscope.traces.events import Trace, marks
from stepscope.traces.exposed_communication import communication, communication_by_kind
from stepscope.traces.files import NoAccelerator, NoSteps, SeveralRecordings, TraceError, runs
from stepscope.traces.files import of_run as files_of_run
from stepscope.traces.idle_time import MEANWHILE, gaps
from stepscope.traces.operators import top_operators
from stepscope.traces.step_times import breakdown
from stepscope.traces.utilization import accelerators, kernel_classes, kernels

WIDTH = 110  # characters in a line
TOP = 5  # kernels or operators


def show(path: str | Path) -> bool:
    """Print the content of each trace at `path`, or why the trace cannot be read.

    `path` is a trace file, the folder of a run, or a folder of such folders. For processes that trained together, each
    process is printed, then the cost of their communication.

    Returns whether all traces could be read. Raises NoTraces if there are none.
    """
    path, readable = Path(path), True
    for place in runs(path) if path.is_dir() else [path]:
        for title, found in of_run(place, path):
            if isinstance(found, TraceError):
                readable, described = False, _paragraph(f"{type(found).__name__}: {found}")
            else:
                described = together(found) if isinstance(found, Ranks) else text(found)
            print(f"{title}\n{textwrap.indent(described, '  ')}\n", flush=True)
    return readable


def text(trace: Trace) -> str:
    """Return the content of a trace in lines of text that are safe for a terminal."""
    lines = _steps(trace)
    try:
        used = accelerators(trace)
        classes = _classes(kernel_classes(trace), sum(marks(span).height for span in trace.spans))
        lines += ["", _used(used), "", _gaps(gaps(trace)), "", classes, "", _kernels(kernels(trace, TOP))]
        unknown = used.attrs["unknown"]
    except NoAccelerator as error:
        table = top_operators(trace, TOP)
        lines += [] if table.empty else ["", _operators(table)]
        unknown = [str(error)] if any(span.devices for span in trace.spans) else []
    if unknown:
        lines += ["", *(_paragraph(f"Unknown: {reason}") for reason in unknown)]
    return "\n".join(lines)


def together(job: Ranks) -> str:
    """Return as text the mean cost of communication in a step for each rank and each kind, and the straggler."""
    try:
        table = communication(job)
    except (NoSteps, SeveralRecordings) as error:
        return _paragraph(str(error))
    if not table["collectives"].any():
        return _paragraph("The steps hold no record of communication, so its cost is unknown.")
    columns = {
        "all of it": table["step"].map(_cost),
        "computing": table["compute"].map(_cost),
        **{name: table[name].map(_cost) for name in ("overlapped", "transfer", "waiting")},
        "efficiency": table["efficiency"].map(percent),
        "operations": table["collectives"].map("{:,.3g}".format),
        "MB": table["megabytes"].map(_size),
    }
    late, waits = table.attrs["straggler"], milliseconds(table.attrs["late_ms"])
    said = [f"The other ranks have {waits} more exposed communication in a step than {late}, which is late."]
    if late is None:
        said = ["No rank is late by more than chance."] if len(table) > 1 else []
    said += [f"Not all ranks took part in the same operations. {sentence}" for sentence in table.attrs["unequal"]]
    ranked, kinds = _table("in a step", columns, table.index.map(printable)), _kinds(communication_by_kind(job))
    return "\n".join([ranked, "", kinds, "", *map(_paragraph, said)])


def _kinds(table: pd.DataFrame) -> str:
    columns = {
        "operations": table["operations"].map("{:,.3g}".format),
        "MB": table["megabytes"].map(_size),
        "all of it": table["time"].map(_cost),
        "exposed": table["exposed"].map(_cost),
        "group": pd.Series([_name(group, 40) or "unknown" for _, group in table.index], table.index),
    }
    return _table("in a step of a rank", columns, [_name(operation) for operation, _ in table.index])


def short(kernel: str, width: int = 44) -> str:
    """Return a printable kernel name without result, arguments and PyTorch's namespaces, cut to `width` characters."""
    for part in ("at::native::", "(anonymous namespace)::"):
        kernel = kernel.replace(part, "")
    return _name(kernel.removeprefix("void ").partition("(")[0].strip() or kernel, width)


def of_run(place: Path, root: Path) -> Iterator[tuple[str, Trace | Ranks | TraceError]]:
    """Yield the title and the trace of each rank in a run, then the job; or each file, if the run is not one job.

    The error of a job comes last if its ranks recorded more than once: which files belong together is not known.
    """
    title = printable(str(place.relative_to(root) if place != root else place.resolve().name))
    try:
        job = ranks(place)
    except TraceError as error:
        files = files_of_run(place) if place.is_dir() else []
        if len(files) < 2:
            yield title, error
        else:
            recorded = set[int | None]()
            for found in (each for file in files for each in of_run(file, root)):
                yield found
                recorded.update({found[1].spans[0].rank} if isinstance(found[1], Trace) else ())
            if isinstance(error, SeveralRecordings) and len(recorded) > 1:
                yield f"{title}, ranks together", error
        return
    ranked = all(trace.spans[0].rank is not None for trace in job.values())
    for name, trace in job.items():
        yield f"{title}, {printable(name)}" if ranked or len(job) > 1 else title, trace
    if ranked and len(job) > 1:
        yield f"{title}, {len(job)} ranks together", job


def _steps(trace: Trace) -> list[str]:
    try:
        table = breakdown(trace)
    except (NoSteps, SeveralRecordings) as error:
        return [_paragraph(str(error))]
    total = table.attrs["total"]
    times = table.sum(axis="columns")
    spread = f" ({_time(times.min())} to {_time(times.max())})" if times.max() > times.min() else ""
    loading = percent(table["DataLoader"].sum() / total)
    shares = [f"{PLAIN_NAMES[name]} {percent(value / total)}" for name, value in table.sum().items() if value > 0]
    return [
        f"steps      {len(table)}, on average {_time(times.mean())}{spread}; loading took {loading} of the time",
        _paragraph(f"in a step  {', '.join(shares)}", " " * 11),
    ]


def _used(table: pd.DataFrame) -> str:
    columns = {
        "utilization": table["utilization"].map(percent),
        "SM efficiency": table["sm_efficiency"].map(percent),
        "occupancy": table["occupancy"].map(percent),
        "Tensor Cores": table["tensor_core_share"].map(percent),
        "kernels": table["kernels"].map("{:,}".format),
    }
    return _table("GPU", columns, [f"{device}  {_name(name)}" for device, name in table["name"].fillna("").items()])


def _gaps(table: pd.DataFrame) -> str:
    columns = {
        "of the time": table["share"].map(percent),
        "median": table["median"].map(_time),
        "longest": table["longest"].map(_time),
        **{name: (table[name] / table["total"]).map(percent) for name in MEANWHILE},
        "in the longest": table["in_longest"].fillna("").map(lambda name: _name(name, 21)),
    }
    return _table("gaps", columns, [f"GPU {device}: {count:,}" for device, count in table["count"].items()])


def _classes(table: pd.DataFrame, steps: int) -> str:
    columns = {
        "in a step": (table["time"] / max(steps, 1)).map(_time),
        "share": table["share"].map(percent),
        "kernels": (table["kernels"] / max(steps, 1)).map("{:,.0f}".format),
    }
    return _table("kernels by class", columns, table.index)


def _kernels(table: pd.DataFrame) -> str:
    columns = {
        "total": table["Total Duration (us)"].map(_time),
        "share": table["Share"].map(percent),
        "calls": table["Calls"].map("{:,}".format),
        "Tensor Cores": table["Tensor Cores Used"].map({True: "yes", False: "no"}),
        "launched by": table["Operator"].astype(object).fillna("unknown").map(lambda name: _name(name, 26)),
    }
    return _table("kernel", columns, table.index.map(short))


def _operators(table: pd.DataFrame) -> str:
    columns = {
        "by itself": table["Host Self Duration (us)"].map(_time),
        "in total": table["Host Total Duration (us)"].map(_time),
        "calls": table["Calls"].map("{:,.0f}".format),
    }
    return _table("operator", columns, table.index.map(_name))


def _table(head: str, columns: dict[str, pd.Series], rows: Iterable[str]) -> str:
    """Return columns by their titles as text; `head` is the title of the row names."""
    shown = pd.DataFrame(columns).set_axis([*rows]).rename(columns=" {}".format)
    lines = shown.rename_axis(index=None, columns=head).to_string().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _name(name: str, width: int = 44) -> str:
    """Return a printable name; a long name is cut in the middle, since kernels differ at both ends."""
    name = printable(name)
    if len(name) <= width:
        return name
    head = (width - 1) * 2 // 3
    return f"{name[:head]}…{name[head + 1 - width :]}"


def _paragraph(text: str, indent: str = "  ") -> str:
    """Return a text in printable lines; lines after the first have an `indent`."""
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


def _size(megabytes: float) -> str:
    return "–" if math.isnan(megabytes) else f"{megabytes:,.3g}"


def _cost(ms: float) -> str:
    """Return ms with their unit as `_time` does; "0" for half a µs or less."""
    return _time(ms * 1e3) if ms > 5e-4 else "0"
