"""Who may import whom: stepscope knows nothing of the course, and imports run downward in both packages."""

import ast
from pathlib import Path

from helpers import config

PACKAGES = {"helpers": config.PROJECT / "helpers", "stepscope": config.PROJECT / "stepscope" / "src" / "stepscope"}
BASE = {"stepscope.base", "stepscope.thresholds"}
TOOL = {f"stepscope.{room}" for room in ("base", "traces", "timing", "tensorboard", "diagnosis", "report", "cli")}
COURSE = {f"helpers.{room}" for room in ("config", "data", "simulate", "training", "loading", "results", "figures")}
# For each room the rooms that its modules may import, anywhere in a file: what a function imports counts, too.
MAY_IMPORT = {
    "stepscope.thresholds": set(),
    "stepscope.base": set(),
    "stepscope.traces": {"stepscope.base"},
    "stepscope.timing": {"stepscope.base", "stepscope.traces"},
    "stepscope.tensorboard": {"stepscope.base", "stepscope.traces"},
    "stepscope.facts": BASE,
    "stepscope.observe": BASE | {"stepscope.facts", "stepscope.timing", "stepscope.traces"},
    "stepscope.trying": BASE | {"stepscope.observe", "stepscope.timing"},
    "stepscope.report": BASE,
    "stepscope.rules": BASE | {"stepscope.facts", "stepscope.report"},
    "stepscope.diagnosis": BASE | {f"stepscope.{room}" for room in ("facts", "observe", "rules", "report", "traces")},
    "stepscope.run": BASE
    | {f"stepscope.{room}" for room in ("facts", "observe", "rules", "report", "traces")}
    | {"stepscope.diagnosis"},
    "stepscope.cli": TOOL - {"stepscope.cli"} | {"stepscope.run", "stepscope.rules", "stepscope.trying"},
    "stepscope.__main__": {"stepscope.cli"},
    "stepscope.__init__": {"stepscope.magic", "stepscope.run", "stepscope.trying"},
    "stepscope.magic": {"stepscope.run"},
    "stepscope.lightning": {"stepscope.run"},
    "stepscope.transformers": {"stepscope.run"},
    "helpers.config": TOOL,
    "helpers.data": TOOL | {"helpers.config"},
    "helpers.simulate": TOOL | {"helpers.config"},
    "helpers.training": TOOL | {"helpers.config", "helpers.data", "helpers.simulate"},
    "helpers.loading": TOOL | {"helpers.config", "helpers.data", "helpers.simulate"},
    "helpers.results": TOOL | COURSE - {"helpers.figures"},
    "helpers.figures": TOOL | COURSE,
    "helpers.lessons": TOOL | COURSE,
    "helpers.course": TOOL | COURSE | {"helpers.lessons"},
    "helpers.__main__": TOOL | COURSE | {"helpers.lessons"},
    "helpers.__init__": set(),
}
BY_SUBJECT = {"facts", "observe", "rules"}  # rooms whose files of one name belong together


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
        found += [(node.lineno, ".".join((*each, "__init__")[:2])) for each in parts if each[0] in PACKAGES]
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
    """Return the room and the path of each module in both packages."""
    paths = [(package, path) for package, folder in PACKAGES.items() for path in sorted(folder.rglob("*.py"))]
    rooms = [
        (package, path.relative_to(PACKAGES[package]).parts[0].removesuffix(".py"), path) for package, path in paths
    ]
    return [(f"{package}.{room}", path) for package, room, path in rooms]


def test_imports_run_downward():
    found = [f"{path}: {fault}" for room, path in modules() for fault in faults(room, path.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


def test_a_bare_import_of_a_package_counts_as_one_of_its_door():
    assert imported_rooms("import stepscope\nfrom stepscope import rules") == [
        (1, "stepscope.__init__"),
        (2, "stepscope.rules"),
    ]


def test_no_file_name_stands_twice_but_for_those_of_one_subject():
    names = {(path.name, "" if path.parent.name in BY_SUBJECT else str(path.parent)) for _, path in modules()}
    found = sorted(name for name, _ in names if name not in ("__init__.py", "__main__.py"))
    assert found == sorted(set(found))
