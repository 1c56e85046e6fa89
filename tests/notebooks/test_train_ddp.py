"""`train_ddp.py`, which readers take home, as a job of several processes: what it computes, and what ends it."""

import ast
import contextlib
import json
import os
import runpy
import shutil
import socket
import sys
import textwrap
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from support import ranks

from helpers import config
from helpers.training import launching

pytestmark = [pytest.mark.processes, pytest.mark.skipif(os.name == "nt", reason="ranks are killed by signals")]
SCRIPT = config.PROJECT / "notebooks" / "train_ddp.py"
IMAGES, BATCH, STEPS, EPOCHS, RATE = 330, 32, 10, 2, 0.1  # in the middle of an epoch, ten images are left over
OPTIONS = ("--batch", BATCH, "--epochs", EPOCHS, "--every", 5, "--timeout", 60, "--lr", RATE * 256 / BATCH)
STEP = "            step += 1\n"
LIMIT = 250  # seconds for a job, on a very busy machine


@pytest.fixture(autouse=True, scope="module")
def mark():
    """A mark for all processes of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ranks.MARK, uuid.uuid4().hex)
        yield os.environ[ranks.MARK]


@pytest.fixture(autouse=True)
def nothing_left(mark):
    yield
    assert [process.cmdline() for process in ranks.processes(mark)] == []


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with images that have their number in their first two pixels."""
    folder, generator = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    labels = generator.integers(0, 10, IMAGES)
    images = generator.integers(0, 128, (IMAGES, 3, 32, 32)) + 12 * labels[:, None, None, None]
    images[:, 0, 0, 0], images[:, 0, 0, 1] = np.arange(IMAGES) % 256, np.arange(IMAGES) // 256
    np.save(folder / "images.npy", images.astype(np.uint8))
    np.save(folder / "labels.npy", labels)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The folder that the script as it is leaves, after all steps on two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(SCRIPT, data, folder)
    return folder


@pytest.fixture(scope="module")
def interrupted(data, tmp_path_factory):
    """The folder of a job whose rank 0 was killed while it wrote its second checkpoint."""
    folder = tmp_path_factory.mktemp("interrupted")
    script = in_step(10, 0, folder, "torch.save = half")
    with pytest.raises(launching.JobFailed, match=r"rank 0 was killed by SIGKILL \(signal 9\)"):
        run(script, data, folder)
    return folder


def run(script, data, folder, *options, **settings):
    """Run a job that writes into a folder, and return its output."""
    files = ("--checkpoint", folder / "kept.pt", "--losses", folder / "losses.csv")
    return launching.torchrun(script, data, *OPTIONS, *files, *options, quiet=True, **{"timeout": LIMIT} | settings)


def in_step(number, rank, folder, action):
    """Write the script so that it notes the images of each step, and something happens in one of the first attempt."""
    (folder / "happening.py").write_text(
        textwrap.dedent(f"""
            import io, json, os, signal, time, torch

            save = torch.save

            def half(kept, path):
                whole = io.BytesIO()
                save(kept, whole)
                path.write_bytes(whole.getvalue()[: len(whole.getvalue()) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

            def now(step, rank, args, images, **others):
                numbers = (images[:, 0, 0, 0] + 256 * images[:, 0, 0, 1].int()).tolist()
                with args.losses.with_name(f"seen-{{rank}}").open("a") as file:
                    print(json.dumps([step, numbers]), file=file)
                if step == {number} and rank == {rank} and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                    {action}
        """)
    )
    changed = (STEP, STEP + "            __import__('happening').now(**locals())\n")
    return ranks.changed(SCRIPT, folder / "train_ddp.py", step=changed)


def seen(folder):
    """Return the numbers of the images of each step, those of all ranks together, sorted."""
    steps = {}
    for path in folder.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, numbers = json.loads(line)
            steps.setdefault(step, set()).update(numbers)
    return {step: sorted(numbers) for step, numbers in steps.items()}


def drawn():
    """Return the same as `seen`, as the order of each epoch is drawn."""
    orders = [torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch)) for epoch in range(EPOCHS)]
    batches = [order[:-10].view(STEPS, BATCH) for order in orders]
    return {step: sorted(batch.tolist()) for step, batch in enumerate(torch.cat(batches), start=1)}


def losses(folder):
    return np.array([loss for _, loss in ranks.losses(folder / "losses.csv")])


def test_nothing_but_torch_and_numpy_is_imported():
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in imported} <= {"numpy", "torch"} | sys.stdlib_module_names


def test_it_is_short_enough_to_be_read():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) < 100


def one_process(data):
    """Return the losses of a plain loop over whole batches, without any rank."""
    torch.manual_seed(0)
    model = runpy.run_path(str(SCRIPT))["network"]()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    images, labels = (torch.from_numpy(np.load(data / f"{name}.npy")) for name in ("images", "labels"))
    found = []
    for step, batch in drawn().items():
        optimizer.param_groups[0]["lr"] = RATE * min(1, step / 20)
        loss = torch.nn.functional.cross_entropy(model(images[batch] / 128 - 1), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return np.array(found)


def test_two_ranks_learn_what_one_process_learns_with_the_whole_batch(uninterrupted, data):
    expected = one_process(data)
    assert expected[-1] < expected[0] - 0.1  # it learns
    np.testing.assert_allclose(losses(uninterrupted), expected, atol=1e-4, rtol=0)


def test_with_the_sampler_forgotten_they_learn_something_else(uninterrupted, data, tmp_path):
    all_the_same = ("DistributedSampler(dataset, world, rank,", "DistributedSampler(dataset, 1, 0,")
    run(ranks.changed(SCRIPT, tmp_path / "train_ddp.py", sampler=all_the_same), data, tmp_path)
    assert np.abs(losses(tmp_path) - losses(uninterrupted)).max() > 0.02


def test_a_rank_that_is_killed_from_outside_ends_the_job_and_is_named(data, tmp_path, mark):
    def kill():
        ranks.wait_until(lambda: (tmp_path / "losses.csv").exists() and len(losses(tmp_path)) > 3)
        for process in ranks.processes(mark):
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == "1":
                    process.kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(launching.JobFailed, match=r"rank 1 was killed by SIGKILL \(signal 9\)"):
        run(SCRIPT, data, tmp_path, "--epochs", 100_000)
    thread.join()


def test_after_a_kill_the_job_goes_on_by_itself_and_all_is_as_without_to_the_last_bit(uninterrupted, data, tmp_path):
    script = in_step(13, 1, tmp_path, "os.kill(os.getpid(), signal.SIGKILL)")
    output = run(script, data, tmp_path, max_restarts=1)
    assert "rank 1 was killed by SIGKILL" in output and "All ranks start again (1 of 1)." in output
    expected = ranks.losses(uninterrupted / "losses.csv")
    found = ranks.losses(tmp_path / "losses.csv")
    assert [step for step, _ in found].count(11) == 2  # it went on from step 10
    assert set(found) == set(expected) and [step for step, _ in expected] == list(range(1, EPOCHS * STEPS + 1))
    kept, whole = (torch.load(folder / "kept.pt", weights_only=True) for folder in (tmp_path, uninterrupted))
    torch.testing.assert_close(kept, whole, rtol=0, atol=0)
    assert seen(tmp_path) == drawn()


def test_a_checkpoint_that_is_half_written_leaves_the_older_one(interrupted, uninterrupted):
    assert torch.load(interrupted / "kept.pt", weights_only=True)["step"] == 5
    with pytest.raises(RuntimeError):
        torch.load(interrupted / "kept.new", weights_only=True)


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_it_goes_on_with_the_very_next_batch_on_another_number_of_ranks(
    world, interrupted, uninterrupted, data, tmp_path
):
    shutil.copy(interrupted / "kept.pt", tmp_path)
    shutil.copy(interrupted / "kept.new", tmp_path)
    run(in_step(None, None, tmp_path, "pass"), data, tmp_path, ranks=world)
    assert seen(tmp_path) == {step: numbers for step, numbers in drawn().items() if step > 5}
    np.testing.assert_allclose(losses(tmp_path), losses(uninterrupted)[5:], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "seconds", [pytest.param(3, marks=pytest.mark.slow), pytest.param(60, marks=pytest.mark.prove)]
)
def test_a_rank_that_is_late_is_waited_for(seconds, uninterrupted, data, tmp_path):
    run(in_step(4, 1, tmp_path, f"time.sleep({seconds})"), data, tmp_path, "--timeout", 600)
    np.testing.assert_array_equal(losses(tmp_path), losses(uninterrupted))


def test_a_rank_that_is_later_than_the_time_out_ends_the_job_and_it_is_said_who_waited_for_whom(data, tmp_path):
    script = in_step(4, 1, tmp_path, "time.sleep(1000)")
    with pytest.raises(launching.JobFailed) as raised:
        run(script, data, tmp_path, "--timeout", 8)
    first, second, *others = str(raised.value).splitlines()
    assert "rank 0 exited with 1: RuntimeError: " in first and "Timed out waiting 8000ms" in first
    assert second == "Still busy, when the wait for it was over: rank 1."
    assert "loss.backward()" in "".join(others)


@pytest.mark.slow
def test_an_error_in_one_rank_ends_the_job_and_is_the_one_that_is_named(data, tmp_path):
    with pytest.raises(launching.JobFailed, match="rank 1 exited with 1: ValueError: no such image"):
        run(in_step(4, 1, tmp_path, "raise ValueError('no such image')"), data, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [31, 332])
def test_a_batch_that_cannot_be_shared_is_refused(batch, data):
    with pytest.raises(launching.JobFailed, match=f"--batch {batch}: expected a multiple of the 2 .* 330 images"):
        launching.torchrun(SCRIPT, data, "--batch", batch, timeout=LIMIT, quiet=True)


UNEVEN = """
import sys, torch, torch.distributed as dist, torch.distributed.nn
dist.init_process_group("gloo")
rank, model = dist.get_rank(), torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
for batch in range(5 - rank):
    model(torch.ones(2, 4)).sum().backward()
if "validate" in sys.argv:
    dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_with_fewer_batches_and_without_join_makes_a_job_hang_which_the_time_out_ends(tmp_path):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    with pytest.raises(launching.JobFailed) as raised:
        launching.torchrun(tmp_path / "uneven.py", "validate", timeout=45, quiet=True)
    assert "rank 0 was at uneven.py, line 6: model(torch.ones(2, 4)).sum().backward(); " in str(raised.value)
    assert "rank 1 was at uneven.py, line 8: dist.barrier(). " in str(raised.value)


@pytest.mark.slow
def test_a_rank_with_fewer_batches_that_ends_is_said_to_have_ended(tmp_path):
    (tmp_path / "uneven.py").write_text(UNEVEN)
    with pytest.raises(launching.JobFailed, match="Ended before, without an error: rank 1. With fewer steps"):
        launching.torchrun(tmp_path / "uneven.py", timeout=LIMIT, quiet=True)


def test_two_jobs_at_once_find_ports_of_their_own_whoever_has_the_usual_one(data, tmp_path, uninterrupted, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as busy, ThreadPoolExecutor(2) as both:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(busy.getsockname()[1]))
        folders = [tmp_path / name for name in "ab"]
        for folder in folders:
            folder.mkdir()
        list(both.map(lambda folder: run(SCRIPT, data, folder), folders))
    for folder in folders:
        np.testing.assert_array_equal(losses(folder), losses(uninterrupted))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted as Linux lists them")
def test_no_thread_of_the_group_is_left_when_it_is_destroyed(data, tmp_path):
    """One that were would free tensors while Python ends, which then aborts, once in some dozens of jobs."""
    end = "    dist.destroy_process_group()\n"
    counted = (end, end + "    print(len(os.listdir('/proc/self/task')), 'thread')\n")
    output = run(ranks.changed(SCRIPT, tmp_path / "train_ddp.py", end=counted), data, tmp_path)
    assert output.splitlines().count("1 thread") == 2


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("jobs", [pytest.param(5, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.prove)])
def test_jobs_in_a_row_all_end(data, tmp_path, mark, jobs):
    for number in range(jobs):
        folder = tmp_path / str(number)
        folder.mkdir()
        run(SCRIPT, data, folder, "--epochs", 1, timeout=60)
        assert len(losses(folder)) == STEPS
        assert ranks.processes(mark) == []
