"""The notebooks for machines that others have set up, such as Colab's: copies whose first cell gets the course.

The notebooks themselves have no such cell: a clone of the course does not need it.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import nbformat

from helpers import config
from helpers.lessons import preflight
from stepscope.base import staging

CELL_ID = "get-the-course"
_TITLE = "# @title Solution"
_PICTURE = re.compile(r"(!\[[^]]*\]\()\.\./")  # in Markdown, the picture of a file beside the notebooks' folder
CELL = """\
# For Colab and the like: gets the released course, and installs missing packages. It replaces nothing.
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


def prepare() -> None:
    """Install the packages that the notebooks need and this environment lacks, and say so; replace no package.

    Afterwards programs that the notebooks start find the course, too. Raises `config.CourseError` if pip cannot install
    a package beside the installed ones, or an installed one is too old for the course.
    """
    folders = [str(config.PROJECT), str(config.PROJECT / "stepscope" / "src"), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    lacking = [package for package in preflight.dependencies() if not preflight.satisfied(package)]
    wanted = [f"{package.name}{package.specifier}" for package in lacking]
    if wanted:
        print(f"Missing here: {', '.join(wanted)}. pip installs it, in a minute or less.", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        with tempfile.TemporaryDirectory() as folder:
            installed = Path(folder, "installed.txt")  # with their versions: what pip may not replace
            installed.write_bytes(subprocess.run([*pip, "list", "--format=freeze"], stdout=subprocess.PIPE).stdout)
            process = subprocess.run([*pip, "install", "--quiet", "--constraint", installed, *wanted])
        if process.returncode:
            unfit = [f"{package.name} {found}" for package in lacking if (found := preflight.version(package.name))]
            quoted = " ".join(f"'{package}'" for package in wanted)
            raise config.CourseError(
                f"pip could not install {', '.join(wanted)}; its output above says why. Is there internet? Installed, "
                f"but too old: {', '.join(unfit) or 'no package'}. For such a package choose a newer runtime, or "
                f"run  pip install {quoted}  and restart the runtime; then run this cell again."
            )
        importlib.invalidate_caches()
    print(f"The course is at {config.PROJECT}. No installed package was changed, so the runtime need not be restarted.")


def write_copies(folder: str | Path) -> list[Path]:
    """Write a copy of each notebook that begins with the cell that gets the course, fit for Colab.

    Colab folds a cell by its title, so solutions get one; pictures get the address of the repository. Notebooks of the
    same names in `folder` are replaced. Raises `config.CourseError` if ``config.REPOSITORY``, the address to clone the
    course from, is empty.
    """
    if not config.REPOSITORY:
        raise config.CourseError(
            "Colab's machine would have to clone the course, but REPOSITORY in helpers/config.py is empty. Publish the "
            "course, write its address there, and release it with the tag " + release() + "."
        )
    copies = []
    for path in sorted((config.PROJECT / "notebooks").glob("[0-9][0-9]-*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        for each in notebook.cells:
            _fit(each)
        notebook.cells.insert(0, nbformat.v4.new_code_cell(first_cell(), id=CELL_ID))
        copies.append(Path(folder, path.name))
        staging.write(copies[-1], nbformat.writes(notebook) + "\n")
    return copies


def first_cell() -> str:
    """Return the source of the cell that gets the course; run on another machine, it needs nothing but Git and pip."""
    return CELL.format(name=_project()["name"], release=release(), repository=config.REPOSITORY)


def _fit(cell: nbformat.NotebookNode) -> None:
    """Fold a solution, and give pictures their address."""
    if "solution" in cell.metadata.get("tags", []):
        cell.metadata["cellView"] = "form"
        first, _, rest = cell.source.partition("\n")
        cell.source = f"{first}\n{_TITLE}\n{rest}" if first.startswith("%%") else f"{_TITLE}\n{cell.source}"
    elif cell.cell_type == "markdown":
        cell.source = _PICTURE.sub(rf"\1{config.REPOSITORY}/raw/{release()}/", cell.source)


def release() -> str:
    """The tag of this release, such as ``v0.1.0``."""
    return f"v{_project()['version']}"


def _project() -> dict:
    return tomllib.loads((config.PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
