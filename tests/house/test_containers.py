"""The Dockerfile and the devcontainer: linted, held against the Makefile, and the Dockerfile's steps run. No Docker."""

import re
import subprocess
import sys
from pathlib import Path

import json5
import pytest
from packaging.requirements import Requirement
from support.dockerfile import instructions, run_steps

from helpers import config

DOCKERFILE = (config.PROJECT / "Dockerfile").read_text(encoding="utf-8")
DEVCONTAINER = json5.loads((config.PROJECT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
MAKEFILE = (config.PROJECT / "Makefile").read_text(encoding="utf-8")
PYPROJECT = (config.PROJECT / "pyproject.toml").read_text(encoding="utf-8")
HADOLINT = Path(sys.executable).with_name("hadolint")
# Of the devcontainer reference, those that ours has: a misspelt one would be ignored without a word
KEYS = {"name", "image", "hostRequirements", "runArgs", "postCreateCommand", "forwardPorts", "portsAttributes"}
KEYS |= {"customizations"}


def arguments_of(name, text=DOCKERFILE):
    return [arguments for instruction, arguments in instructions(text) if instruction == name]


def python_of(image):
    """The Python that an image has, as its name says."""
    return re.search(r"python:(\d+\.\d+)-", image)[1]


@pytest.fixture
def lint(tmp_path):
    if not HADOLINT.exists():
        pytest.skip("hadolint has no package for this system")

    def findings(text):
        (tmp_path / "Dockerfile").write_text(text, encoding="utf-8")
        found = subprocess.run([HADOLINT, "--no-color", tmp_path / "Dockerfile"], capture_output=True, text=True)
        assert found.returncode == bool(found.stdout), found.stderr
        return re.findall(r"\bDL\d+|\bSC\d+", found.stdout)

    return findings


# ------------------------------------------------------------------------------------------------------- the Dockerfile


def test_hadolint_has_no_findings(lint):
    assert lint(DOCKERFILE) == []


def test_hadolint_finds_an_image_without_a_version(lint):
    assert lint(re.sub(r"(FROM python):\S+", r"\1", DOCKERFILE)) == ["DL3006"]


def test_jupyterlab_runs_as_a_user_without_rights_and_asks_for_its_token():
    names = [name for name, _ in instructions(DOCKERFILE)]
    assert names.index("USER") < names.index("WORKDIR") < names.index("CMD")
    assert arguments_of("USER") == ["1000"]
    assert "token" not in arguments_of("CMD")[0] and "allow" not in arguments_of("CMD")[0]


def test_the_image_is_made_and_started_by_the_makefile():
    assert arguments_of("RUN")[-1].endswith(" make .venv/installed")
    assert json5.loads(arguments_of("CMD")[0])[:2] == ["make", "lab"]
    prerequisites = re.search(r"^\.venv/installed: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert {*prerequisites, "Makefile"} <= set(arguments_of("COPY")[0].split())


@pytest.mark.parametrize("image", [arguments_of("FROM")[0], DEVCONTAINER["image"]])
def test_the_images_python_is_one_for_which_the_project_is_made(image):
    allowed = re.search(r'^requires-python = "(.*)"', PYPROJECT, re.MULTILINE)[1]
    assert Requirement(f"python{allowed}").specifier.contains(python_of(image))


def test_what_git_ignores_does_not_get_into_the_image():
    ignored = {line.strip("/").replace("!/", "!") for line in (config.PROJECT / ".gitignore").read_text().splitlines()}
    left_out = {line.removeprefix("**/") for line in (config.PROJECT / ".dockerignore").read_text().splitlines()}
    assert ignored <= left_out


@pytest.mark.slow
@pytest.mark.timeout(1200)  # where nothing is cached, it downloads PyTorch with CUDA
def test_the_steps_make_an_environment_that_needs_no_further_installation(tmp_path):
    if not (config.PROJECT / ".git").exists():
        pytest.skip("not a clone: Git does not say which files belong to the project")
    uv = [Path(sys.executable).with_name("uv"), "cache", "dir"]
    cache = subprocess.run(uv, capture_output=True, text=True, check=True).stdout.strip()
    own = {"HOME": str(tmp_path / "home"), "UV_CACHE_DIR": cache}
    folder = tmp_path / "course"
    folder.mkdir()
    assert run_steps(DOCKERFILE, config.PROJECT, folder, own) == ["make .venv/installed"]
    commands = subprocess.run(["make", "-n", "lab"], cwd=folder, capture_output=True, text=True, check=True).stdout
    assert "pip" not in commands and "helpers prepare" in commands
    shown = [folder / ".venv" / "bin" / "python", "-c", "import torch, helpers; print(helpers.__file__)"]
    found = subprocess.run(shown, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(found) == folder / "helpers" / "__init__.py"


# ----------------------------------------------------------------------------------------------------- the devcontainer


def test_the_devcontainer_has_known_keys_only():
    assert set(DEVCONTAINER) == KEYS
    assert set(DEVCONTAINER["hostRequirements"]) <= {"cpus", "memory", "storage", "gpu"}


def test_the_devcontainer_is_made_by_the_makefile_and_does_not_ask_for_a_gpu():
    assert DEVCONTAINER["postCreateCommand"] == "make .venv/installed"
    assert re.search(r"^\.venv/installed:", MAKEFILE, re.MULTILINE)
    assert DEVCONTAINER["hostRequirements"]["gpu"] == "optional"
    assert python_of(DEVCONTAINER["image"]) == python_of(arguments_of("FROM")[0])
