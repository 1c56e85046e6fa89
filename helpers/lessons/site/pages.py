"""The pages of the site as Sphinx reads them: notebooks, documents, sources, and their order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import nbformat

from helpers import config
from helpers.lessons.site import api, links, outputs, tab

# The parts of the course, by the number of their first notebook
PARTS = {
    "Part 1: feed it": 0,
    "Part 2: compute": 8,
    "Part 3: beyond one machine": 12,
    "Part 4: yours": 14,
}
FIGURES = "figures"  # folder of the site, beside `notebooks`
TAB = config.PROJECT / "notebooks" / "tensorboard.png"  # where the picture of the tab would lie, if it were kept

MEASURED = """```{{admonition}} Measured on {date}
:class: note

{machine} Processor: {processor}. Images: {images}.

The preset is how much was run: `ci` the least, `full` the most. The numbers of your machine will differ.
```"""
NOT_EXECUTED = """```{admonition} Without outputs
:class: note

This notebook was not executed when this page was made: it shows the code, and not what the code prints and draws.
```"""
TENSORBOARD = """{picture}

*TensorBoard opens here when you run the notebook.* [How to open and read it]({how})
"""
HOW = "01-first-profile.ipynb#read-the-trace-in-tensorboard"
SOURCE = """# {name}

{{download}}`Download {name} <{name}>`

```{{literalinclude}} {name}
:language: {language}
```
"""
LADDER = "![Bars of images per second, one for each rung of the ladder]({})"
TOCTREE = """```{{toctree}}
:hidden:
:caption: {caption}

{pages}
```
"""


def write(notebooks: dict[Path, nbformat.NotebookNode], source: Path, extra: Path) -> None:
    """Write all pages into Sphinx's source folder, which may have the pages of the functions already.

    Parameters
    ----------
    notebooks : dict of Path to NotebookNode
        Their files, and they themselves with outputs or without.
    source : Path
    extra : Path
        Folder for what goes into the site as it is.
    """
    tensorboards = any(outputs.is_tensorboard(each) for notebook in notebooks.values() for each in _outputs(notebook))
    pictured = tensorboards and tab.picture(source / TAB.relative_to(config.PROJECT))
    for path, notebook in notebooks.items():
        page = source / "notebooks" / path.name
        page.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(_page(notebook, path, source, extra, pictured), page)
    for path in documents():
        _write(source / links.page_of(path, source), _document(path, source))
    for path in sources():
        links.copy(path, source)
        text = SOURCE.format(name=path.name, language=links.CODE[path.suffix])
        _write(source / links.page_of(path, source), text)
    with open(source / "index.md", "a", encoding="utf-8") as index:
        index.write("\n\n" + "\n".join(_toctrees(notebooks, source)))


def documents() -> list[Path]:
    """The project's pages of text."""
    folders = (config.PROJECT, config.PROJECT / "notebooks", config.PROJECT / "notebooks" / "slurm")
    references = (config.PROJECT / "data" / "reference").glob("*/README.md")
    return [*(path for folder in folders for path in sorted(folder.glob("*.md"))), *sorted(references)]


def sources() -> list[Path]:
    """The scripts that readers take home."""
    return [path for path in sorted((config.PROJECT / "notebooks").rglob("*.*")) if path.suffix in links.CODE]


# ---------------------------------------------------------------------------------------------------------------------
# Notebooks


def _page(
    notebook: nbformat.NotebookNode, path: Path, source: Path, extra: Path, pictured: bool
) -> nbformat.NotebookNode:
    page = nbformat.from_dict({**notebook, "cells": []})
    origin = config.PROJECT / "notebooks" / path.name
    for cell in map(nbformat.from_dict, notebook.cells):
        page.cells.append(cell)
        if cell.cell_type == "markdown":
            cell.source = links.rewritten(cell.source, origin, source)
            cell.source = cell.source.replace("click on the three dots", "click to open")
        elif cell.cell_type == "code":
            if any(map(outputs.is_tensorboard, cell.outputs)):
                page.cells.append(nbformat.v4.new_markdown_cell(_tensorboard(pictured)))
            shown = (outputs.shown(each, extra / FIGURES / path.stem) for each in _outputs_of(cell))
            cell.outputs = [each for each in shown if each is not None]
            if "solution" in cell.metadata.get("tags", ()) or cell.metadata.get("jupyter", {}).get("source_hidden"):
                _fold(cell)
    page.cells.insert(1, nbformat.v4.new_markdown_cell(_note(notebook)))
    return page


def _outputs(notebook: nbformat.NotebookNode) -> Iterable[nbformat.NotebookNode]:
    return (output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs)


def _outputs_of(cell: nbformat.NotebookNode) -> Iterable[nbformat.NotebookNode]:
    return (output for output in cell.outputs if not outputs.is_tensorboard(output))


def _fold(cell: nbformat.NotebookNode) -> None:
    """Fold a cell with its outputs."""
    cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "hide-cell"]
    cell.metadata["mystnb"] = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide the solution"}


def _note(notebook: nbformat.NotebookNode) -> str:
    """What the outputs were measured on, and when."""
    course = notebook.metadata.get("course")
    return NOT_EXECUTED if course is None else MEASURED.format(**course)


def _tensorboard(pictured: bool) -> str:
    return TENSORBOARD.format(picture=f"![{tab.ALT}]({TAB.name})" if pictured else "", how=HOW).strip()


# ---------------------------------------------------------------------------------------------------------------------
# Documents


def _document(path: Path, source: Path) -> str:
    text = links.rewritten(path.read_text(encoding="utf-8"), path, source)
    ladder = path.with_name("ladder.png")
    if ladder.exists():
        links.copy(ladder, source)
        title, rest = text.split("\n", 1)
        text = f"{title}\n\n{LADDER.format(ladder.name)}\n{rest}"
    return text


def _toctrees(notebooks: Iterable[Path], source: Path) -> Iterable[str]:
    pages = {caption: [] for caption in PARTS}
    for path in notebooks:
        number = int(re.match(r"\d+", path.name)[0])
        part = max((caption for caption in PARTS if PARTS[caption] <= number), key=PARTS.get)
        pages[part].append(f"notebooks/{path.name}")
    written = {path: links.page_of(path, source).as_posix() for path in (*documents(), *sources())}
    lessons = [page for page in written.values() if page.startswith("notebooks/")]
    first = ["notebooks/README.md", "glossary.md", "notebooks/checklist.md"]
    pages["To take home"] = [*first, *(page for page in lessons if page not in first)]
    pages["Recorded results"] = [page for page in written.values() if page.startswith("data/")]
    pages["The toolbox"] = ["api/index.md", *(f"api/{name}.rst" for name in api.MODULES)]
    pages["The project"] = [page for page in written.values() if "/" not in page]
    pages["The project"].remove("index.md")
    for caption, names in pages.items():
        if names:
            yield TOCTREE.format(caption=caption, pages="\n".join(name.rpartition(".")[0] for name in names))


def _write(page: Path, text: str) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
