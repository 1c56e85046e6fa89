"""A real network on one machine: two nodes that are network namespaces of Linux, and a cable that tc limits.

This file also runs as the process that has the networks; it ends with its owner.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from helpers import config
from stepscope.base import child

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}  # Debian's packages
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # where Debian has ip and tc
# Seconds of data that an idle link may send at once. With 1 ms, a busy machine reached 93% of the rate with 4 ms: the
# kernel's timer comes late, and capacity that is unused by then is lost.
_BURST = 4e-3
_PACKET = 65_536 + 1_000  # bytes, the longest that the kernel passes in one piece
_QUEUED = 0.2  # seconds that a packet waits before the next one is dropped
_SHOWN = 15  # lines of a node's output in an error
_NODE_0 = 3  # an open file of the process: the network namespace of node 0; node 1 has the process's own
_ENTER = f"nsenter --net=/proc/self/fd/{_NODE_0}"
_CONNECT = f"""
set_up() {{
    $2 ip link set lo up
    $2 ip address add $1/24 dev eth0
    $2 ip link set eth0 up
    $2 tc qdisc add dev eth0 root tbf $LIMITS
}}
ip link add name eth0 type veth peer name eth0 netns /proc/self/fd/{_NODE_0}
set_up $MASTER_ADDR "{_ENTER}"
set_up 10.0.0.2
"""


def why_not() -> str | None:
    """Say why network namespaces are not possible here; None if they are. The trial takes a fraction of 1 s."""
    try:
        run(["true"])
    except RuntimeError as refused:
        return f"No network namespaces here: {str(refused).splitlines()[-1]}"
    return None


def run(command: Sequence[object], mb_per_s: float = 125.0, timeout: float = 300) -> list[str]:
    """Run a command on two nodes at the same time, one rank each, in this folder, over a network that is limited.

    Each node is a network namespace of Linux, with one end of a cable, which has a token bucket filter (``tc qdisc …
    tbf``) at both ends. Nothing else is separate: nodes share the cores, the files and the memory. The machine's own
    network is not touched. Root is needed unless users may make user namespaces. The ranks find each other by the
    variables that ``torch.distributed.init_process_group("gloo")`` reads. When this returns or raises, or its process
    ends, the network, the commands and all processes that they have started end, too.

    Parameters
    ----------
    command : sequence
        Such as ``[sys.executable, "job.py", 3]``.
    mb_per_s : float
        Bandwidth of the cable, in each direction: 125 for 1 Gbit/s. Packet headers take some 4% of it.
    timeout : float
        Seconds.

    Returns
    -------
    list of str
        What each node wrote, to standard output and error.

    Raises
    ------
    RuntimeError
        If a command ends with an error; the other is ended then. Or if this machine, or its administrator, does not
        allow network namespaces.
    TimeoutError
        If they take longer than `timeout`.
    """
    if mb_per_s <= 0:
        raise ValueError(f"Expected a bandwidth above 0 MB/s, found {mb_per_s}.")
    if sys.platform != "linux":
        raise RuntimeError(f"Network namespaces are a part of Linux, found {sys.platform}.")
    for tool, package in _TOOLS.items():
        if not shutil.which(tool, path=_PATH):
            raise RuntimeError(f"Expected the command {tool}, found none: install Debian's package {package}.")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / "0", folder / "1", folder / "log"]
        for path in paths:
            path.touch()
        with open(folder / "log", "wb") as log:
            nodes = child.Child(
                [__file__, "make", folder, *command], env=_environment(mb_per_s), stdout=log, stderr=log
            )
        try:
            code = nodes.process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            nodes.stop()
        *outputs, log = (path.read_text(errors="replace") for path in paths)
        ends = ""
        for node, output in enumerate(outputs):
            if output:
                ends += "\n".join([f"\nnode {node}:", *output.splitlines()[-_SHOWN:]])
        if code is None:
            raise TimeoutError(f"Expected {command} to end within {timeout:g} s, found it running.{ends}")
        if code != 0:
            raise RuntimeError(f"Expected {command} to succeed on both nodes, found: {log.strip()}{ends}")
        return outputs


def _environment(mb_per_s: float) -> dict[str, str]:
    rate = mb_per_s * 1e6  # bytes
    burst = max(rate * _BURST, _PACKET)
    return dict(
        os.environ,
        PATH=_PATH,
        LIMITS=f"rate {rate * 8:.0f}bit burst {burst:.0f}b limit {rate * _QUEUED + burst:.0f}b",
        GLOO_SOCKET_IFNAME="eth0",
        MASTER_ADDR="10.0.0.1",
        MASTER_PORT="29500",  # where nobody else can have taken it
        WORLD_SIZE="2",
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        OMP_NUM_THREADS="1",  # nodes share the cores
        KINETO_LOG_LEVEL="6",
        TORCH_CPP_LOG_LEVEL="ERROR",  # else a warning for each connection: addresses here have no names
        PYTHONPATH=os.pathsep.join(filter(None, [str(config.PROJECT), os.environ.get("PYTHONPATH", "")])),
    )


def _make(folder: str, *command: str) -> None:
    """Continue in the second of two new network namespaces, inside a user namespace if necessary."""
    for user in ([], ["--user", "--map-root-user"]):
        first = ["unshare", *user, "--net"]
        tried = subprocess.run([*first, "true"], stderr=subprocess.PIPE, text=True)
        if tried.returncode == 0:
            second = ["sh", "-c", f'exec unshare --net "$@" {_NODE_0}< /proc/self/ns/net', "sh"]
            os.execvp("unshare", [*first, *second, sys.executable, "-P", __file__, "run", folder, *command])
    sys.exit(tried.stderr)


def _run(folder: str, *command: str) -> None:
    child.end_with_owner()
    if subprocess.run(["sh", "-ec", _CONNECT], pass_fds=[_NODE_0]).returncode:
        sys.exit(1)
    nodes = []  # kept: a Popen that is dropped waits for its process, and os.wait would miss it
    for rank, network in enumerate([_ENTER.split(), []]):
        # In a process namespace: when its first process ends, the kernel ends all that runs in it
        new = [*network, "unshare", "--pid", "--fork", "--kill-child"]
        with open(Path(folder, str(rank)), "wb") as output:
            node = subprocess.Popen(
                [*new, *command], env=os.environ | {"RANK": str(rank)}, pass_fds=[_NODE_0], stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, preexec_fn=child.kernel_ends_with_parent(),
            )  # fmt: skip
        nodes.append(node)
    for _ in nodes:
        number, status = os.wait()
        if status:
            rank = [node.pid for node in nodes].index(number)
            sys.exit(f"node {rank} ended with exit code {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    {"make": _make, "run": _run}[sys.argv[1]](*sys.argv[2:])
