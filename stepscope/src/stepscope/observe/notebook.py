"""Runs the code cells of a Jupyter notebook as a script: ``python -m stepscope.observe.notebook train.ipynb ARGS``.

The cells run in the notebook's folder, as in Jupyter, and in a module ``__main__`` of their own. With IPython, magics
and shell commands work; those that only time or capture a cell are left out. Cells are numbered as after "Run All".
"""

from __future__ import annotations

import builtins
import json
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

# Magics at the beginning of a cell that is code of its own
_AROUND = re.compile(r"\A((?:#\n)*)%%(?:time|timeit|capture|prun|stepscope)\b.*")


def main(arguments: Sequence[str]) -> None:
    """Run the notebook that `arguments` name first, with the rest as its ``sys.argv``."""
    path = Path(arguments[0]).resolve()
    cells = cells_of(path)
    module = sys.modules["__main__"] = ModuleType("__main__")
    sys.argv, sys.path[0] = list(arguments), str(path.parent)
    os.chdir(path.parent)
    os.environ.setdefault("MPLBACKEND", "agg")  # a window would wait to be closed
    python = _python(module)
    for number, source in enumerate(cells, 1):
        name = f"<ipython-input-{number}-stepscope>"
        while (plain := _AROUND.sub(r"\1#", source)) != source:
            source = plain
        try:
            code = python(source)
            linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
            exec(compile(code, name, "exec"), vars(module))
        except Exception as error:
            shown = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)  # without this function
            traceback.print_exception(shown)  # Python itself shows no lines of cells
            sys.exit(1)


def cells_of(path: Path) -> list[str]:
    """Return the code of the cells of a notebook that are not empty; `SystemExit` if this is no notebook of Python."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        language = content.get("metadata", {}).get("kernelspec", {}).get("language", "python")
        cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise SystemExit(f"{path.name}: expected a notebook in format 4, found other content ({error}).") from error
    if language != "python":
        raise SystemExit(f"{path.name}: expected a notebook of Python, found {language}.")
    return [cell for cell in cells if cell.strip()]


def _python(module: ModuleType) -> Callable[[str], str]:
    """Return a function that turns the code of a cell into Python, by IPython if it is there."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
        from traitlets.config import Config
    except ImportError:
        vars(builtins).setdefault("display", print)
        return lambda source: source

    class Shell(InteractiveShell):
        def enable_gui(self, gui: object = None) -> None:
            """Show no windows."""

    settings = Config()
    settings.HistoryManager.enabled = False
    shell = Shell.instance(user_module=module, user_ns=vars(module), config=settings)
    transform: Callable[[str], str] = shell.transform_cell
    return transform


if __name__ == "__main__":
    main(sys.argv[1:])
