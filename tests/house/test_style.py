"""Ruff, mypy and git find nothing: their rules, and why some are left out, are in pyproject.toml."""

import subprocess
import sys

import pytest

from helpers import config

RULES = {
    "the rules": "check --output-format=concise",
    "the format": "format --check",
    "simple functions": "check --select=C901 --config=lint.mccabe.max-complexity=15 helpers stepscope/src",
}


@pytest.mark.parametrize("arguments", RULES.values(), ids=RULES)
def test_the_code_keeps_to(arguments):
    command = [sys.executable, "-m", "ruff", *arguments.split(), "--no-cache"]
    process = subprocess.run(command, cwd=config.PROJECT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.processes
def test_the_types_fit():
    process = subprocess.run([sys.executable, "-m", "mypy"], cwd=config.PROJECT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.skipif(not (config.PROJECT / ".git").exists(), reason="not a clone")
def test_no_file_has_leftovers_of_a_merge():
    nothing = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's number for a tree without files
    process = subprocess.run(["git", "diff", "--check", nothing], cwd=config.PROJECT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
