"""The two halves of the house: who may import whom, and the toolbox without the course and its packages."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import config

HELPERS = config.PROJECT / "helpers"
TRACE = config.PROJECT / "data" / "reference" / "cpu-2-cores" / "traces" / "03-more-workers"

BASE = {"confidence", "config", "staging", "wording"}
TOOLBOX = {"traces", "timing", "tensorboard", "diagnosis"}
# For each room the rooms that its modules may import, anywhere in a file: what a function imports counts, too.
MAY_IMPORT = {
    # the base
    "confidence": set(),
    "config": set(),
    "staging": set(),
    "wording": set(),
    # the toolbox
    "traces": BASE,
    "timing": BASE | {"traces"},
    "tensorboard": BASE | {"traces"},
    "diagnosis": BASE | {"traces", "timing"},
    # the course
    "data": BASE | TOOLBOX,
    "simulate": BASE | TOOLBOX,
    "training": BASE | TOOLBOX | {"data", "simulate"},
    "loading": BASE | TOOLBOX | {"data", "simulate"},
    "results": BASE | TOOLBOX | {"data", "simulate", "training", "loading"},
    "figures": BASE | TOOLBOX | {"data", "simulate", "training", "loading", "results"},
    "lessons": BASE | TOOLBOX | {"data", "simulate", "training", "loading", "results"},
    "course": {"timing", "data", "training", "loading", "results", "lessons"},
}
ROOMS = BASE | {"course"} | {path.parent.name for path in HELPERS.glob("*/__init__.py")}


def imported_rooms(source: str) -> list[tuple[int, str]]:
    """Return the line and the room of each import from `helpers`, those in functions too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: expected an absolute import, found a relative one"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "import_module":
            texts = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
            names = [text for text in texts if isinstance(text, str)]
        else:
            continue
        found += [(node.lineno, name.split(".")[1]) for name in names if name.startswith("helpers.")]
    return found


def faults(path: str, source: str) -> list[str]:
    """Return what a file of `helpers` imports and must not, a line each."""
    room = Path(path).parts[0].removesuffix(".py")
    allowed = MAY_IMPORT[room] | {room}
    return [
        f"helpers/{path}:{line} imports {imported}: {room} may import only {', '.join(sorted(allowed))}"
        for line, imported in imported_rooms(source)
        if imported not in allowed
    ]


def test_the_table_has_each_room_of_the_house():
    assert set(MAY_IMPORT) == ROOMS


def test_imports_run_downward():
    found = []
    for path in sorted(HELPERS.rglob("*.py")):
        name = path.relative_to(HELPERS).as_posix()
        if name not in ("__init__.py", "__main__.py"):  # the second one is the shell's door to all rooms
            found += faults(name, path.read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from helpers import figures",
        "import helpers.figures.drawing",
        "from helpers.figures.drawing import Picture",
        "def draw():\n    from helpers import config, figures",
        "import importlib\nimportlib.import_module('helpers.figures')",
    ],
)
def test_an_import_upward_is_found_however_it_is_written(source):
    (fault,) = faults("timing/loaders.py", source)
    line = len(source.splitlines())
    assert fault.startswith(f"helpers/timing/loaders.py:{line} imports figures: timing may import only")


# ------------------------------------------------------------------------------------- the toolbox, standing alone

# Finds no package that is neither in the standard library nor needed by the toolbox. PyTorch's own requirements are
# torch's; some it imports only if they are there, as tqdm and pynvml, and so these are not found either.
ALONE = """
import importlib.metadata, re, sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in refused else super().find_spec(name, path, target)

def needed(packages):
    found, left = set(), list(packages)
    while left:
        name = re.match(r"[\\w.-]+", left.pop())[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            try:
                requires = importlib.metadata.requires(name) or []
            except importlib.metadata.PackageNotFoundError:  # for another system
                continue
            left += [each for each in requires if "extra ==" not in each]
    return found

kept = needed(sys.argv.pop(1).split(","))
refused = {
    module
    for module, packages in importlib.metadata.packages_distributions().items()
    if not {package.lower().replace("_", "-") for package in packages} & kept and module != "helpers"
}
assert {"torchvision", "torchmetrics", "matplotlib", "IPython", "tqdm", "pynvml"} <= refused, sorted(refused)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
TORCH, TABLES = "torch,numpy,pandas,orjson,psutil", "numpy,pandas,orjson,psutil"


def alone(code: str, packages: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run a script of somebody's own in another folder, where there are only these packages."""
    script = folder / "own.py"
    script.write_text(ALONE + code, encoding="utf-8")
    variables = {"PYTHONPATH": str(config.PROJECT), "COURSE_RUNS": str(folder / "runs")}
    return subprocess.run(
        [sys.executable, str(script), packages, *arguments],
        env=os.environ | variables, capture_output=True, text=True, cwd=folder,
    )  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("packages", [TABLES, TORCH], ids=["without torch", "with torch"])
@pytest.mark.parametrize(("command", "shown"), [("traces", "in a step"), ("diagnose", "Verdict: ")])
def test_the_shell_reads_traces_without_the_courses_packages(tmp_path, command, shown, packages):
    process = alone(
        "import runpy\nrunpy.run_module('helpers', run_name='__main__', alter_sys=True)",
        packages, tmp_path, command, str(TRACE),
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    assert shown in process.stdout


LIVE = """
import torch
from helpers import diagnosis

model = torch.nn.Linear(3, 2)

def step(images, labels):
    torch.nn.functional.cross_entropy(model(images), labels).backward()

if __name__ == "__main__":
    dataset = torch.utils.data.TensorDataset(torch.zeros(400, 3), torch.zeros(400, dtype=torch.long))
    found = diagnosis.diagnose(torch.utils.data.DataLoader(dataset, 4), step, steps=3)
    print(found)
    print(found._repr_html_())
"""


@pytest.mark.processes
def test_a_script_of_ones_own_diagnoses_its_loop_without_the_courses_packages(tmp_path):
    process = alone(LIVE, TORCH, tmp_path)
    assert process.returncode == 0, process.stderr
    assert "Verdict: " in process.stdout and "an item" in process.stdout
    assert list((tmp_path / "runs" / "diagnosis").glob("*.pt.trace.json.gz"))


EACH = """
import importlib
for name in {names}:
    importlib.import_module(name)
assert "pandas" not in sys.modules, "takes three times as long as all that was asked for: import it in a function"
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("rooms", "packages"), [(BASE | {"traces"}, TABLES), ({"timing", "diagnosis"}, TORCH)], ids=["traces", "timing"]
)
def test_each_module_can_be_imported_without_the_courses_packages(tmp_path, rooms, packages):
    paths = [path.relative_to(config.PROJECT) for path in sorted(HELPERS.rglob("*.py"))]
    names = [".".join(path.with_suffix("").parts) for path in paths if path.parts[1].removesuffix(".py") in rooms]
    process = alone(EACH.format(names=names), packages, tmp_path)
    assert process.returncode == 0, process.stderr
