"""The notebooks on machines that others have set up, such as Colab's: copies whose first cell gets the course there.

The notebooks themselves have no such cell: wherever the course was cloned, it would only stand in the way.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

import nbformat
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from helpers import config
from helpers.lessons import preflight
from stepscope.base import staging

NOTEBOOKS = config.PROJECT / "notebooks"
CELL_ID = "get-the-course"
CELL = """\
# For Colab and the like: gets the course as it was released, and installs what is missing here. It replaces nothing.
import os, subprocess, sys
from pathlib import Path

COURSE = Path.home() / "{name}"
if not COURSE.exists():
    git = ["git", "-c", "advice.detachedHead=false", "clone", "--quiet", "--depth=1"]
    subprocess.run([*git, "--branch={release}", "{repository}", COURSE], check=True)
os.chdir(COURSE / "notebooks")
sys.path[:0] = [str(COURSE), str(COURSE / "stepscope" / "src")]

from helpers.lessons import hosted

hosted.prepare()"""


# ------------------------------------------------------------------------------------------ what the first cell calls


def prepare() -> None:
    """Install what the notebooks need and this environment lacks, and say so; replace nothing that is installed.

    Programs that the notebooks start find the course afterwards, too.

    Raises
    ------
    config.CourseError
        If a package is installed in a version with which the course does not work, or one that is missing cannot be
        installed beside those that are there.
    """
    folders = [str(config.PROJECT), str(config.PROJECT / "stepscope" / "src"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    wanted = preflight.dependencies()
    missing = [each for each in wanted if preflight.version(each.name) is None]
    unfit = [each for each in wanted if each not in missing and not preflight.satisfied(each)]
    if unfit:
        needed = " ".join(f"'{_pip(each)}'" for each in unfit)
        raise config.CourseError(
            f"The course does not fit {_versions(unfit)}, and replaces nothing by itself: choose a newer runtime, "
            f"or run  pip install {needed}  and restart the runtime; then run this cell again."
        )
    if missing:
        _install(missing)
    added = f"Installed: {_versions(missing)}." if missing else "No package was missing."
    print(f"The course is at {config.PROJECT}. {added}")
    print("Nothing that was here has changed, so the runtime need not be restarted.")


def _install(missing: Sequence[Requirement]) -> None:
    names = ", ".join(each.name for each in missing)
    print(f"Missing here: {names}. pip installs it, in a minute or less.", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "installed.txt")
        pins.write_text("".join(f"{name}=={found}\n" for name, found in _installed().items()), encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", pins]
        process = subprocess.run([*pip, *map(_pip, missing)])
    if process.returncode:
        raise config.CourseError(
            f"pip could not install {names} beside what is here; above it says why. Is there internet?"
        )
    importlib.invalidate_caches()


def _pip(wanted: Requirement) -> str:
    return f"{wanted.name}{wanted.specifier}"


def _versions(packages: Sequence[Requirement]) -> str:
    return ", ".join(f"{each.name} {preflight.version(each.name)}" for each in packages)


def _installed() -> dict[str, str]:
    """Every installed package with its version: what pip may not replace."""
    found = {}
    for each in importlib.metadata.distributions():
        try:
            Version(each.version)
        except (InvalidVersion, TypeError):  # packages of the system have versions that pip refuses to read
            continue
        found.setdefault(each.name, each.version)  # as for imports, the first on the path
    return found


# --------------------------------------------------------------------------------------------------------- the copies


def write_copies(folder: str | Path) -> list[Path]:
    """Write a copy of each notebook that begins with the cell that gets the course.

    Parameters
    ----------
    folder : str or Path
        Notebooks of the same names there are replaced.

    Raises
    ------
    config.CourseError
        If ``config.REPOSITORY``, the address to clone the course from, is empty.
    """
    if not config.REPOSITORY:
        raise config.CourseError(
            "Colab's machine would have to clone the course, but REPOSITORY in helpers/config.py is empty. Publish the "
            "course, write its address there, and release it with the tag " + release() + "."
        )
    cell = CELL.format(name=_project()["name"], release=release(), repository=config.REPOSITORY)
    copies = []
    for path in sorted(NOTEBOOKS.glob("[0-9][0-9]-*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(cell, id=CELL_ID))
        copies.append(Path(folder, path.name))
        staging.write(copies[-1], nbformat.writes(notebook) + "\n")
    return copies


def release() -> str:
    """The tag of the release that this is, such as ``v0.1.0``."""
    return f"v{_project()['version']}"


def _project() -> dict:
    return tomllib.loads((config.PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
