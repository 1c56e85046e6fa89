"""The folder for what a notebook needs until its process ends."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers import config


@pytest.mark.processes
@pytest.mark.parametrize("end", ["pass", "os.kill(os.getpid(), 9)"], ids=["normal end", "killed"])
def test_a_notebooks_folder_goes_with_its_process_or_with_the_next_start(end, tmp_path, monkeypatch):
    if os.name == "nt" and end != "pass":
        pytest.skip("Windows has no such signal")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = f"import os\nfrom helpers import config\n(config.temporary('15') / 'kept').touch()\n{end}"
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=config.PROJECT,
        env={**os.environ, "TMPDIR": str(tmp_path), "TEMP": str(tmp_path)},
    )
    left = list(tmp_path.iterdir())
    assert len(left) == (end != "pass")
    mine = config.temporary("15")  # of a process that runs
    for folder in (*left, mine):
        os.utime(folder, (0, 0))  # as if it was old
    other = config.temporary("15")
    assert set(tmp_path.iterdir()) == {mine, other}


@pytest.mark.processes
def test_a_folder_is_kept_while_its_process_runs_whatever_its_number_is_here(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from helpers import config\nprint(config.temporary('15'), flush=True)\ninput()"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TEMP": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=config.PROJECT, env=environment, **pipes) as process:
        theirs = Path(process.stdout.readline().strip())
        os.utime(theirs, (0, 0))
        mine = config.temporary("15")
        assert set(tmp_path.iterdir()) == {mine, theirs}
        process.communicate("\n")
    assert not theirs.exists()
