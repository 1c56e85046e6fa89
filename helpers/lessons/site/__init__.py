"""The course as web pages: the notebooks with the outputs of their last run, and all other texts.

Sphinx and MyST-NB make them, configured in `conf`. A page loads nothing from elsewhere, so it opens without internet.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat

from helpers import config
from helpers.lessons import execute
from stepscope.base import staging

HERE = Path(__file__).parent
# The pages, and the files that they link: these can be downloaded
FILES = (
    "*.md",
    "LICENSE*",
    "CITATION.cff",
    ".github/workflows/*.yml",
    "data/reference/*/README.md",
    "data/reference/*/*.png",
    "notebooks/*.*",
    "notebooks/slurm/*.*",
    "stepscope/*.md",
    "stepscope/docs/*.*",
    "stepscope/src/stepscope/*.py",
    "stepscope/src/stepscope/*/*.py",
    "stepscope/src/stepscope/*/*.json",
    "stepscope/tests/*.py",
    "tests/*/*.*",
)
MADE_BY_SPHINX = ".buildinfo"

MEASURED = """```{{admonition}} Measured on {date}
:class: note

{machine} Processor: {processor}. Images: {images}.

The preset is how much was run: `ci` the least, `full` the most. The numbers of your machine will differ.
```"""
NOT_EXECUTED = """```{admonition} Without outputs
:class: note

This notebook was not executed for this page: it shows the code without what the code prints and draws.
```"""


def refresh(images: str | None = None) -> None:
    """Execute, with `execute.run`, the notebooks that have no kept outputs of the same code and preset."""
    missing = [notebook for notebook in execute.all_notebooks() if kept(notebook) is None]
    if missing:
        execute.run(missing, images)


def kept(notebook: Path) -> nbformat.NotebookNode | None:
    """Return a notebook with the outputs that `execute.run` has kept, or None if they have other code or preset.

    Its text is the current one: outputs belong to the code.
    """
    path = execute.pages() / notebook.name
    if not path.exists():
        return None
    content, executed = (nbformat.read(file, as_version=4) for file in (notebook, path))
    code, ran = ([cell for cell in each.cells if cell.cell_type == "code"] for each in (content, executed))
    if executed.metadata.course.preset != config.preset().name or [c.source for c in code] != [c.source for c in ran]:
        return None
    for cell, with_outputs in zip(code, ran, strict=True):
        cell.outputs, cell.execution_count = with_outputs.outputs, with_outputs.execution_count
    content.metadata |= executed.metadata
    return content


def build(out: Path, notebooks: Sequence[Path] | None = None) -> None:
    """Build the site from the notebooks, by default all, each with its kept outputs, if any.

    An earlier site in `out` is replaced when the new one is complete. Raises `config.CourseError` if Sphinx warns of
    anything, such as a broken link (an earlier site stays then); or if `out` holds other files.
    """
    if out.exists() and any(out.iterdir()) and not (out / MADE_BY_SPHINX).exists():
        raise config.CourseError(
            f"{out}: expected nothing or an earlier site, found other files. Choose another folder."
        )
    with tempfile.TemporaryDirectory(prefix="site-") as scratch:
        source, made = Path(scratch, "source"), Path(scratch, "made", "html")  # MyST-NB leaves a folder beside it
        shutil.copytree(HERE / "pages", source)
        for path in (path for pattern in FILES for path in config.PROJECT.glob(pattern)):
            if path.suffix == ".ipynb" or not path.is_file():  # JupyterLab leaves a folder .ipynb_checkpoints
                continue
            target = source / path.relative_to(config.PROJECT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        with open(source / "README.md", "a", encoding="utf-8") as home:
            home.write((HERE / "contents.md").read_text(encoding="utf-8"))
        for path in execute.all_notebooks() if notebooks is None else notebooks:
            (source / "notebooks" / path.name).write_text(_page(path), encoding="utf-8")
        options = ["-q", "-W", "--keep-going", "--no-color", "-c"]
        sphinx: list[str | Path] = [sys.executable, "-m", "sphinx", *options, HERE, source, made]
        folders = os.pathsep.join([str(config.PROJECT), *filter(None, sys.path)])
        process = subprocess.run(sphinx, env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True)
        if process.returncode:
            warnings = process.stderr.replace(f"{source.resolve()}{os.sep}", "").strip()
            raise config.CourseError(f"Sphinx warns; correct what it names, and build again.\n{warnings}")
        shutil.copyfile(made / "README.html", made / "index.html")
        shutil.rmtree(made / ".doctrees")
        with staging.folder(out, replace=True) as built:
            shutil.copytree(made, built, dirs_exist_ok=True)


def _page(path: Path) -> str:
    """Return a notebook for MyST-NB: with what it was measured on, its solutions folded, no path of this machine."""
    notebook = kept(path) or nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("click on the three dots", "click to open")
        if "solution" in cell.metadata.get("tags", ()):
            cell.metadata.tags.append("hide-cell")
    course = notebook.metadata.get("course")
    note = NOT_EXECUTED if course is None else MEASURED.format(**course)
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(note))
    text = nbformat.writes(notebook)
    folders = {config.runs_dir(): "runs", config.data_dir(): "data", config.PROJECT: ".", Path.home(): "~"}
    for folder, short in folders.items():
        text = re.sub(rf"{re.escape(str(folder))}(?![\w.-])", short, text)
    return text
