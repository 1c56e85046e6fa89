"""The plans for teachers agree with the syllabus and with the notebooks."""

import builtins
import dis
import re

import nbformat
import pytest
from support.notebooks import NOTEBOOKS

from helpers import config

FOLDER = config.PROJECT / "notebooks"
PAGE = (FOLDER / "teaching.md").read_text(encoding="utf-8")
PLANS = {"Half a day: four hours": 240, "A day: seven hours, and lunch": 420}
MINUTES = {
    name: int(minutes)
    for name, minutes in re.findall(
        r"^\| \[\d\d[^\]]*\]\(([^)]*)\) \|.*\| (\d+)[^|]*\|$", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M
    )
}


def rows(heading):
    """Return the rows of a plan as lists of cells: when, minutes, what, what to run, what to skip."""
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


# What a plan says to skip: the notebook, and the headings, of which two with "to" between them stand for all from the
# first to the last one.
SKIPPED = [
    (what.split("(")[1].split(")")[0], re.findall(r"\*([^*]+)\*( to )?", skip))
    for heading in PLANS
    for _, _, what, _, skip in rows(heading)
    if "*" in skip
]


def names(code, operation):
    """Return the global names that code, and the functions in it, load or store."""
    used = {
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in (f"{operation}_NAME", f"{operation}_GLOBAL")
    }
    return used.union(*(names(inner, operation) for inner in code.co_consts if hasattr(inner, "co_consts")))


def lacking(name, named):
    """Return the names that a cell reads and only a skipped one has set; each heading that is named has to be there."""
    cells = nbformat.read(FOLDER / name, as_version=4).cells
    titles = re.findall(r"^##+ (.*)$", "\n".join(cell.source for cell in cells if cell.cell_type == "markdown"), re.M)
    skip = set()
    for (first, upto), (last, _) in zip(named, [*named[1:], ("", "")], strict=True):
        assert first in titles, f"{name} has no heading {first!r}"
        skip.update(titles[titles.index(first) : titles.index(last) + 1] if upto else [first])
    heading, known, missing, lost = "", set(dir(builtins)), set(), set()
    for cell in cells:
        if cell.cell_type == "markdown":
            heading = [heading, *re.findall(r"^##+ (.*)$", cell.source, re.M)][-1]
        elif not cell.source.startswith("%%writefile"):
            code = compile(re.sub(r"^[%!].*$", "", cell.source, flags=re.M), name, "exec")
            if heading in skip:
                missing |= names(code, "STORE") - known
            else:
                lost |= (names(code, "LOAD") & missing) - known - names(code, "STORE")
                known |= names(code, "STORE")
    return lost


@pytest.mark.parametrize(("name", "named"), SKIPPED, ids=[f"{name[:2]}-{named[0][0]}" for name, named in SKIPPED])
def test_the_rest_of_a_notebook_runs_without_what_a_plan_skips(name, named):
    assert lacking(name, named) == set()
