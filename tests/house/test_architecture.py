"""Who may import whom: stepscope knows nothing of the course, and imports run downward in both packages."""

import ast
from pathlib import Path

from helpers import config

PACKAGES = {"helpers": config.PROJECT / "helpers", "stepscope": config.PROJECT / "stepscope" / "src" / "stepscope"}
TOOL = {f"stepscope.{room}" for room in ("base", "traces", "timing", "tensorboard", "diagnosis", "results", "script")}
COURSE = {f"helpers.{room}" for room in ("config", "data", "simulate", "training", "loading", "results", "figures")}
# For each room the rooms that its modules may import, anywhere in a file: what a function imports counts, too.
MAY_IMPORT = {
    "stepscope.base": set(),
    "stepscope.traces": {"stepscope.base"},
    "stepscope.timing": {"stepscope.base", "stepscope.traces"},
    "stepscope.tensorboard": {"stepscope.base", "stepscope.traces"},
    "stepscope.diagnosis": TOOL - {"stepscope.tensorboard", "stepscope.results", "stepscope.script"},
    "stepscope.results": {"stepscope.base", "stepscope.diagnosis"},
    "stepscope.script": TOOL - {"stepscope.tensorboard"},
    "stepscope.lightning": {"stepscope.script"},
    "stepscope.transformers": {"stepscope.script"},
    "helpers.config": TOOL,
    "helpers.data": TOOL | {"helpers.config"},
    "helpers.simulate": TOOL | {"helpers.config"},
    "helpers.training": TOOL | {"helpers.config", "helpers.data", "helpers.simulate"},
    "helpers.loading": TOOL | {"helpers.config", "helpers.data", "helpers.simulate"},
    "helpers.results": TOOL | COURSE - {"helpers.figures"},
    "helpers.figures": TOOL | COURSE,
    "helpers.lessons": TOOL | COURSE,
    "helpers.course": TOOL | COURSE | {"helpers.lessons"},
}
DOORS = {"__init__", "__main__"}  # of a package: a command may use every room


def imported_rooms(source: str) -> list[tuple[int, str]]:
    """Return the line and the room of each import from the two packages, those in functions too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: expected an absolute import, found a relative one"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts = [name.split(".") for name in names]
        found += [(node.lineno, ".".join(each[:2])) for each in parts if each[0] in PACKAGES and len(each) > 1]
    return found


def faults(room: str, source: str) -> list[str]:
    """Return what a module of a room imports and must not, a line each."""
    allowed = MAY_IMPORT[room] | {room}
    return [
        f"line {line} imports {imported}: {room} may import only {', '.join(sorted(allowed))}"
        for line, imported in imported_rooms(source)
        if imported not in allowed
    ]


def modules() -> list[tuple[str, Path]]:
    """Return the room and the path of each module in both packages, but for their doors."""
    paths = [(package, path) for package, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]
    rooms = [
        (package, path.relative_to(PACKAGES[package]).parts[0].removesuffix(".py"), path) for package, path in paths
    ]
    return [(f"{package}.{room}", path) for package, room, path in rooms if room not in DOORS]


def test_imports_run_downward():
    found = [f"{path}: {fault}" for room, path in modules() for fault in faults(room, path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_no_file_name_stands_twice():
    names = [path.name for _, path in modules() if path.stem not in DOORS]
    assert sorted(names) == sorted(set(names))
