"""Diagnoses a training script as it is: ``stepscope run train.py ARGS…``, and nothing of it is edited.

The command starts the script with a folder before its PYTHONPATH, whose ``sitecustomize`` Python imports as it starts.
That lets a `Watch` see each batch that a DataLoader gives and each step of an optimizer. The modules:

- `start`: the command. It starts the script, waits for it, and prints what its processes found.
- `hooks`: what is put into the script's process, before it imports anything.
- `watch`: what a step is, and the diagnosis of some of them, one after the other.

Where a script may be edited, `stepscope.watch` does the same for its loop, and the callbacks in `stepscope.lightning`
and `stepscope.transformers` for that of a Trainer.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.script import hooks

if TYPE_CHECKING:
    from stepscope.script.watch import Watch


def begin(steps: int, folder: str | Path) -> Watch | None:
    """Let the loops of this process be watched from now on, and print the diagnosis to stderr when it is there.

    Returns what watches it; None if something did already. Raises ValueError if there is no step to time.
    """
    if steps < 1:
        raise ValueError(f"Expected at least one step to time, found {steps=}.")
    if hooks.watched():
        return None
    from stepscope.script.watch import Watch  # here, because the shell needs no torch, which takes seconds

    def report(found: dict) -> None:
        print(f"\n{found.get('text') or found['problem']}", file=sys.stderr, flush=True)

    watch = Watch(steps, Path(folder), report)
    hooks.install_here(watch)
    return watch
