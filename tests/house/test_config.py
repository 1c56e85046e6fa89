"""The folder for what a notebook needs until its process ends."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from helpers import config

ENDS = {"normal end": "", "killed": "os.kill(os.getpid(), 9)", "still running": "input()"}


@pytest.mark.processes
@pytest.mark.parametrize("end", ENDS)
def test_a_notebooks_folder_goes_with_its_process_or_with_the_next_start(end, tmp_path, monkeypatch):
    if os.name == "nt" and end == "killed":
        pytest.skip("Windows has no such signal")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = f"import os\nfrom helpers import config\nprint(config.temporary('15'), flush=True)\n{ENDS[end]}"
    environment = {**os.environ, "TMPDIR": str(tmp_path), "TEMP": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], cwd=config.PROJECT, env=environment, **pipes) as process:
        theirs = Path(process.stdout.readline().strip())
        if end != "still running":
            process.wait()
        assert theirs.exists() == (end != "normal end")
        mine = config.temporary("15")  # of a process that runs
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))  # as if it was old
        other = config.temporary("15")
        assert set(tmp_path.iterdir()) == {mine, other} | ({theirs} if end == "still running" else set())
        process.communicate("\n" if end == "still running" else None)
    assert not theirs.exists()
