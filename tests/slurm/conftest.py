"""A real Slurm of two nodes on this machine: in a folder of its own, on free ports, as whoever runs the tests."""

from __future__ import annotations

import ctypes
import getpass
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
INSTALL = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
NODES = ("127.0.0.1", "127.0.0.2")  # names that lead somewhere, as those of a cluster do
STARTS, PATIENCE = 3, 60  # seconds for a start or an end

# proctrack/linuxproc finds the processes of a job by their parents, without control groups. cred_expire: seconds that a
# requeued job waits. FirstJobId: the scripts take
# their ports from it, and other tests, on a Slurm of their own, may run beside these.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=20
FirstJobId={first_job}
GresTypes=gpu
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=500 Gres=gpu:2
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=500 Gres=gpu:2
PartitionName=usual Nodes=ALL PriorityTier=1 Default=YES
PartitionName=graceful Nodes=ALL PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class Ended(RuntimeError):
    """A program of Slurm has ended; the message has what it said."""


class Cluster:
    """Two nodes and the programs that run jobs on them; use it in a ``with`` statement."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.local = folder / "local"  # where jobs copy data to: both nodes' own disk
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("SLURM", "SBATCH", "OMP_", "PET_"))
        } | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"]),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "TMPDIR": str(self.local),
            "GLOO_SOCKET_IFNAME": "lo",
            "KINETO_LOG_LEVEL": "6",
        }

    def __enter__(self) -> Cluster:
        for name in ("state", "local", *NODES):
            (self.folder / name).mkdir()
        (self.folder / "key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "key").chmod(0o600)
        (self.folder / "gpu0").touch()
        (self.folder / "gpu1").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        for _ in range(STARTS):  # another program may take a port before a daemon does: then take others
            self._daemons, self._logs = [], ExitStack()
            try:
                self._start()
                return self
            except Ended as error:
                failed = error
                self._end()
            except BaseException:
                self._end()
                raise
        raise failed

    def __exit__(self, *_) -> None:
        """End all jobs, then the daemons; whatever is left of them is killed, and an error."""
        self.run("scancel", f"--user={getpass.getuser()}", check=False)
        left = []
        try:
            self.wait_until(lambda: not self.processes(), "no process of a job")
        except TimeoutError:
            left = self.processes()
        self._end()
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"left of the jobs: {left}"

    def run(self, *command: object, check: bool = True, **variables: object) -> str:
        """Run a program of Slurm, and return what it says."""
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        words = [str(word) for word in command]
        process = subprocess.run(words, env=environment, cwd=self.folder, capture_output=True, text=True)
        assert process.returncode == 0 or not check, f"{words}: {process.stderr}"
        return process.stdout.strip()

    def submit(self, *words: object, **variables: object) -> str:
        """Submit a job where its files shall be, the folder of the cluster, and return its number."""
        return self.run("sbatch", "--parsable", *words, **variables)

    def shown(self, job: str) -> dict[str, str]:
        """Return what Slurm says of a job, by the names that it gives."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job: str) -> str:
        return self.shown(job)["JobState"]

    def finish(self, job: str) -> str:
        """Wait until a job is over, and return its log."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_until(lambda: self.state(job) in over and not self.processes(job), f"the end of job {job}", 200)
        return self.log(job)

    def log(self, job: str) -> str:
        path = Path(self.shown(job)["StdOut"])
        return path.read_text() if path.exists() else ""

    def processes(self, job: str | None = None) -> list[int]:
        """Return the processes of jobs here, or of one, from their environments; not the daemons."""
        needed = {"SLURM_CONF": self.environment["SLURM_CONF"]} | ({"SLURM_JOB_ID": job} if job else {})
        own = {daemon.pid for daemon in self._daemons} | {os.getpid()}
        return [
            process.pid
            for process in psutil.process_iter(["environ", "ppid"])
            if process.pid not in own
            and process.info["ppid"] != self._controller.pid  # a part of it
            and needed.items() <= (process.info["environ"] or {}).items()  # None of another user's
        ]

    def wait_until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"Expected {what} within {seconds} seconds, found none. {self._said()}")
            time.sleep(0.1)

    def _start(self) -> None:
        configuration = CONFIGURATION.format(
            folder=self.folder, user=getpass.getuser(), ports=_free_ports(3), nodes=NODES,
            first_job=random.SystemRandom().randrange(1_000, 50_000_000),
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(configuration)
        # --force: the folder is for this user only, and so is the socket
        files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        self._daemon("munged", "-F", "--force", *(f"--{option}={self.folder / name}" for option, name in files.items()))
        self.wait_until((self.folder / "munge.sock").exists, "a socket of munged")
        self._controller = self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        self.wait_until(self._are_idle, "two idle nodes")

    def _are_idle(self) -> bool:
        ended = [Path(daemon.args[0]).name for daemon in self._daemons if daemon.poll() is not None]
        if ended:
            raise Ended(f"Expected {', '.join(ended)} to run on. {self._said()}")
        states = self.run("sinfo", "--noheader", "--Node", "--partition=usual", "--format=%T", check=False)
        return states.split() == ["idle"] * len(NODES)

    def _daemon(self, program: str, *options: str) -> subprocess.Popen:
        log = self._logs.enter_context((self.folder / f"daemon-{len(self._daemons)}.log").open("wb"))
        path = shutil.which(program, path=self.environment["PATH"])
        end_with_this = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # noqa: E731 (1 is PR_SET_PDEATHSIG)
        daemon = subprocess.Popen(
            [path, *options], env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            preexec_fn=end_with_this,
        )  # fmt: skip
        self._daemons.append(daemon)
        return daemon

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._logs.close()

    def _said(self) -> str:
        logs = sorted(self.folder.glob("daemon-*.log"))
        return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-1_500:]}" for log in logs)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        return [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    missing = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if missing:
        pytest.skip(f"needs Slurm, and there is no {', '.join(missing)}. On Debian and Ubuntu: {INSTALL}")
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
