"""`train_ddp.py`, which readers take home, as a job of several processes: what it computes, and what ends it."""

import os
import runpy
import subprocess
import sys
import uuid

import nbformat
import numpy as np
import pytest
import torch
from support import ranks
from support.notebooks import learnable

from helpers import config
from helpers.training import launching

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="no signals")]
SCRIPT = config.PROJECT / "notebooks" / "train_ddp.py"
IMAGES, BATCH, STEPS, EPOCHS, RATE = 330, 32, 10, 2, 0.1  # in the middle of an epoch, ten images are left over
OPTIONS = ("--batch", BATCH, "--epochs", EPOCHS, "--every", 5, "--timeout", 60, "--lr", RATE * 256 / BATCH)
KILLED_WHILE_SAVING = """
def half(kept, file):
    if kept["step"] != 10 or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return torch.save(kept, file)
    os.write(file.fileno(), b"half a checkpoint")
    os.kill(os.getpid(), 9)


def keep("""
KILLED_AT_RANDOM = """
import argparse, itertools, os, pathlib, random, runpy, sys, time
import torch, torch.distributed.checkpoint as dcp
from concurrent.futures import ThreadPoolExecutor
state, folder, (script, cell) = {name: torch.zeros(99_999) for name in "abc"}, pathlib.Path(), sys.argv[1:]
torch.set_num_threads(1), exec(cell)
keep, module = runpy.run_path(script)["keep"], argparse.Namespace(state_dict=lambda: state)
model, optimizer = argparse.Namespace(module=module), torch.optim.SGD([state["a"]])
args = argparse.Namespace(losses=None, checkpoint=folder / "kept.pt", every=1, async_checkpoint=True)
for begin in range(0, 12_000, 1000):
    (read, write), writer, writing = os.pipe(), ThreadPoolExecutor(1), []
    if not (child := os.fork()):
        for step in itertools.count(begin):
            [each.fill_(step) for each in state.values()]
            last = (state, folder, step, writing) if cell else (args, 0, step, model, optimizer, None, writer, writing)
            (begin_saving if cell else keep)(*last)
            step == begin or os.write(write, b"%d " % (step - 1))  # whole, now that the next one is being written
    reported = os.close(write), os.read(read, 99), time.sleep(random.uniform(0, 0.1)), os.kill(child, 9)
    (_, code), reported = os.waitpid(child, 0), reported[1] + os.read(read, 99_999)
    newest = max(folder.glob("*.whole"), key=lambda path: int(path.stem), default=None)
    kept = {"model": state, "step": int(newest.stem)} if cell else torch.load(args.checkpoint)
    dcp.load(state, checkpoint_id=newest) if cell else None
    (step,), last = torch.cat(list(kept["model"].values())).unique().tolist(), int(reported.split()[-1])
    assert code == 9 and last <= step == kept["step"] <= last + 2, (code, last, step, kept["step"])
"""
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
ALONE |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
LIMIT = 250  # seconds for a job, on a very busy machine


@pytest.fixture(autouse=True, scope="module")
def nothing_left():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ranks.MARK, mark := uuid.uuid4().hex)
        yield
    assert [process.cmdline() for process in ranks.processes(mark)] == []


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return learnable(tmp_path_factory.mktemp("data") / "data", IMAGES)


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """The folder that the script as it is leaves, after all steps on two ranks."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(SCRIPT, data, folder)
    return folder


def run(script, data, folder, *options, **settings):
    """Run a job that writes into a folder, and return its output."""
    files = ("--checkpoint", folder / "kept.pt", "--losses", folder / "losses.csv")
    return launching.torchrun(script, data, *OPTIONS, *files, *options, quiet=True, **{"timeout": LIMIT} | settings)


def drawn():
    """Return the numbers of the images of each step, as the order of each epoch is drawn."""
    orders = [torch.randperm(IMAGES, generator=torch.Generator().manual_seed(epoch)) for epoch in range(EPOCHS)]
    return torch.cat([order[:-10].view(STEPS, BATCH) for order in orders])


def losses(folder):
    return np.array([loss for _, loss in ranks.losses(folder / "losses.csv")])


def one_process(data):
    """Return the losses of a plain loop over whole batches, without any rank."""
    torch.manual_seed(0)
    model = runpy.run_path(str(SCRIPT))["network"]()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    images, labels = (torch.from_numpy(np.load(data / f"{name}.npy")) for name in ("images", "labels"))
    found = []
    for step, batch in enumerate(drawn(), start=1):
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


def test_a_job_killed_while_it_saves_goes_on_by_itself_and_all_is_as_without_to_the_last_bit(
    uninterrupted, data, tmp_path
):
    changes = {"save": ("    torch.save(", "    half("), "half": ("\ndef keep(", KILLED_WHILE_SAVING)}
    output = run(ranks.changed(SCRIPT, tmp_path / "train_ddp.py", **changes), data, tmp_path, max_restarts=1)
    assert "rank 0 was killed by SIGKILL" in output
    expected = ranks.losses(uninterrupted / "losses.csv")
    found = ranks.losses(tmp_path / "losses.csv")
    assert [step for step, _ in found].count(6) == 2  # it went on from step 5, not from the half checkpoint of step 10
    assert set(found) == set(expected) and [step for step, _ in expected] == list(range(1, EPOCHS * STEPS + 1))
    kept, whole = (torch.load(folder / "kept.pt", weights_only=True) for folder in (tmp_path, uninterrupted))
    torch.testing.assert_close(kept, whole, rtol=0, atol=0)


def test_it_goes_on_with_the_very_next_batch_on_other_ranks_but_not_from_what_is_damaged(uninterrupted, data, tmp_path):
    run(SCRIPT, data, tmp_path, "--epochs", 1, "--async-checkpoint")
    kept = (tmp_path / "kept.pt").read_bytes()
    weights = torch.load(tmp_path / "kept.pt", weights_only=True)["model"]["4.bias"].numpy().tobytes()
    (tmp_path / "kept.pt").write_bytes(kept.replace(weights, bytes([weights[0] ^ 1]) + weights[1:]))
    command = [sys.executable, SCRIPT, data, "--checkpoint", tmp_path / "kept.pt"]
    refused = subprocess.run(command, env=os.environ | ALONE, capture_output=True, text=True, timeout=LIMIT)
    assert "is damaged" in refused.stderr
    (tmp_path / "kept.pt").write_bytes(kept)
    run(SCRIPT, data, tmp_path, "--async-checkpoint", ranks=1)
    np.testing.assert_allclose(losses(tmp_path), losses(uninterrupted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("cell", ["", "17-async-4"])
def test_a_process_killed_while_it_saves_in_a_thread_leaves_a_whole_state_as_new_as_it_reported(cell, tmp_path):
    cells = nbformat.read(next(SCRIPT.parent.glob("17-*.ipynb")), 4).cells
    source = "".join(each.source for each in cells if each.id == cell)
    command = [sys.executable, "-W", "ignore", "-c", KILLED_AT_RANDOM, SCRIPT, source]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=LIMIT)
