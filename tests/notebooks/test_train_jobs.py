"""`train_photos.py` and `train_clips.py`, which readers take home, as jobs of several processes on the CPU."""

import os
import re

import pytest
import torch
from support.notebooks import NOTEBOOKS, SMALL_CLIPS, SMALL_PHOTOS, bright_photos, tones

from helpers.training import launching

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="no signals")]
LIMIT = 250  # seconds for a job, on a very busy machine
JOBS = {"photos": (SMALL_PHOTOS, bright_photos, ()), "clips": (SMALL_CLIPS, tones, ("--seconds", 0.4))}


@pytest.fixture(scope="module", params=JOBS)
def job(request, tmp_path_factory):
    script, draw, options = JOBS[request.param]
    return script, draw(tmp_path_factory.mktemp(request.param)), options


def train(job, folder, ranks, norm=True, killed_after=None, slow=False, **settings):
    """Train on so many ranks, and return what was printed, and the weights."""
    text, data, options = job
    folder.mkdir(exist_ok=True)
    script = folder / "small.py"
    script.write_text(text.format(norm=norm, killed_after=killed_after, slow=slow))
    options = ("--epochs", 4, "--batch", 12, "--lr", 1, "--workers", 1, *options)
    output = launching.torchrun(
        script, data, folder / "out", *options, ranks=ranks, quiet=True, timeout=LIMIT, **settings
    )
    return output, torch.load(folder / "out" / "checkpoint.pt", weights_only=True)["model"]


def test_any_number_of_ranks_learns_the_same_from_the_same_data(job, tmp_path):
    found = {}
    for ranks in (1, 2, 3):
        printed, weights = train(job, tmp_path / f"{ranks}", ranks, norm=False)
        assert printed.count("Left out: ") == 1 and f"{ranks} ranks" in printed
        losses, right = zip(*re.findall(r"epoch \d: loss (.*) nats, .*/s, (.*) right", printed), strict=True)
        found[ranks] = [*map(float, losses)], right, weights
    assert len(found[1][0]) == 4 and found[1][0][0] != found[1][0][-1]  # it learns
    for ranks in (2, 3):
        losses, right, weights = found[ranks]
        assert losses == pytest.approx(found[1][0], abs=0.002) and right == found[1][1]  # they are printed rounded
        torch.testing.assert_close(weights, found[1][2], rtol=1e-4, atol=1e-5)


def test_ranks_that_would_choose_differently_and_are_killed_go_on_as_if_nothing_had_been(job, tmp_path):
    printed, whole = train(job, tmp_path / "whole", 3, slow=True)
    assert "From epoch 0 on: float32, 1 workers, 3 ranks" in printed
    printed, resumed = train(job, tmp_path / "killed", 3, killed_after=2, max_restarts=1)
    assert "was killed by SIGKILL" in printed and "From epoch 2 on: float32, 1 workers, 3 ranks" in printed
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


@pytest.mark.parametrize("job", ["clips"], indirect=True)
def test_workers_that_import_the_script_anew_join_no_ranks(job, tmp_path):
    """So they do on macOS and Windows, and from Python 3.14 on."""
    script = tmp_path / "small.py"
    script.write_text(f"""
import multiprocessing, sys
sys.path.insert(0, {str(NOTEBOOKS[0].parent)!r})
import train_clips
if __name__ == "__main__":
    multiprocessing.set_start_method("forkserver")
    train_clips.main()
""")
    options = ("--epochs", 1, "--batch", 12, "--workers", 1, "--way", "float32", *job[2])
    printed = launching.torchrun(script, job[1], tmp_path / "out", *options, ranks=2, quiet=True, timeout=LIMIT)
    assert "float32, 1 workers, 2 ranks" in printed and "epoch 0: loss" in printed


def test_a_batch_that_the_ranks_cannot_share_is_refused(job, tmp_path):
    with pytest.raises(launching.JobFailed, match="expected a multiple of the 5 ranks, found 12"):
        train(job, tmp_path, 5)
