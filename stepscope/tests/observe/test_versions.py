"""``stepscope run`` with older versions of PyTorch, each in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_run import SCRIPT, line

PROJECT = Path(__file__).parents[2]
OLDEST, *BETWEEN = ("2.4.1", "2.6.0", "2.9.1")  # the tests of this environment run with the newest
DISK = 10e9  # bytes of an environment with the GPU's libraries, and of its downloads
TESTS = ["facts", "observe", "report", "rules", "timing"]
pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module", params=[OLDEST, *BETWEEN])
def python(request):
    """Python of an environment with a version of PyTorch, into which stepscope was installed afterwards."""
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if shutil.disk_usage(folder).free < DISK:
            pytest.skip(f"There are less than {DISK / 1e9:.0f} GB of free disk.")
        environment = Path(folder) / "environment"
        python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
        subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, environment], check=True)
        install = [uv, "pip", "install", "--quiet", "--python", python]
        if subprocess.run([*install, f"torch=={request.param}"]).returncode:
            pytest.skip(f"PyTorch {request.param} cannot be installed.")
        subprocess.run([*install, PROJECT], check=True)
        yield python


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "key"), [("slow", "items.waiting"), ("validates", "host.other-work-in-steps")])
def test_a_script_with_an_older_pytorch_is_diagnosed_and_prints_the_same(python, tmp_path, fault, key):
    def execute(*command):
        command = [python, *command, SCRIPT, fault, "150"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    alone, ended = execute(), execute("-m", "stepscope", "run", "--json", "found.json")
    assert (ended.returncode, ended.stdout) == (3, alone.stdout), ended.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())["results"]
    lines = {finding["key"]: finding["line"] for finding in found["diagnosis"]["findings"]}
    assert line(fault) in lines[key]


@pytest.mark.prove
def test_the_tests_of_a_diagnosis_pass_with_an_older_pytorch(python):
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, f"{PROJECT}[test]"], check=True)
    command = [python, "-m", "pytest", "-q", "-m", "not slow and not prove and not browser", "-p", "no:cacheprovider"]
    ended = subprocess.run([*command, *(f"tests/{name}" for name in TESTS)], cwd=PROJECT)
    assert ended.returncode == 0
