"""The notebooks, how to execute them, and images for a script that readers take home."""

import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import nbformat
import numpy as np
import soundfile
from PIL import Image

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


def bright_photos(folder: Path) -> Path:
    """Write photos whose brightness says their class: 25 to train with, one of them damaged; 7 to validate with."""
    for part, of_each in (("train", (13, 12)), ("val", (4, 3))):
        for label, count in enumerate(of_each):
            (folder / part / f"{label}").mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng(number).integers(0, 99, (48, 60, 3)) + 150 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / f"{label}" / f"{number}.png")
    damaged = folder / "train" / "0" / "3.png"
    damaged.write_bytes(damaged.read_bytes()[:-400])
    return folder


def tones(folder: Path) -> Path:
    """Write clips of low and high tones, 0.3 to 1.2 s: 25 to train with, one of them damaged; 8 to validate with."""
    for part, of_each in (("train", (13, 12)), ("val", (4, 4))):
        for label, count in enumerate(of_each):
            (folder / part / f"{label}").mkdir(parents=True)
            for number in range(count):
                draw = np.random.default_rng((label, number))
                seconds = np.arange(int(draw.uniform(0.3, 1.2) * 8000)) / 8000
                hertz = draw.uniform(200, 400) * (1 + 3 * label)
                samples = 0.3 * np.sin(2 * np.pi * hertz * seconds) + 0.01 * draw.standard_normal(len(seconds))
                soundfile.write(folder / part / f"{label}" / f"{number}.flac", samples, 8000)
    (folder / "train" / "0" / "3.flac").write_bytes(b"no sound")
    return folder


# A script for photos or for clips as a job of its own, with what a small network needs of it
_JOB = f"""
import os, sys, time
sys.path.insert(0, {str(NOTEBOOKS[0].parent)!r})
import recipes, torch, {{name}} as script
from torch import nn
{{change}}
recipes.record = lambda *_: None
recipes.fastest = lambda *_: ["float32", "float32, channels_last"][recipes.rank_and_ranks()[0] > 0]
save_whole = recipes.save_whole


def killed(path, state):
    save_whole(path, state)
    if state["epoch"] == {{{{killed_after}}}} and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)


recipes.save_whole = killed
time.sleep(2 * {{{{slow}}}} * recipes.rank_and_ranks()[0])
script.main()
"""

# Small networks. Without `norm`, each photo or clip becomes the same on any rank
SMALL_PHOTOS = _JOB.format(
    name="train_photos",
    change="""

NORM = {norm}
script.STORED, script.SIDE = 40, 32
script.torchvision.models.resnet50 = lambda num_classes, **_: nn.Sequential(
    nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8) if NORM else nn.Identity(), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
)
if not NORM:
    recipes.crop_and_flip = lambda images, side: images[:, :, 4:36, 4:36]
""",
)
SMALL_CLIPS = _JOB.format(
    name="train_clips",
    change="""
if not {norm}:
    script.network = lambda rate, classes: nn.Sequential(
        script.Spectrogram(rate, bands=16), nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, classes),
    )
""",
)
