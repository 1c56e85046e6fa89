"""A real network on one machine: nodes that are network namespaces of Linux, and links that tc limits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from helpers import config
from helpers.wording import counted

_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}  # Debian's packages
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])  # where Debian has ip and tc
_INTERFACE = "eth0"  # of each node
_PORT = 29500  # of node 0, where nobody else can have taken it
# Seconds that a link which was idle may send at once. With 1 ms, a busy machine reached 93% of the rate of 4 ms: the
# kernel's timer comes late, and what the link did not use by then is lost.
_BURST = 4e-3
_PACKET = 65_536 + 1_000  # bytes, the longest that the kernel passes in one piece
_QUEUED = 0.2  # seconds that a packet waits before the next one is dropped
_SHOWN = 15  # lines of a failed node's output


class NotPossible(RuntimeError):
    """This machine, or its administrator, does not allow network namespaces."""


class NodeFailed(RuntimeError):
    """A command ended with an error on one of the nodes."""


def why_not() -> str | None:
    """Say in a sentence why there can be no `Nodes` here; None if there can. It tries, which takes 0.2 s."""
    try:
        with Nodes(2):
            return None
    except NotPossible as refused:
        return str(refused)


class Nodes:
    """Nodes on this machine, each with a network of its own, joined by a switch: what they send is really limited.

    Each node is a network namespace of Linux, with one interface, whose cable to the switch has a token bucket filter
    (``tc qdisc … tbf``) at both ends. Nothing else is separate: nodes share the cores, the files and the memory. The
    machine's own network is not touched. Needs no privileges where users may make user namespaces, and else root. All
    of it is gone when the object is, or the process, however that ends.

    Parameters
    ----------
    count : int
        Nodes, at least 2.
    mb_per_s : float
        Bandwidth of each node's cable, in each direction: 125 for 1 Gbit/s. Some 4% of it are the heads of packets.

    Attributes
    ----------
    addresses : list of str
        Of the nodes.

    Raises
    ------
    NotPossible
        With the reason, as `why_not` gives it.

    Examples
    --------
    >>> with namespaces.Nodes(2, mb_per_s=125) as nodes:
    ...     print(*nodes.torchrun("train_ddp.py", "data", ranks=1))
    """

    def __init__(self, count: int = 2, mb_per_s: float = 125.0):
        if not 2 <= count <= 250 or mb_per_s <= 0:
            raise ValueError(f"Expected 2 to 250 nodes and a bandwidth above 0 MB/s, found {count=}, {mb_per_s=}.")
        if sys.platform != "linux":
            raise NotPossible(f"Network namespaces are a part of Linux, found {sys.platform}.")
        for tool, package in _TOOLS.items():
            if not shutil.which(tool, path=_PATH):
                raise NotPossible(f"Expected the command {tool}, found none: install Debian's package {package}.")
        self.mb_per_s = mb_per_s
        self.addresses = [f"10.0.0.{node + 1}" for node in range(count)]
        self._user, self._networks = None, []  # open files: a namespace lives as long as somebody has it
        try:
            self._networks.append(switch := self._own_namespaces())
            for _ in range(count):
                self._networks.append(self._new_network())
            self._connect(switch, self._networks[1:])
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return f"{counted(len(self.addresses), 'network namespace')}, {self.mb_per_s:g} MB/s by tc tbf"

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Take the network down."""
        files = [*self.__dict__.pop("_networks", []), self.__dict__.pop("_user", None)]
        for file in files:
            if file is not None:
                os.close(file)

    def run(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout: float = 300
    ) -> list[str]:
        """Run a command on each node at the same time, as one rank; return their outputs.

        The ranks find each other by the variables that ``torch.distributed.init_process_group("gloo")`` reads. When
        this returns or raises, the commands and all that they have started are gone.

        Parameters
        ----------
        command : sequence of str
            Such as ``[sys.executable, "job.py"]``; it runs in this folder.
        env : mapping, optional
            Further variables.
        timeout : float
            Seconds.

        Returns
        -------
        list of str
            Standard output and error of each node.

        Raises
        ------
        NodeFailed
            If a command ends with an error; the others are ended then.
        TimeoutError
            If they take longer than `timeout`.
        """
        return self._run([command] * len(self.addresses), env, timeout)

    def torchrun(
        self,
        script: str | Path,
        *arguments: str | Path,
        ranks: int = 1,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
    ) -> list[str]:
        """Run a script by torchrun, as on so many machines, with `ranks` processes each; the rest is as in `run`."""
        meeting = f"--rdzv-endpoint={self.addresses[0]}:{_PORT}"
        start = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.addresses)}"]
        start += [f"--nproc-per-node={ranks}", "--rdzv-backend=c10d", meeting, "--rdzv-id=nodes"]
        commands = [  # all nodes have the name of this machine, so that torchrun must be given who is where
            [*start, f"--rdzv-conf=is_host={int(node == 0)}", f"--local-addr={address}", script, *arguments]
            for node, address in enumerate(self.addresses)
        ]
        return self._run(commands, env, timeout)

    def _run(self, commands: list[Sequence], env: Mapping[str, str] | None, timeout: float) -> list[str]:
        deadline = time.monotonic() + timeout
        outputs = [tempfile.TemporaryFile() for _ in commands]
        with _Processes(self._enter()) as processes:
            running = []
            for node, (command, output) in enumerate(zip(commands, outputs, strict=True)):
                enter = self._enter(net=self._networks[1 + node], pid=processes.namespace)
                environment = self._environment(node) | dict(env or {})
                running.append(
                    subprocess.Popen(
                        [*enter, *map(str, command)], env=environment, stdin=subprocess.DEVNULL, stdout=output,
                        stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
            while not (failed := [node for node, each in enumerate(running) if each.poll()]):
                if all(each.returncode == 0 for each in running):
                    break
                if time.monotonic() > deadline:
                    break
                time.sleep(0.02)
        for each in running:
            each.wait()
        texts = []
        for output in outputs:
            with output:
                output.seek(0)
                texts.append(output.read().decode(errors="replace"))
        if failed:
            node = failed[0]
            raise NodeFailed(
                f"node {node}: expected that {_shown(commands[node])} ends well, found exit code "
                f"{running[node].returncode}; the end of its output:\n{_end_of(texts[node])}"
            )
        if any(each.returncode for each in running):
            found = "\n".join(f"node {node}:\n{_end_of(text)}" for node, text in enumerate(texts))
            raise TimeoutError(
                f"Expected that {_shown(commands[0])} ends within {timeout:g} s, found it running.\n{found}"
            )
        return texts

    def _environment(self, node: int) -> dict[str, str]:
        world = str(len(self.addresses))
        paths = [str(config.PROJECT), os.environ.get("PYTHONPATH", "")]
        return dict(
            os.environ,
            GLOO_SOCKET_IFNAME=_INTERFACE,
            MASTER_ADDR=self.addresses[0],
            MASTER_PORT=str(_PORT),
            RANK=str(node),
            WORLD_SIZE=world,
            LOCAL_RANK="0",
            LOCAL_WORLD_SIZE="1",
            OMP_NUM_THREADS="1",  # nodes share the cores
            KINETO_LOG_LEVEL="6",
            TORCH_CPP_LOG_LEVEL="ERROR",  # else a warning for each connection: addresses here have no names
            PYTHONPATH=os.pathsep.join(filter(None, paths)),
        )

    # -----------------------------------------------------------------------------------------------------------------
    # Setting up

    def _own_namespaces(self) -> int:
        """Make the switch's network namespace, within a user namespace if it must be; return it."""
        problems = []
        for user in ([], ["--user", "--map-root-user"]):
            try:
                with _Held(["unshare", *user, "--net"]) as process:
                    if user:
                        self._user = _open(process.pid, "user")
                    return _open(process.pid, "net")
            except NotPossible as refused:
                problems.append(str(refused))
        raise NotPossible(" ".join(problems))

    def _new_network(self) -> int:
        with _Held([*self._enter(), "unshare", "--net"]) as process:
            return _open(process.pid, "net")

    def _enter(self, **namespaces: int) -> list[str]:
        """Return the beginning of a command that runs in these namespaces, given as open files of this process."""
        user = {} if self._user is None else {"user": self._user}
        options = [f"--{kind}=/proc/{os.getpid()}/fd/{file}" for kind, file in (user | namespaces).items()]
        options += ["--preserve-credentials"] if user else []
        return ["nsenter", *options, "--"] if options else []

    def _connect(self, switch: int, nodes: list[int]) -> None:
        lines = ["link add name switch type bridge", "link set switch up"]
        for node, file in enumerate(nodes):
            lines += [
                f"link add name port{node} type veth peer name end{node}",
                f"link set port{node} master switch up",
                f"link set end{node} netns /proc/self/fd/{file} name {_INTERFACE}",
            ]
        self._batch(switch, "ip", lines)
        self._batch(switch, "tc", [self._limit(f"port{node}") for node in range(len(nodes))])
        for file, address in zip(nodes, self.addresses, strict=True):
            lines = ["link set lo up", f"address add {address}/24 dev {_INTERFACE}", f"link set {_INTERFACE} up"]
            self._batch(file, "ip", lines)
            self._batch(file, "tc", [self._limit(_INTERFACE)])

    def _limit(self, interface: str) -> str:
        rate = self.mb_per_s * 1e6  # bytes
        burst = max(rate * _BURST, _PACKET)
        limit = rate * _QUEUED + burst
        return f"qdisc add dev {interface} root tbf rate {rate * 8:.0f}bit burst {burst:.0f}b limit {limit:.0f}b"

    def _batch(self, network: int, tool: str, lines: list[str]) -> None:
        command = [*self._enter(net=network), tool, "-batch", "-"]
        process = subprocess.run(
            command, input="\n".join(lines), capture_output=True, text=True, env=_environment(),
            pass_fds=self._networks,  # from a user namespace it could not open the files of this process
        )  # fmt: skip
        if process.returncode:
            raise NotPossible(f"Expected that `{tool}` sets up the network, found: {_line(process.stderr)}.")


class _Held:
    """A process that waits in new namespaces until they are opened."""

    def __init__(self, command: list[str]):
        self.process = subprocess.Popen(
            [*command, "cat"], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=_environment(), start_new_session=True,
        )  # fmt: skip
        with suppress(BrokenPipeError):
            self.process.stdin.write(b"\n")
        if self.process.stdout.read(1) != b"\n":  # `cat` runs, so that the namespaces are there
            problem = self.process.communicate()[1].decode(errors="replace")
            raise NotPossible(f"Expected that `{' '.join(command)}` works, found: {_line(problem)}.")

    def __enter__(self) -> subprocess.Popen:
        return self.process

    def __exit__(self, *_) -> None:
        self.process.communicate()  # `cat` ends with its input


class _Processes:
    """A process namespace: when it ends, or the process that made it, the kernel kills all that runs in it."""

    def __init__(self, enter: list[str]):
        self.held = _Held([*enter, "unshare", "--pid", "--fork", "--kill-child"])

    def __enter__(self) -> _Processes:
        self.namespace = _open(self.held.process.pid, "pid_for_children")
        return self

    def __exit__(self, *_) -> None:
        os.close(self.namespace)
        self.held.__exit__()


def _open(process: int, kind: str) -> int:
    try:
        return os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NotPossible(f"Expected to open a new {kind} namespace, found: {error}.") from None


def _environment() -> dict[str, str]:
    return dict(os.environ, PATH=_PATH, LC_ALL="C")


def _shown(command: Sequence) -> str:
    return " ".join(map(str, command))


def _line(text: str) -> str:
    return "; ".join(text.split("\n")).strip("; .") or "no message"


def _end_of(text: str) -> str:
    return "\n".join(text.splitlines()[-_SHOWN:])
