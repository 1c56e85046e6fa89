"""Every notebook is executed by nbval, and keeps to the course's form."""

import re

import nbformat
import pytest
from support.notebooks import NOTEBOOKS, environment, nbval

NAMES = [path.stem for path in NOTEBOOKS]


def test_every_cell_of_the_notebook_executes(executed):
    assert not executed.failed, "\n".join(executed.failed)
    assert executed.passed == len(code_cells(executed.notebook)), executed.log


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "stored"), [("1 / 0", None), ("# NBVAL_CHECK_OUTPUT\nprint(2)", "1\n"), ("import missing_module", None)]
)
def test_a_notebook_that_is_wrong_fails(tmp_path, source, stored):
    outputs = [] if stored is None else [nbformat.v4.new_output("stream", text=stored)]
    cell = nbformat.v4.new_code_cell(source, outputs=outputs, execution_count=1 if outputs else None)
    write(tmp_path / "wrong.ipynb", cell)
    process = nbval([tmp_path / "wrong.ipynb"], environment(tmp_path, tmp_path))
    assert process.returncode == 1, process.stdout
    assert "1 failed" in process.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("line", "named"),
    [("torch.set_num_threads(torch.get_num_threads() + 1)", "threads"), ("import os; os.chdir('/')", "folder")],
)
def test_a_notebook_that_leaves_a_setting_behind_fails(tmp_path, line, named):
    cells = [nbformat.v4.new_code_cell(source) for source in ("import torch\n", line, "print(1)")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "leaks.ipynb")
    process = nbval([tmp_path / "leaks.ipynb"], environment(tmp_path, tmp_path))
    assert "1 failed, 2 passed" in process.stdout
    assert f"{{'{named}': (" in process.stdout


FORGETTING = [path for path in NOTEBOOKS if "timing.forget(data.train)" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FORGETTING, ids=[path.stem for path in FORGETTING])
def test_images_that_the_system_was_asked_to_forget_are_read_again_before_the_next_cell(path):
    """What is measured on a cold page cache by accident is the disk."""
    sources = [cell.source for cell in code_cells(path)]
    last = max(place for place, text in enumerate(sources) if "timing.forget(data.train)" in text)
    assert "timing.warm(data.train)" in "".join(sources[last : last + 2])


@pytest.mark.processes
def test_a_cell_that_is_silent_for_six_seconds_passes(tmp_path):
    write(tmp_path / "slow.ipynb", nbformat.v4.new_code_cell("import time; print(1); time.sleep(6); print(2)"))
    process = nbval([tmp_path / "slow.ipynb"], environment(tmp_path, tmp_path))
    assert process.returncode == 0, process.stdout


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_the_notebook_is_stored_without_outputs_but_those_that_are_compared(path):
    for cell in code_cells(path):
        assert not cell.outputs or "NBVAL_CHECK_OUTPUT" in cell.source, cell.id
        assert cell.outputs or "NBVAL_CHECK_OUTPUT" not in cell.source, cell.id
        assert cell.execution_count is None or cell.outputs, cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_no_cell_is_longer_than_25_lines(path):
    assert {cell.id: len(cell.source.splitlines()) for cell in code_cells(path) if cell.source.count("\n") >= 25} == {}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_no_cell_begins_with_more_than_seven_imports(path):
    written = [cell for cell in code_cells(path) if cell.source.startswith("%%writefile ")]
    for cell in code_cells(path):
        lines = cell.source.splitlines()
        assert cell in written or sum(line.startswith(("import ", "from ")) for line in lines) <= 7, cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_no_cell_defines_what_a_spawned_worker_could_not_import(path):
    """A dataset in a cell is written to a file, from which it is then imported."""
    inside = [cell for cell in code_cells(path) if not cell.source.startswith("%%writefile ")]
    assert [cell.id for cell in inside if "Dataset)" in cell.source and "class " in cell.source] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_the_notebook_has_the_parts_that_every_notebook_has(path):
    cells = nbformat.read(path, 4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    parts = [
        "# ",
        "**The question.**",
        "*Minutes:",
        "## Predict",
        "## Measure",
        "## Exercise",
        "## In this notebook we saw",
    ]
    assert [part for part in parts if part not in text] == []
    solutions = [cell for cell in cells if "solution" in cell.metadata.get("tags", [])]
    assert solutions and all(cell.metadata.jupyter.source_hidden for cell in solutions)
    assert all(
        cell.source.startswith(("# Solution\n", "%%writefile ")) for cell in solutions
    )  # of a folded cell it is shown


def test_the_last_line_of_each_notebook_leads_to_the_one_before_and_the_next():
    for place, path in enumerate(NOTEBOOKS):
        last = nbformat.read(path, 4).cells[-1].source.splitlines()[-1]
        neighbours = [*NAMES[max(place - 1, 0) : place], *NAMES[place + 1 : place + 2]]
        assert re.findall(r"\]\(([^)]+)\)", last) == [f"{name}.ipynb" for name in neighbours], path.name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_links_between_files_of_the_project_lead_somewhere(path):
    text = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown")
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


def code_cells(path):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == "code"]


def write(path, *cells):
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), path)
