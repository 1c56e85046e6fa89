"""What a notebook measures: its digest changes with the measured code, and with nothing else; recorded rows hold."""

import ast
import copy
import functools

import nbformat
import pytest
from support.cells import parts
from support.notebooks import NOTEBOOKS

from helpers.lessons import measured
from helpers.results import scoreboard

digest_of = functools.cache(measured.digest)  # a notebook has many rows
CELLS = [
    "import torch\nfrom helpers.results import scoreboard",
    "size = 128\nunused = 3",
    '%%writefile "train.py"\nfrom loop import step\nstep()',
    '%%writefile "loop.py"\ndef step():\n    return 1',
    "variants = {'a': lambda: size}\nif torch:\n    print('some text')\n    variants['b'] = lambda: run('train.py')",
    "result = compare(variants)\nprint(result)",
    "scoreboard.add('01 naive', result, 'a')",
]


@pytest.fixture
def digest(tmp_path):
    """Return the digest of a notebook of these cells, and the heading after its core."""

    def of(cells):
        notebook = nbformat.v4.new_notebook()
        notebook.cells = [*map(nbformat.v4.new_code_cell, cells), nbformat.v4.new_markdown_cell("## Going further")]
        nbformat.write(notebook, tmp_path / "01-test.ipynb")
        return measured.digest(tmp_path / "01-test.ipynb")

    return of


@pytest.mark.parametrize(
    ("cell", "old", "new", "same"),
    [
        (1, "size = 128", "size = 64", False),
        (1, "unused = 3", "unused = 4", True),
        (1, "size = 128", "size   =   128  # images", True),
        (3, "return 1", "return 2", False),  # in a script that a script imports
        (4, "some text", "another text", True),
        (4, "if torch:", "if not torch:", False),
        (4, "variants['b'] =", "variants['c'] =", False),
        (5, "print(result)", "draw(result)", True),
        (6, "'01 naive'", "'01 new name'", True),
    ],
)
def test_the_digest_changes_with_what_is_measured_and_with_nothing_else(digest, cell, old, new, same):
    changed = copy.copy(CELLS)
    assert old in changed[cell]
    changed[cell] = changed[cell].replace(old, new)
    assert (digest(changed) == digest(CELLS)) is same


def test_a_notebook_that_adds_nothing_has_no_digest(digest):
    assert digest(CELLS[:-1]) is None


@pytest.mark.parametrize(
    "board", sorted(scoreboard.REFERENCE.glob("*/scoreboard.jsonl")), ids=lambda path: path.parent.name
)
def test_each_recorded_result_is_of_the_code_that_its_notebook_measures_today(board):
    rows = [*scoreboard.read(board), *scoreboard.read(board.with_name("processes.jsonl"))]
    stale = {row.rung for row in rows if row.code != digest_of(NOTEBOOKS[int(row.rung[:2])])}
    assert not stale, f"{board.parent.name}: record these rungs again, or take them out: {sorted(stale)}"
    assert rows


def test_the_measured_code_of_each_notebook_has_its_comparison(digest):
    for path in NOTEBOOKS:
        if any("scoreboard.add(" in source for source in parts(path)[0].code):
            code = "\n".join(map(ast.unparse, measured.measured(path)))
            assert "timing." in code or "launching." in code, path.name
