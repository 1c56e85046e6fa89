"""The plans for teachers agree with the syllabus and with the notebooks."""

import re

import pytest
from support.notebooks import NOTEBOOKS

from helpers import config

FOLDER = config.PROJECT / "notebooks"
PAGE = (FOLDER / "teaching.md").read_text(encoding="utf-8")
PLANS = {"Half a day: four hours": 240, "A day: seven hours, and lunch": 420}
SYLLABUS = (FOLDER / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| \[\d\d[^\]]*\]\(([^)]*)\) \|.*\| (\d+)[^|]*\| \d+ \|$", re.MULTILINE)
MINUTES = {name: int(minutes) for name, minutes in ROW.findall(SYLLABUS)}


def rows(heading):
    """Return the rows of a plan as lists of cells: when, minutes, what, how."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", part, re.M)[2:]]


def test_the_syllabus_has_minutes_for_each_notebook():
    assert list(MINUTES) == [path.name for path in NOTEBOOKS]


@pytest.mark.parametrize("heading", PLANS)
def test_a_plan_adds_up_and_gives_each_notebook_its_minutes_and_a_row_with_where_they_will_be_stuck(heading):
    explained = {row[0] for row in rows("What to show, and where they will be stuck")}
    now = 0
    for at, minutes, what, *_ in rows(heading):
        if at:
            assert at == f"{now // 60}:{now % 60:02}", what
            now += int(minutes)
        for name in re.findall(r"\(([^)]*\.ipynb)\)", what):
            assert int(minutes) == MINUTES[name] or ("the beginning" in what and int(minutes) < MINUTES[name]), what
            assert what[1:3] in explained
    assert now == PLANS[heading]
