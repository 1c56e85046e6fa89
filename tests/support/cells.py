"""A notebook as a core and the sections behind it: what each cell needs of others, by its names."""

import ast
import builtins
import re
from dataclasses import dataclass, field
from pathlib import Path

import nbformat

from helpers.lessons.execute import core_cells

_OF_IPYTHON = {"display", "get_ipython"}


@dataclass
class Part:
    """The core, or a section of what goes further."""

    title: str
    cells: list = field(default_factory=list)

    @property
    def words(self) -> int:
        """Of its text, without what is folded."""
        texts = [cell.source for cell in self.cells if cell.cell_type == "markdown"]
        return len(re.sub(r"<details>.*?</details>", "", "\n".join(texts), flags=re.DOTALL).split())

    @property
    def code(self) -> list[str]:
        return [cell.source for cell in self.cells if cell.cell_type == "code"]


def parts(path: Path) -> list[Part]:
    """Return the core of a notebook, and its further sections; a section begins with a heading of the third order."""
    content = nbformat.read(path, 4)
    cells, first = content.cells, core_cells(content)
    found = [Part("core", cells[:first])]
    for cell in cells[first + 1 :]:
        if cell.cell_type == "markdown" and cell.source.startswith("### "):
            found.append(Part(cell.source.splitlines()[0].strip("# ")))
        found[-1].cells.append(cell)
    return found


def names(source: str) -> tuple[set[str], set[str]]:
    """Return the names, of variables and of scripts, that a cell needs from others, and those that it binds."""
    if source.startswith("%%writefile"):
        script = Path(source.splitlines()[0].split()[-1].strip('"')).stem
        return ({script} if " -a " in source.splitlines()[0] else set()), {script}
    needs, binds = set(), set()
    for statement in ast.parse(re.sub(r"^[%!].*$", "pass", source, flags=re.MULTILINE)).body:
        loaded, bound, own = set(), set(), set()
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
        if isinstance(statement, ast.ImportFrom):
            loaded.add(statement.module.split(".")[0])
        needs |= loaded - binds - own - (bound if isinstance(statement, ast.With | ast.For) else set())
        binds |= bound - own
    return needs - set(dir(builtins)) - _OF_IPYTHON, binds


def faults(path: Path) -> list[str]:
    """Say which sections need each other, or change what others use: then not every cell could be run again."""
    core, *sections = parts(path)
    scripts = {name for part in (core, *sections) for source in part.code for name in names(source)[1]}
    of_core = {name for source in core.code for name in names(source)[1]}
    asked = {part.title: {name for source in part.code for name in names(source)[0]} for part in (core, *sections)}
    found = [f"the core needs {name}" for name in asked["core"] & scripts - of_core]
    for section in sections:
        own = {name for source in section.code for name in names(source)[1]}
        found += [f"{section.title}: needs {name}" for name in asked[section.title] & scripts - of_core - own]
        for other in (core, *sections):
            if other is not section:
                changed = own & asked[other.title] & of_core
                found += [f"{section.title}: binds {name} anew, which {other.title} uses" for name in sorted(changed)]
    return found
