"""What several test files share: images from both sources, and the notebooks executed on them."""

import itertools
import json
import os
import shutil
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
from support.nbval_plugin import AGAIN
from support.notebooks import NOTEBOOKS, environment, nbval

from helpers import config
from helpers.data import cifar10

pytest_plugins = ["support.shared"]

# Real CIFAR-10 images that may lie beside the project; they are no part of it.
REAL_IMAGES = config.PROJECT.parent / "shared" / "data" / "cifar-10-python-subset.tar.gz"
REFERENCE = config.PROJECT / "data" / "reference" / "cpu-2-cores"


@dataclass(frozen=True)
class Executed:
    """A notebook after nbval executed it."""

    notebook: Path
    runs: Path  # the traces and the scoreboard that it left
    passed: int  # cells, at first
    failed: list[str]  # messages of the other cells, and of those that failed when executed again
    log: str


@pytest.fixture(scope="session")
def drawn_images(tmp_path_factory):
    """Environment variables for a folder with drawn images, and for empty runs."""
    return prepared(tmp_path_factory, "drawn")


@pytest.fixture(scope="session")
def any_images(tmp_path_factory):
    """Environment variables for a folder with real images if there are such, or else with drawn ones."""
    if not REAL_IMAGES.exists():
        return prepared(tmp_path_factory, "drawn")
    return prepared(tmp_path_factory, "images", CIFAR10_ARCHIVE=str(REAL_IMAGES))


# These start many jobs of several processes, each of which imports PyTorch
EXECUTED = [pytest.param(path, marks=pytest.mark.slow) if path.stem[:2] in ("16", "17") else path for path in NOTEBOOKS]


@pytest.fixture(scope="session", params=EXECUTED, ids=lambda path: path.stem)
def executed(request, any_images, tmp_path_factory):
    """A notebook, executed by nbval with the preset for CI, where the ones before it have left recorded results."""
    notebook, folder = request.param, tmp_path_factory.mktemp(request.param.stem)
    runs = folder / "runs"
    leave_results_before(notebook, runs)
    report = folder / "report.xml"
    process = nbval([notebook], any_images | {"COURSE_RUNS": str(runs)}, f"--junit-xml={report}")
    problems = {
        case.get("name"): [each.get("message") or each.text for each in case if each.tag in ("failure", "error")]
        for case in ET.parse(report).iter("testcase")
    }
    passed = sum(not problem and not name.endswith(AGAIN) for name, problem in problems.items())
    return Executed(notebook, runs, passed, list(itertools.chain(*problems.values())), process.stdout)


def leave_results_before(notebook: Path, runs: Path) -> None:
    """Put recorded results and traces where the notebooks before this one would have left theirs."""
    lines = (REFERENCE / "scoreboard.jsonl").read_text().splitlines(keepends=True)
    runs.mkdir()
    before = [line for line in lines if json.loads(line)["rung"] < notebook.stem[:2]]
    (runs / "scoreboard.jsonl").write_text("".join(before))
    if notebook.stem > "04":  # 06 compares with it
        shutil.copytree(REFERENCE / "traces" / "03-more-workers", runs / "03-more-workers" / "best-number")


def prepared(tmp_path_factory: pytest.TempPathFactory, name: str, **archive: str) -> dict[str, str]:
    """Prepare images in a folder of that name, which all processes of these tests use."""
    base = tmp_path_factory.getbasetemp()
    data = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    variables = environment(data, tmp_path_factory.mktemp("runs"))
    with mock.patch.dict(os.environ, variables | archive):
        cifar10.prepare(download=False)
    return variables
