"""Is this machine ready for the course? Answers in a few seconds, with a remedy for each problem."""

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

from helpers import config
from stepscope.base import machine, wording

SERVERS = {"jupyterlab", "jupyter-server-proxy"}  # of the notebooks themselves
SHOWN_PACKAGES = ("torch", "torchvision", "tensorboard", "torch-tb-profiler", "jupyterlab")

GB = 1e9
BUSY = 25  # % of all cores: open notebooks that compute nothing take less
# What the course needs, with room to spare: a notebook's kernel takes about 1 GB, each worker up to 0.3 GB, the
# prepared images 250 MB, drawn photos up to 90 MB. Batches pass from workers through shared memory, 1.5 MB each
# (in 05, 4.8 MB); Docker grants 64 MB.
LEAST_MEMORY, LEAST_DISK, LEAST_SHARED_MEMORY, LEAST_OPEN_FILES = 4 * GB, 1 * GB, 0.25 * GB, 512


@dataclass(frozen=True)
class Row:
    """One check: its name, what was found, what is wrong ("" if nothing), and the remedy."""

    name: str
    value: str
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True, repr=False)
class Report:
    """What `check` found, to be read in a shell or a notebook."""

    rows: tuple[Row, ...]

    @property
    def problems(self) -> tuple[Row, ...]:
        """The rows with a problem."""
        return tuple(row for row in self.rows if row.problem)

    def __repr__(self) -> str:
        width = max(len(row.name) for row in self.rows)
        wrap = textwrap.TextWrapper(110, subsequent_indent=" " * (width + 2), break_on_hyphens=False)
        lines = []
        for row in self.rows:
            lines += wrap.wrap(f"{row.name:{width}}  {row.value}")
            if row.problem:
                lines += [f"{'':{width}}  PROBLEM: {row.problem}", f"{'':{width}}  → {row.remedy}"]
        names = ", ".join(row.name for row in self.problems)
        summary = f"{wording.counted(len(self.problems), 'problem')}: {names}." if names else "This machine is ready."
        return "\n".join([*lines, "", summary])


def check() -> Report:
    """Look at this machine and return what was found, problems and remedies included."""
    looks = _packages, _cores, _memory, _disk, _open_files, _hub, _images, _gpu, _course
    return Report(tuple(row for look in looks for row in look()))


def _packages() -> Iterator[Row]:
    yield Row("Python", f"{platform.python_version()} at {sys.executable}")
    lock = (config.PROJECT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split()[0].split("==") for line in lock if "==" in line and not line.startswith("#"))
    shown = []
    for package in SHOWN_PACKAGES:
        found = version(package)
        if found is not None:
            same = found.split("+")[0] == pins[package]
            shown.append(f"{package} {found}" + ("" if same else f" (the course was tested with {pins[package]})"))
    missing = [str(wanted) for wanted in dependencies() if not satisfied(wanted)]
    problem = f"missing, or in another version: {', '.join(missing)}" if missing else ""
    remedy = "run the first cell again" if machine.in_colab() else "in the course's folder:  make -B lab"
    yield Row("Packages", ", ".join(shown), problem, remedy)


def dependencies() -> list[Requirement]:
    """Return the packages that the course and stepscope need here; without servers in Colab, which has its own."""
    files = config.PROJECT / "pyproject.toml", config.PROJECT / "stepscope" / "pyproject.toml"
    course, tool = (tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files)
    names = [*course["dependencies"], *tool["dependencies"], *tool["optional-dependencies"]["tab"]]
    wanted = {str(each): each for each in map(Requirement, names) if not each.marker or each.marker.evaluate()}
    refused = {"stepscope"} | (SERVERS if machine.in_colab() else set())  # stepscope is a folder of the course
    return [each for each in wanted.values() if each.name not in refused]


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
    granted, quota = machine.cores(), machine.cpu_quota()
    value = f"{granted} of the machine's {os.cpu_count()}" + (f", limited to the time of {quota:g}" if quota else "")
    busy = psutil.cpu_percent(interval=0.5)
    if busy >= BUSY:
        value += f"; other programs keep the machine {busy:.0f}% busy now, so times measured here may be longer"
    problem = "loading and training share one core" if min(granted, quota or granted) < 2 else ""
    yield Row("Cores", value, problem, "ask for two cores or more")


def _memory() -> Iterator[Row]:
    remedy = "shut down kernels and programs not in use"
    yield room("Memory", machine.available_memory(), LEAST_MEMORY, "too little for a notebook and its workers", remedy)
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free
        problem = "loader workers send batches to the main process through it, and will crash with a bus error"
        yield room("/dev/shm", free, LEAST_SHARED_MEMORY, problem, "start the container with  --shm-size=2g")


def _disk() -> Iterator[Row]:
    for name, variable, folder, prepared in (
        ("Disk for images", "COURSE_DATA", config.data_dir(), _prepared()),
        ("Disk for runs", "COURSE_RUNS", config.runs_dir(), False),
    ):
        existing = existing_part(folder)
        free = shutil.disk_usage(existing).free
        fits = prepared or (free >= LEAST_DISK and os.access(existing, os.W_OK))
        problem = "" if fits else f"{existing} is not writable, or has under {LEAST_DISK / GB:.0f} GB"
        yield Row(name, f"{free / GB:.1f} GB free at {folder}", problem, f"set {variable} to a folder on another disk")


def _prepared() -> bool:
    """Return whether all images are there that this preset needs."""
    try:
        from helpers.data import cifar10, photos

        return cifar10.folder_of() is not None and (config.photos() is not None or photos.folder_of().exists())
    except (ImportError, config.CourseError):  # the row of the packages, or of the preset, says so
        return False


def room(name: str, free: float, needed: float, problem: str, remedy: str) -> Row:
    """Return the row of a resource with `free` bytes, of which at most `needed` are needed."""
    value = f"{free / GB:.2f} GB free, at most {needed / GB:.2f} GB needed"
    return Row(name, value, problem if free < needed else "", remedy)


def existing_part(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _open_files() -> Iterator[Row]:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    problem = "loaders with many workers need more" if limit < LEAST_OPEN_FILES else ""
    yield Row("Open files", f"{limit:,} at most", problem, "before  make lab:  ulimit -n 4096")


def _gpu() -> Iterator[Row]:
    try:
        import pynvml
        import torch
    except ImportError:  # the row of the packages says so
        return
    try:
        driver, driver_cuda, names = _nvidia()
    except pynvml.NVMLError as error:
        yield Row("GPU", "unknown", f"its driver does not answer: {error}", "restart the machine, or ask who runs it")
        return
    value = f"{', '.join(names)}, driver {driver}"
    other_build = "rm -rf .venv; make lab TORCH_BACKEND=cu126  (see notebooks/anywhere.md)"
    if torch.cuda.is_available():
        yield _usable_gpu(f"driver {driver or 'unknown'}, CUDA {torch.version.cuda or torch.version.hip}", other_build)
    elif not names:
        yield Row("GPU", "none; every notebook runs without one, with a simulated GPU where it needs one")
    elif torch.version.cuda is None:
        yield Row("GPU", value, "this PyTorch was built without CUDA", "rm -rf .venv; make lab")
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
        old = "no kernel image" in first_line  # CUDA 13 dropped all GPUs before Turing, such as the V100
        remedy = other_build if old else "end the programs that nvidia-smi lists, or wait for them"
        return Row("GPU", value, f"PyTorch cannot compute on it: {first_line}", remedy)
    return Row("GPU", f"{value}, {free / GB:.0f} of {total / GB:.0f} GB free")


def _hub() -> Iterator[Row]:
    base = machine.hub_base_url()
    if machine.in_colab():
        yield Row("Colab", "yes; TensorBoard opens below the cell that shows it, through Colab's proxy")
    elif base is None:
        yield Row("JupyterHub", f"no; TensorBoard opens at {machine.address('PORT')}")
    else:
        missing = version("jupyter-server-proxy") is None
        problem = "its proxy is missing, so TensorBoard cannot open" if missing else ""
        value = f"yes; TensorBoard opens through its proxy at {base}proxy/"
        yield Row("JupyterHub", value, problem, "pip install jupyter-server-proxy")


def _images() -> Iterator[Row]:
    sources, problem, remedy = [], "", ""
    # The name of a staging folder begins with a dot
    for manifest in sorted(config.data_dir().glob("cifar10*/manifest.json")):
        try:
            sources.append("" + json.loads(manifest.read_text(encoding="utf-8"))["source"])
        except PermissionError:
            problem = f"this account may not read {manifest}"
            remedy = f"ask its owner for  chmod -R a+rX {config.data_dir()}"
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            problem = f"damaged: {manifest} has no source"
            remedy = f"delete the folder {manifest.parent}  and then  python -m helpers prepare"
    value = ", ".join(sources) or "not prepared yet:  python -m helpers prepare  (the notebooks do it too)"
    yield Row("Images", value, problem, remedy)


def _course() -> Iterator[Row]:
    try:
        yield Row("Preset", f"{config.preset().name}; COURSE_PRESET sets another: {', '.join(config.PRESETS)}")
    except config.CourseError as error:
        yield Row("Preset", "unknown", str(error), "unset COURSE_PRESET")
    if all(map(satisfied, dependencies())):
        from helpers.lessons import execute  # which needs most of them

        yield Row("Machine's time for all notebooks", execute.times_text())


def _nvidia() -> tuple[str | None, int, list[str]]:
    """Ask the driver, without PyTorch, for its version, the major version of its CUDA, and the names of the GPUs.

    Raises `pynvml.NVMLError` if there is a driver that does not work, such as one that was updated and not yet
    reloaded.
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
