"""The folder for what a notebook needs until its process ends."""

import os
import subprocess
import sys
import tempfile

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
    assert len(list(tmp_path.iterdir())) == (end != "pass")
    mine, other = config.temporary("15"), config.temporary("15")  # of a process that runs
    assert set(tmp_path.iterdir()) == {mine, other}
