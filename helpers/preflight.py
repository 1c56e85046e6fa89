"""Is this machine ready for the course? Answers in a few seconds, with the line that mends each problem."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from helpers import config

RUN_TIMES = config.PROJECT / "data" / "reference" / "run-times.json"
PACKAGES = ("torch", "torchvision", "torchmetrics", "tensorboard", "torch-tb-profiler", "jupyterlab")

GB = 1e9
# What the course needs, with room to spare: a notebook's kernel takes about 1 GB, each worker up to 0.3 GB, the
# prepared images 250 MB. Mini-batches pass from workers through shared memory, 1.5 MB each; Docker grants 64 MB.
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED_MEMORY, LEAST_OPEN_FILES = 4 * GB, 1 * GB, 0.25 * GB, 512


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    Attributes
    ----------
    name, value : str
        What it is, and what was found.
    problem, remedy : str
        What is wrong with it and how to mend that; empty if nothing is.
    """

    name: str
    value: str
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Report:
    """What `check` found; in a notebook it shows as a table."""

    rows: tuple[Row, ...]

    @property
    def problems(self) -> tuple[Row, ...]:
        """The rows with a problem."""
        return tuple(row for row in self.rows if row.problem)

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        lines = []
        for row in self.rows:
            lines += textwrap.wrap(f"{row.name:{width}}  {row.value}", 110, subsequent_indent=" " * (width + 2), break_on_hyphens=False)
            if row.problem:
                lines += [f"{'':{width}}  PROBLEM: {row.problem}", f"{'':{width}}  → {row.remedy}"]
        return "\n".join([*lines, "", self._summary()])

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr>{self._html(row)}</tr>" for row in self.rows)
        return f"<table>{cells}</table><p><b>{html.escape(self._summary())}</b></p>"

    def _summary(self) -> str:
        if not self.problems:
            return "This machine is ready."
        return f"{len(self.problems)} problem(s): {', '.join(row.name for row in self.problems)}."

    @staticmethod
    def _html(row: Row) -> str:
        name, value, problem, remedy = map(html.escape, (row.name, row.value, row.problem, row.remedy))
        wrong = f"<br><b>Problem: {problem}</b><br>→ {remedy}" if problem else ""
        return f'<td style="text-align: left">{name}</td><td style="text-align: left">{value}{wrong}</td>'


def check() -> Report:
    """Look at this machine and return what was found, problems and remedies included."""
    rows = (_python, _packages, _cores, _memory, _shared_memory, _disk, _open_files, _gpu, _hub, _data, _times)
    return Report(tuple(row for function in rows for row in function()))


def calibrate() -> dict[str, float]:
    """Time two small pieces of the course's work: the speed of this machine in two numbers.

    Returns
    -------
    dict
        ``"loading"``, seconds to decode 400 small PNGs, and ``"compute"``, seconds of two training steps of the small
        network; of each, the fastest of three.
    """
    import io

    import numpy as np
    import torch
    from PIL import Image

    from helpers import models, synthetic

    def encoded(image: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "png")
        return buffer.getvalue()

    files = [encoded(image) for image in synthetic.draw(50, config.SEED)[0]]
    model = models.SmallCNN(normalize=True)
    images = torch.zeros(64, 3, 32, 32)

    def loading() -> None:
        for file in files * 8:
            np.asarray(Image.open(io.BytesIO(file)).convert("RGB"), dtype=np.float32) / 255

    def compute() -> None:
        for _ in range(2):
            model(images).sum().backward()

    return {function.__name__: min(_seconds(function) for _ in range(3)) for function in (loading, compute)}


def estimate_minutes(times: dict, here: dict[str, float]) -> dict[str, float]:
    """Estimate how long each preset takes on a machine, from how long it took on another one.

    Parameters
    ----------
    times : dict
        What `execute.record_times` wrote: for each preset the machine's calibration and the seconds of each notebook.
    here : dict
        The calibration of this machine, by `calibrate`.

    Returns
    -------
    dict
        Minutes for each preset: those measured there, times the mean of the ratios of the two calibrations.
    """
    minutes = {}
    for name, run in times.items():
        ratios = [here[kind] / run["calibration"][kind] for kind in here]
        minutes[name] = sum(run["seconds"].values()) / 60 * sum(ratios) / len(ratios)
    return minutes


def _python() -> Iterator[Row]:
    yield Row("Python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Row]:
    pinned = dict(
        line.split(";")[0].strip().split("==")
        for line in (config.PROJECT / "requirements.lock").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    found, missing = [], []
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
            continue
        same = version.split("+")[0] == pinned[package]
        found.append(f"{package} {version}" + ("" if same else f" (the course was tested with {pinned[package]})"))
    remedy = "in the course's folder:  make lab" if missing else ""
    yield Row("Packages", ", ".join(found), f"missing: {', '.join(missing)}" if missing else "", remedy)


def _cores() -> Iterator[Row]:
    granted, quota = config.cores(), _cpu_quota()
    value = f"{granted} of the machine's {os.cpu_count()}" + (f", limited to the time of {quota:g}" if quota else "")
    if min(granted, quota or granted) < 2:
        yield Row("Cores", value, "loading and training share one core", "ask for two cores or more")
    else:
        yield Row("Cores", value)


def _memory() -> Iterator[Row]:
    available = psutil.virtual_memory().available
    limit = _container_memory()
    value = f"{available / GB:.1f} GB available" + (f", limited to {limit / GB:.1f} GB here" if limit else "")
    if min(available, limit or available) < LEAST_MEMORY:
        yield Row("Memory", value, f"under {LEAST_MEMORY / GB:.0f} GB", "shut down kernels and programs not in use")
    else:
        yield Row("Memory", value)


def _shared_memory() -> Iterator[Row]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    size = shutil.disk_usage(folder).total
    if size < LEAST_SHARED_MEMORY:
        problem = "loader workers hand mini-batches over through it, and will crash with a bus error"
        yield Row("/dev/shm", f"{size / 1e6:.0f} MB", problem, "start the container with  --shm-size=2g")
    else:
        yield Row("/dev/shm", f"{size / GB:.1f} GB")


def _disk() -> Iterator[Row]:
    for name, variable, folder in (
        ("Disk for images", "COURSE_DATA", config.data_dir()),
        ("Disk for runs", "COURSE_RUNS", config.runs_dir()),
    ):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        value, elsewhere = f"{free / GB:.1f} GB free at {folder}", f"set {variable} to a folder on another disk"
        prepared = variable == "COURSE_DATA" and any(_manifests())
        if not os.access(existing, os.W_OK) and not prepared:
            yield Row(name, value, f"{existing} is not writable", elsewhere)
        elif free < LEAST_DISK and not prepared:
            yield Row(name, value, f"under {LEAST_DISK / GB:.0f} GB", elsewhere)
        else:
            yield Row(name, value)


def _open_files() -> Iterator[Row]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit < LEAST_OPEN_FILES:
        yield Row("Open files", f"{limit} at most", "loaders with many workers need more", "before  make lab:  ulimit -n 4096")
    else:
        yield Row("Open files", f"{limit:,} at most")


def _gpu() -> Iterator[Row]:
    import torch

    driver, names = _nvidia()
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = f"{torch.cuda.get_device_name()}, {free / GB:.0f} of {total / GB:.0f} GB free"
        yield Row("GPU", f"{name}, driver {driver or 'unknown'}, CUDA {torch.version.cuda or torch.version.hip}")
    elif not names:
        yield Row("GPU", "none; every notebook runs all the same, with a pretended accelerator where it needs one")
    elif torch.version.cuda is None:
        yield Row("GPU", f"{', '.join(names)}", "this PyTorch was built without CUDA", "make clean  and then  make lab")
    else:
        yield Row(
            "GPU",
            f"{', '.join(names)}, driver {driver}",
            f"this PyTorch cannot use it: it needs a driver for CUDA {torch.version.cuda}",
            "update the driver, or  make clean  and then  make lab TORCH_BACKEND=cu126  (see README)",
        )


def _hub() -> Iterator[Row]:
    base = config.hub_base_url()
    if base is None:
        yield Row("JupyterHub", "no; TensorBoard opens on this machine's 127.0.0.1")
        return
    try:
        version = importlib.metadata.version("jupyter-server-proxy")
    except importlib.metadata.PackageNotFoundError:
        yield Row("JupyterHub", base, "its proxy is missing, so TensorBoard cannot open", "pip install jupyter-server-proxy")
    else:
        yield Row("JupyterHub", f"yes; TensorBoard opens through its proxy at {base}proxy/ ({version})")


def _data() -> Iterator[Row]:
    sources = [json.loads(manifest.read_text())["source"] for manifest in _manifests()]
    todo = "not prepared yet:  python -m helpers prepare  (the notebooks do it too)"
    yield Row("Images", ", ".join(sources) if sources else todo)


def _times() -> Iterator[Row]:
    if not RUN_TIMES.exists():
        yield Row("Time for all notebooks", f"unknown: {RUN_TIMES} is missing")
        return
    minutes = estimate_minutes(json.loads(RUN_TIMES.read_text()), calibrate())
    known = (f"{name} about {max(minutes[name], 1):.0f} min" for name in config.PRESETS if name in minutes)
    yield Row("Time for all notebooks", f"{', '.join(known)} (COURSE_PRESET is {config.preset().name} now)")


def _manifests() -> list[Path]:
    return sorted(config.data_dir().glob("cifar10*/manifest.json"))


def _nvidia() -> tuple[str | None, list[str]]:
    """Return the driver's version and the names of the GPUs, asked of the driver itself: it knows without PyTorch."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return pynvml.nvmlSystemGetDriverVersion(), [pynvml.nvmlDeviceGetName(handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def _cpu_quota() -> float | None:
    """Return how many cores' time a container may use (control groups, version 2), or None without a limit."""
    quota, _, period = _control_group("cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _container_memory() -> int | None:
    """Return the memory that a container may use, in bytes, or None without a limit."""
    limit = _control_group("memory.max")
    return int(limit) if limit.isdigit() else None


def _control_group(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:  # no Linux, no version 2, or no limit at this level
        return ""


def _seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start
