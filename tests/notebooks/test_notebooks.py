"""Every notebook is executed by nbval, and keeps to the course's form."""

import re

import pytest
from support import cells as names
from support.notebooks import NOTEBOOKS, content

NAMES = [path.stem for path in NOTEBOOKS]


@pytest.mark.timeout(1200)  # on a busy machine
def test_every_cell_of_the_notebook_executes(executed):
    assert not executed.failed, "\n".join(executed.failed)
    assert executed.passed == len(code_cells(executed.notebook)), executed.log


FORGETTING = [path for path in NOTEBOOKS if "timing.forget(data.train)" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", FORGETTING, ids=[path.stem for path in FORGETTING])
def test_images_that_the_system_was_asked_to_forget_are_read_again_before_the_next_cell(path):
    """What is measured on a cold page cache by accident is the disk."""
    sources = [cell.source for cell in code_cells(path)]
    last = max(place for place, text in enumerate(sources) if "timing.forget(data.train)" in text)
    assert "timing.warm(data.train)" in "".join(sources[last : last + 2])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_cells_are_short_and_without_outputs_and_define_nothing_that_a_spawned_worker_could_not_import(path):
    for cell in code_cells(path):
        assert bool(cell.outputs) == ("nbval-check-output" in cell.metadata.get("tags", [])), cell.id
        assert cell.execution_count is None or cell.outputs, cell.id
        lines = cell.source.splitlines()
        assert len(lines) <= 25, cell.id
        if not cell.source.startswith("%%writefile "):  # a file, from which a dataset is then imported
            assert sum(line.startswith(("import ", "from ")) for line in lines) <= 10, cell.id
            assert not ("Dataset)" in cell.source and "class " in cell.source), cell.id


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_the_notebook_has_the_parts_that_every_notebook_has_and_links_that_lead_somewhere(path):
    cells = content(path).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    parts = ["# ", "**The question.**", "*Minutes:", "## Predict", "## Measure", "## Exercise"]
    assert [part for part in [*parts, "## In this notebook we saw"] if part not in text] == []
    solutions = [cell for cell in cells if "solution" in cell.metadata.get("tags", [])]
    assert solutions and all(cell.metadata.jupyter.source_hidden for cell in solutions)
    shown = ("# Solution\n", "%%writefile ")  # the line that is shown of a folded cell
    assert all(cell.source.startswith(shown) for cell in solutions)
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in target]
    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_core_can_be_done_in_its_minutes_and_what_goes_further_needs_the_core_only(path):
    core, *sections = names.parts(path)
    assert len(core.cells) <= 35 and core.words <= 1_000
    minutes = [re.search(r"\*Minutes: (\d+)", core.cells[0].source)]
    minutes += [re.search(r"\((\d+) minutes?\b.*\)$", part.title) for part in sections]
    for part, stated in zip((core, *sections), minutes, strict=True):
        lines = sum(len([line for line in source.splitlines() if line.strip()]) for source in part.code)
        # Read at 150 words and 10 lines of code a minute
        assert part.words / 150 + lines / 10 <= int(stated[1]), part.title
    assert core.cells[-1].source.startswith("## In this notebook we saw")
    assert [
        part.title for part in sections if any("scoreboard.add(" in source for source in part.code)
    ] == []  # `record`
    assert names.faults(path) == []
    listing = [line for part in (core, *sections) for source in part.code for line in source.splitlines()]
    cells = content(path).cells
    texts = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    listing += [line for code in re.findall(r"```.*?```", texts, re.DOTALL) for line in code.splitlines()]
    assert [line for line in listing if len(line) > 92] == []  # on a laptop's screen the rest is cut off


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_core_times_first_and_profiles_last(path):
    """On a GPU a part of the profiler stays attached after a recording. (A script of its own is another process.)"""
    code = [source for source in names.parts(path)[0].code if not source.startswith("%%writefile")]
    records = [place for place, source in enumerate(code) if "profiling.record(" in source]
    times = [
        place for place, source in enumerate(code) if re.search(r"timing\.(interleaved|loop|\w*call_ms)\(", source)
    ]
    assert max(times, default=-1) < min(records, default=len(code))


def test_the_last_line_of_each_core_leads_to_the_notebook_before_and_the_next():
    for place, path in enumerate(NOTEBOOKS):
        last = names.parts(path)[0].cells[-1].source.splitlines()[-1]
        neighbours = [*NAMES[max(place - 1, 0) : place], *NAMES[place + 1 : place + 2]]
        assert re.findall(r"\]\(([^)]+)\)", last) == [f"{name}.ipynb" for name in neighbours], path.name


def code_cells(path):
    return [cell for cell in content(path).cells if cell.cell_type == "code"]
