"""The lines around the line that a finding names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

LINES = 2  # before the line, and after it
SHOWN = 69  # characters of a long line that a finding shows, see `observe.sampler.Frame`
_NAMED = re.compile(r"([^:]+\.py):(\d+): (.+)")
_PLACES = ("", "*/", "*/*/")  # below a folder: deeper ones may hold a million images


def around(line: str, folders: Iterable[Path]) -> list[tuple[int, str]]:
    """Return the numbers and texts of the lines around a line such as ``"train.py:16: x = …"``, itself included.

    The file is searched for in `folders`, and in the folders in them. Without a file in which this line has this text,
    the list is empty: the file may have changed since the run.
    """
    named = _NAMED.match(line)
    if named is None:
        return []
    file, number, text = named[1], int(named[2]), named[3]
    for path in (path for folder in folders for place in _PLACES for path in folder.glob(f"{place}{Path(file).name}")):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError):
            continue
        code = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        if code and text.startswith(code[:SHOWN]):
            first = max(1, number - LINES)
            return [*enumerate(lines[first - 1 : number + LINES], first)]
    return []
