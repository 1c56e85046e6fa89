"""What tests of jobs of several processes share: scripts, and a look at which processes are left."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "TEST_OF_RANKS"  # an environment variable, which every process of a job inherits


def processes(mark: str) -> list[psutil.Process]:
    """Return the other processes with this mark, those that are not yet reaped left out."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or just gone
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(process)
    return found


def wait_until(condition: Callable[[], object]) -> None:
    """Return when a condition holds; the test's time-out ends what never comes."""
    while not condition():
        time.sleep(0.02)


def changed(script: Path, to: Path, **changes: tuple[str, str]) -> Path:
    """Write a script with some of its text replaced, each once, and return where it is."""
    text = script.read_text(encoding="utf-8")
    for name, (old, new) in changes.items():
        assert text.count(old) == 1, f"{name}: expected once in {script}: {old}"
        text = text.replace(old, new)
    to.write_text(text, encoding="utf-8")
    return to


def losses(path: Path) -> list[tuple[int, float]]:
    """Return the steps and losses that `train_ddp.py` has written, in the order of the file."""
    return [(int(step), json.loads(loss)) for step, loss in (line.split(",") for line in path.read_text().splitlines())]
