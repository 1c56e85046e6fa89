"""Presets, folders, seed and device: the only place that reads the course's environment variables.

========================= =====================================================================
variable                  meaning
========================= =====================================================================
``COURSE_PRESET``         how much to run: ``ci``, ``workshop`` (the default) or ``full``
``COURSE_DATA``           folder of the images; a class may share one (default: ``data``)
``COURSE_RUNS``           folder of your traces and scoreboard (default: ``runs``)
``CIFAR10_ARCHIVE``       a CIFAR-10 archive or extracted folder that you already have
``COURSE_PHOTOS``         photos of your own: a folder with a folder of images for each class
``S3_ENDPOINT``           URL of an S3 store of your own, with a bucket in ``S3_BUCKET``, keys in
                          ``AWS_ACCESS_KEY_ID`` and ``AWS_SECRET_ACCESS_KEY``, for temporary keys
                          ``AWS_SESSION_TOKEN``, and ``AWS_REGION`` (default: ``us-east-1``)
``TENSORBOARD_PROXY_URL`` where a proxy shows ports of this machine, such as ``/proxy/%PORT%/``
========================= =====================================================================
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
CONTROL_GROUPS, OWN_CONTROL_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Where the course is published, such as https://github.com/OWNER/NAME: the only place that says so. Empty, it is
# nowhere: the site has no buttons that lead there, and there are no copies of the notebooks for Colab.
REPOSITORY = ""
SEED = 2021  # any fixed number: two runs draw the same images, the same weights, the same order


@dataclass(frozen=True)
class Preset:
    """How much a notebook runs; the code is the same in all presets.

    Attributes
    ----------
    name : str
    steps : int
        Training steps in one timed run.
    seconds : float
        How long a loader alone is timed, in one run.
    rounds : int
        How often each variant is timed, interleaved with the others.
    longest_run, longest_comparison : float
        Seconds after which a timed run takes no further step, and a comparison no further round: on a slow or busy
        machine both are shorter, and the course still takes the time that it says.
    train_images : int
        Images in one training epoch, where an epoch is trained; all there are, if fewer.
    drawn_images : tuple of int
        Training and test images to draw where CIFAR-10 itself cannot be had.
    worker_counts : tuple of int
        Loader workers to sweep, where workers are swept.
    drawn_photos : int
        Photos to draw where there are none of the reader's own.
    cpu_batch : int
        Images in a training step of ResNet-50 where there is no GPU.
    """

    name: str
    steps: int
    seconds: float
    rounds: int
    longest_run: float
    longest_comparison: float
    train_images: int
    drawn_images: tuple[int, int]
    worker_counts: tuple[int, ...]
    drawn_photos: int
    cpu_batch: int


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("ci", 6, 0.1, 2, 0.5, 8, 2_560, (5_000, 1_000), (0, 1, 2), 120, 8),
        Preset("workshop", 20, 0.3, 5, 8, 90, 12_800, (50_000, 10_000), (0, 1, 2, 4, 8), 600, 32),
        Preset("full", 60, 0.5, 9, 60, 900, 50_000, (50_000, 10_000), (0, 1, 2, 3, 4, 6, 8, 12, 16), 2_000, 32),
    )
}


class UnknownPreset(ValueError):
    """``COURSE_PRESET`` names no preset."""


def preset() -> Preset:
    """Return the preset that ``COURSE_PRESET`` names, ``workshop`` by default.

    Raises
    ------
    UnknownPreset
        If there is no such preset.
    """
    name = os.environ.get("COURSE_PRESET") or "workshop"
    if name not in PRESETS:
        raise UnknownPreset(f"COURSE_PRESET is {name!r}, but there is only {', '.join(PRESETS)}; set one of these.")
    return PRESETS[name]


def data_dir() -> Path:
    """Folder of the images, absolute; it need not exist yet."""
    return _folder("COURSE_DATA", PROJECT / "data")


def runs_dir() -> Path:
    """Folder of this reader's traces and scoreboard, absolute; it need not exist yet."""
    return _folder("COURSE_RUNS", PROJECT / "runs")


def cifar10_archive() -> Path | None:
    """The archive or folder that ``CIFAR10_ARCHIVE`` names, absolute, or None."""
    return _folder("CIFAR10_ARCHIVE", None)


def photos() -> Path | None:
    """The reader's own photos in class folders, as ``COURSE_PHOTOS`` names them, absolute, or None."""
    return _folder("COURSE_PHOTOS", None)


def s3() -> dict[str, str] | None:
    """The reader's own S3 store as the arguments of `stores.Bucket`, or None if ``S3_ENDPOINT`` names none.

    Raises
    ------
    ValueError
        If the bucket or the keys are missing.
    """
    endpoint = os.environ.get("S3_ENDPOINT")
    if not endpoint:
        return None
    needed = ("S3_BUCKET", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"S3_ENDPOINT is {endpoint}, but {', '.join(missing)} is missing; set it, or unset S3_ENDPOINT."
        )
    return {
        "endpoint": endpoint.rstrip("/"),
        "name": os.environ["S3_BUCKET"],
        "access_key": os.environ["AWS_ACCESS_KEY_ID"],
        "secret_key": os.environ["AWS_SECRET_ACCESS_KEY"],
        "region": os.environ.get("AWS_REGION") or "us-east-1",
        "session_token": os.environ.get("AWS_SESSION_TOKEN", ""),
    }


def hub_base_url() -> str | None:
    """URL path of this reader's server behind JupyterHub (``/user/ada/``), or None without a hub."""
    prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX")
    return None if not prefix else f"/{prefix.strip('/')}/"


def address(port: int | str) -> str:
    """URL at which a reader's browser finds a port of this machine, with ``/`` at its end.

    It is a path if a proxy stands before this machine: JupyterHub's, or the one that ``TENSORBOARD_PROXY_URL`` names.
    """
    hub = hub_base_url()
    proxy = os.environ.get("TENSORBOARD_PROXY_URL") or (None if hub is None else f"{hub}proxy/%PORT%/")
    return f"{proxy.rstrip('/')}/".replace("%PORT%", str(port)) if proxy else f"http://127.0.0.1:{port}/"


def in_colab() -> bool:
    """Whether this process is a kernel of Google Colab.

    Its kernels have loaded this module. Kaggle's have not, though it is installed there, too: Kaggle's image is made of
    Colab's.
    """
    return "google.colab" in sys.modules


def device():
    """The ``torch.device`` to train on: the first CUDA GPU, or else the CPU."""
    import torch  # here, because traces, the shell and the set-up need the folders but not torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe() -> str:
    """Return one line that names the device, the cores and the preset: the first output of every notebook."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU only, no CUDA GPU found"
    return f"Device: {name}. Cores: {cores()}. PyTorch {torch.__version__}. Preset: {preset().name}."


def cores() -> int:
    """Processor cores that this process may use: a shared machine often grants fewer than it has.

    A container may run on all cores and still be limited to the time of a few: then it is as many as that, rounded up.
    """
    try:
        runs_on = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows cannot restrict a process to some cores
        runs_on = os.cpu_count() or 1
    return min(runs_on, math.ceil(cpu_quota() or runs_on))


def cpu_quota() -> float | None:
    """Return how many cores' time this process may use, or None without a limit."""
    quotas = [limit.split() for limit in control_group_limits("cpu.max")]
    return min((int(quota) / int(period) for quota, period in quotas if quota != "max"), default=None)


def control_group_limits(name: str) -> list[str]:
    """Return what limits the control group (version 2, of Linux) of this process, and all groups that it is part of.

    A container sees its own group as the root; a batch job's or a hub's group lies deeper.

    Parameters
    ----------
    name : str
        A limit by its file, such as ``"cpu.max"``.
    """
    try:
        groups = OWN_CONTROL_GROUP.read_text().splitlines()
    except FileNotFoundError:  # no Linux
        return []
    own = CONTROL_GROUPS.joinpath(*(group.removeprefix("0::/") for group in groups if group.startswith("0::/")))
    files = (folder / name for folder in (own, *own.parents) if folder.is_relative_to(CONTROL_GROUPS))
    return [file.read_text().strip() for file in files if file.is_file()]


def _folder(variable: str, default: Path | None) -> Path | None:
    value = os.environ.get(variable)
    return Path(value).expanduser().resolve() if value else default
