"""Is this machine ready for the course? Answers in a few seconds, with the line that fixes each problem."""

from __future__ import annotations

import html
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from helpers import config, wording

RUN_TIMES = config.PROJECT / "data" / "reference" / "run-times.json"
_FIRST_COMPUTING = "08"  # the notebooks before it load, those from it on compute
_CALIBRATION = 5.0  # s for each of its two kinds of work, whatever the preset
SERVERS = {"jupyterlab", "jupyter-server-proxy"}  # of the notebooks themselves
SHOWN_PACKAGES = ("torch", "torchvision", "torchmetrics", "tensorboard", "torch-tb-profiler", "jupyterlab")

GB = 1e9
# What the course needs, with room to spare: a notebook's kernel takes about 1 GB, each worker up to 0.3 GB, the
# prepared images 250 MB, drawn photos up to 90 MB. Batches pass from workers through shared memory, 1.5 MB each
# (in 05, 4.8 MB); Docker grants 64 MB.
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED_MEMORY, LEAST_OPEN_FILES = 4 * GB, 1 * GB, 0.25 * GB, 512


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    Attributes
    ----------
    name, value : str
        What it is, and what was found.
    problem, remedy : str
        What is wrong with it and how to fix that; empty if nothing is.
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
        wrap = textwrap.TextWrapper(110, subsequent_indent=" " * (width + 2), break_on_hyphens=False)
        for row in self.rows:
            lines += wrap.wrap(f"{row.name:{width}}  {row.value}")
            if row.problem:
                lines += [f"{'':{width}}  PROBLEM: {row.problem}", f"{'':{width}}  → {row.remedy}"]
        return "\n".join([*lines, "", self._summary()])

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr>{self._html(row)}</tr>" for row in self.rows)
        return f"<table>{cells}</table><p><b>{html.escape(self._summary())}</b></p>"

    def _summary(self) -> str:
        if not self.problems:
            return "This machine is ready."
        return f"{wording.counted(len(self.problems), 'problem')}: {', '.join(row.name for row in self.problems)}."

    @staticmethod
    def _html(row: Row) -> str:
        name, value, problem, remedy = map(html.escape, (row.name, row.value, row.problem, row.remedy))
        wrong = f"<br><b>Problem: {problem}</b><br>→ {remedy}" if problem else ""
        return f'<td style="text-align: left">{name}</td><td style="text-align: left">{value}{wrong}</td>'


def check() -> Report:
    """Look at this machine and return what was found, problems and remedies included."""
    looks = [_python, _packages, _cores, _memory, _shared_memory, _disk, _open_files, _hub, _data, _preset]
    if None not in (version("torch"), version("nvidia-ml-py")):  # or the row of the packages has a problem already
        looks += [_gpu, _times]
    return Report(tuple(row for look in looks for row in look()))


def calibrate() -> dict[str, float]:
    """Time two pieces of the course's work: the speed of this machine in two numbers.

    Returns
    -------
    dict
        ``"loading"``, seconds to decode 400 small PNGs, and ``"compute"``, seconds of a training step of ResNet-50
        with 32 images; of each, the fastest of three, after one as warm-up.
    """
    import io

    import numpy as np
    import torch
    from PIL import Image

    from helpers import timing, training
    from helpers.data import synthetic
    from helpers.training import models

    def encoded(image: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, "png")
        return buffer.getvalue()

    files = [encoded(image) for image in synthetic.draw(50, config.SEED)[0]]
    workload = training.resnet_workload(batch=32)
    model = models.resnet50(workload.side).to(config.device())
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.01))
    batch = torch.zeros(workload.batch, 3, 32, 32, dtype=torch.uint8), torch.zeros(workload.batch, dtype=torch.long)

    def loading() -> None:
        for file in files * 8:
            np.asarray(Image.open(io.BytesIO(file)).convert("RGB"), dtype=np.float32) / 255

    work = {"loading": loading, "compute": lambda: step(*batch)}
    times = {kind: timing.each_call_ms(function, repeats=3, longest=_CALIBRATION) for kind, function in work.items()}
    return {kind: min(each) / 1e3 for kind, each in times.items()}


def estimate_minutes(
    recorded: dict,
    here: dict[str, float],
    measured: dict[str, dict[str, float]] | None = None,
    people: int = 1,
    cores: float = 1,
) -> dict[str, float]:
    """Estimate how long each preset takes on this machine.

    A notebook that has run here takes as long as it did. Of the others it is known how long they took on another
    machine, and for which share of that time a processor worked. This share is scaled by the two machines'
    calibrations: by that of loading for notebooks 00 to 07, by that of compute from 08 on. The rest was waiting, which
    is as long everywhere.

    Several people at once share the cores: a notebook takes them as long as the cores need for everybody's share, if
    that is longer. In truth it takes longer where a notebook keeps several cores busy, which is not recorded, and less
    where it leaves out rounds because the machine is slow.

    Parameters
    ----------
    recorded : dict
        What `execute.record_times` wrote: for each preset the machine's calibration, and of each notebook the seconds
        and the share of them in which a processor worked, 0 to 1.
    here : dict
        The calibration of this machine, by `calibrate`.
    measured : dict, optional
        For each preset, the seconds of each notebook that has run here.
    people : int
        How many execute all notebooks at once.
    cores : float
        Of this machine.

    Returns
    -------
    dict
        Minutes for each preset.
    """
    minutes = {}
    for name, run in recorded.items():
        ratios = {kind: here[kind] / run["calibration"][kind] for kind in here}
        seconds, working = {}, {}
        for notebook, there in run["seconds"].items():
            ratio, share = ratios["loading" if notebook < _FIRST_COMPUTING else "compute"], run["working"][notebook]
            longer = 1 + share * (ratio - 1)
            seconds[notebook], working[notebook] = there * longer, share * ratio / longer
        seconds |= (measured or {}).get(name, {})
        shared = {notebook: max(1, people * working.get(notebook, 1) / cores) for notebook in seconds}
        minutes[name] = sum(seconds[notebook] * shared[notebook] for notebook in seconds) / 60
    return minutes


def _python() -> Iterator[Row]:
    yield Row("Python", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Row]:
    pins = _pins()
    shown = []
    for package in SHOWN_PACKAGES:
        found = version(package)
        if found is not None:
            same = found.split("+")[0] == pins[package]
            shown.append(f"{package} {found}" + ("" if same else f" (the course was tested with {pins[package]})"))
    missing = [str(wanted) for wanted in dependencies() if not satisfied(wanted)]
    problem = f"missing, or another version: {', '.join(missing)}" if missing else ""
    remedy = "run the first cell again" if config.in_colab() else "in the course's folder:  make -B lab"
    yield Row("Packages", ", ".join(shown), problem, remedy if missing else "")


def dependencies() -> list[Requirement]:
    """Return what pyproject.toml says that the course needs on this system; in Colab, which has its own, no server."""
    project = tomllib.loads((config.PROJECT / "pyproject.toml").read_text())["project"]
    wanted = [each for each in map(Requirement, project["dependencies"]) if not each.marker or each.marker.evaluate()]
    return [each for each in wanted if not (config.in_colab() and each.name in SERVERS)]


def _pins() -> dict[str, str]:
    lines = (config.PROJECT / "requirements.lock").read_text().splitlines()
    return dict(line.split(";")[0].strip().split("==") for line in lines if "==" in line and not line.startswith("#"))


def satisfied(wanted: Requirement) -> bool:
    """Whether a package is installed, in a version that is allowed."""
    found = version(wanted.name)
    return found is not None and wanted.specifier.contains(found, prereleases=True)


def version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> Iterator[Row]:
    granted, quota = config.cores(), config.cpu_quota()
    value = f"{granted} of the machine's {os.cpu_count()}" + (f", limited to the time of {quota:g}" if quota else "")
    if min(granted, quota or granted) < 2:
        yield Row("Cores", value, "loading and training share one core", "ask for two cores or more")
    else:
        yield Row("Cores", value)


def _memory() -> Iterator[Row]:
    available = psutil.virtual_memory().available
    limit = _container_memory()
    value = f"{available / GB:.1f} GB available" + (f", limited to {limit / GB:.1f} GB here" if limit else "")
    if available_memory() < LEAST_MEMORY:
        yield Row("Memory", value, f"under {LEAST_MEMORY / GB:.0f} GB", "shut down kernels and programs not in use")
    else:
        yield Row("Memory", value)


def _shared_memory() -> Iterator[Row]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return
    size = shutil.disk_usage(folder).total
    if size < LEAST_SHARED_MEMORY:
        problem = "loader workers send batches to the main process through it, and will crash with a bus error"
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
        prepared = variable == "COURSE_DATA" and any(manifests())
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
        problem, remedy = "loaders with many workers need more", "before  make lab:  ulimit -n 4096"
        yield Row("Open files", f"{limit} at most", problem, remedy)
    else:
        yield Row("Open files", f"{limit:,} at most")


def _gpu() -> Iterator[Row]:
    import pynvml
    import torch

    try:
        driver, driver_cuda, names = _nvidia()
    except pynvml.NVMLError as error:
        yield Row("GPU", "unknown", f"its driver does not answer: {error}", "restart the machine, or ask who runs it")
        return
    value = f"{', '.join(names)}, driver {driver}"
    other_build = "make -B lab TORCH_BACKEND=cu126  (see notebooks/anywhere.md)"
    if torch.cuda.is_available():
        yield _usable_gpu(f"driver {driver or 'unknown'}, CUDA {torch.version.cuda or torch.version.hip}", other_build)
    elif not names:
        yield Row("GPU", "none; every notebook runs all the same, with a simulated accelerator where it needs one")
    elif torch.version.cuda is None:
        yield Row("GPU", value, "this PyTorch was built without CUDA", "make -B lab")
    elif driver_cuda < int(torch.version.cuda.split(".")[0]):
        problem = f"this PyTorch needs a driver for CUDA {torch.version.cuda}, this one is for CUDA {driver_cuda}"
        yield Row("GPU", value, problem, f"update the driver, or  {other_build}")
    else:
        yield Row("GPU", value, "it is hidden from PyTorch", "unset CUDA_VISIBLE_DEVICES, then start again")


def _usable_gpu(versions: str, other_build: str) -> Row:
    import torch

    value = f"{torch.cuda.get_device_name()}, {versions}"
    try:
        torch.ones(1, device="cuda").item()
        free, total = torch.cuda.mem_get_info()
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        old = "no kernel image" in first_line  # CUDA 13 left out all GPUs before Turing, such as the V100
        remedy = other_build if old else "end the programs that nvidia-smi lists, or wait for them"
        return Row("GPU", value, f"PyTorch cannot compute on it: {first_line}", remedy)
    return Row("GPU", f"{value}, {free / GB:.0f} of {total / GB:.0f} GB free")


def _hub() -> Iterator[Row]:
    base = config.hub_base_url()
    if config.in_colab():
        yield Row("Colab", "yes; TensorBoard opens below the cell that shows it, through Colab's proxy")
    elif base is None:
        yield Row("JupyterHub", f"no; TensorBoard opens at {config.address('PORT')}")
    elif version("jupyter-server-proxy") is None:
        problem = "its proxy is missing, so TensorBoard cannot open"
        yield Row("JupyterHub", base, problem, "pip install jupyter-server-proxy")
    else:
        yield Row("JupyterHub", f"yes; TensorBoard opens through its proxy at {base}proxy/")


def _data() -> Iterator[Row]:
    sources = []
    for manifest in manifests():
        try:
            sources.append(json.loads(manifest.read_text())["source"])
        except (ValueError, TypeError, KeyError):
            remedy = f"delete the folder {manifest.parent}  and then  python -m helpers prepare"
            yield Row("Images", str(manifest.parent), f"damaged: {manifest} has no source", remedy)
            return
    todo = "not prepared yet:  python -m helpers prepare  (the notebooks do it too)"
    yield Row("Images", ", ".join(sources) if sources else todo)


def manifests() -> list[Path]:
    """Return the file that lies in each folder of prepared images, and says where they come from."""
    return sorted(config.data_dir().glob("cifar10*/manifest.json"))  # the name of a staging folder begins with a dot


def _preset() -> Iterator[Row]:
    try:
        yield Row("Preset", f"{config.preset().name}; COURSE_PRESET sets another: {', '.join(config.PRESETS)}")
    except config.UnknownPreset as error:
        yield Row("Preset", "unknown", str(error), "unset COURSE_PRESET")


def own_times() -> Path:
    """The file in which `execute.run` keeps how long the notebooks took on this machine."""
    return config.runs_dir() / "run-times.json"


def known_times() -> tuple[dict, dict]:
    """Return what is recorded in `RUN_TIMES`, and in `own_times`, for `estimate_minutes`."""
    recorded, measured = (json.loads(file.read_text()) if file.exists() else {} for file in (RUN_TIMES, own_times()))
    return recorded, measured


def _times() -> Iterator[Row]:
    if not RUN_TIMES.exists():
        yield Row("Time for all notebooks", "unknown: no times are recorded in data/reference/run-times.json yet")
        return
    recorded, measured = known_times()
    minutes = estimate_minutes(recorded, calibrate(), measured)
    texts = []
    for name in config.PRESETS:
        text = f"{name} about {max(minutes[name], 1):.0f} min" if name in minutes else f"{name} unknown"
        count = len(recorded.get(name, {}).get("seconds", {}).keys() & measured.get(name, {}).keys())
        texts.append(f"{text} ({count} of them timed here)" if count else text)
    yield Row("Time for all notebooks", ", ".join(texts))


def _nvidia() -> tuple[str | None, int, list[str]]:
    """Ask the driver, which knows without PyTorch: its version, that of its CUDA (the major one), names of the GPUs.

    Raises
    ------
    pynvml.NVMLError
        If there is a driver, but it does not work, as when it was updated and not yet loaded anew.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None, 0, []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        names = [pynvml.nvmlDeviceGetName(handle) for handle in handles]
        return pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion() // 1000, names
    finally:
        pynvml.nvmlShutdown()


def available_memory() -> int:
    """Return the memory in bytes that is free here, or what the container or job may use, if that is less."""
    available = psutil.virtual_memory().available
    return min(available, _container_memory() or available)


def _container_memory() -> int | None:
    """Return the memory that this process and others in its container or job may use, in bytes, or None."""
    return min((int(limit) for limit in config.control_group_limits("memory.max") if limit != "max"), default=None)
