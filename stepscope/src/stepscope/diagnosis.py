"""Finds the bottleneck of a training loop, and suggests changes: for a running loop, or for a recorded trace.

`diagnose` runs a loop: it examines the loader, times some steps with the stopwatch, and records steps with the
profiler. `of_trace` reads a recorded trace, `of_ranks` the traces of all ranks of a job, `of_facts` the facts that a
run wrote beside its trace. ``stepscope diagnose PATH`` prints these diagnoses for a folder.

Measurements become facts (`stepscope.observe`), facts become findings (`stepscope.rules`), and findings become text, a
page or a file (`stepscope.report`). Each finding names a topic, such as "mixed precision". `Diagnosis.linked` adds
links to pages about the topics.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from stepscope import rules, traces
from stepscope.base.wording import printable, without_paths
from stepscope.facts import Facts, saving
from stepscope.facts.job import Job
from stepscope.report.findings import Diagnosis, Finding
from stepscope.traces import files, report

__all__ = ["Diagnosis", "Finding", "diagnose", "each", "of_facts", "of_ranks", "of_trace", "show"]


def diagnose(
    loader: Iterable[Any], step: Callable[..., object], *, steps: int = 20, folder: str | Path = "diagnosis"
) -> Diagnosis:
    """Find the bottleneck of a training loop.

    The loop runs unchanged: first with the stopwatch, then with the profiler, then while a second thread samples the
    running line each millisecond. `step` is called some dozens of times, or hundreds if some calls take far longer than
    most, and trains the model. Some items of the dataset are loaded in this process, to time them. If a setting is
    known to slow steps, further steps run with another setting. If a batch has fewer than eight items, further steps
    run with a batch that repeats the items eight times; such a step may fail half-way, so use a model that you can
    discard. On return all workers have ended.

    The profiler's trace and the facts stay in `folder`, where they replace the results of the previous diagnosis.

    Parameters
    ----------
    loader : iterable
        A DataLoader, or another iterable that can be iterated again; only items of a DataLoader are timed.
    step : callable
        One training step. It is called as ``step(*batch)`` if the batch is a tuple or a list, such as images and
        labels, otherwise, as with a dict, as ``step(batch)``; see `timing.call`.
    steps : int
        Number of steps to time; 1 or more.
    folder : str or Path
        Folder for the profile and the facts: by default ``diagnosis`` in the current folder.

    Raises
    ------
    Exception
        Any error of the loader or the step; an error in a worker has the worker's traceback.
    timing.WorkerDied
        If a worker is killed or exits.
    ValueError
        If the loader yields no batches, or no batches when it is iterated again; or if there is no step to time.
    RuntimeError
        If a profiler is active already, or if several processes train together.
    FileExistsError
        If `folder` contains other files than recordings.

    Examples
    --------
    >>> diagnosis.diagnose(loader, lambda images, labels: train(images, labels))  # doctest: +SKIP
    """
    from stepscope.observe import loop  # here: importing torch takes seconds, and the command does not need torch

    folder = Path(folder)
    facts = loop.observe(loader, step, steps, folder)
    saving.write(facts, folder / saving.NAME)
    return _concluded(facts, folder)


def of_facts(file: str | Path) -> Diagnosis:
    """Return the diagnosis that follows from a file of facts, such as ``facts.json`` beside a trace.

    Raises `saving.FactsError` if the file has no facts, or facts of another version, and OSError if it cannot be read.
    """
    return _concluded(saving.read(Path(file)), Path(file).parent)


def _concluded(facts: Facts | Job, folder: Path) -> Diagnosis:
    found = rules.diagnose(facts)
    return found.at(folder) if isinstance(facts, Facts) and facts.loop and facts.profile else found


def of_trace(path: str | Path | traces.Trace) -> Diagnosis:
    """Find the bottleneck of a training loop in its trace, recorded with PyTorch 1.12 or newer.

    `path` may be the folder of a run. Raises TraceError if there is no trace, if it cannot be read, or if it contains
    several processes or recordings.
    """
    return rules.diagnose(facts_of_trace(traces.load(path)))


def of_ranks(path: str | Path | Mapping[str, traces.Trace]) -> Diagnosis:
    """Find the bottleneck of a job: communication, or waiting for a late rank.

    `of_trace` diagnoses each rank separately.

    Parameters
    ----------
    path : str, Path or mapping of str to Trace
        The folder with the traces of all ranks, or the result of `traces.ranks`.

    Raises TraceError if there is no trace, if a trace cannot be read, or if two traces belong to the same rank.
    """
    return rules.diagnose(facts_of_ranks(path))


def facts_of_trace(trace: traces.Trace) -> Facts:
    """Return the facts that a trace alone contains."""
    from stepscope.observe import device, host, profile  # here: tables need pandas

    try:
        trace, stall = profile.usual(trace)
        recorded = profile.read(trace, stall)
    except traces.NoSteps as error:
        return Facts(problem=without_paths(str(error)))
    return Facts(recorded, host.read(trace, recorded), device.read(trace, recorded))


def facts_of_ranks(path: str | Path | Mapping[str, traces.Trace]) -> Facts | Job:
    """Return the facts of all ranks together; see `of_ranks`."""
    from stepscope.observe import job  # here: tables need pandas

    ranks = path if isinstance(path, Mapping) else traces.ranks(path)
    if len(ranks) < 2:
        return Facts(
            problem="There is the trace of one rank only. Let each rank record into the same folder: "
            'tensorboard_trace_handler(folder, worker_name=f"rank_{rank}").'
        )
    try:
        return job.read(ranks)
    except traces.NoSteps as error:
        return Facts(problem=without_paths(str(error)))


def show(path: str | Path) -> bool:
    """Print each diagnosis at `path`, and the error of each file that cannot be read.

    Parameters
    ----------
    path : str or Path
        A trace, a file of facts, the folder of a run, or a folder of such folders. If a folder contains facts, these
        are read instead of its traces. The ranks of a job are diagnosed one by one, and then together.

    Returns whether all files could be read; raises NoTraces if there are none.
    """
    readable = True
    for title, found, folder in _each(path):
        if isinstance(found, Exception):
            readable, text = False, printable(f"{type(found).__name__}: {found}")
            text = textwrap.fill(text, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        else:
            text = str(_concluded(found, folder))
        print(f"{title}\n{textwrap.indent(text, '  ')}\n", flush=True)
    return readable


def each(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield each diagnosis that `show` prints, with its facts, in the form that `stepscope.report.document` takes.

    Each rank of a job is one result, and all ranks together are another result. Raises the errors of `show`.
    """
    for title, found, folder in _each(path):
        if isinstance(found, Exception):
            yield {"trace": title, "problem": str(found)}
        else:
            yield {"trace": title, "diagnosis": _concluded(found, folder).as_json(), **saving.as_json(found)}


def _each(path: str | Path) -> Iterator[tuple[str, Facts | Job | Exception, Path]]:
    """Yield the title, facts or error, and folder of each file of facts, and of each trace without facts."""
    path = Path(path)
    if path.is_file() and path.name.endswith(saving.NAME):
        yield path.name, _attempted(saving.read, path), path.parent
        return
    known = {file.parent for file in path.rglob(f"*{saving.NAME}") if saving.of_folder(file.parent)}
    try:
        recorded = set(files.runs(path) if path.is_dir() else [path])
    except files.NoTraces:
        if not known:
            raise
        recorded = set()
    for folder in sorted(known | recorded):
        if folder not in known:
            for title, trace in report.of_run(folder, path):
                yield title, trace if isinstance(trace, Exception) else _attempted(_facts, trace), folder
            continue
        title = printable(str(folder.relative_to(path)) if folder != path else folder.resolve().name)
        for file in saving.of_folder(folder):
            rank = "all ranks together" if file.name == saving.JOB else file.name.removesuffix(saving.NAME).rstrip(".")
            yield f"{title}, {rank}" if rank else title, _attempted(saving.read, file), folder


def _attempted(read: Callable[[Any], Facts | Job], place: object) -> Facts | Job | Exception:
    try:
        return read(place)
    except (traces.TraceError, saving.FactsError) as error:
        return error


def _facts(trace: traces.Trace | traces.Ranks) -> Facts | Job:
    return facts_of_trace(trace) if isinstance(trace, traces.Trace) else facts_of_ranks(trace)
