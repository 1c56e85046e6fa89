"""Tests of ``stepscope try`` with real scripts: what is changed, what is not, and what ends."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from stepscope import trying
from stepscope.cli import main
from stepscope.trying.runs import folder_for_runs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script in the current folder, which stays as it is."""
    folder = tmp_path / "own"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    monkeypatch.chdir(folder)
    return folder


def test_a_setting_is_changed_in_the_training_alone_and_the_folder_stays_as_it_is(script):
    tried = trying.run(["train.py"], wanted=["workers"], rounds=1, steps=16)
    assert tried.rounds == 1
    seen = tried.base.runs[0]
    assert (seen["loader"]["workers"], seen["steps"], len(seen["losses"])) == (0, 16, 8)  # of the first epoch
    assert seen["loader"]["line"].startswith("train.py:29: loader = DataLoader(Images(alone), 8, shuffle=True)")
    (worker,) = next(each.runs for each in tried.settings if each.name == "num_workers=1")
    assert worker["loader"]["workers"] == 1 and worker["losses"] == pytest.approx(seen["losses"], abs=1e-5)
    assert os.listdir(script) == ["train.py"]


@pytest.mark.slow
def test_the_script_runs_in_its_own_folder_if_asked_and_its_other_loaders_stay_as_they_are(script):
    trying.run(["train.py"], wanted=["workers"], rounds=1, steps=16, in_copy=False)
    written = {tuple(line.split()) for line in (script / "epochs.txt").read_text().splitlines()}
    assert {("0", "0"), ("1", "0")} <= written and {evaluation for _, evaluation in written} == {"0"}


@pytest.mark.slow
def test_a_setting_with_which_the_script_fails_is_not_recommended(script):
    tried = trying.run(["train.py", "alone"], wanted=["workers"], rounds=1, steps=16)
    assert tried.settings and all("no worker may read this" in each.problem for each in tried.settings)
    assert tried.recommended is None and "no worker may read this" in str(tried)


@pytest.mark.parametrize(("text", "said"), [("1 / 0", "ZeroDivisionError"), ("pass", "status 0")])
def test_a_script_that_cannot_be_timed_is_told_with_its_error(script, capsys, text, said):
    (script / "broken.py").write_text(text)
    assert main(["try", "broken.py"]) == 1
    error = capsys.readouterr().err
    assert "The script as it is could not be timed" in error and said in error


def test_a_limit_holds_and_what_is_known_by_then_is_said(script, capsys):
    begin = time.monotonic()
    assert main(["try", "--minutes", "0.001", "train.py"]) == 1
    assert "it takes more than 0.001 minutes" in capsys.readouterr().err
    assert time.monotonic() - begin < 60


def test_a_copy_has_links_that_lead_to_the_same_files_and_stays_away_from_the_folder(script):
    (script.parent / "data").mkdir()
    (script.parent / "data" / "images").write_text("there")
    (script / "link").symlink_to(Path("..", "data"))
    (script.parent.parent / "shared-images").touch()
    with folder_for_runs(True) as copy:
        assert copy != script and (copy / "link" / "images").read_text() == "there"
        assert (copy / ".." / "data" / "images").read_text() == "there"  # as many scripts find their data
        assert (copy / ".." / ".." / "shared-images").exists()
        (copy / "written").touch()
    assert not copy.exists() and sorted(os.listdir(script)) == ["link", "train.py"]
    assert (script.parent / "data" / "images").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_ends_the_run_that_was_started_and_nothing_else(script):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    command = [sys.executable, "-m", "stepscope", "try", "--steps", "1000000", "train.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not (children := psutil.Process(process.pid).children(recursive=True)):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        psutil.wait_procs(children, timeout=10)
        assert not any(child.is_running() for child in children) and other.poll() is None
    finally:
        for each in (other, process):
            each.kill()
            each.wait()
