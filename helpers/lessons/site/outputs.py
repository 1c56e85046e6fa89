"""The outputs of an executed notebook, as a page that nobody runs can show them."""

from __future__ import annotations

import base64
import html
import re
import sys
import tempfile
from pathlib import Path

import nbformat

from helpers import config

# A bar of tqdm, which is drawn anew over the line that it ends
_BAR = re.compile(r"^.*\d+%\|.*\|.*\[.*\].*\n?", re.MULTILINE)
_OVERWRITTEN = re.compile(r"^.*\r(?!\n)", re.MULTILINE)
_FIGURE = re.compile(r'src="data:image/png;base64,([^"]+)"')
# The look that pandas gives a table, and IPython the source of code: the theme has its own, also a dark one
_LOOK = re.compile(r'<style.*?</style>\s*|(?<=<table) border="1"', re.DOTALL)
_TABLE = '<table class="dataframe">'


def is_tensorboard(output: nbformat.NotebookNode) -> bool:
    """Whether an output embeds the TensorBoard that ran beside the notebook."""
    return "<iframe" in output.get("data", {}).get("text/html", "")


def shown(output: nbformat.NotebookNode, figures: Path) -> nbformat.NotebookNode | None:
    """Return an output as the site shows it, or None if nothing of it stays.

    Progress bars are left out, and the paths of this machine are shortened, but not in source code. Figures become
    files: a browser keeps those, and the page stays small.

    Parameters
    ----------
    output : NotebookNode
        It is left as it is.
    figures : Path
        Where figures go: a path without its ending, to which their numbers are added. The page finds the folder
        beside its own.
    """
    output = nbformat.from_dict(output)
    if output.output_type == "stream":
        output.text = without_paths(_BAR.sub("", _OVERWRITTEN.sub("", output.text)))
        return output if output.text.strip() else None
    if output.output_type == "error":
        output.traceback = [without_paths(line) for line in output.traceback]
        return output
    if "text/html" in output.data:
        page = _as_files(_LOOK.sub("", output.data["text/html"]).replace("<table>", _TABLE), figures)
        is_source = '<div class="highlight">' in page
        output.data = nbformat.from_dict({"text/html": page if is_source else without_paths(page)})
    elif "text/plain" in output.data:
        output.data["text/plain"] = without_paths(output.data["text/plain"])
    return output


def without_paths(text: str) -> str:
    """Return a text in which paths begin at the folders that a reader knows."""
    for path, short in _known_folders():
        for written in dict.fromkeys((str(path), repr(str(path))[1:-1], path.as_posix(), html.escape(str(path)))):
            text = re.sub(rf"(?<!\w){re.escape(written)}(?![\w-])", short, text)
    return text


def _known_folders() -> list[tuple[Path, str]]:
    folders = {
        config.runs_dir(): "runs",
        config.data_dir(): "data",
        Path(sys.prefix): ".venv",
        config.PROJECT: ".",
        Path(tempfile.gettempdir()): "tmp",
        Path.home(): "~",
    }
    # The inner ones first; and a container's user may have the root as home
    return sorted(((path, short) for path, short in folders.items() if path.name), key=lambda each: -len(str(each[0])))


def _as_files(page: str, figures: Path) -> str:
    def write(match: re.Match) -> str:
        figures.parent.mkdir(parents=True, exist_ok=True)
        number = len(list(figures.parent.glob(f"{figures.name}-*.png")))
        path = figures.with_name(f"{figures.name}-{number}.png")
        path.write_bytes(base64.b64decode(match[1]))
        return f'src="../{path.parent.name}/{path.name}"'

    return _FIGURE.sub(write, page)
