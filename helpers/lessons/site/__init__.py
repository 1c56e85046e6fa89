"""The course as web pages: the notebooks with the outputs of their last run, and all else that there is to read.

Nothing of a page comes from elsewhere, so it opens without internet, and no one counts who reads it.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from sphinx.application import Sphinx
from sphinx.util.docutils import docutils_namespace, patch_docutils

from helpers import config, staging
from helpers.lessons import execute
from helpers.lessons.site import api, conf, glossary, pages

CONFIGURATION = Path(__file__).parent
MADE_BY_SPHINX = ".buildinfo"
_COLOURS = re.compile(r"\x1b\[[\d;]*m")  # of a terminal


class SiteFailed(RuntimeError):
    """Sphinx found something wrong with a page."""


class NoSite(FileExistsError):
    """A folder that should be replaced by the site is none."""


def refresh(images: str | None = None) -> None:
    """Execute the notebooks of which there are no outputs by the same code and with the same preset.

    Parameters
    ----------
    images : str, optional
        Where the images come from, as `cifar10.Prepared` says it.

    Raises
    ------
    NotebookFailed
        If a cell raises an error or its kernel dies.
    """
    missing = [notebook for notebook in execute.all_notebooks() if kept(notebook) is None]
    if missing:
        execute.run(missing, images)


def kept(notebook: Path) -> nbformat.NotebookNode | None:
    """Return a notebook with the outputs that `execute.run` has kept, or None if those are of other code or preset.

    Its text is that of today: outputs belong to the code.
    """
    content = nbformat.read(notebook, as_version=4)
    path = execute.pages() / notebook.name
    if not path.exists():
        return None
    executed = nbformat.read(path, as_version=4)
    if executed.metadata.get("course", {}).get("preset") != config.preset().name or _code(executed) != _code(content):
        return None
    for cell, with_outputs in zip(_code_cells(content), _code_cells(executed), strict=True):
        cell.outputs, cell.execution_count = with_outputs.outputs, with_outputs.execution_count
    content.metadata["course"] = executed.metadata["course"]
    content.metadata["language_info"] = executed.metadata["language_info"]
    return content


def build(out: Path, notebooks: Sequence[Path] | None = None) -> None:
    """Build the site from the notebooks, each with the outputs that are kept of it, if there are such.

    Parameters
    ----------
    out : Path
        Folder of the site. One that is there is replaced, once the new one is whole.
    notebooks : sequence of Path, optional
        By default all of the course.

    Raises
    ------
    SiteFailed
        If Sphinx warns of anything, such as a link to nothing; an earlier site stays.
    NoSite
        If there is something else in `out`.
    """
    if out.exists() and any(out.iterdir()) and not (out / MADE_BY_SPHINX).exists():
        raise NoSite(f"{out}: expected nothing or an earlier site, but it holds other files. Choose another folder.")
    notebooks = execute.all_notebooks() if notebooks is None else notebooks
    with tempfile.TemporaryDirectory(prefix="site-") as scratch:
        source, extra = Path(scratch, "source"), Path(scratch, "extra")
        for folder in (source, extra):
            folder.mkdir()
        api.write(source)
        (source / "glossary.md").write_text(glossary.markdown(notebooks), encoding="utf-8")
        shown = {path: kept(path) or nbformat.read(path, as_version=4) for path in notebooks}
        pages.write(shown, source, extra)
        with staging.folder(out, replace=True) as built:
            render(source, built, extra)


def render(source: Path, built: Path, extra: Path | None = None) -> None:
    """Make pages of a source folder; a warning is an error.

    Parameters
    ----------
    source, built : Path
        Folders; `built` is there.
    extra : Path, optional
        Folder with what goes into `built` as it is.

    Raises
    ------
    SiteFailed
        With all of Sphinx's warnings.
    """
    settings = {"html_extra_path": [str(extra)] if extra else [], "html_theme_options": _theme_options()}
    warnings = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="site-") as scratch, patch_docutils(CONFIGURATION), docutils_namespace():
        made = Path(scratch, "made", "html")  # MyST-NB leaves a folder of its own beside it
        sphinx = Sphinx(
            source, CONFIGURATION, made, Path(scratch, "doctrees"), "html", settings, status=None, warning=warnings,
            warningiserror=True,
        )  # fmt: skip
        sphinx.build()
        shutil.copytree(made, built, dirs_exist_ok=True)
    if sphinx.statuscode:
        found = _COLOURS.sub("", warnings.getvalue()).replace(f"{source.resolve()}{os.sep}", "")
        raise SiteFailed(f"Sphinx warns; correct what it names, and build again.\n{found.strip()}")


def _theme_options() -> dict[str, object]:
    """The theme's options, with buttons that lead to the repository if its address is known."""
    if not config.REPOSITORY:
        return conf.html_theme_options
    return conf.html_theme_options | {
        "repository_url": config.REPOSITORY,
        "repository_branch": "colab",  # where a release's copies of the notebooks are, for the button of that name
        "use_repository_button": True,
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }


def _code_cells(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _code(notebook: nbformat.NotebookNode) -> list[str]:
    return [cell.source for cell in _code_cells(notebook)]
