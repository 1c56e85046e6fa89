"""What a notebook measures: the statements that its scoreboard's results follow from, as a digest.

A recorded result holds only for the code that was measured. So each row of a reference has the digest of its notebook's
measured code; texts, figures, checks and solutions may change, and the row still holds.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat

from helpers.lessons.execute import core_cells

_OF_IPYTHON = {"display", "get_ipython"}


def digest(notebook: Path) -> str | None:
    """Return the digest of the measured code in a notebook's core; None if it adds nothing to the scoreboard.

    The measured code is found backwards, from the comparison that `scoreboard.add` gets: each statement that binds or
    changes a name it needs, and so on; and each script that such a statement names or imports. Comments and layout do
    not count, nor does what is printed.
    """
    statements = measured(notebook)
    return hashlib.sha256(repr([*map(_plain, statements)]).encode()).hexdigest()[:12] if statements else None


def measured(notebook: Path) -> list[ast.stmt]:
    """Return the measured statements of a notebook; see `digest`."""
    statements = [*_statements(notebook)]
    calls = [node for _, statement in statements for node in ast.walk(statement) if isinstance(node, ast.Call)]
    compared = [call.args[1] for call in calls if ast.unparse(call.func) == "scoreboard.add"]
    needed = {name for argument in compared for name in names(ast.unparse(argument))[0]}
    kept, before = set[int](), -1
    while len(kept) > before:
        before = len(kept)
        for number, (script, statement) in enumerate(statements):
            binds = {script} if script else names(ast.unparse(statement))[1] | _changed(statement)
            if binds & needed and (script or not isinstance(statement, ast.Import | ast.ImportFrom)):
                kept.add(number)
                needed |= names(ast.unparse(statement))[0] | _scripts(statement)
    return [_Silent().visit(statements[number][1]) for number in sorted(kept)]


def _plain(node: object) -> object:
    """Return a part of a syntax tree as lists and values, without fields that are empty.

    It is the same in all versions of Python; what `ast.unparse` and `ast.dump` return is not.
    """
    if isinstance(node, ast.AST):
        fields = [(name, _plain(value)) for name, value in ast.iter_fields(node) if value is not None and value != []]
        return [type(node).__name__, *fields]
    return [*map(_plain, node)] if isinstance(node, list) else node


def names(source: str) -> tuple[set[str], set[str]]:
    """Return the names, of variables and scripts, that a cell needs from other cells, and the names that it binds."""
    if source.startswith("%%writefile"):
        script = _script_of(source)
        return ({script} if " -a " in source.splitlines()[0] else set()), {script}
    needs, binds = set[str](), set[str]()
    for statement in ast.parse(_without_magics(source)).body:
        loaded, bound, own = set[str](), set[str](), set[str]()
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else bound).add(node.id)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, ast.arg):
                own.add(node.arg)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).split(".")[0])
            elif isinstance(node, ast.comprehension):
                own |= {each.id for each in ast.walk(node.target) if isinstance(each, ast.Name)}
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):  # what it binds inside is its own
            own |= bound - {statement.name}
            bound = {statement.name}
        if isinstance(statement, ast.ImportFrom):  # of a script, perhaps
            loaded |= {str(statement.module).split(".")[0]} - sys.stdlib_module_names
        needs |= loaded - binds - own - (bound if isinstance(statement, ast.With | ast.For) else set())
        binds |= bound - own
    return needs - set(dir(builtins)) - _OF_IPYTHON, binds


def _statements(notebook: Path) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the statements of a core's cells, each with the name of the script that it is written to, or ""."""
    content = nbformat.read(notebook, 4)
    for cell in content.cells[: core_cells(content)]:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type != "code" or "solution" in tags or "exercise" in tags:
            continue
        script = _script_of(cell.source) if cell.source.startswith("%%writefile") else ""
        for statement in ast.parse(_without_magics(cell.source)).body:
            yield script, statement


class _Silent(ast.NodeTransformer):
    """Takes out calls of `print` and `display`."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        call = node.value
        shows = isinstance(call, ast.Call) and ast.unparse(call.func) in ("print", "display")
        return ast.Pass() if shows else node


def _without_magics(source: str) -> str:
    return re.sub(r"^[%!].*$", "pass", source, flags=re.MULTILINE)


def _script_of(source: str) -> str:
    return Path(source.splitlines()[0].split()[-1].strip('"')).stem


def _changed(statement: ast.stmt) -> set[str]:
    """Return the names of the objects whose items or attributes a statement sets or deletes."""
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Subscript | ast.Attribute) and not isinstance(node.ctx, ast.Load):
            base: ast.expr = node
            while isinstance(base, ast.Subscript | ast.Attribute):
                base = base.value
            if isinstance(base, ast.Name):
                found.add(base.id)
    return found


def _scripts(statement: ast.stmt) -> set[str]:
    """Return the scripts that a statement names, such as "train.py", or imports."""
    texts = [str(node.value) for node in ast.walk(statement) if isinstance(node, ast.Constant)]
    named = {Path(text).stem for text in texts if text.endswith(".py")}
    return named | {node.module for node in ast.walk(statement) if isinstance(node, ast.ImportFrom) and node.module}
