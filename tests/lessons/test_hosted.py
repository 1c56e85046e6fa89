"""Copies of the notebooks for Colab: their first cell, run by a real Git and a real pip, offline."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from support.notebooks import NOTEBOOKS, content

from helpers import __main__ as shell
from helpers import config
from helpers.lessons import hosted, preflight

COLAB = Path(__file__).parent.parent / "support" / "colab-2026-08.txt"


def test_each_notebook_has_a_copy_with_another_first_cell_folded_solutions_and_pictures(tmp_path, monkeypatch):
    monkeypatch.setattr(config, "REPOSITORY", "https://github.com/somebody/course")
    copies = hosted.write_copies(tmp_path)
    assert [copy.name for copy in copies] == [path.name for path in NOTEBOOKS]
    for copy, path in zip(copies, NOTEBOOKS, strict=True):
        made, notebook = nbformat.read(copy, as_version=4), content(path)
        nbformat.validate(made)
        first = made.cells.pop(0)
        for cell, before in zip(made.cells, notebook.cells, strict=True):
            if "solution" in before.metadata.get("tags", []):
                assert cell.metadata.pop("cellView") == "form"
                cell.source = cell.source.replace("# @title Solution\n", "", 1)
                assert "# @title Solution" not in cell.source
            assert not re.search(r"!\[[^]]*\]\((?!https://)", cell.source), cell.source  # all pictures have an address
            cell.source = cell.source.replace(f"https://github.com/somebody/course/raw/{hosted.release()}/", "../")
        assert made == notebook
        assert (first.id, first.cell_type, first.outputs) == (hosted.CELL_ID, "code", [])
        assert first.source == hosted.first_cell()


def test_without_an_address_there_are_no_copies_and_the_shell_says_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(config, "REPOSITORY", "")
    assert shell.main(["colab", "--out", str(tmp_path)]) == 1
    assert "REPOSITORY in helpers/config.py is empty" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def wheel(folder, name, version, requires=""):
    """A package of nothing but its name, as a file that pip installs."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in [*archive.namelist(), f"{info}/RECORD"]))
    return zipfile.ZipFile(archive.filename)


@pytest.fixture
def machine(tmp_path):
    """A machine that somebody else has set up: all packages of this environment, and ``there`` 1.0; 2.0 is offered."""
    packages = tmp_path / "packages"
    packages.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "environment"], check=True)
    there = {"base": str(tmp_path / "environment")}
    site, python = sysconfig.get_path("purelib", vars=there), Path(sysconfig.get_path("scripts", vars=there), "python")
    Path(site, "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    wheel(packages, "there", "1.0").extractall(site)
    wheel(packages, "there", "2.0")
    own = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(packages), "HOME": str(tmp_path), "USERPROFILE": str(tmp_path)}
    return python, packages, os.environ | own


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Publishes a course that needs some packages more, and returns the cell that gets it."""

    def publish(*needed):
        origin = tmp_path / "published"
        for folder in ("helpers", "stepscope/src"):
            shutil.copytree(config.PROJECT / folder, origin / folder, ignore=shutil.ignore_patterns("__pycache__"))
        (origin / "notebooks").mkdir()
        (origin / "notebooks" / "one.ipynb").touch()
        shutil.copy(config.PROJECT / "stepscope" / "pyproject.toml", origin / "stepscope")
        text = (config.PROJECT / "pyproject.toml").read_text(encoding="utf-8")
        more = "".join(f'    "{each}",\n' for each in needed)
        (origin / "pyproject.toml").write_text(text.replace("dependencies = [\n", f"dependencies = [\n{more}", 1))
        git = ["git", "-C", origin, "-c", "user.name=a", "-c", "user.email=a@b.c"]
        for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"], ["tag", hosted.release()]):
            subprocess.run([*git, *command], check=True)
        monkeypatch.setattr(config, "REPOSITORY", origin.as_uri())
        return hosted.first_cell()

    return publish


SHOWN = """
import importlib.metadata, json
print(json.dumps({each: importlib.metadata.version(each) for each in ("there", "missing", "numpy", "torch")}))
print(os.getcwd())
subprocess.run([sys.executable, "-c", "import helpers, stepscope; print(helpers.__file__)"], cwd="/", check=True)
"""


def run(machine, cell):
    python, _, environment = machine
    return subprocess.run([python, "-P", "-c", cell + SHOWN], env=environment, capture_output=True, text=True)


@pytest.mark.processes
def test_the_cell_gets_the_course_and_installs_what_is_missing_and_nothing_else(machine, published, tmp_path):
    """The newest ``missing`` would replace a package that is there; pip takes one that does not."""
    wheel(machine[1], "missing", "1.0", "Requires-Dist: there\n")
    wheel(machine[1], "missing", "2.0", "Requires-Dist: there>=2\n")
    cell = published("missing")
    process = run(machine, cell)
    assert process.returncode == 0, process.stderr
    course = tmp_path / "faster-pytorch-training"
    versions, folder, file = process.stdout.splitlines()[-3:]
    kept = {each: preflight.version(each) for each in ("numpy", "torch")}
    assert json.loads(versions) == {"there": "1.0", "missing": "1.0"} | kept
    assert Path(folder) == course / "notebooks"
    assert Path(file) == course / "helpers" / "__init__.py"
    assert "Missing here: missing." in process.stdout and "Missing here" not in run(machine, cell).stdout


@pytest.mark.processes
def test_what_is_too_old_is_named_with_the_way_out_and_the_restart(machine, published):
    wheel(machine[1], "missing", "1.0")
    process = run(machine, published("there>=2", "missing"))
    assert process.returncode == 1
    assert "too old: there 1.0" in process.stderr
    assert "pip install 'there>=2' 'missing'  and restart the runtime" in process.stderr


def test_colab_needs_no_server_of_its_own(monkeypatch):
    names = {each.name for each in preflight.dependencies()}
    monkeypatch.setitem(sys.modules, "google.colab", None)
    assert names - {each.name for each in preflight.dependencies()} == preflight.SERVERS


@pytest.mark.slow
def test_what_colab_lacks_can_be_installed_beside_what_it_has(monkeypatch, tmp_path):
    """Its published versions, and for the rest the registry's newest: nothing that it has may be replaced."""
    monkeypatch.setitem(sys.modules, "google.colab", None)
    there = dict(line.split("==") for line in COLAB.read_text().splitlines() if "==" in line)
    wanted = [each for each in preflight.dependencies() if each.name not in there]
    (tmp_path / "wanted.txt").write_text("\n".join([*(f"{each.name}{each.specifier}" for each in wanted), *there]))
    uv = [Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    uv += ["--python-version=3.13", "--python-platform=linux", f"--constraint={COLAB}", tmp_path / "wanted.txt"]
    process = subprocess.run(uv, cwd=tmp_path, capture_output=True, text=True)  # not with the project's own settings
    if "error sending request" in process.stderr:
        pytest.skip("no registry to ask")
    assert process.returncode == 0, process.stderr
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", process.stdout, re.MULTILINE))
    assert {each.name for each in wanted} <= found.keys()
    assert {name: found[name] for name in there} == there
    for each in preflight.dependencies():
        assert Requirement(str(each)).specifier.contains(found[each.name]), each
