"""Watches a script or a loop and prints its diagnosis: ``stepscope run``, `stepscope.watch` and the callbacks.

The command puts a folder first in the script's PYTHONPATH, and Python imports the folder's ``sitecustomize`` at the
start. This module lets a recorder see each batch of a DataLoader and each step of an optimizer. The script's processes
report facts, and the command's process makes the diagnosis.
"""

from __future__ import annotations

import atexit
import errno
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope import rules, thresholds
from stepscope.base import staging, terminal
from stepscope.facts import Facts, saving
from stepscope.facts.job import Job
from stepscope.observe import hooks, launch
from stepscope.report import documents
from stepscope.report.findings import Diagnosis
from stepscope.traces import files as recorded

if TYPE_CHECKING:
    from stepscope.observe.watched import ScriptRecorder

NOTHING = (
    "Nothing was seen: the script used no batch of a torch DataLoader, and no step of an optimizer of torch.optim; or "
    "a signal or os._exit ended the training process before its diagnosis."
)


def say(text: str) -> None:
    """Print a text to stderr, if it is open."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"\n{text}", file=sys.stderr, flush=True)


def begin(steps: int, folder: str | Path) -> ScriptRecorder | None:
    """Watch the loops of this process from now on, and print the diagnosis to stderr when it is ready.

    Return the recorder; None if the process is watched already. Raises ValueError if there is no step to time.
    """
    if hooks.watched():
        return None
    announce = Announcement()

    def report(found: dict[str, Any]) -> None:
        if "so_far" in found:
            announce([found])
            return
        diagnosis = _diagnosed(found, Path(folder))
        say(diagnosis if isinstance(diagnosis, str) else diagnosis.text(terminal.colours(sys.stderr)))

    recorder = _recorder(steps, folder, report)
    hooks.install_here(recorder)
    return recorder


@contextmanager
def watching(steps: int, folder: str | Path) -> Iterator[list[Diagnosis | str]]:
    """Watch the loops of this process within the block; the list gets the diagnosis, or why there is none.

    Raises ValueError if there is no step to time.
    """
    found = list[Diagnosis | str]()

    def report(reported: dict[str, Any]) -> None:
        if "so_far" not in reported:
            found.append(_diagnosed(reported, Path(folder)))

    recorder = _recorder(steps, folder, report)
    try:
        with hooks.watching(recorder):
            yield found
    finally:
        atexit.unregister(recorder.end)
        try:
            recorder.end()
        except Exception as error:  # of ours: the user's cell must not fail
            found.append(f"{type(error).__name__}: {error}")


def _recorder(steps: int, folder: str | Path, report: Callable[[dict[str, Any]], None]) -> ScriptRecorder:
    from stepscope.observe.watched import ScriptRecorder  # here: torch takes seconds, and the command does not need it

    return ScriptRecorder(steps, Path(folder), report)


def _diagnosed(found: dict[str, Any], folder: Path) -> Diagnosis | str:
    """Return the diagnosis of a report, and write its facts; or return the problem that prevents a diagnosis."""
    if "facts" not in found:
        return str(found["problem"])
    facts = _facts(found)
    place = folder if found["ranks"] == 1 else folder / f"rank_{found['rank']}"
    with _whose_errors_are_printed():
        saving.write(facts, place / saving.NAME)
    diagnosis = rules.diagnose(facts)
    return diagnosis.at(place) if facts.profile else diagnosis


def run(command: Sequence[str], *, steps: int, folder: Path, stop: bool, files: Mapping[str, Path]) -> int:
    """Run a script with its arguments, print its diagnosis to stderr as soon as it is ready, and return its status.

    `command` is a Python file or ``-m`` and a module, with arguments; or a program that starts a Python file, such as
    ``torchrun``. `steps` is the number of steps to time, `folder` is for traces and facts, and `files` for the results:
    see `write`. `stop` ends the script after its diagnosis, with the status 0, or 1 if an error ended the diagnosis. If
    a signal ends the script, the status is 128 plus the signal's number, as in a shell. Raises `FileNotFoundError` if
    the program or the folder of a file does not exist, `FileExistsError` if `folder` contains other files than
    recordings, and OSError if a file cannot be written.
    """
    recorded.refuse_others(folder)
    refuse_unwritable(files)

    def show_all(reports: launch.Reports, traces: list[Path], status: int | None) -> None:
        show(reports, traces, folder, files, status, shlex.join(command))

    announce = Announcement("the script is stopped" if stop else "the script goes on")
    return launch.run(command, show_all, announce, steps=steps, stop=stop)


def refuse_unwritable(files: Mapping[str, Path]) -> None:
    """Raise OSError if a file cannot be written, before the script runs for hours."""
    for file in files.values():
        if not file.parent.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", str(file.parent))
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, "expected a file, found a folder", str(file))
        if not os.access(file.parent, os.W_OK):
            raise PermissionError(errno.EACCES, "this folder cannot be written", str(file.parent))


def write(files: Mapping[str, Path], document: str, title: str) -> None:
    """Write the results of a command, as a text of JSON, into the files that `files` names.

    Its keys are ``"json"``, ``"page"`` and ``"markdown"``.
    """
    from stepscope import report

    renders = {"page": report.page, "markdown": report.markdown}
    for kind, file in files.items():
        text = renders[kind](report.parse(document, title), f"stepscope: {title}") if kind in renders else document
        staging.write(file, text.encode(errors="replace"))


class Announcement:
    """Says on stderr when the diagnosis is expected: once if it takes long, on a terminal in a line of progress."""

    def __init__(self, then: str = "the script goes on"):
        self.then, self.said = then, ""

    def __call__(self, reports: launch.Reports) -> None:
        """Say what reports expect, unless it is said already."""
        so_far = (report["so_far"] for report in reports if "so_far" in report)
        last = max(so_far, key=itemgetter("seconds_left"), default=None)
        if last is None:
            return
        left, seen, seconds = last["steps_left"], last["steps_seen"], last["seconds_left"]
        if terminal.shows(sys.stderr):
            text = f"stepscope: step {seen} of about {seen + left}; then {self.then}  "
            if text != self.said:  # the script may have written meanwhile
                terminal.progress(sys.stderr, text)
                self.said = text
        elif not self.said and seconds >= thresholds.ANNOUNCED_S:
            self.said = f"stepscope: about {left} more steps until the diagnosis, or {seconds:.0f} s."
            say(self.said)


def show(
    reports: launch.Reports,
    traces: list[Path],
    folder: Path,
    files: Mapping[str, Path],
    status: int | None = None,
    script: str = "",
) -> None:
    """Print the diagnoses of a script's processes, and write facts, traces and the requested files; see `write`.

    `status` is the exit status of a script that ended before its diagnosis.
    """
    nothing = f"The script ended with status {status}. {NOTHING}" if status else NOTHING
    kept, several = list[dict[str, Any]](), any(report["ranks"] > 1 for report in reports)
    job = _written(reports, traces, folder, several) if traces else None
    for report in reports:
        result = {name: value for name, value in report.items() if name not in ("here", "so_far")}
        result |= {"script": script}
        text = report.get("problem", "")
        if "facts" in report:
            facts = _facts(report)
            diagnosis = rules.diagnose(facts, alone=not isinstance(job, Job))
            if facts.profile is not None:
                diagnosis = diagnosis.at(folder)
            text, result["diagnosis"] = diagnosis.text(terminal.colours(sys.stderr)), diagnosis.as_json()
            if facts.machine is not None:
                machine = facts.machine
                result["machine"] = {"device": machine.device, "cores": machine.cores, "torch": machine.torch}
        say(f"Rank {report['rank']}. {text}" if several else text)
        kept.append(result)
    if not reports:
        say(nothing)
    if job is not None:
        together, ranks = rules.diagnose(job), reports[0]["ranks"]
        which = "All ranks" if len(reports) == ranks else f"{len(reports)} of {ranks} ranks"
        say(f"{which} together. {together.text(terminal.colours(sys.stderr))}")
        kept.append({"rank": None, "ranks": ranks, "diagnosis": together.as_json(), **saving.as_json(job)})
    try:
        write(files, documents.document("run", kept or [{"problem": nothing}]), script)
    except Exception as error:  # the script and its exit status must not change
        say(f"{type(error).__name__}: {error}")


def _written(reports: launch.Reports, traces: list[Path], folder: Path, several: bool) -> Facts | Job | None:
    """Write traces and facts into the folder; return the facts about all ranks, None if there is one, or an error."""
    with _whose_errors_are_printed():
        recorded.refuse_others(folder)  # again: the script may have put its own files there
        with staging.folder(folder, replace=True) as staged:
            for trace in traces:
                shutil.copy(trace, staged)
            for report in reports:
                if "facts" in report:
                    rank = f"rank_{report['rank']}." if several else ""
                    saving.write(_facts(report), staged / f"{rank}{saving.NAME}")
        if len(reports) > 1 and all("facts" in report for report in reports):
            from stepscope.diagnosis import facts_of_ranks  # here: it needs pandas, and most scripts are one process

            job = facts_of_ranks(folder)
            if isinstance(job, Job):
                hosts = [host for report in reports if (host := _facts(report).host)]
                job = replace(job, backward=next((host.backward_line for host in hosts if host.backward_line), ""))
            saving.write(job, folder / saving.JOB)
            return job
    return None


def _facts(report: dict[str, Any]) -> Facts:
    facts = saving.of_json({"version": saving.VERSION, "facts": report["facts"]})
    assert isinstance(facts, Facts)
    return facts


@contextmanager
def _whose_errors_are_printed() -> Iterator[None]:
    """Print errors in writing results, and suppress them: the script and its exit status must not change."""
    try:
        yield
    except (OSError, recorded.TraceError) as error:
        say(f"{type(error).__name__}: {error}")
