"""The scripts for Slurm as texts: what bash and shellcheck say, and that two of them stay alike."""

import difflib
import shutil
import subprocess

import pytest

from helpers import config

FOLDER = config.PROJECT / "notebooks" / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)


def said(*command):
    process = subprocess.run(command, capture_output=True, text=True)
    return process.stdout + process.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@each_script
def test_bash_can_read_a_script(script):
    assert said("bash", "-n", script) == ""


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
@each_script
def test_shellcheck_finds_nothing(script):
    assert said("shellcheck", script) == ""


@each_script
def test_a_script_is_as_wide_as_the_code(script):
    assert max(map(len, script.read_text(encoding="utf-8").splitlines())) <= 120


def test_one_node_is_trained_on_as_several_are_but_for_the_meeting():
    texts = [(FOLDER / f"{name}.sbatch").read_text(encoding="utf-8") for name in ("one_node", "several_nodes")]
    one, several = (text.replace("on_the_node", "on_each_node").replace(" endpoint", "").splitlines() for text in texts)
    lines = [line for line in difflib.ndiff(one, several) if line.startswith(("- ", "+ "))]
    other = [line for line in lines if not line[2:].lstrip().startswith("#") and line[2:].strip()]
    words = (
        "--nodes",
        "--ntasks-per-node",
        "torchrun",
        "rdzv",
        "endpoint",
        "read -r first",
        "--kill-on-bad-exit",
        "echo",
    )
    assert not [line for line in other if not any(word in line for word in words)], "change both"
