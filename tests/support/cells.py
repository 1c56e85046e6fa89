"""A notebook as a core and the sections behind it: what each cell needs of others, by its names."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from support.notebooks import content

from helpers.lessons.execute import core_cells
from helpers.lessons.measured import names


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
    cells, first = content(path).cells, core_cells(content(path))
    found = [Part("core", cells[:first])]
    for cell in cells[first + 1 :]:
        if cell.cell_type == "markdown" and cell.source.startswith("### "):
            found.append(Part(cell.source.splitlines()[0].strip("# ")))
        found[-1].cells.append(cell)
    return found


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
