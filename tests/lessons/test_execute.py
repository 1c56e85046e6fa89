import os
import re
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
from support.clock import Clock

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


def test_notebooks_are_executed_in_order_by_this_interpreter_and_written_as_pages(tmp_path, own_runs, capsys):
    first = notebook(tmp_path / "00-a.ipynb", "import sys; print('by', sys.executable)", "import os; os.getcwd()")
    second = notebook(tmp_path / "01-b.ipynb", "40 + 2")
    took = execute.run([first, second])
    assert list(took) == ["00-a", "01-b"]
    pages = [(own_runs / "html" / f"{name}.html").read_text() for name in took]
    assert f"by {sys.executable}" in pages[0] and str(tmp_path) in pages[0]
    assert "42" in pages[1]
    assert "No result yet" in capsys.readouterr().out  # the ladder comes last


def test_a_kernel_that_the_machine_has_under_the_same_name_is_not_used(tmp_path, own_runs, monkeypatch):
    other = tmp_path / "jupyter" / "kernels" / "python3"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["another-python"], "display_name": "Another", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    execute.run([notebook(tmp_path / "00-a.ipynb", "import sys; print('by', sys.executable)")])
    assert f"by {sys.executable}" in (own_runs / "html" / "00-a.html").read_text()


def test_a_page_needs_nothing_from_elsewhere(tmp_path, own_runs):
    execute.run([notebook(tmp_path / "00-a.ipynb", "from IPython.display import Markdown; Markdown('**bold**')")])
    page = (own_runs / "html" / "00-a.html").read_text()
    assert re.findall(r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(?!data:)[^"]*"', page) == []
    assert "<strong>bold</strong>" in page


def test_a_page_does_not_embed_a_tensorboard_that_has_ended(tmp_path, own_runs):
    frame = "<iframe src=http://127.0.0.1:1/></iframe>"
    execute.run([notebook(tmp_path / "00-a.ipynb", f"from IPython.display import HTML; HTML('''{frame}''')")])
    page = (own_runs / "html" / "00-a.html").read_text()
    assert "TensorBoard opens here when you run the notebook" in page
    assert "<iframe src=http" not in page


def test_an_executed_notebook_is_kept_beside_its_page_with_what_it_was_measured_on(tmp_path, own_runs):
    frame = "<iframe src=http://127.0.0.1:1/></iframe>"
    path = notebook(tmp_path / "00-a.ipynb", "print(40 + 2)", f"import IPython; IPython.display.HTML({frame!r})")
    execute.run([path], "drawn images")
    kept = nbformat.read(own_runs / "html" / "00-a.ipynb", as_version=4)
    assert [cell.source for cell in kept.cells] == [cell.source for cell in nbformat.read(path, as_version=4).cells]
    assert kept.cells[0].outputs[0].text == "42\n"
    assert kept.cells[1].outputs[-1].data["text/html"] == frame  # as it was shown: only the page is without it
    course = kept.metadata.course
    assert course.machine == execute.config.describe() and course.processor
    assert course.preset == "ci" and course.images == "drawn images" and len(course.date) == 10
    assert not nbformat.read(path, as_version=4).cells[0].outputs


def test_the_outputs_that_are_kept_stay_when_a_later_run_fails(tmp_path, own_runs):
    path = notebook(tmp_path / "00-a.ipynb", "print('good')")
    execute.run([path])
    kept = (own_runs / "html" / "00-a.ipynb").read_text()
    notebook(path, "1 / 0")
    with pytest.raises(execute.NotebookFailed):
        execute.run([path])
    assert (own_runs / "html" / "00-a.ipynb").read_text() == kept


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
    shell = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not started.exists():
        assert shell.poll() is None
        time.sleep(0.1)
    (kernel,) = [child for child in psutil.Process(shell.pid).children() if "ipykernel" in " ".join(child.cmdline())]
    os.killpg(shell.pid, signal.SIGINT)  # as a terminal does
    last_line = shell.communicate()[1].strip().splitlines()[-1]
    assert last_line == "KeyboardInterrupt"
    kernel.wait(120)


def test_no_kernel_is_left_behind(tmp_path):
    execute.run([notebook(tmp_path / "00-a.ipynb", "1"), notebook(tmp_path / "01-b.ipynb", "1 + 1")])
    assert [child for child in psutil.Process().children() if "ipykernel" in " ".join(child.cmdline())] == []


def test_what_a_kernel_writes_to_the_terminal_is_kept_in_a_file(tmp_path, own_runs, capfd):
    execute.run([notebook(tmp_path / "00-a.ipynb", "import os; os.write(2, b'from below')")])
    assert "from below" in (own_runs / "html" / "00-a.log").read_text()
    assert "from below" not in capfd.readouterr().err


def test_the_time_and_the_share_in_which_a_processor_worked_are_kept(tmp_path, own_runs, monkeypatch):
    own_runs.mkdir()
    clock = Clock(monkeypatch, execute)
    monkeypatch.setattr(execute, "_cpu_seconds", lambda: clock.worked)

    def waits_and_computes(path, page):
        clock.sleep(6)
        clock.work(2)
        return nbformat.v4.new_notebook()

    def computes_in_threads(path, page):
        clock.work(3)
        clock.worked += 3
        return nbformat.v4.new_notebook()

    for kind, expected in ((waits_and_computes, (8, 0.25)), (computes_in_threads, (3, 1))):
        monkeypatch.setattr(execute, "execute", kind)
        assert execute.run([tmp_path / "00-a.ipynb"]) == {"00-a": execute.Took(*expected)}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not report the time of processes that have ended")
def test_what_a_kernel_computed_is_counted(tmp_path):
    path = notebook(tmp_path / "00-computing.ipynb", "import time\nwhile time.process_time() < 3: pass")
    took = execute.run([path])["00-computing"]
    assert took.seconds >= 3
    assert took.working >= min(3 / took.seconds, 1) - 0.02  # it is rounded


def test_how_long_a_notebook_took_is_kept_for_the_estimate(tmp_path, own_runs, monkeypatch):
    for name in ("00-a", "01-b"):
        execute.run([notebook(tmp_path / f"{name}.ipynb", "1")])
    kept = execute.json.loads(execute.preflight.own_times().read_text())
    assert kept["ci"].keys() == {"00-a", "01-b"} and execute.preflight.own_times().parent == own_runs


def test_recorded_times_keep_those_of_other_presets(tmp_path, monkeypatch):
    path = tmp_path / "reference" / "run-times.json"
    monkeypatch.setattr(execute.preflight, "RUN_TIMES", path)
    monkeypatch.setattr(execute.preflight, "calibrate", lambda: {"loading": 0.02, "compute": 0.2})
    execute.record_times({"00-a": execute.Took(1.0, 0.5)}, "drawn images")
    monkeypatch.setenv("COURSE_PRESET", "workshop")
    execute.record_times({"00-a": execute.Took(2.0, 0.5)}, "drawn images")
    times = execute.json.loads(path.read_text())
    assert {name: run["seconds"]["00-a"] for name, run in times.items()} == {"ci": 1.0, "workshop": 2.0}
    assert all(run["calibration"] and run["machine"] and run["date"] and run["data"] for run in times.values())
