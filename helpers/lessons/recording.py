"""Records a reference for others: executes the notebooks' cores, each several times, and keeps their rungs' results.

``python -m helpers record --out DIR`` makes this folder:

==================== ====================================================================
``scoreboard.jsonl`` a result for each rung: means and intervals over the processes
``processes.jsonl``  every result of every process; an interrupted recording goes on
``machine.json``     what they were measured on
``README.md``        all of it, to read
``ladder.png``       the results as a figure
``waiting.png``      the same of the rungs that load data, 01 to 07
``calculated.png``   what the later rungs do on a GPU, calculated; the same on every machine
``traces/``          a folder for each rung, with the trace that its notebook recorded first
==================== ====================================================================
"""

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

from helpers import config, figures
from helpers.lessons import execute, measured
from helpers.results import hardware, scoreboard
from helpers.results.scoreboard import Result
from stepscope import traces
from stepscope.base import confidence, staging
from stepscope.timing import profiling

PROCESSES = 3  # an interval over rounds covers its own process only
_ALL, _MACHINE, _RESULTS = "processes.jsonl", "machine.json", "scoreboard.jsonl"
_CHANGES = {"date", "clocks"}  # may change on the same machine


def record(out: Path, notebooks: Sequence[Path] | None = None, processes: int = PROCESSES) -> list[str]:
    """Execute the core of each notebook that adds a rung, several times, and write the reference.

    An interrupted recording of this machine goes on in `out`: results of a notebook in a process are not measured
    again. `notebooks` are by default, or if empty, all; on a machine with a short time limit, name one after the other.
    `processes`, 1 or more, is how often each is executed.

    Returns what could not be recorded, and why: a cell of the notebook raised an error. Raises `config.CourseError` if
    the folder holds a recording of another machine or with other settings.
    """
    if processes < 1:
        raise config.CourseError(f"Expected to execute each notebook once or more, found {processes} processes.")
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    _same_machine(out)
    failed = []
    for process in range(processes):
        for notebook in notebooks or execute.all_notebooks():
            if "scoreboard.add(" in notebook.read_text(encoding="utf-8"):
                try:
                    _measure(notebook, process, out)
                except execute.NotebookFailed as error:
                    failed.append(str(error))
    results = [_joined(results) for results in _by_rung(out).values()]
    staging.write(out / _RESULTS, scoreboard.lines(results))
    draw(out)
    staging.write(out / "README.md", _page(out, results))
    return failed


def draw(out: Path) -> None:
    """Draw the figures of a reference from its scoreboard; nothing is recorded."""
    results = scoreboard.ladder(out / _RESULTS)
    if results:
        figures.ladder(results).save(out / "ladder.png")
        figures.on_a_gpu().save(out / "calculated.png")
    if loading := [result for result in results if result.rung[:2] <= "07"]:
        figures.ladder(loading).save(out / "waiting.png")


def _measure(notebook: Path, process: int, out: Path) -> None:
    """Execute a notebook on top of the earlier ones' results, and keep its own results and traces."""
    path = out / _ALL
    stored = scoreboard.read(path)
    runs_so_far = [results[process] for results in _by_rung(out).values() if len(results) > process]
    if any(result.rung[:2] == notebook.stem[:2] for result in runs_so_far):
        return
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, COURSE_RUNS=folder):
        staging.write(scoreboard.own_path(), scoreboard.lines(runs_so_far))
        execute.execute(notebook, None, core=True)
        added = scoreboard.read()[len(runs_so_far) :]
        for result in added:
            kept = out / scoreboard.trace_folder(result.rung)
            written = sorted(Path(folder, result.trace).glob("*.pt.trace.json.gz")) if result.trace else []
            if written and not kept.exists():
                with staging.folder(kept) as staged:
                    traces.slim(written[0], staged / "reference.pt.trace.json.gz")  # it was named after the machine
    code = measured.digest(notebook)
    added = [replace(result, code=code) for result in added]
    staging.write(path, scoreboard.lines([*stored, *added]), durable=True)


def _by_rung(out: Path) -> dict[str, list[Result]]:
    """Return the results of each rung, one per process, in the order of the notebooks."""
    results: dict[str, list[Result]] = {}
    for result in sorted(scoreboard.read(out / _ALL), key=lambda result: result.rung[:2]):
        results.setdefault(result.rung, []).append(result)
    return results


def _joined(results: list[Result]) -> Result:
    """Return the mean of a rung's results, with intervals over the processes."""
    if len(results) == 1:
        return results[0]
    idle = [result.device_idle for result in results if result.device_idle is not None]  # unknown without kernels
    compared = [result for result in results if result.ratio]  # not where a rung was its own baseline
    ratios = [result.ratio.mean for result in results if result.ratio]
    before = [share for result in compared if (share := result.baseline_loading_share) is not None]
    return replace(
        (compared or results)[0],
        rate=confidence.geometric(result.rate.mean for result in results),
        ratio=confidence.geometric(ratios) if ratios else None,
        step_ms=statistics.fmean(result.step_ms for result in results),
        loading_share=statistics.fmean(result.loading_share for result in results),
        device_idle=statistics.fmean(idle) if idle else None,
        baseline_loading_share=statistics.fmean(before) if before else None,
        processes=len(results),
    )


def _same_machine(out: Path) -> None:
    path, now = out / _MACHINE, hardware.describe()
    if not path.exists():
        staging.write(path, json.dumps(now, indent=2) + "\n")
    before = json.loads(path.read_text(encoding="utf-8"))
    other = [key for key in before.keys() | now.keys() if key not in _CHANGES and before.get(key) != now.get(key)]
    if other:
        found = ", ".join(f"{key} {before.get(key)!r} instead of {now.get(key)!r}" for key in sorted(other))
        raise config.CourseError(
            f"{out} holds another recording, with {found}. Name another folder, or delete this one."
        )


def _page(out: Path, results: list[Result]) -> str:
    """Return the reference as a page of Markdown."""
    machine = json.loads((out / _MACHINE).read_text(encoding="utf-8"))
    clocks = (machine["clocks"] or {}).items()
    machine["clocks"] = ", ".join(f"{kind} {mhz:,} MHz" for kind, mhz in clocks) or None
    rows = []
    for result in results:
        rate = f"{result.rate.mean:,.0f} ({result.rate.lowest:,.0f} to {result.rate.highest:,.0f})"
        times = f"{result.step_ms:.2f} | {result.loading_share:.1%} | {scoreboard.percent_or_dash(result.device_idle)}"
        size = profiling.size_kb(out / scoreboard.trace_folder(result.rung))
        rows.append(f"| {result.rung} | {rate} | {times} | {scoreboard.ratio_text(result) or '–'} | {size:.0f} kB |")
    lines = [
        f"# Recorded on {machine['device']}",
        "",
        "| rung | images/s (95% interval) | ms a step | host waits | device idle | ratio (95% interval) | trace |",
        "|---|---|---|---|---|---|---|",
        *rows,
        "",
        "Each rung is what its notebook measured, in interleaved rounds. Where several processes measured it, the "
        f"figures are their means, and the intervals are over the processes; `{_ALL}` has all of them. An interval "
        "over the rounds of one process speaks of that process only.",
        "",
        "| measured on | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in machine.items() if value is not None),
        "",
        "What a step is, and what it is fed:",
        "",
        *(f"- {step}; {data}" for step, data in dict.fromkeys((result.step, result.data) for result in results)),
    ]
    return "\n".join(lines) + "\n"
