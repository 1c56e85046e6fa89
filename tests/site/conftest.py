"""The site as tests see it: of the whole course, with outputs of one notebook that prints what the site shows apart."""

import os
from pathlib import Path

import nbformat
import pytest
from filelock import FileLock
from nbformat import v4

from helpers import config
from helpers.lessons import execute, site


def notebook(path: Path) -> Path:
    cells = [
        v4.new_markdown_cell("# 14 · Everything\n\nSee the [recipes](recipes.py) and the [README](../README.md)."),
        v4.new_code_cell(f"print({str(config.runs_dir() / 'everything')!r})"),
        v4.new_code_cell("1 + 2", metadata={"tags": ["solution"]}),
    ]
    nbformat.write(v4.new_notebook(cells=cells, metadata={"language_info": {"name": "python"}}), path)
    return path


@pytest.fixture(scope="session")
def built_site(tmp_path_factory) -> Path:
    """Folder of the built site, one for all processes that test side by side."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with FileLock(folder / "site.lock"), pytest.MonkeyPatch.context() as patch:
        if not (folder / "site").exists():
            patch.setenv("COURSE_PRESET", "ci")
            patch.setenv("COURSE_RUNS", str(folder / "site-runs"))
            everything = notebook(folder / "14-everything.ipynb")
            execute.run([everything], "drawn images")
            site.build(folder / "site", [*execute.all_notebooks(), everything])
    return folder / "site"
