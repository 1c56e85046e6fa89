"""The notebooks, how to execute them, and images for a script that readers take home."""

import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import nbformat
import numpy as np

from helpers import config

NOTEBOOKS = sorted((config.PROJECT / "notebooks").glob("[0-9][0-9]-*.ipynb"))


@cache
def content(notebook: Path) -> nbformat.NotebookNode:
    """Return what a notebook holds. It is read once, since that takes long; no test changes it."""
    return nbformat.read(notebook, 4)


def environment(data: Path, runs: Path) -> dict[str, str]:
    """Environment variables of a reader with these folders, and none of the machine's own settings."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("COURSE_", "CIFAR10_"))}
    return inherited | {"COURSE_PRESET": "ci", "COURSE_DATA": str(data), "COURSE_RUNS": str(runs)}


def nbval(notebooks: list[Path], environment: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    """Execute notebooks of a folder by nbval in the running interpreter; compare the outputs marked so."""
    run = partial(
        subprocess.run,
        [
            *(sys.executable, "-m", "pytest", "--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=900"),
            *("-p", "support.nbval_plugin", "-p", "no:cacheprovider", f"--rootdir={notebooks[0].parent}", *options),
            *map(str, notebooks),
        ],
        env=environment | {"PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    process = run()
    # Kernels that start at the same moment may choose the same TCP port; then one dies before its first cell
    lost = "Kernel died before replying to kernel_info" in process.stdout and " passed" not in process.stdout
    return run() if lost else process


def learnable(folder: Path, count: int) -> Path:
    """Write images as `train_ddp.py` reads them; a network learns something, as each has its label's brightness."""
    folder.mkdir()
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 10, count)
    images = generator.integers(0, 128, (count, 3, 32, 32)) + 12 * labels[:, None, None, None]
    np.save(folder / "images.npy", images.astype(np.uint8))
    np.save(folder / "labels.npy", labels)
    return folder
