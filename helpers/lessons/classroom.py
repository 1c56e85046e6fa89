"""Is this machine ready for a whole class at once? With what to do if not."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from helpers import config
from helpers.lessons import preflight
from helpers.lessons.preflight import GB, Report, Row

# What one reader needs at the most. Measured on two cores with the preset ci: all processes of a notebook took 1.5 GB
# (03), 2.6 GB (12) and 3.0 GB (13), of which readers share a part, the libraries: thirty at once in 00 and 01 took
# 32 GB, where one alone takes 1.5. 16 processes with 79 threads, and 292 sockets (12).
READER_MEMORY = 3 * GB
READER_SHARED_MEMORY = 0.1 * GB  # batches on their way: 8 workers, 2 batches each, 4.8 MB in 05
READER_PROCESSES, READER_PORTS = 16, 300
READER_RUNS = {"ci": 0.3 * GB, "workshop": 1 * GB, "full": 3 * GB}  # most of it are the packs of 06
READER_CORES = 2

PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class NobodyToCheckFor(ValueError):
    """The number of people is below one."""


def check(people: int) -> Report:
    """Look at what a class shares on this machine, if so many people run the notebooks at once.

    Raises
    ------
    NobodyToCheckFor
    """
    if people < 1:
        raise NobodyToCheckFor(f"Expected 1 person or more, found {people}: name another number after --people.")
    cores = min(config.cores(), config.cpu_quota() or math.inf)
    looks = (
        _cores(people, cores), _threads(people, cores), _memory(people), _shared_memory(people), _processes(people),
        _ports(people), _disk(people), _images(people), _runs(), _gpu(people), _times(people, cores),
    )  # fmt: skip
    where = "at once here; where a hub gives each a container of their own, check inside of one, for 1"
    return Report((Row("People", f"{people} {where}"), *(row for rows in looks for row in rows)))


def _cores(people: int, cores: float) -> Iterator[Row]:
    value = f"{cores:g} for {people}: {cores / people:.2g} each"
    if cores >= READER_CORES * people:
        yield Row("Cores", value)
    else:
        problem = f"under {READER_CORES} each: who times at the same moment times the others, too, and effects drown"
        yield Row("Cores", value, problem, _fewer(people, cores / READER_CORES))


def _fewer(people: int, fit: float) -> str:
    fit = max(1, int(fit))
    return (
        f"at most {fit} at a time: groups share a screen, or some run while the others write code; or "
        f"{math.ceil(people / fit)} machines like this one"
    )


def _threads(people: int, cores: float) -> Iterator[Row]:
    own, each = _threads_of_one(cores), max(1, int(cores / people))
    value = (
        f"a training starts {own} ({'as OMP_NUM_THREADS says' if 'OMP_NUM_THREADS' in os.environ else 'one a core'})"
    )
    if own > each:
        problem = f"together {own * people} on {cores:g} cores: threads wait for each other"
        yield Row("Threads", value, problem, f"in everybody's environment:  export OMP_NUM_THREADS={each}")
    else:
        yield Row("Threads", value)


def _threads_of_one(cores: float) -> int:
    named = os.environ.get("OMP_NUM_THREADS", "")
    return int(named) if named.isdigit() else math.ceil(cores)


def _memory(people: int) -> Iterator[Row]:
    available, needed = preflight.available_memory(), people * READER_MEMORY
    problem = "the system will kill kernels, with no other word than that they died" if available < needed else ""
    remedy = f"{_fewer(people, available / READER_MEMORY)}; shut down each kernel when its notebook is done"
    yield _room("Memory", available, needed, problem, remedy)


def _shared_memory(people: int) -> Iterator[Row]:
    folder = Path("/dev/shm")
    if folder.is_dir():
        free, needed = shutil.disk_usage(folder).free, people * READER_SHARED_MEMORY
        problem = "loader workers will crash with a bus error" if free < needed else ""
        yield _room("/dev/shm", free, needed, problem, f"start the container with  --shm-size={needed / GB:.0f}g")


def _room(name: str, free: float, needed: float, problem: str, remedy: str) -> Row:
    value = f"{free / GB:.1f} GB free, {needed / GB:.1f} GB needed at the most"
    return Row(name, value, problem, remedy if problem else "")


def _processes(people: int) -> Iterator[Row]:
    limits = {"pids.max": [int(each) for each in config.control_group_limits("pids.max") if each != "max"]}
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        limits["ulimit -u"] = [soft] if soft != resource.RLIM_INFINITY else []
    except ImportError:  # Windows has no such limit
        pass
    needed = people * READER_PROCESSES * (3 + _threads_of_one(config.cores()))
    found = {name: min(values) for name, values in limits.items() if values}
    value = ", ".join(f"{name} {limit:,}" for name, limit in found.items()) or "no limit"
    value += f"; {needed:,} needed at the most, threads included"
    if found and min(found.values()) < needed:
        remedy = "raise it for the container (--pids-limit) or the account that all share; fewer OMP_NUM_THREADS"
        yield Row("Processes", value, "kernels and workers will fail to start", remedy)
    else:
        yield Row("Processes", value)


def _ports(people: int) -> Iterator[Row]:
    if not PORT_RANGE.exists():
        return  # macOS and Windows have 16,384, which is enough for 50 people
    first, last = map(int, PORT_RANGE.read_text().split())
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    lines = [line for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    used = {int(line.split()[1].rpartition(":")[2], 16) for line in lines}
    free, needed = last - first + 1 - sum(first <= port <= last for port in used), people * READER_PORTS
    value = f"{free:,} free, {needed:,} needed at the most"
    if free < needed:
        remedy = f'as root:  sysctl net.ipv4.ip_local_port_range="{min(first, 15_000)} 60999"'
        yield Row("Ports", value, "kernels, TensorBoard and ranks find none", remedy)
    else:
        yield Row("Ports", value)


def _disk(people: int) -> Iterator[Row]:
    folder, preset = config.runs_dir(), config.preset().name
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free, needed = shutil.disk_usage(existing).free, people * READER_RUNS[preset]
    images = 0 if any(preflight.manifests()) else preflight.LEAST_DISK
    problem = f"too little for everybody's runs with the preset {preset}" if free < needed + images else ""
    yield _room(
        "Disk", free, needed + images, problem, "put each COURSE_RUNS on another disk; or a smaller COURSE_PRESET"
    )


def _images(people: int) -> Iterator[Row]:
    folder, remedies = config.data_dir(), []
    problems = [] if any(preflight.manifests()) else ["not prepared: the first to start makes them, all others wait"]
    if problems:
        remedies.append("python -m helpers prepare")
    if people > 1 and folder.exists() and (closed := _closed_to_others([*reversed(folder.parents), folder])):
        problems.append(f"other accounts cannot read {closed}")
        remedies.append(
            f"chmod -R a+rX {folder}" if closed == folder else f"chmod a+x {closed}, or another COURSE_DATA"
        )
    value = f"{folder}: prepared once, for everybody who has COURSE_DATA={folder}"
    yield Row("Images", value, "; ".join(problems), "; ".join(remedies))


def _closed_to_others(way: Sequence[Path]) -> Path | None:
    """Return the first of nested folders that keeps out its group and all others; None, too, on Windows."""
    if os.name == "nt":
        return None
    for path in way:
        needed = 0o5 if path == way[-1] else 0o1
        if all((path.stat().st_mode >> bits) & needed != needed for bits in (0, 3)):
            return path
    return None


def _runs() -> Iterator[Row]:
    yield Row(
        "Runs", f"{config.runs_dir()} here; each person needs a clone of the course, or a COURSE_RUNS, of their own"
    )


def _gpu(people: int) -> Iterator[Row]:
    import torch

    if not torch.cuda.is_available():
        yield Row("GPU", "none; everybody's step is simulated or computed by the cores, and labelled so")
        return
    count, (free, _) = torch.cuda.device_count(), torch.cuda.mem_get_info()
    value = f"{count} for {people}; of the first one {free / GB:.0f} GB are free"
    problem = "who times at the same moment times the others, too" if count < people else ""
    remedy = "a MIG instance for each, or a queue: see notebooks/teaching.md, One GPU for a class"
    yield Row("GPU", value, problem, remedy if problem else "")


def _times(people: int, cores: float) -> Iterator[Row]:
    recorded, measured = preflight.known_times()
    here = preflight.calibrate() if recorded else {}
    alone = preflight.estimate_minutes(recorded, here, measured)
    together = preflight.estimate_minutes(recorded, here, measured, people, cores)
    texts = [
        f"{name} about {_long(together[name])}, alone {_long(alone[name])}" if name in alone else f"{name} unknown"
        for name in config.PRESETS
    ]
    known = {notebook for run in recorded.values() for notebook in run["seconds"]}
    missing = sorted({path.stem for path in (config.PROJECT / "notebooks").glob("[0-9][0-9]-*.ipynb")} - known)
    value = "; ".join(texts) + (
        f". Not recorded, so not counted: {', '.join(each[:2] for each in missing)}" * bool(missing)
    )
    if psutil.getloadavg()[0] > cores:
        value += ". Others work here now, so it looks slower than it is: check when it is quiet"
    name = config.preset().name
    if name in alone and together[name] > 1.5 * alone[name]:
        problem = f"with {name}, {together[name] / alone[name]:.0f} times as long as alone"
        remedy = "COURSE_PRESET=ci; fewer at a time (see Cores); let what takes long run before a break"
        yield Row("Time if all run at once", value, problem, remedy)
    else:
        yield Row("Time if all run at once", value)


def _long(minutes: float) -> str:
    return f"{max(minutes, 1):.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
