"""Ruff, mypy and git find nothing: their rules, and why some are left out, are in pyproject.toml."""

import ast
import subprocess
import sys

import pytest
from support.notebooks import NOTEBOOKS, content

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


def test_text_is_read_and_written_as_utf_8_whatever_the_machine_speaks():
    sources = {
        path: path.read_text(encoding="utf-8")
        for folder in ("helpers", "stepscope/src")
        for path in (config.PROJECT / folder).rglob("*.py")
    }
    for path in NOTEBOOKS:
        code = [cell.source for cell in content(path).cells if cell.cell_type == "code"]
        lines = [line for source in code if source[:2] != "%%" for line in source.splitlines() if line[:1] != "%"]
        sources[path] = "\n".join(lines)
    found = [
        f"{path.name}: {ast.unparse(call)}" for path, source in sources.items() for call in without_encoding(source)
    ]
    assert found == []


def without_encoding(source):
    """Return the calls that read or write text in the encoding of the machine's language."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if "encoding" not in [option.arg for option in call.keywords]]
    most = {"read_text": 0, "write_text": 1}  # arguments without a place for the encoding
    texts = [call for call in calls if len(call.args) <= most.get(getattr(call.func, "attr", ""), -1)]
    modes = [call for call in calls if getattr(call.func, "id", "") == "open"]
    return texts + [call for call in modes if "b" not in str(ast.unparse(call.args[1]) if call.args[1:] else "")]


def test_a_call_without_an_encoding_is_found():
    source = "open(a); open(a, 'w'); open(a, 'rb'); open(a, encoding='utf-8'); a.read_text(); a.write_text(b); f.open()"
    assert [ast.unparse(call) for call in without_encoding(source)] == [
        "a.read_text()", "a.write_text(b)", "open(a)", "open(a, 'w')",
    ]  # fmt: skip


@pytest.mark.skipif(not (config.PROJECT / ".git").exists(), reason="not a clone")
def test_no_file_has_leftovers_of_a_merge():
    nothing = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's number for a tree without files
    process = subprocess.run(["git", "diff", "--check", nothing], cwd=config.PROJECT, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
