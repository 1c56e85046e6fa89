"""Presets, folders, seed and device: the only place that reads the course's environment variables.

========================= =====================================================================
variable                  meaning
========================= =====================================================================
``COURSE_PRESET``         how much to run: ``ci``, ``workshop`` (the default) or ``full``
``COURSE_DATA``           folder of the images; a class may share one (default: ``data``)
``COURSE_RUNS``           folder of your traces and scoreboard (default: ``runs``)
``COURSE_SLIDERS``        ``off``: sliders only show what they show at first, as for programs
``CIFAR10_ARCHIVE``       a CIFAR-10 archive or extracted folder that you already have
``COURSE_PHOTOS``         your own photos: a folder with a subfolder of images for each class
``S3_ENDPOINT``           URL of an S3 store of your own, with a bucket in ``S3_BUCKET``, keys in
                          ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``, for temporary keys
                          ``AWS_SESSION_TOKEN``, and ``AWS_REGION`` (default: ``us-east-1``)
========================= =====================================================================
"""

import atexit
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from stepscope.base import machine

PROJECT = Path(__file__).resolve().parent.parent
# Where the course is published, such as https://github.com/OWNER/NAME; nothing else says so. While it is empty, the
# site has no buttons that lead there, and there are no copies of the notebooks for Colab.
REPOSITORY = ""
SEED = 2021  # any fixed number: two runs draw the same images, the same weights, the same order
_LOCK = ".lock"  # of a temporary folder
_NEW_S = 60.0  # so long another process leaves a temporary folder alone: its owner may not have locked it yet


@dataclass(frozen=True)
class Preset:
    """How much a notebook runs; the code is the same in all presets."""

    name: str
    steps: int  # in one timed run
    seconds: float  # for which a loader alone is timed, in one run
    rounds: int  # of a comparison; each times each variant once
    longest_run: float  # seconds after which a timed run takes no further step
    longest_comparison: float  # seconds after which a comparison has no further round
    train_images: int  # in an epoch of training; all there are, if fewer
    drawn_images: tuple[int, int]  # to train on and to test, where CIFAR-10 is not available
    worker_counts: tuple[int, ...]  # to sweep
    drawn_photos: int  # where there are none of the reader's own
    cpu_batch: int  # images in a training step of ResNet-50 where there is no GPU


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("ci", 6, 0.1, 2, 0.5, 8, 1_280, (5_000, 1_000), (0, 1, 2), 120, 8),
        Preset("workshop", 20, 0.3, 5, 8, 90, 12_800, (50_000, 10_000), (0, 1, 2, 4, 8), 600, 32),
        Preset("full", 60, 0.5, 9, 60, 900, 50_000, (50_000, 10_000), (0, 1, 2, 3, 4, 6, 8, 12, 16), 2_000, 32),
    )
}


class CourseError(ValueError):
    """The reader's input does not fit: an archive, a folder, a setting. The message says what would fit."""


def preset() -> Preset:
    """Return the preset that ``COURSE_PRESET`` names, ``workshop`` by default; raise `CourseError` for another name."""
    name = os.environ.get("COURSE_PRESET") or "workshop"
    if name not in PRESETS:
        raise CourseError(f"COURSE_PRESET is {name!r}, but there is only {', '.join(PRESETS)}; set one of these.")
    return PRESETS[name]


def data_dir() -> Path:
    """Folder of the images, absolute; it need not exist yet."""
    return _folder("COURSE_DATA") or PROJECT / "data"


def runs_dir() -> Path:
    """Folder of this reader's traces and scoreboard, absolute; it need not exist yet."""
    return _folder("COURSE_RUNS") or PROJECT / "runs"


def cifar10_archive() -> Path | None:
    """The archive or folder that ``CIFAR10_ARCHIVE`` names, absolute, or None."""
    return _folder("CIFAR10_ARCHIVE")


def photos() -> Path | None:
    """The reader's own photos in class folders, as ``COURSE_PHOTOS`` names them, absolute, or None."""
    return _folder("COURSE_PHOTOS")


def s3() -> dict[str, str] | None:
    """The reader's own S3 store as the arguments of `buckets.Bucket`, or None if ``S3_ENDPOINT`` names none.

    Raises `ValueError` if the bucket or the keys are missing.
    """
    endpoint = os.environ.get("S3_ENDPOINT")
    if not endpoint:
        return None
    needed = ("S3_BUCKET", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        lacking = ", ".join(missing)
        raise ValueError(f"S3_ENDPOINT is {endpoint}, but {lacking} is missing; set it, or unset S3_ENDPOINT.")
    return {
        "endpoint": endpoint.rstrip("/"),
        "name": os.environ["S3_BUCKET"],
        "access_key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        "region": os.environ.get("AWS_REGION") or "us-east-1",
        "session_token": os.environ.get("AWS_SESSION_TOKEN", ""),
    }


def device():
    """The ``torch.device`` to train on: the first CUDA GPU, or else the CPU."""
    import torch  # here, because traces, the shell and the set-up need the folders but not torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def start(notebook: str) -> Path:
    """Begin a notebook: limit timed runs as the preset says, print what it runs on, and return the folder of its runs.

    The folder, below ``COURSE_RUNS``, has the notebook's name, such as ``"03-more-workers"``.
    """
    from stepscope import timing

    # For more workers than cores; notebook 03 measures how many are best
    warnings.filterwarnings("ignore", "This DataLoader will create")
    timing.limit(run=preset().longest_run, comparison=preset().longest_comparison)
    if os.environ.get("COURSE_SLIDERS") == "off":
        _replace_sliders()
    print(describe())
    return runs_dir() / notebook


def _replace_sliders() -> None:
    """Let `ipywidgets.interact` call a function once, with its defaults, and display the result.

    A program that executes a notebook needs no widgets, and nbclient has waited for ever for a cell with some.
    """
    import ipywidgets  # type: ignore[import-untyped]
    from IPython.display import display

    def interact(**dials: object) -> Callable[[Callable[..., object]], Callable[..., object]]:
        def called(function: Callable[..., object]) -> Callable[..., object]:
            result = function()
            if result is not None:
                display(result)
            return function

        return called

    ipywidgets.interact = interact


def temporary(notebook: str) -> Path:
    """Return a new folder for what a notebook, such as ``"15"``, needs until this process ends.

    It is removed when the process ends. A process that is killed, as Jupyter kernels may be, leaves its folder behind:
    the next call for this notebook removes it. A lock, which ends with its process, shows which folders are in use.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"course-{notebook}-*"):
        with suppress(OSError, Timeout):  # the folder of another user, or in use
            if time.time() - folder.stat().st_mtime > _NEW_S:
                with FileLock(folder / _LOCK, blocking=False):
                    shutil.rmtree(folder, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"course-{notebook}-"))
    lock = FileLock(folder / _LOCK)
    lock.acquire()

    def remove() -> None:
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def describe() -> str:
    """Return one line that names the device, the cores and the preset."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only, no CUDA GPU found"
    return f"Device: {name}. Cores: {machine.cores()}. PyTorch {torch.__version__}. Preset: {preset().name}."


def _folder(variable: str) -> Path | None:
    value = os.environ.get(variable)
    try:
        return Path(value).expanduser().resolve() if value else None
    except RuntimeError:  # "~name" of nobody
        raise CourseError(f"{variable}={value}: expected a folder, found the home of an unknown user.") from None
