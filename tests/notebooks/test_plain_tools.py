"""A notebook executed as somebody does who knows nothing of this course's own commands."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.notebooks import environment

from helpers import config

BIN = Path(sys.executable).parent
NOTEBOOKS = config.PROJECT / "notebooks"
FIRST, WITH_SLIDERS = NOTEBOOKS / "00-start-here.ipynb", NOTEBOOKS / "02-two-clocks.ipynb"
TOOLS = {
    "nbval": [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", FIRST],
    "papermill": [BIN / "papermill", "--cwd", NOTEBOOKS, FIRST, "executed.ipynb"],
    "jupyter execute": [BIN / "jupyter", "execute", "copy.ipynb"],
}


@pytest.mark.notebooks
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", TOOLS.values(), ids=TOOLS)
def test_a_notebook_executes_to_its_end(command, drawn_images, tmp_path):
    shutil.copy(WITH_SLIDERS, tmp_path / "copy.ipynb")
    variables = environment(Path(drawn_images["COURSE_DATA"]), tmp_path / "runs")
    path = os.pathsep.join([str(BIN), os.environ["PATH"]])
    cwd = config.PROJECT if "--nbval" in command else tmp_path
    done = subprocess.run(command, cwd=cwd, env=variables | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
