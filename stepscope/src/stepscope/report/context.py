"""The lines around the line that a finding names."""

from __future__ import annotations

import re
from pathlib import Path

from stepscope.base.wording import without_folders

LINES = 2  # before the line, and after it
SHOWN = 69  # characters of a long line that a finding shows, see `observe.sampler.Frame`
_NAMED = re.compile(r"([^:]+\.py):(\d+): (.+)")
_PLACES = ("", "*/", "*/*/")  # deeper ones may hold a million images


def around(line: str) -> list[tuple[int, str]]:
    """Return the numbers and texts of the lines around a line such as ``"train.py:16: x = …"``, itself included.

    The file is searched for in the current folder, and two levels below it. The list is empty without a file in which
    this line has this text: the file may have changed since the run. As in findings, paths have no folders.
    """
    named = _NAMED.match(line)
    if named is None:
        return []
    file, number, text = Path(named[1]).name, int(named[2]), named[3]
    for path in (path for place in _PLACES for path in Path().glob(f"{place}{file}")):
        try:
            lines = [*map(without_folders, path.read_text(encoding="utf-8").splitlines())]
        except (OSError, ValueError):
            continue
        code = lines[number - 1].strip() if 0 < number <= len(lines) else ""
        if code and text.startswith(code[:SHOWN]):
            first = max(1, number - LINES)
            return [*enumerate(lines[first - 1 : number + LINES], first)]
    return []
