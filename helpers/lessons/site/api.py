"""The pages of the toolbox's functions and classes: Sphinx makes them of the docstrings (`sphinx.ext.autodoc`)."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from helpers import config

# What Sphinx needs for these pages, and its settings
EXTENSIONS = ("sphinx.ext.autodoc", "sphinx.ext.napoleon")
SETTINGS = {
    "add_module_names": False,
    "autodoc_typehints": "none",  # the docstrings have the types, with shapes and units
    "napoleon_google_docstring": False,
    "napoleon_use_rtype": False,  # what is returned with its type, in one line
}

# Whose functions are called by a module's name, as ``timing.loop`` and ``profiling.record``
MODULES = (
    "helpers.timing",
    "helpers.timing.profiling",
    "helpers.timing.monitor",
    "helpers.traces",
    "helpers.diagnosis",
    "helpers.tensorboard",
)
USAGE = "## In an environment of your own\n"

INDEX = """# The toolbox

{usage}

{list}
"""


def write(folder: Path) -> None:
    """Write ``api/index.md`` and a page for each module of the toolbox into the source folder of the site.

    Raises
    ------
    LookupError
        If ``notebooks/toolbox.md`` no longer says how to use the toolbox outside of the course.
    """
    page = config.PROJECT / "notebooks" / "toolbox.md"
    _, found, usage = page.read_text(encoding="utf-8").partition(USAGE)
    if not found:
        raise LookupError(f"Expected the section {USAGE.strip()!r} in {page}. Name the new one in {__name__}.USAGE.")
    pages = folder / "api"
    pages.mkdir()
    lines = [f"- {{doc}}`{name}`: {_subject(name)}" for name in MODULES]
    index = INDEX.format(usage=usage.partition("\n## ")[0].strip(), list="\n".join(lines))
    (pages / "index.md").write_text(index, encoding="utf-8")
    for name in MODULES:
        (pages / f"{name}.rst").write_text(_page(name), encoding="utf-8")


def public(name: str) -> dict[str, object]:
    """Return the public functions, classes and errors of a module, by their names."""
    module = importlib.import_module(name)
    own = [each for each, it in vars(module).items() if each[0] != "_" and getattr(it, "__module__", None) == name]
    found = {each: getattr(module, each) for each in sorted(getattr(module, "__all__", own))}
    return {each: it for each, it in found.items() if inspect.isroutine(it) or inspect.isclass(it)}


def _subject(name: str) -> str:
    return inspect.getdoc(importlib.import_module(name)).partition("\n")[0]


def _page(name: str) -> str:
    sections = {"Functions": [], "Classes": [], "Errors": []}
    for each, it in public(name).items():
        if inspect.isroutine(it):
            sections["Functions"].append(f".. autofunction:: {name}.{each}\n")
        elif issubclass(it, Exception):
            sections["Errors"].append(f".. autoexception:: {name}.{each}\n")
        else:
            sections["Classes"].append(f".. autoclass:: {name}.{each}\n   :members:\n")
    # In a docstring a word between single backticks is a link, if it is a name that these pages have
    parts = [".. default-role:: py:obj", f"{name}\n{'=' * len(name)}", f".. automodule:: {name}"]
    for title, directives in sections.items():
        if directives:
            parts += [f"{title}\n{'-' * len(title)}", *directives]
    return "\n\n".join(parts)
