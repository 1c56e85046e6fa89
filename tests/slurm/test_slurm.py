"""The scripts for Slurm: what shellcheck says, and one as a job of a real Slurm of two nodes on this machine."""

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from support import ranks
from support.notebooks import SMALL_PHOTOS, bright_photos, learnable

from helpers import config
from stepscope.base import child

SCRIPTS = config.PROJECT / "notebooks" / "slurm"
TRAIN = config.PROJECT / "notebooks" / "train_ddp.py"
OPTIONS = ("--batch", "32", "--epochs", "40", "--every", "10")
STEPS = 40 * 1_024 // 32
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"], "/usr/sbin", "/sbin"])
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=PATH) is None]
NODES = ("127.0.0.1", "127.0.0.2")  # names that lead somewhere, as those of a cluster do
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
PATIENCE = 240  # seconds for an end

# proctrack/linuxproc finds the processes of a job by their parents, without control groups. cred_expire: seconds that a
# requeued job waits, and that a launch may take. MessageTimeout: seconds for which a daemon of a busy machine may be
# silent (of usually 10, a launch fails).
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge.sock,cred_expire=20
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
ReturnToService=2
MessageTimeout=90
KillWait=20
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=500
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=500
PartitionName=usual Nodes=ALL Default=YES
"""


class Cluster:
    """Two nodes and the programs that run jobs on them, in a folder of their own, as whoever runs the tests."""

    def __init__(self, folder):
        self.folder, self.daemons, self.mark = folder, [], folder.name
        outer = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "PET_"))}
        self.environment = outer | {
            "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf"), "TMPDIR": str(folder / "local"),
            "GLOO_SOCKET_IFNAME": "lo", "KINETO_LOG_LEVEL": "6",
        }  # fmt: skip
        self.environment.pop("OMP_NUM_THREADS", None)

    def start(self):
        for name in ("state", "local", *NODES):
            (self.folder / name).mkdir()
        (self.folder / "key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "key").chmod(0o600)
        with ExitStack() as sockets:
            free = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [each.getsockname()[1] for each in free]
        text = CONFIGURATION.format(folder=self.folder, user=getpass.getuser(), ports=ports, nodes=NODES)
        (self.folder / "slurm.conf").write_text(text)
        files = {"key-file": "key", "socket": "munge.sock", "pid-file": "munge.pid", "seed-file": "munge.seed"}
        # --force: the folder is for this user only, and so is the socket
        self._daemon("munged", "-F", "--force", *(f"--{option}={self.folder / name}" for option, name in files.items()))
        ranks.wait_until((self.folder / "munge.sock").exists)
        self._daemon("slurmctld", "-D", "-i")
        for node in NODES:
            self._daemon("slurmd", "-D", "-N", node)
        states = ("sinfo", "--noheader", "--Node", "--format=%T")
        ranks.wait_until(lambda: self.run(*states, check=False).split() == ["idle"] * len(NODES))

    def _daemon(self, program, *arguments):
        options = {"env": self.environment, "preexec_fn": child.kernel_ends_with_parent(), "stdin": subprocess.DEVNULL}
        with (self.folder / "daemons.log").open("ab") as log:
            command = [shutil.which(program, path=PATH), *arguments]
            self.daemons.append(subprocess.Popen(command, stdout=log, stderr=log, **options))

    def end(self):
        """End all jobs, then the daemons; whatever is left of the jobs is killed, and an error."""
        self.run("scancel", f"--user={getpass.getuser()}", check=False)
        _, left = psutil.wait_procs(ranks.processes(self.mark), PATIENCE)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait(PATIENCE)
        for process in left:
            process.kill()
        assert left == []

    def run(self, *command, check=True, **variables):
        """Run a program of Slurm, and return what it says."""
        words = [str(word) for word in command]
        environment = self.environment | {name: str(value) for name, value in variables.items()}
        process = subprocess.run(words, env=environment, cwd=self.folder, capture_output=True, text=True)
        assert process.returncode == 0 or not check, f"{words}: {process.stderr}"
        return process.stdout.strip()

    def shown(self, job):
        """Return what Slurm says of a job, by the names that it gives."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def log(self, job):
        """Return what Slurm says of a job, what the job has printed, and what the daemons have."""
        shown = self.shown(job)
        logs = (Path(shown["StdOut"]), self.folder / "daemons.log")
        return "\n".join([str(shown), *(path.read_text()[-4_000:] for path in logs if path.exists())])


@pytest.fixture
def cluster():
    # Not in tmp_path: below it, the address of a step's socket is longer than the 107 characters that Linux takes.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.end()


def losses(path):
    """The losses of all steps; one that was taken again, after a restart, must be the same to the last digit."""
    found = {}
    for step, loss in ranks.losses(path):
        assert found.setdefault(step, loss) == loss, f"step {step} was repeated with another loss"
    assert list(found) == list(range(1, len(found) + 1))
    return list(found.values())


def on_a_cluster(test):
    """Mark a test that runs a job."""
    reason = "apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
    marks = (pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(900))
    for mark in (*marks, pytest.mark.skipif(bool(MISSING), reason=reason)):
        test = mark(test)
    return test


@on_a_cluster
def test_a_job_of_two_nodes_that_is_out_of_time_goes_on_from_its_checkpoint(cluster, tmp_path):
    data = learnable(tmp_path / "data", 1_024)
    run = tmp_path / "run"
    job = cluster.run(
        "sbatch", "--parsable", "--nodes=2", "--cpus-per-task=1", SCRIPTS / "train.sbatch", data, *OPTIONS,
        "--losses", run / "losses.csv", SCRIPT=TRAIN, RUN=run, **{ranks.MARK: cluster.mark},
    )  # fmt: skip

    def lines():
        return (run / "losses.csv").read_text().count("\n")

    ranks.wait_until((run / "checkpoint.pt").exists)
    ranks.wait_until(lambda: lines() % 10 > 2)  # steps after a checkpoint
    assert lines() < 1_000, "it is nearly done: there is no middle left"
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # what Slurm sends two minutes before, by --signal
    ranks.wait_until(lambda: cluster.shown(job)["Restarts"] == "1")
    ranks.wait_until(lambda: cluster.shown(job)["JobState"] in OVER and not ranks.processes(cluster.mark))
    shown = cluster.shown(job)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), cluster.log(job)
    assert "expected 4 or more for each" in Path(shown["StdOut"]).read_text()  # cores of a process
    assert len(losses(run / "losses.csv")) == STEPS
    # Of steps since the checkpoint 9 at most, or by chance none, and what a rank of the old job still writes on a busy
    # machine. That repeated steps are right is proved by the tests of train_ddp.py, too.
    assert STEPS <= lines() < STEPS + 100, "not only the steps since the checkpoint"
    assert not list((cluster.folder / "local").glob("train-*")), "a node kept its copy of the data"


@on_a_cluster
def test_photos_are_trained_on_by_a_job_of_two_nodes_where_they_are(cluster, tmp_path):
    script, run, photos = tmp_path / "small.py", tmp_path / "run", bright_photos(tmp_path / "photos")
    script.write_text(SMALL_PHOTOS.format(norm=True, killed_after=None, slow=False))
    job = cluster.run(
        "sbatch", "--parsable", "--nodes=2", "--cpus-per-task=1", SCRIPTS / "train.sbatch", photos, tmp_path / "packed",
        "--epochs", "4", "--batch", "12", "--workers", "0",
        SCRIPT=script, RUN=run, COPY="no", **{ranks.MARK: cluster.mark},
    )  # fmt: skip
    ranks.wait_until(lambda: cluster.shown(job)["JobState"] in OVER and not ranks.processes(cluster.mark))
    assert cluster.shown(job)["JobState"] == "COMPLETED", cluster.log(job)
    printed = Path(cluster.shown(job)["StdOut"]).read_text()
    assert "float32, 0 workers, 2 ranks" in printed and "epoch 3: loss " in printed and "epoch 4" not in printed
    assert (run / "checkpoint.pt").exists() and photos.exists()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck: apt-get install shellcheck")
@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    process = subprocess.run(["shellcheck", script], capture_output=True, text=True)
    assert process.stdout + process.stderr == ""
