"""`train_photos.py`, which readers take home, as a job of several processes on the CPU."""

import os
import re

import pytest
import torch
from support.notebooks import SMALL_PHOTOS, bright_photos

from helpers.training import launching

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.skipif(os.name == "nt", reason="no signals")]
LIMIT = 250  # seconds for a job, on a very busy machine


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return bright_photos(tmp_path_factory.mktemp("photos"))


def train(photos, folder, ranks, norm=True, killed_after=None, slow=False, **settings):
    """Train on so many ranks, and return what was printed, and the weights."""
    script = folder / "small.py"
    script.write_text(SMALL_PHOTOS.format(norm=norm, killed_after=killed_after, slow=slow))
    options = ("--epochs", 4, "--batch", 12, "--lr", 1, "--workers", 1)
    output = launching.torchrun(
        script, photos, folder / "packed", *options, ranks=ranks, quiet=True, timeout=LIMIT, **settings
    )
    return output, torch.load(folder / "packed" / "checkpoint.pt", weights_only=True)["model"]


def test_any_number_of_ranks_learns_the_same_from_the_same_photos(photos, tmp_path):
    found = {}
    for ranks in (1, 2, 3):
        folder = tmp_path / f"{ranks}"
        folder.mkdir()
        printed, weights = train(photos, folder, ranks, norm=False)
        assert printed.count("Left out: ") == 1 and f"{ranks} ranks" in printed
        losses, right = zip(*re.findall(r"epoch \d: loss (.*) nats, .* images/s, (.*) right", printed), strict=True)
        found[ranks] = [*map(float, losses)], right, weights
    assert len(found[1][0]) == 4 and found[1][0][0] != found[1][0][-1]  # it learns
    for ranks in (2, 3):
        losses, right, weights = found[ranks]
        assert losses == pytest.approx(found[1][0], abs=0.002) and right == found[1][1]  # they are printed rounded
        torch.testing.assert_close(weights, found[1][2], rtol=1e-4, atol=1e-5)


def test_ranks_that_would_choose_differently_and_are_killed_go_on_as_if_nothing_had_been(photos, tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    printed, whole = train(photos, tmp_path / "whole", 3, slow=True)
    assert "From epoch 0 on: float32, 1 workers, 3 ranks" in printed
    printed, resumed = train(photos, tmp_path / "killed", 3, killed_after=2, max_restarts=1)
    assert "was killed by SIGKILL" in printed and "From epoch 2 on: float32, 1 workers, 3 ranks" in printed
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_a_batch_that_the_ranks_cannot_share_is_refused(photos, tmp_path):
    with pytest.raises(launching.JobFailed, match="expected a multiple of the 5 ranks, found 12"):
        train(photos, tmp_path, 5)
