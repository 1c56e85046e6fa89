"""Ruff finds nothing: its rules, and why some are left out, are in pyproject.toml."""

import subprocess
import sys

import pytest

from helpers import config


def ruff(*arguments, folder=config.PROJECT):
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_code_keeps_to_the_rules():
    process = ruff("check", "--output-format=concise")
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_code_is_formatted():
    process = ruff("format", "--check")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.parametrize(
    "wrong", ["import os\n", "x = lambda: 1\n", "l = [i for i in range(2)]\n", f"x = '{'x' * 120}'\n"]
)
def test_code_that_breaks_a_rule_is_found(wrong, tmp_path):
    (tmp_path / "wrong.py").write_text(wrong)
    assert ruff("check", f"--config={config.PROJECT / 'pyproject.toml'}", folder=tmp_path).returncode == 1
