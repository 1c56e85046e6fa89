"""Links between the files of the project, as links between the pages of the site."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from helpers import config

CODE = {".py": "python", ".sbatch": "bash"}  # what of `notebooks` gets a page with its source, by the language
IMAGES = (".png", ".svg")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")


def rewritten(text: str, origin: Path, source: Path) -> str:
    """Return the Markdown of a file with its links as the site needs them.

    A file with a page becomes a link to that; of the toolbox, to its functions. Any other leads to the repository, if
    `config.REPOSITORY` has its address, and is plain text otherwise. A link to nothing stays as it is: Sphinx finds it.

    Parameters
    ----------
    origin : Path
        The file, in the project.
    source : Path
        Sphinx's source folder; pictures are copied into it.
    """

    def replace(match: re.Match) -> str:
        mark, shown, target = match.groups()
        name, anchor = re.fullmatch(r"([^#]*)(#.*)?", target).groups(default="")
        path = Path(os.path.normpath(origin.parent / name))
        if not name or "://" in target or not path.exists() or not path.is_relative_to(config.PROJECT):
            return match[0]
        if path.suffix in IMAGES:
            copy(path, source)
        page = page_of(path, source)
        if page is not None:
            target = Path(os.path.relpath(source / page, (source / page_of(origin, source)).parent)).as_posix() + anchor
        elif config.REPOSITORY:
            target = f"{config.REPOSITORY}/blob/main/{path.relative_to(config.PROJECT).as_posix()}{anchor}"
        else:
            return shown
        return f"{mark}[{shown}]({target})"

    return _LINK.sub(replace, text)


def page_of(path: Path, source: Path) -> Path | None:
    """Return which file of Sphinx's source folder a file of the project becomes, relative to that, or None."""
    name = path.relative_to(config.PROJECT)
    if name == Path("README.md"):
        return Path("index.md")
    if path.suffix in (".md", ".ipynb", *IMAGES):
        return name
    if name.parts[0] == "notebooks" and path.suffix in CODE:
        return name.with_suffix(".md")
    if name.parts[0] == "helpers" and len(name.parts) > 1:
        functions = Path("api", f"helpers.{name.parts[1]}.rst")
        return functions if (source / functions).exists() else None
    return None


def copy(path: Path, source: Path) -> None:
    """Copy a file of the project to its place in Sphinx's source folder."""
    target = source / path.relative_to(config.PROJECT)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
