import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace

import nbformat
import psutil
import pytest

from helpers.lessons import execute

pytestmark = pytest.mark.processes

SLIDER = "from ipywidgets import interact\n@interact(dial=(1, 9))\ndef turn(dial=4):\n    return f'turned to {dial}'"
FIRST = (
    "import os, sys; print('by', sys.executable, 'in', os.getcwd())",
    "from helpers import config; config.start('00-a');",
    SLIDER,
    "import IPython; IPython.display.HTML('<iframe src=http://127.0.0.1:1/></iframe>')",
)
SECOND = "from IPython.display import Markdown; Markdown('**bold**')", execute.FURTHER, "1 / 0", "print('after')"


@pytest.fixture(autouse=True)
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COURSE_PRESET", "ci")
    return tmp_path / "runs"


def notebook(path, *sources):
    """Write a notebook of cells with code, or with a heading."""
    v4 = nbformat.v4
    cells = [(v4.new_markdown_cell if source[0] == "#" else v4.new_code_cell)(source) for source in sources]
    nbformat.write(v4.new_notebook(cells=cells), path)
    return path


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The cores of two notebooks, executed where the machine has another kernel of the same name."""
    folder = tmp_path_factory.mktemp("ran")
    other = folder / "jupyter" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["another-python"], "display_name": "Another", "language": "python"}')
    variables = {"JUPYTER_PATH": folder / "jupyter", "COURSE_RUNS": folder / "runs", "COURSE_PRESET": "ci"}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        notebooks = notebook(folder / "00-a.ipynb", *FIRST), notebook(folder / "01-b.ipynb", *SECOND)
        took = execute.run(notebooks, "drawn images", core=True)
    html = folder / "runs" / "html"
    return SimpleNamespace(
        folder=folder,
        took=took,
        printed=printed.getvalue(),
        pages=[(html / f"{path.stem}.html").read_text() for path in notebooks],
        kept=nbformat.read(html / "00-a.ipynb", as_version=4),
    )


def test_notebooks_are_executed_in_order_by_this_interpreter_and_written_as_pages(ran):
    assert list(ran.took) == ["00-a", "01-b"]
    assert f"by {sys.executable} in {ran.folder}" in ran.pages[0]
    assert "<strong>bold</strong>" in ran.pages[1]
    for page in ran.pages:  # they ask for nothing elsewhere
        assert re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?!data:)[^"]*"', page) == []
    assert "No result yet" in ran.printed  # the ladder comes last


def test_only_the_core_is_executed_if_asked_for(ran):
    assert "Going further" not in ran.pages[1] and "ZeroDivisionError" not in ran.pages[1]


def test_an_executed_notebook_is_kept_beside_its_page_with_what_it_was_measured_on(ran):
    assert [cell.source for cell in ran.kept.cells] == list(FIRST)
    assert ran.kept.cells[0].outputs[0].text.startswith("by ")
    for shown in (ran.pages[0], ran.kept.cells[3].outputs[-1].data["text/html"]):  # TensorBoard has ended
        assert "TensorBoard opens here" in shown and "<iframe src=http" not in shown
    course = ran.kept.metadata.course
    assert course.machine == execute.config.describe() and course.processor
    assert course.preset == "ci" and course.images == "drawn images" and len(course.date) == 10
    assert not nbformat.read(ran.folder / "00-a.ipynb", as_version=4).cells[0].outputs


def test_a_page_shows_what_sliders_show_at_first(ran):
    outputs = ran.kept.cells[2].outputs
    assert [output.data["text/plain"] for output in outputs] == ["'turned to 4'"]
    assert "turned to 4" in ran.pages[0]


def test_a_failing_cell_stops_the_run_and_is_named_and_the_page_shows_it(tmp_path, own_runs):
    bad, never = notebook(tmp_path / "00-bad.ipynb", *SECOND), notebook(tmp_path / "01-never.ipynb", "1")
    with pytest.raises(execute.NotebookFailed, match=r"(?s)00-bad\.ipynb, cell 2 of 3.*ZeroDivisionError"):
        execute.run([bad, never])
    page = (own_runs / "html" / "00-bad.html").read_text()
    assert "<strong>bold</strong>" in page and "ZeroDivisionError" in page
    assert not (own_runs / "html" / "01-never.html").exists()


def test_a_kernel_that_dies_is_named_with_its_notebook_and_cell(tmp_path, own_runs):
    deadly = notebook(tmp_path / "00-deadly.ipynb", "print('before')", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(execute.NotebookFailed, match=r"00-deadly\.ipynb, cell 2 of 2: the kernel died.*memory"):
        execute.run([deadly])
    assert "before" in (own_runs / "html" / "00-deadly.html").read_text()


def test_ctrl_c_ends_the_run_and_the_kernel_and_is_called_nothing_else(tmp_path):
    started = tmp_path / "started"
    slow = notebook(tmp_path / "00-slow.ipynb", f"open({str(started)!r}, 'w').close(); import time; time.sleep(100)")
    code = f"from pathlib import Path; from helpers.lessons import execute; execute.run([Path({str(slow)!r})])"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    shell = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)
    while not started.exists():
        assert shell.poll() is None
        time.sleep(0.1)
    (kernel,) = [child for child in psutil.Process(shell.pid).children() if "ipykernel" in " ".join(child.cmdline())]
    os.killpg(shell.pid, signal.SIGINT)  # as a terminal does
    out, err = shell.communicate()
    assert "Interrupted in 00-slow. The pages before it" in out
    assert err.strip().splitlines()[-1] == "KeyboardInterrupt" and "DeadKernelError" not in err
    kernel.wait(120)


def test_the_time_of_all_notebooks_is_the_sum_of_the_recorded_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "RUN_TIMES", tmp_path / "reference" / "run-times.json")
    monkeypatch.setenv("COURSE_PRESET", "workshop")
    execute.record_times({"03-a": 60.0, "08-b": 120.0}, "drawn images")
    assert execute.times_text().startswith("workshop 3 min, recorded on ")
