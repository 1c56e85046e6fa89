"""Starts a script whose processes record their loops, and collects their reports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stepscope.observe import hooks

HOOK = Path(__file__).parent / "hook"
LOOK = 0.2  # seconds between two looks for reports
# Signals that reach both the script and this process; for example, Slurm sends one before a job's time limit
FOR_THE_SCRIPT = ("SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
Reports = list[dict[str, Any]]  # one for each process, in the order of ranks; `watched.ScriptRecorder` makes them
Show = Callable[[Reports, list[Path], int | None], object]


def run(command: Sequence[str], show: Show, announce: Callable[[Reports], object], *, steps: int, stop: bool) -> int:
    """Run a script with its arguments, and return its exit status: 128 plus the signal's number, if a signal ends it.

    `show` receives the reports and the traces as soon as all ranks of this machine have reported facts, otherwise at
    the script's end, with its exit status. `announce` receives the reports so far, again and again. `steps` is the
    number of steps to time; `stop` ends the script after its examination. Raises FileNotFoundError if the program
    does not exist.
    """
    with tempfile.TemporaryDirectory(prefix="stepscope-") as folder:
        reports = Path(folder)
        options = {"steps": steps, "reports": folder, "stop": stop}
        process = subprocess.Popen(program_of(command), env=environment_with(options))
        ignored = [getattr(signal, name) for name in FOR_THE_SCRIPT if hasattr(signal, name)]
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
        handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        found: Reports = []

        def traces() -> list[Path]:
            return sorted(reports.glob("traces/**/*.pt.trace.json*"))

        try:
            while process.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK)
                if not found and (found := complete(reports)):
                    show(found, traces(), None)
                if not found:
                    announce(_reports(reports))
        except BaseException:  # for example a full disk: let the script finish
            process.wait()
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        status = process.returncode if process.returncode >= 0 else 128 - process.returncode
        if not found:
            show(_reports(reports), traces(), status)
    return status


def environment_with(options: dict[str, Any]) -> dict[str, str]:
    """Return the environment variables by which `hooks` receives options in each process of a script."""
    path = os.pathsep.join(filter(None, [str(HOOK), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path, hooks.OPTIONS: json.dumps(options)}


def complete(folder: Path) -> Reports:
    """Return the reports of all ranks of this machine; an empty list until all ranks have reported."""
    reports = [report for report in _reports(folder) if "facts" in report and "so_far" not in report]
    return reports if reports and len(reports) >= reports[0]["here"] else []


def _reports(folder: Path) -> Reports:
    found = (json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json"))
    return sorted(found, key=lambda report: int(report["rank"]))


def program_of(command: Sequence[str]) -> list[str]:
    """Return the program to start, with its arguments; raises FileNotFoundError if there is none."""
    name = command[0]
    if name.endswith(".ipynb") and Path(name).is_file():
        return [sys.executable, "-m", "stepscope.observe.notebook", *command]
    if name == "-m" or (name.endswith(".py") and Path(name).is_file()):
        return [sys.executable, *command]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    script = name.endswith((".py", ".ipynb"))
    program = None if script else shutil.which(name, path=path)
    if program is None:
        why = "no such script" if script else "no such program"
        if Path(name).is_dir():
            why = "expected a Python file or a program, found a folder"
        elif Path(name).is_file():
            why = "expected a Python file or a program; start a shell script with bash"
        raise FileNotFoundError(2, why, name)
    return [program, *command[1:]]
