"""The scripts for Slurm as jobs of a real one: two nodes, with one address and one disk, since they are one machine."""

import csv
import os
import re
import shutil
import signal

import numpy as np
import pytest
from obstore.store import LocalStore, MemoryStore

from helpers import config, traces
from helpers.data import photos
from helpers.loading import shards
from helpers.training import launching

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SCRIPTS = config.PROJECT / "notebooks" / "slurm"
TRAIN = config.PROJECT / "notebooks" / "train_ddp.py"
SHORT = ("--batch", 64, "--epochs", 3)
LONG = ("--batch", 32, "--epochs", 40)  # to be stopped in the middle
TWO_NODES = ("--nodes=2", "--cpus-per-task=1", SCRIPTS / "several_nodes.sbatch")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Images of which a network learns something: each has its label's brightness."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(config.SEED)
    labels = generator.integers(0, 10, 1_024)
    noise = generator.integers(0, 60, (len(labels), 3, 32, 32))
    np.save(folder / "images.npy", (noise + 19 * labels[:, None, None, None]).astype(np.uint8))
    np.save(folder / "labels.npy", labels)
    return folder


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    """The losses of a run without Slurm and without a stop."""
    known = {}

    def losses_of(ranks, options):
        if (ranks, options) not in known:
            path = tmp_path_factory.mktemp("straight") / "losses.csv"
            launching.torchrun(TRAIN, data, "--losses", path, *options, ranks=ranks, quiet=True)
            known[ranks, options] = losses(path)
        return known[ranks, options]

    return losses_of


@pytest.fixture
def train(cluster, data, tmp_path):
    """Submit a training, and return its number and its folder."""
    jobs = []

    def submit(*words, options=SHORT, name="run", **variables):
        run = tmp_path / name
        options = (*options, "--losses", run / "losses.csv")
        jobs.append(cluster.submit(*words, data, *options, SCRIPT=TRAIN, RUN=run, **variables))
        return jobs[-1], run

    yield submit
    for job in jobs:  # those of a test that failed in the middle
        cluster.run("scancel", job, check=False)
        cluster.finish(job)
    assert not list(cluster.local.glob("train-*")), "a node kept its copy of the data"


def losses(path):
    """The losses of all steps; one that was taken again, after a restart, must be the same to the last digit."""
    found = {}
    for step, loss in csv.reader(path.open()):
        assert found.setdefault(int(step), loss) == loss, f"step {step} was repeated with another loss"
    assert list(found) == list(range(1, len(found) + 1))
    return np.array([float(loss) for loss in found.values()])


def lines(run):
    path = run / "losses.csv"
    return path.read_text().count("\n") if path.exists() else 0


def attempts(run):
    """How often torchrun has started the ranks, on the node where it did so most often."""
    return max(len({path.name for path in node.rglob("attempt_*")}) for node in (run / "logs").iterdir())


def in_the_middle(cluster, run):
    """Wait until a training has kept a checkpoint, and has taken some steps since."""
    cluster.wait_until((run / "checkpoint.pt").exists, "a checkpoint", 120)
    cluster.wait_until(lambda: lines(run) % 10 > 2, "steps after a checkpoint")
    assert lines(run) < 400, "it is nearly done: there is no middle left"


def test_two_nodes_learn_what_one_process_learns(cluster, train, data, straight):
    job, run = train(*TWO_NODES)
    copies = {cluster.local / f"train-{job}-{node}" / "images.npy" for node in ("127.0.0.1", "127.0.0.2")}
    cluster.wait_until(lambda: all(copy.exists() for copy in copies), "the data on both nodes")
    log = cluster.finish(job)
    assert cluster.state(job) == "COMPLETED", log
    np.testing.assert_allclose(losses(run / "losses.csv"), straight(1, SHORT), rtol=1e-4)
    assert straight(1, SHORT)[-1] < 0.95 * straight(1, SHORT)[0], "it learned nothing, so the same loss says nothing"
    found = traces.ranks(run / "traces" / "start-0")
    assert list(found) == ["rank 0", "rank 1"]
    assert re.findall(r"processes (\d+), threads of each (\d+)", log) == [("1", "1")] * 2
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.slow
def test_one_node_has_a_process_for_each_of_its_gpus(cluster, train, straight):
    job, run = train("--cpus-per-task=2", "--gpus-per-node=2", SCRIPTS / "one_node.sbatch")
    log = cluster.finish(job)
    assert cluster.state(job) == "COMPLETED", log
    assert "processes 2, threads of each 1" in log
    assert (losses(run / "losses.csv") == straight(2, SHORT)).all()
    assert list(traces.ranks(run / "traces" / "start-0")) == ["rank 0", "rank 1"]


@pytest.mark.slow
def test_two_jobs_on_the_same_nodes_do_not_meet(cluster, train, straight):
    """At a common port the second one meets in the first one's store, and cannot start again when that has gone."""
    first, first_run = train(*TWO_NODES, options=(*LONG[:-1], 1_000), name="first")
    cluster.wait_until(lambda: lines(first_run), "the first one to train", 120)
    second, run = train(*TWO_NODES, options=LONG, name="second")
    cluster.wait_until(lambda: lines(run), "both to train at the same time", 120)
    assert [cluster.state(job) for job in (first, second)] == ["RUNNING"] * 2
    cluster.run("scancel", first)
    cluster.finish(first)
    os.kill(process_of(cluster, second, "RANK=1"), signal.SIGKILL)
    log = cluster.finish(second)
    assert cluster.state(second) == "COMPLETED", log
    assert (losses(run / "losses.csv") == straight(2, LONG)).all()
    assert attempts(run) >= 2


def preempt(cluster, job):
    cluster.submit("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")


def come_to_the_end_of_its_time(cluster, job):
    cluster.run("scancel", "--batch", "--signal=USR1", job)  # what Slurm sends two minutes before, by --signal


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accident", "partition"),
    [(preempt, "usual"), (preempt, "graceful"), (come_to_the_end_of_its_time, "usual")],
    ids=["preempted", "preempted with time of grace", "out of time"],
)
def test_a_job_that_was_stopped_goes_on_from_its_checkpoint(cluster, train, straight, accident, partition):
    job, run = train(f"--partition={partition}", *TWO_NODES, options=LONG)
    in_the_middle(cluster, run)
    accident(cluster, job)
    cluster.wait_until(lambda: cluster.shown(job)["Restarts"] == "1", "the job to begin again", 120)
    log = cluster.finish(job)
    assert cluster.state(job) == "COMPLETED", log
    assert (losses(run / "losses.csv") == straight(2, LONG)).all()
    assert len(straight(2, LONG)) <= lines(run) < len(straight(2, LONG)) + 11, "only the steps since the checkpoint"
    assert list(traces.ranks(run / "traces" / "start-0")) == ["rank 0", "rank 1"]


@pytest.mark.slow
def test_a_rank_that_was_killed_is_started_again_on_all_nodes(cluster, train, straight):
    job, run = train(*TWO_NODES, options=LONG)
    in_the_middle(cluster, run)
    os.kill(process_of(cluster, job, "RANK=1"), signal.SIGKILL)
    log = cluster.finish(job)
    assert cluster.state(job) == "COMPLETED", log
    assert cluster.shown(job)["Restarts"] == "0"
    assert (losses(run / "losses.csv") == straight(2, LONG)).all()
    assert attempts(run) >= 2


def process_of(cluster, job, variable):
    (pid,) = (pid for pid in cluster.processes(job) if variable in environment(pid))
    return pid


def environment(pid):
    with open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().decode().split("\0")


@pytest.mark.slow
def test_a_job_that_is_cancelled_leaves_no_process_and_does_not_begin_again(cluster, train):
    job, run = train(*TWO_NODES, options=LONG)
    in_the_middle(cluster, run)
    assert len(cluster.processes(job)) > 4, "two ranks, two times torchrun, and what started them"
    cluster.run("scancel", job)
    log = cluster.finish(job)  # waits until there are none
    assert (cluster.state(job), cluster.shown(job)["Restarts"]) == ("CANCELLED", "0"), log


@pytest.mark.slow
def test_a_node_that_fails_ends_the_job_on_the_other_one(cluster, train, tmp_path):
    (tmp_path / "cp").write_text('#!/bin/sh\n[ "$SLURM_NODEID" = 0 ] || { echo "disk full" >&2; exit 1; }\n')
    (tmp_path / "cp").chmod(0o755)
    job, run = train(*TWO_NODES, PATH=f"{tmp_path}:{cluster.environment['PATH']}")
    log = cluster.finish(job)
    assert (cluster.state(job), cluster.shown(job)["Restarts"]) == ("FAILED", "0"), log
    assert "1: disk full" in log
    assert lines(run) == 0


@pytest.mark.slow
def test_a_container_is_given_the_gpus_and_the_folders(cluster, train, tmp_path):
    """By a stand-in for Apptainer, which says what it was asked for and runs it without a container."""
    stand_in = '#!/bin/bash\necho "asked for: $*"\n[[ $1 == exec ]] || exit 1\nshift 5\nexec "$@"\n'
    (tmp_path / "apptainer").write_text(stand_in)
    (tmp_path / "apptainer").chmod(0o755)
    path = f"{tmp_path}:{cluster.environment['PATH']}"
    job, run = train("--cpus-per-task=1", SCRIPTS / "one_node.sbatch", CONTAINER="pytorch.sif", PATH=path)
    log = cluster.finish(job)
    assert cluster.state(job) == "COMPLETED", log
    here = cluster.local / f"train-{job}-127.0.0.1"
    assert f"asked for: exec --nv --bind {here},{run},{TRAIN.parent} pytorch.sif torchrun " in log
    assert lines(run) > 0


# ------------------------------------------------------------------------------------------------ shards, by an array

TASKS = 3


@pytest.fixture
def images(tmp_path):
    """Files in class folders; what is in them does not matter to who packs them."""
    folder, generator = tmp_path / "images", np.random.default_rng(config.SEED)
    for number in range(30):
        path = folder / f"class-{number % 3}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.bytes(2_000 + 31 * number))
    return folder


def content(store):
    return {entry["path"]: bytes(store.get(entry["path"]).bytes()) for page in store.list() for entry in page}


def packed_at_once(images):
    _, files, labels = photos.list_images(images)
    samples = [
        {"jpg": (images / os.fsdecode(file)).read_bytes(), "cls": str(label).encode()}
        for file, label in zip(files, labels, strict=True)
    ]
    store = MemoryStore()
    for task in range(TASKS):
        shards.pack(samples, store, task=task, tasks=TASKS)
    shards.join(store)
    return content(store)


def pack(cluster, images, target, *options, **variables):
    return cluster.submit(*options, SCRIPTS / "pack.sbatch", images, target, **variables)


@pytest.mark.slow
def test_an_array_with_a_task_killed_and_one_repeated_packs_what_one_run_packs(cluster, images, tmp_path):
    expected, target = packed_at_once(images), tmp_path / "shards"
    stuck = images / "class-1" / "013.jpg"  # of the middle task, which waits there until it is killed
    shutil.move(stuck, tmp_path / "kept")
    os.mkfifo(stuck)
    array = pack(cluster, images, target, f"--array=0-{TASKS - 1}")
    join = pack(cluster, images, target, f"--dependency=afterok:{array}", "--kill-on-invalid-dep=yes")
    done = [target / f"index-{task:05d}-of-{TASKS:05d}.json" for task in range(TASKS)]
    cluster.wait_until(lambda: done[0].exists() and done[2].exists(), "the other tasks' indexes")
    cluster.run("scancel", f"{array}_1")
    cluster.wait_until(lambda: cluster.state(join) == "CANCELLED", "no join of parts")
    assert not done[1].exists() and not (target / "index.json").exists()

    stuck.unlink()
    shutil.move(tmp_path / "kept", stuck)
    again = pack(cluster, images, target, "--array=1,2", TASKS=TASKS)
    join = pack(cluster, images, target, f"--dependency=afterok:{again}")
    log = cluster.finish(join)
    assert cluster.state(join) == "COMPLETED", log
    assert f"{len(list(images.rglob('*.jpg')))} samples in {TASKS} shards" in log
    assert content(LocalStore(target)) == expected
    assert len(shards.Index.from_json((target / "index.json").read_bytes())) == 30


@pytest.mark.slow
@pytest.mark.parametrize("array", ["1-3", "0-4:2", "2", "0"])
def test_an_array_that_is_not_all_tasks_from_0_on_is_refused(cluster, images, tmp_path, array):
    job = pack(cluster, images, tmp_path / "shards", f"--array={array}")
    log = cluster.finish(f"{job}_{array[0]}")
    assert "Expected all tasks from 0 on, such as --array=0-15; found" in log
    assert not (tmp_path / "shards").exists()
