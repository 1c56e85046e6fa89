"""This machine as a program may use it: its cores, and the address at which the user's browser finds its ports."""

import math
import os
import sys
from pathlib import Path

import psutil

_VERSION_1 = {
    "cpu.max": ["cpu.cfs_quota_us", "cpu.cfs_period_us"],
    "memory.max": ["memory.limit_in_bytes"],
    "pids.max": ["pids.max"],
}
CONTROL_GROUPS, OWN_CONTROL_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """CPU cores that this process may use: a shared machine often grants fewer than it has.

    A container may run on all cores but be limited to the CPU time of a few: then it is this limit, rounded up.
    """
    try:
        runs_on = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS and Windows cannot restrict a process to some cores
        runs_on = os.cpu_count() or 1
    return min(runs_on, math.ceil(cpu_quota() or runs_on))


def cpu_quota() -> float | None:
    """Return the number of cores whose CPU time this process may use, or None without a limit."""
    quotas = [limit.split() for limit in control_group_limits("cpu.max")]
    return min((int(quota) / int(period) for quota, period in quotas if quota != "max"), default=None)


def available_memory() -> int:
    """Return the free memory in bytes, or the limit of the container or job, if that is less."""
    limits = (int(limit) for limit in control_group_limits("memory.max") if limit != "max")
    return min([psutil.virtual_memory().available, *limits])


def control_group_limits(name: str) -> list[str]:
    """Return the limits ``"cpu.max"``, ``"memory.max"`` or ``"pids.max"`` of this process's control groups (Linux).

    A container sees its own group as the root; a batch job's or a hub's group lies deeper. The texts are those of the
    files in version 2 (https://docs.kernel.org/admin-guide/cgroup-v2.html), also where the system has version 1, with
    a hierarchy for each controller.
    """
    try:
        groups = [line.split(":", 2) for line in OWN_CONTROL_GROUP.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:  # no Linux
        return []
    controller, limits = name.partition(".")[0], []
    for _, controllers, path in groups:
        if controllers and controller not in controllers.split(","):
            continue
        root, files = (CONTROL_GROUPS / controller, _VERSION_1[name]) if controllers else (CONTROL_GROUPS, [name])
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            paths = [folder / file for file in files]
            if folder.is_relative_to(root) and all(file.is_file() for file in paths):
                limits.append(
                    " ".join(file.read_text(encoding="utf-8").strip() for file in paths).replace("-1 ", "max ")
                )
    return limits


def hub_base_url() -> str | None:
    """URL path of this user's server behind JupyterHub (``/user/ada/``), or None without a hub."""
    prefix = os.environ.get("JUPYTERHUB_SERVICE_PREFIX")
    return None if not prefix else f"/{prefix.strip('/')}/"


def address(port: int | str) -> str:
    """URL at which the user's browser finds a port of this machine, with ``/`` at its end.

    It is a path if this machine is behind a proxy: JupyterHub's, or the one in ``TENSORBOARD_PROXY_URL``.
    """
    hub = hub_base_url()
    proxy = os.environ.get("TENSORBOARD_PROXY_URL") or (None if hub is None else f"{hub}proxy/%PORT%/")
    return f"{proxy.rstrip('/')}/".replace("%PORT%", str(port)) if proxy else f"http://127.0.0.1:{port}/"


def in_colab() -> bool:
    """Whether this process is a kernel of Google Colab."""
    return "google.colab" in sys.modules  # its kernels have loaded it; on Kaggle it is only installed
