"""Ruff finds nothing: its rules, and why some are left out, are in pyproject.toml."""

import subprocess
import sys

from helpers import config


def ruff(*arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache"]
    return subprocess.run(command, cwd=config.PROJECT, capture_output=True, text=True)


def test_the_code_keeps_to_the_rules():
    process = ruff("check", "--output-format=concise")
    assert process.returncode == 0, process.stdout + process.stderr


def test_the_code_is_formatted():
    process = ruff("format", "--check")
    assert process.returncode == 0, process.stdout + process.stderr


def test_no_function_is_too_complex():
    process = ruff("check", "--select=C901", "--config=lint.mccabe.max-complexity=15", "helpers", "stepscope/src")
    assert process.returncode == 0, process.stdout
