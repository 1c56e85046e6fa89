"""The command ``stepscope run``: starts a script, and prints what its processes found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from stepscope.base import staging
from stepscope.script import hooks, say
from stepscope.traces import files

HOOK = Path(__file__).parent / "hook"
LOOK = 0.2  # seconds between two looks for results
NOTHING = (
    "Nothing was seen: no batch of a torch DataLoader, and no step of an optimizer of torch.optim; or a signal, or "
    "os._exit, ended the process that trains before its diagnosis."
)
# What others send to the script and to this process alike, such as Slurm before a job's time is over: the script acts
FOR_THE_SCRIPT = ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")


def run(command: Sequence[str], *, steps: int, folder: Path, stop: bool, json_file: Path | None) -> int:
    """Run a script with its arguments, print its diagnosis to stderr as soon as it is ready, and return its status.

    `command` is a Python file or ``-m`` and a module, with arguments; or a program that starts one, such as
    ``torchrun``. `steps` are timed, `folder` is where the profile goes, `json_file` gets the results, too, and `stop`
    ends the script after its diagnosis: with the status 0, or 1 if an error ended the diagnosis. If a signal ends the
    script, the status is 128 plus the signal's number, as in a shell. Raises `FileNotFoundError` if there is no such
    program, and `FileExistsError` if `folder` holds files that are not of a recording.
    """
    files.refuse_others(folder)
    with tempfile.TemporaryDirectory(prefix="stepscope-") as reports:
        options = {"steps": steps, "folder": str(folder.absolute()), "reports": reports, "stop": stop}
        path = os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {"PYTHONPATH": path, hooks.OPTIONS: json.dumps(options)}
        process = subprocess.Popen(_command(command), env=environment)
        ignored = [getattr(signal, name) for name in FOR_THE_SCRIPT if hasattr(signal, name)]
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
        handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        found: list[dict] = []
        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
                if not found and (found := _complete(Path(reports))):
                    _show(found, Path(reports), folder, json_file)
        except BaseException:  # such as a full disk: the script ends by itself
            process.wait()
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if not found:
            _show(_reports(Path(reports)), Path(reports), folder, json_file)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _command(command: Sequence[str]) -> list[str]:
    """Return the program to start, and its arguments."""
    if command[0] == "-m" or command[0].endswith(".py"):
        return [sys.executable, *command]
    beside = shutil.which(command[0], path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if beside is None:
        raise FileNotFoundError(2, "no such program", command[0])
    return [beside, *command[1:]]


def _reports(folder: Path) -> list[dict]:
    """Return the reports of the script's processes so far, in the order of ranks."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda report: report["rank"])


def _complete(folder: Path) -> list[dict]:
    """Return the diagnoses of all ranks of this machine; an empty list as long as one is missing."""
    reports = [report for report in _reports(folder) if "diagnosis" in report]
    return reports if reports and len(reports) >= reports[0]["here"] else []


def _show(found: list[dict], reports: Path, folder: Path, json_file: Path | None) -> None:
    """Print the results of a script's processes, and write their traces and the requested file."""
    texts = [report.get("text") or report["problem"] for report in found]
    kept = [{name: value for name, value in report.items() if name not in ("text", "here")} for report in found]
    if found and found[0]["ranks"] > 1:
        texts = [f"Rank {report['rank']}. {text}" for report, text in zip(found, texts, strict=True)]
    say("\n\n".join(texts or [NOTHING]))
    recorded = [*reports.glob("traces/**/*.pt.trace.json*")]
    if recorded:
        with _whose_errors_are_printed():
            files.refuse_others(folder)  # again: the script may have put its own files there
            with staging.folder(folder, replace=True) as staged:
                for trace in recorded:
                    shutil.copy(trace, staged)
    if len(found) > 1 and all("diagnosis" in report for report in found):
        from stepscope import diagnosis  # here: its tables need pandas, and most scripts are one process

        with _whose_errors_are_printed():
            together = diagnosis.of_ranks(folder)
            ranks = found[0]["ranks"]
            say(f"{'All ranks' if len(found) == ranks else f'{len(found)} of {ranks} ranks'} together. {together}")
            kept.append({"rank": None, "ranks": ranks, "diagnosis": together.as_json()})
    if json_file is not None:
        from stepscope.results import document

        with _whose_errors_are_printed():
            staging.write(json_file, document("run", kept or [{"problem": NOTHING}]))


@contextmanager
def _whose_errors_are_printed() -> Iterator[None]:
    """Print an error of writing what was found: the script and its exit status are as without it."""
    try:
        yield
    except (OSError, files.TraceError) as error:
        say(f"{type(error).__name__}: {error}")
