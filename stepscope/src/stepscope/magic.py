"""The cell magic ``%%stepscope``: diagnoses the training loop in a cell, as ``stepscope run`` does in a script.

``%load_ext stepscope`` registers the magic. Options: ``%%stepscope --steps 50 --folder runs/diagnosis``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stepscope import run


def register(shell: Any) -> None:
    """Register the magic in a shell of IPython."""

    def stepscope(line: str, cell: str) -> None:
        """Run a cell with a training loop, and show its diagnosis below it."""
        options = _options(line)
        number = shell.execution_count
        shell.execution_count = len(shell.history_manager.input_hist_parsed) - 1  # of this cell
        try:
            with run.watching(options.steps, options.folder) as found:
                result = shell.run_cell(f"#\n{cell}")  # the magic is the first line: so lines keep their numbers
        finally:
            shell.execution_count = number
        if not isinstance(result.error_in_exec, KeyboardInterrupt):
            _show(found)
        result.raise_error()  # so that the cell fails, and "Run All" ends

    shell.register_magic_function(stepscope, "cell")


def _options(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="%%stepscope", add_help=False, exit_on_error=False)
    parser.add_argument("--steps", type=int, default=20, help="steps to time")
    parser.add_argument("--folder", type=Path, default=Path("diagnosis"), help="folder for the profile and the facts")
    try:
        return parser.parse_args(line.split())
    except (argparse.ArgumentError, SystemExit) as error:
        raise ValueError(f"%%stepscope: expected --steps N or --folder FOLDER, found {line!r} ({error})") from None


def _show(found: list[Any]) -> None:
    from IPython.display import display

    for each in found:
        print(each) if isinstance(each, str) else display(each)
