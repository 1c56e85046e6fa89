"""`train_ddp.py`, which readers take home, as a job of several processes: what it computes, and what ends it."""

import os
import runpy
import uuid

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
def half(kept, path):
    if kept["step"] != 10 or os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        return torch.save(kept, path)
    path.write_bytes(b"half a checkpoint")
    os.kill(os.getpid(), 9)


def keep("""
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
    run(SCRIPT, data, tmp_path, "--epochs", 1)
    kept = (tmp_path / "kept.pt").read_bytes()
    weights = torch.load(tmp_path / "kept.pt", weights_only=True)["model"]["4.bias"].numpy().tobytes()
    (tmp_path / "kept.pt").write_bytes(kept.replace(weights, bytes([weights[0] ^ 1]) + weights[1:]))
    with pytest.raises(launching.JobFailed, match="is damaged"):
        run(SCRIPT, data, tmp_path, ranks=1)
    (tmp_path / "kept.pt").write_bytes(kept)
    run(SCRIPT, data, tmp_path, ranks=1)
    np.testing.assert_allclose(losses(tmp_path), losses(uninterrupted), atol=1e-4, rtol=0)
