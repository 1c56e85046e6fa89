"""Diagnoses an unedited training script: ``stepscope run train.py ARGS…``.

The command puts a folder first in the script's PYTHONPATH, and Python imports its ``sitecustomize`` at the start. That
lets a `Watch` see each batch of a DataLoader and each step of an optimizer. The modules:

- `start`: the command. It starts the script, waits for it, and prints what its processes found.
- `hooks`: the code put into the script's process before the script imports anything.
- `watch`: what a step is, and the diagnosis of some of them, one after the other.

If you may edit a script, `stepscope.watch` does the same for its loop, and the callbacks in `stepscope.lightning` and
`stepscope.transformers` do it for a Trainer.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.script import hooks

if TYPE_CHECKING:
    from stepscope.script.watch import Watch


def say(text: str) -> None:
    """Print a text to stderr, if it is open."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"\n{text}", file=sys.stderr, flush=True)


def begin(steps: int, folder: str | Path) -> Watch | None:
    """Watch the loops of this process from now on, and print the diagnosis to stderr when it is ready.

    Returns the `Watch`; None if the process is watched already. Raises ValueError if there is no step to time.
    """
    if steps < 1:
        raise ValueError(f"Expected at least one step to time, found {steps=}.")
    if hooks.watched():
        return None
    from stepscope.script.watch import Watch  # here, since torch takes seconds, and the shell does not need it

    def report(found: dict) -> None:
        say(found.get("text") or found["problem"])

    watch = Watch(steps, Path(folder), report)
    hooks.install_here(watch)
    return watch
