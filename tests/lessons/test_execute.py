import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from helpers.lessons import execute

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("COURSE_PRESET", "ci")
    return tmp_path / "runs"


def notebook(path, *sources):
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources]), path)
    return path


def test_notebooks_are_executed_in_order_by_this_interpreter_and_written_as_pages(
    tmp_path, own_runs, monkeypatch, capsys
):
    other = tmp_path / "jupyter" / "kernels" / "python3"  # the machine has a kernel of the same name
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["another-python"], "display_name": "Another", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    first = notebook(tmp_path / "00-a.ipynb", "import sys; print('by', sys.executable)", "import os; os.getcwd()")
    second = notebook(tmp_path / "01-b.ipynb", "from IPython.display import Markdown; Markdown('**bold**')")
    took = execute.run([first, second])
    assert list(took) == ["00-a", "01-b"]
    pages = [(own_runs / "html" / f"{name}.html").read_text() for name in took]
    assert f"by {sys.executable}" in pages[0] and str(tmp_path) in pages[0]
    assert "<strong>bold</strong>" in pages[1]
    for page in pages:  # they ask for nothing elsewhere
        assert re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?!data:)[^"]*"', page) == []
    assert "No result yet" in capsys.readouterr().out  # the ladder comes last


def test_only_the_core_is_executed_if_asked_for(tmp_path, own_runs):
    path = notebook(tmp_path / "00-a.ipynb", "print(1)", "1 / 0")
    content = nbformat.read(path, as_version=4)
    content.cells.insert(1, nbformat.v4.new_markdown_cell(f"{execute.FURTHER}\n\nDivided."))
    nbformat.write(content, path)
    execute.run([path], core=True)
    assert "Divided" not in (own_runs / "html" / "00-a.html").read_text()
    with pytest.raises(execute.NotebookFailed):
        execute.run([path])


def test_an_executed_notebook_is_kept_beside_its_page_with_what_it_was_measured_on(tmp_path, own_runs):
    frame = "<iframe src=http://127.0.0.1:1/></iframe>"
    path = notebook(tmp_path / "00-a.ipynb", "print(40 + 2)", f"import IPython; IPython.display.HTML({frame!r})")
    execute.run([path], "drawn images")
    kept = nbformat.read(own_runs / "html" / "00-a.ipynb", as_version=4)
    assert [cell.source for cell in kept.cells] == [cell.source for cell in nbformat.read(path, as_version=4).cells]
    assert kept.cells[0].outputs[0].text == "42\n"
    page = (own_runs / "html" / "00-a.html").read_text()
    for shown in (page, kept.cells[1].outputs[-1].data["text/html"]):  # TensorBoard has ended
        assert "TensorBoard opens here" in shown and "<iframe src=http" not in shown
    course = kept.metadata.course
    assert course.machine == execute.config.describe() and course.processor
    assert course.preset == "ci" and course.images == "drawn images" and len(course.date) == 10
    assert not nbformat.read(path, as_version=4).cells[0].outputs


def test_a_page_shows_what_sliders_show_at_first(tmp_path, own_runs):
    begin = "from helpers import config; config.start('00-a');"
    turned = (
        "from ipywidgets import interact\n@interact(dial=(1, 9))\ndef turn(dial=4):\n    return f'turned to {dial}'"
    )
    execute.run([notebook(tmp_path / "00-a.ipynb", begin, turned)])
    kept = nbformat.read(own_runs / "html" / "00-a.ipynb", as_version=4)
    assert [output.data["text/plain"] for output in kept.cells[1].outputs] == ["'turned to 4'"]
    assert "turned to 4" in (own_runs / "html" / "00-a.html").read_text()


def test_a_failing_cell_stops_the_run_and_is_named_and_the_page_shows_it(tmp_path, own_runs):
    bad = notebook(tmp_path / "00-bad.ipynb", "print('before')", "1 / 0", "print('after')")
    never = notebook(tmp_path / "01-never.ipynb", "1")
    with pytest.raises(execute.NotebookFailed, match=r"(?s)00-bad\.ipynb, cell 2 of 3.*ZeroDivisionError"):
        execute.run([bad, never])
    page = (own_runs / "html" / "00-bad.html").read_text()
    assert "before" in page and "ZeroDivisionError" in page
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
