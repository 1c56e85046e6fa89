"""The plans for teachers agree with the syllabus and with the notebooks."""

import ast
import builtins
import json
import re

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
def test_the_times_of_a_plan_add_up(heading):
    now = 0
    for at, minutes, what, *_ in rows(heading):
        if at:
            assert at == f"{now // 60}:{now % 60:02}", what
            now += int(minutes)
    assert now == PLANS[heading]


@pytest.mark.parametrize("heading", PLANS)
def test_a_notebook_gets_the_minutes_of_the_syllabus_unless_the_plan_says_that_it_is_a_part(heading):
    for _, minutes, what, *_ in rows(heading):
        for name in re.findall(r"\(([^)]*\.ipynb)\)", what):
            assert int(minutes) == MINUTES[name] or ("the beginning" in what and int(minutes) < MINUTES[name]), what


@pytest.mark.parametrize("heading", PLANS)
def test_each_notebook_of_a_plan_has_a_row_that_says_where_they_will_be_stuck(heading):
    explained = [row[0] for row in rows("What to show, and where they will be stuck")]
    planned = {what[1:3] for _, _, what, *_ in rows(heading) if ".ipynb" in what}
    assert planned <= set(explained)


# What a plan says to skip: the notebook, and the headings, of which two with "to" between them stand for all from the
# first to the last one.
SKIPPED = [
    (what.split("(")[1].split(")")[0], re.findall(r"\*([^*]+)\*( to )?", skip))
    for heading in PLANS
    for _, _, what, _, skip in rows(heading)
    if "*" in skip
]


def cells_by_heading(name):
    """Return each code cell of a notebook with the heading that it stands below."""
    heading, found = "", []
    for cell in json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = [heading, *re.findall(r"^##+ (.*)$", text, re.M)][-1]
        elif not text.startswith("%%writefile"):
            found.append((heading, ast.parse(re.sub(r"^[%!].*$", "", text, flags=re.M))))
    return found


def headings(name):
    text = [
        "".join(cell["source"])
        for cell in json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "markdown"
    ]
    return re.findall(r"^##+ (.*)$", "\n".join(text), re.M)


def skipped(name, named):
    """Return the headings of what is skipped; each that is named has to be there."""
    titles, found = headings(name), []
    for (first, upto), (last, _) in zip(named, [*named[1:], ("", "")], strict=True):
        assert first in titles, f"{name} has no heading {first!r}"
        found += titles[titles.index(first) : titles.index(last) + 1] if upto else [first]
    return found


def lacking(cells, skip):
    """Return the names that a cell reads and only a skipped one has set."""
    known, missing, lost = set(dir(builtins)), set(), set()
    for heading, tree in cells:
        nodes = list(ast.walk(tree))
        names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        names |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if heading in skip:
            missing |= names - known
        else:
            read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
            lost |= (read & missing) - known - names
            known |= names
    return lost


@pytest.mark.parametrize(("name", "named"), SKIPPED, ids=[f"{name[:2]}-{named[0][0]}" for name, named in SKIPPED])
def test_the_rest_of_a_notebook_runs_without_what_a_plan_skips(name, named):
    assert lacking(cells_by_heading(name), skipped(name, named)) == set()


def test_a_section_that_the_rest_needs_is_found():
    assert "result" in lacking(cells_by_heading("04-normalize-on-device.ipynb"), ["Measure"])
