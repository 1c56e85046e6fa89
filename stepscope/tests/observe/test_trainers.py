"""Tests of the callbacks, with the real Trainers, which are installed for that into a folder of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]
HERE = Path(__file__).parent
PACKAGES = ["lightning==2.6.6", "transformers==5.24.0", "accelerate==1.15.0"]
OURS = ["torch", "numpy", "psutil", "filelock"]  # what is here already: not to be had twice


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    (folder / "without.txt").write_text("\n".join(f'{name}; sys_platform == "never"' for name in OURS))
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", sys.executable]
    subprocess.run([*uv, "--target", folder / "site", "--overrides", folder / "without.txt", *PACKAGES], check=True)
    return os.environ | {"PYTHONPATH": str(folder / "site"), "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize(
    ("watcher", "script"),
    [
        ([], ["of_lightning.py"]),
        ([], ["of_transformers.py", "callback"]),
        (["-m", "stepscope", "run", "--steps", "5"], ["of_transformers.py"]),
    ],
    ids=["callback of Lightning", "callback of Transformers", "run"],
)
def test_the_line_that_is_slow_is_named_and_the_training_goes_on_to_its_end(environment, tmp_path, watcher, script):
    name, *arguments = script
    command = [sys.executable, *watcher, HERE / name, *arguments]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "updates: 80"), ended.stderr
    assert ended.stderr.count("Verdict: ") == 1
    first = ended.stderr.partition("  1  ")[2].partition("  2  ")[0]
    assert first.startswith("items that wait"), ended.stderr
    lines = (HERE / "slow_items.py").read_text().splitlines()
    (number,) = (number for number, text in enumerate(lines, 1) if "fault" in text)
    assert f"slow_items.py:{number}:" in first
