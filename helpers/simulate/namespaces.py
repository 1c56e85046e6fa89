"""A real network on one machine: two nodes that are network namespaces of Linux, and a cable that tc limits."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from helpers import config

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "setpriv": "util-linux"}  # Debian's packages
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # where Debian has ip and tc
# Seconds of data that an idle link may send at once. With 1 ms, a busy machine reached 93% of the rate with 4 ms: the
# kernel's timer comes late, and capacity that is unused by then is lost.
_BURST = 4e-3
_PACKET = 65_536 + 1_000  # bytes, the longest that the kernel passes in one piece
_QUEUED = 0.2  # seconds that a packet waits before the next one is dropped
_SHOWN = 15  # lines of the nodes' output in an error
# This shell is in the network of node 1, and is the first process of a process namespace: when it ends, the kernel ends
# all that runs in it. Node 0 has the network of a process that sleeps.
_NODES = """
unshare --net sleep infinity & network=/proc/$!/ns/net
until [ "$(readlink "$network")" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
connect() {
    "${@:2}" ip link set lo up
    "${@:2}" ip address add "$1/24" dev eth0
    "${@:2}" ip link set eth0 up
    "${@:2}" tc qdisc add dev eth0 root tbf $LIMITS
}
ip link add name eth0 type veth peer name eth0 netns "$network"
connect "$MASTER_ADDR" nsenter --net="$network"
connect 10.0.0.2
exec 3>&1
nodes() {
    RANK=0 nsenter --net="$network" "$@" >&3 || echo $? &
    RANK=1 "$@" >&3 || echo $? &
    wait
}
! read -r code < <(nodes "$@") || exit "$code"  # as soon as one fails
"""


def why_not() -> str | None:
    """Say why network namespaces are not possible here; None if they are. The trial takes a fraction of 1 s."""
    try:
        run(["true"], timeout=30)
    except (RuntimeError, subprocess.TimeoutExpired) as refused:
        return f"No network namespaces here: {str(refused).splitlines()[-1]}"
    return None


def run(command: Sequence[object], mb_per_s: float = 125.0, timeout: float = 300) -> str:
    """Run a command on two nodes at the same time, one rank each, over a limited network; return what they print.

    Each node is a network namespace of Linux, with one end of a cable, which has a token bucket filter (``tc qdisc …
    tbf``) at both ends: `mb_per_s` in each direction, 125 for 1 Gbit/s, of which packet headers take some 4%. Nothing
    else is separate: nodes share the cores, the files and the memory. The machine's own network is not touched. Root is
    needed unless users may make user namespaces. The ranks find each other by the variables that
    ``torch.distributed.init_process_group("gloo")`` reads. When this returns or raises, or its process ends, the
    network and all processes end, too.

    Raises `RuntimeError` if a command fails, and the other one is ended, or if this machine does not allow network
    namespaces; `subprocess.TimeoutExpired` after `timeout` seconds.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"Network namespaces are a part of Linux, found {sys.platform}.")
    for tool, package in _TOOLS.items():
        if not shutil.which(tool, path=_PATH):
            raise RuntimeError(f"Expected the command {tool}, found none: install Debian's package {package}.")
    user = ["--user", "--map-root-user"]
    if subprocess.run(["unshare", *user, "--net", "true"], capture_output=True).returncode:
        user = []
    done = subprocess.run(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *user, "--net", "--pid", "--fork", "--kill-child", "--mount-proc",
         "bash", "-euc", _NODES, "nodes", *map(str, command)],
        env=_environment(mb_per_s), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", timeout=timeout,
    )  # fmt: skip
    if done.returncode:
        end = "\n".join(done.stdout.splitlines()[-_SHOWN:])
        raise RuntimeError(f"Expected {command} to succeed on both nodes, found exit code {done.returncode}:\n{end}")
    return done.stdout


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
