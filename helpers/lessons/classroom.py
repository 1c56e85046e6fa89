"""Is this machine ready for a whole class at once? With what to do if not."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from helpers import config
from helpers.data import cifar10, manifests, photos
from helpers.lessons import execute, preflight
from helpers.lessons.preflight import GB, Report, Row, room
from helpers.loading import packs
from stepscope.base import machine

# The most that one reader needs. Measured on two cores with the preset ci: all processes of a notebook took 1.5 GB
# (03), 2.6 GB (14 and 15 in one) and 3.0 GB (16 and 17 in one). Readers share the part of it that holds libraries:
# thirty at once in 00 and 01 took 32 GB, one alone takes 1.5. 16 processes with 79 threads (14 and 15).
READER_MEMORY = 3 * GB
READER_SHARED_MEMORY = 0.1 * GB  # batches of workers: 8 workers, 2 batches each, 4.8 MB in 05
READER_PROCESSES = 16
READER_RUNS = {"ci": 0.3 * GB, "workshop": 1 * GB, "full": 3 * GB}  # most of it are the packs of 06
READER_CORES = 2
SHARED_MEMORY = Path("/dev/shm")


def check(people: int) -> Report:
    """Check whether so many people, 1 or more, can run the notebooks on this machine at once.

    Raises `config.CourseError` for another number.
    """
    if people < 1:
        raise config.CourseError(f"Expected 1 person or more, found {people}.")
    return Report(tuple(_rows(people)))


def _rows(people: int) -> Iterator[Row]:
    where = "at once here; where a hub gives each person a container, check inside a container, for 1"
    yield Row("People", f"{people} {where}")

    cores = min(machine.cores(), machine.cpu_quota() or math.inf)
    value = f"{cores:g} for {people}: {cores / people:.2g} each"
    problem = f"under {READER_CORES} each: people who measure at the same moment disturb each other's results"
    problem = problem if cores < READER_CORES * people else ""
    yield Row("Cores", value, problem, _fewer(people, cores / READER_CORES))

    own, fit = _threads_of_one(cores), max(1, int(cores / people))
    problem = f"together {own * people} on {cores:g} cores: threads wait for each other" if own > fit else ""
    remedy = f"in everybody's environment:  export OMP_NUM_THREADS={fit}"
    yield Row("Threads", f"a training run starts {own}: OMP_NUM_THREADS, or one per core", problem, remedy)

    available = machine.available_memory()
    remedy = f"{_fewer(people, available / READER_MEMORY)}; shut down each kernel when its notebook is done"
    problem = "the system will kill Jupyter kernels, and report only that they died"
    yield room("Memory", available, people * READER_MEMORY, problem, remedy)
    if SHARED_MEMORY.is_dir():
        free, needed = shutil.disk_usage(SHARED_MEMORY).free, people * READER_SHARED_MEMORY
        remedy = f"start the container with  --shm-size={needed / GB:.0f}g"
        yield room("/dev/shm", free, needed, "loader workers will crash with a bus error", remedy)

    limits = [int(limit) for limit in machine.control_group_limits("pids.max") if limit != "max"]
    with suppress(ImportError):  # Windows has no such limit
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limits += [soft] if soft != resource.RLIM_INFINITY else []
    processes = people * READER_PROCESSES * (3 + _threads_of_one(machine.cores()))
    value = f"{processes:,} needed at the most, threads included; limit: {min(limits, default='none')}"
    problem = "kernels and workers will fail to start" if min(limits, default=processes) < processes else ""
    remedy = "raise it for the container (--pids-limit) or the shared account (ulimit -u); or lower OMP_NUM_THREADS"
    yield Row("Processes", value, problem, remedy)

    preset, runs, prepared = config.preset().name, config.runs_dir(), cifar10.folder_of()
    free = shutil.disk_usage(preflight.existing_part(runs)).free
    needed = people * READER_RUNS[preset] + (0 if prepared else preflight.LEAST_DISK)
    problem = f"too little for everybody's runs with the preset {preset}"
    yield room("Disk", free, needed, problem, "put each COURSE_RUNS on another disk; or a smaller COURSE_PRESET")
    images = config.data_dir()
    value = f"{images}: prepared once, for everybody who has COURSE_DATA={images} and the preset {preset}"
    yield Row("Images", value, *_images(prepared, people))
    yield Row("Runs", f"{runs} here; each person needs a clone of the course, or a COURSE_RUNS, of their own")

    if torch.cuda.is_available():
        count, (free, _) = torch.cuda.device_count(), torch.cuda.mem_get_info()
        value = f"{count} for {people}; {free / GB:.0f} GB of the first are free"
        problem = "people who measure at the same moment disturb each other" if count < people else ""
        remedy = "a MIG instance for each, or a queue: see notebooks/teaching.md, One GPU for a class"
        yield Row("GPU", value, problem, remedy)
    else:
        yield Row("GPU", "none; training steps are simulated or computed on the CPU, and labelled so")

    longer = max(1, people / cores)  # in practice more, where a notebook keeps several cores busy
    problem = f"{longer:.1f} times as long if all run everything at once" if longer > 1.5 else ""
    remedy = "COURSE_PRESET=ci; fewer at a time (see Cores); start long cells before a break"
    yield Row("Machine's time", f"for one person alone: {execute.times_text()}", problem, remedy)


def _images(prepared: Path | None, people: int) -> tuple[str, str]:
    """Return what is wrong with the prepared images, and the remedy; "" twice if nothing is."""
    prepare = f"python -m helpers prepare --preset {config.preset().name}"
    if prepared is None:
        return "not prepared: the first reader prepares them, all others wait", prepare
    needed = [packs.folder_of(prepared), *([] if config.photos() else [photos.folder_of()])]
    if lacking := [folder for folder in needed if not folder.exists()]:
        return f"{lacking[0]} is missing: the first reader makes it, all others wait", prepare
    read = [prepared / manifests.NAME, prepared / "train" / "labels.csv", prepared / "train" / "00000.png"]
    read += [file for folder in needed for file in folder.rglob("*") if file.is_file()]
    closed = next(filter(None, map(_closed, read if people > 1 else ())), None)
    if closed is None:
        return "", ""
    if closed in config.data_dir().parents:
        return f"other accounts cannot enter {closed}", f"chmod a+x {closed}  or another COURSE_DATA"
    return f"other accounts cannot read {closed}", f"chmod -R a+rX {config.data_dir()}"


def _closed(path: Path) -> Path | None:
    """Return the file, or the folder on the way to it, that no other account may read; None if there is none.

    A group counts as others, as a class may be one, unless it is the owner's own group.
    """
    for part in (path, *path.parents):
        status = part.stat()
        needed = 0o1 if part in config.data_dir().parents else 0o5 if part.is_dir() else 0o4
        of_group = status.st_mode >> 3 & needed == needed and not _private(status)
        if not of_group and status.st_mode & needed != needed:
            return part
    return None


def _private(status: os.stat_result) -> bool:
    """Return whether a file's group is its owner's own, which then has the owner's name."""
    try:
        import grp
        import pwd

        return grp.getgrgid(status.st_gid).gr_name == pwd.getpwuid(status.st_uid).pw_name
    except (ImportError, KeyError):  # Windows, or an account that has no name here
        return False


def _fewer(people: int, fit: float) -> str:
    fit = max(1, int(fit))
    machines = f"{math.ceil(people / fit)} machines like this one"
    return f"at most {fit} at a time: groups share a screen, or some run while the others write code; or {machines}"


def _threads_of_one(cores: float) -> int:
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() else math.ceil(cores)
