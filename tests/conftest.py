"""What several test files share: images from both sources, and the notebooks executed on them."""

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers import cifar10, config

# Real CIFAR-10 images that may lie beside the project; they are no part of it.
REAL_IMAGES = config.PROJECT.parent / "shared" / "data" / "cifar-10-python-subset.tar.gz"
SOURCES = ["real", "drawn"]


@dataclass(frozen=True)
class Executed:
    """The notebooks after nbval executed them in order."""

    notebooks: list[Path]
    runs: Path
    passed: dict[str, int]  # cells that passed, by notebook
    failed: dict[str, list[str]]  # messages of those that did not
    log: str


@pytest.fixture(scope="session", params=SOURCES)
def source(request):
    """Where images come from: "real", if there are such, and "drawn"."""
    if request.param == "real" and not REAL_IMAGES.exists():
        pytest.skip(f"no real images at {REAL_IMAGES}")
    return request.param


@pytest.fixture(scope="session")
def images(source, tmp_path_factory):
    """Environment variables for a folder with prepared images."""
    return prepared(tmp_path_factory, REAL_IMAGES if source == "real" else None)


@pytest.fixture(scope="session")
def drawn_images(tmp_path_factory):
    """Environment variables for a folder with drawn images, and for empty runs."""
    return prepared(tmp_path_factory, None)


@pytest.fixture(scope="session")
def executed(source, images, tmp_path_factory):
    """The notebooks, executed in order by nbval with the preset for CI: once all of them.

    Where there are real images, only the first half is executed with drawn ones again: the second half reads a pack.
    """
    notebooks = sorted((config.PROJECT / "notebooks").glob("*.ipynb"))
    if REAL_IMAGES.exists() and source == "drawn":
        notebooks = [path for path in notebooks if path.name < "07"]
    report = tmp_path_factory.mktemp("nbval") / "report.xml"
    process = nbval(notebooks, images, f"--junit-xml={report}")
    passed, failed = {}, {}
    for case in ET.parse(report).iter("testcase"):
        notebook = case.get("classname").split(".")[-2]
        problems = [problem.get("message") or problem.text for problem in case if problem.tag in ("failure", "error")]
        failed.setdefault(notebook, []).extend(problems)
        passed[notebook] = passed.get(notebook, 0) + (not problems)
    return Executed(notebooks, Path(images["COURSE_RUNS"]), passed, failed, process.stdout)


@pytest.fixture(scope="session")
def executed_runs(executed):
    """Folder of the traces and the scoreboard that the executed notebooks left."""
    return executed.runs


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """A Jupyter server as JupyterHub gives one to the reader Ada; the address that her browser knows."""
    folder = tmp_path_factory.mktemp("hub")
    settings = ("base_url=/user/ada/", "port=0", "open_browser=False", "allow_root=True", f"root_dir={folder}")
    options = [f"--ServerApp.{setting}" for setting in settings]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyter_server", "--IdentityProvider.token=", *options],
            env=os.environ | {"JUPYTER_RUNTIME_DIR": str(folder), "JUPYTER_CONFIG_DIR": str(folder)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    for _ in range(600):
        found = list(folder.glob("jpserver-*.json"))
        if found and (text := found[0].read_text()):
            break
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.1)
    yield f"http://127.0.0.1:{json.loads(text)['port']}"
    process.terminate()
    process.wait(20)


def prepared(tmp_path_factory: pytest.TempPathFactory, archive: Path | None) -> dict[str, str]:
    data = tmp_path_factory.mktemp("images")
    cifar10.prepare(data_dir=data, archive=archive, drawn=(5_000, 1_000), download=False)
    return environment(data, tmp_path_factory.mktemp("runs"))


def environment(data: Path, runs: Path) -> dict[str, str]:
    """Environment variables of a reader with these folders, and none of the machine's own settings."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("COURSE_", "CIFAR10_"))}
    return inherited | {"COURSE_PRESET": "ci", "COURSE_DATA": str(data), "COURSE_RUNS": str(runs)}


def nbval(notebooks: list[Path], environment: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    """Execute notebooks of a folder by nbval in the running interpreter; compare the outputs marked so."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=300"]
        + ["-p", "patient_nbval", "-p", "no:cacheprovider", f"--rootdir={notebooks[0].parent}", *options]
        + list(map(str, notebooks)),
        env=environment | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )
