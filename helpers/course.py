"""The modules of all rooms, for notebooks to import in one line. Nothing in `helpers` imports this."""

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from IPython.display import Code

from helpers.data import buckets, cifar10, photos, s3_server
from helpers.lessons import checks, exercises, faults, topics
from helpers.lessons.faults import grading, running
from helpers.loading import accidents, datasets, formats, packs, resizing, shards
from helpers.results import elsewhere, scoreboard, tour
from helpers.training import calculated, compiling, footprint, launching, models, precision, roofline
from stepscope.timing import monitor, profiling

__all__ = [
    "accidents", "buckets", "calculated", "checks", "cifar10", "compiling", "datasets", "elsewhere", "exercises",
    "faults", "footprint", "formats", "grading", "launching", "models", "monitor", "packs", "photos", "precision",
    "profiling", "resizing", "roofline", "running", "s3_server", "scoreboard", "shards", "show_lines",
    "source_of", "topics", "tour",
]  # fmt: skip


def source_of(*objects: Callable | ModuleType) -> Code:
    """Return the source of functions, methods, classes or modules, one below the other, with syntax highlighting."""
    return Code("\n".join(map(inspect.getsource, objects)), language="python")


def show_lines(file: str | Path, *parts: tuple[str, str]) -> Code:
    """Return parts of a file with syntax highlighting, "…" between them.

    A part goes from the first line that begins with one text to the next line that begins with another, both included;
    indentation does not count. Raises `ValueError` if there is no such line.
    """
    lines, shown = Path(file).read_text(encoding="utf-8").splitlines(), []
    for first, last in parts:
        begin = _place(lines, first, 0)
        shown.append("\n".join(lines[begin : _place(lines, last, begin) + 1]))
    return Code("\n…\n".join(shown), language="python" if Path(file).suffix == ".py" else "bash")


def _place(lines: list[str], text: str, after: int) -> int:
    for number in range(after, len(lines)):
        if lines[number].lstrip().startswith(text):
            return number
    raise ValueError(f"Expected a line that begins with {text!r}, found none.")
