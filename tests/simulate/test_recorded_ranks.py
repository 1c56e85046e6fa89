"""Ranks that have really trained with a simulated network, and what `diagnosis.of_ranks` says of them."""

from pathlib import Path

import pytest
from support import processes, recorded_ranks

from stepscope import diagnosis, traces

pytestmark = pytest.mark.processes

EXPOSED = "exposed communication"
# For each recording of support/recorded_ranks.py the finding, and what stands in its change.
FAULTS = {
    "late": ("a straggler", "rank 1: its data on node-local storage"),
    "by hand": (EXPOSED, "DDP(model, bucket_cap_mb=1)"),
    "one bucket": (EXPOSED, "DDP(model, bucket_cap_mb=1)"),
    "slow network": (EXPOSED, "bf16_compress_hook"),
    "small buckets": ("many small operations", "DDP(model, bucket_cap_mb=25)"),
    "buffers": ("buffers broadcast in every forward", "broadcast_buffers=False"),
}
# These exchange gradients by gloo alone. On a busy machine that takes any time, and then it is true that communication
# is exposed in them, or that one rank is late: both were found in "buffers". What is found without a load is in
# stepscope's own tests of jobs.
BY_GLOO = {"healthy", "late", "buffers"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ended = processes.run(Path(recorded_ranks.__file__), folder, ranks=2)
    assert [code for code, _ in ended] == [0, 0], ended
    return folder


def found_in(recorded, name):
    """The changes that are proposed, by the names of the findings."""
    found = {finding.name: finding.change for finding in diagnosis.of_ranks(recorded / name).findings}
    for other in {EXPOSED, "a straggler"} - {FAULTS.get(name, (None,))[0]} if name in BY_GLOO else ():
        found.pop(other, None)
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_trained_with_one_fault_are_accused_of_just_that(recorded, fault):
    found, (name, change) = found_in(recorded, fault), FAULTS[fault]
    assert list(found) == [name]
    assert change in found[name]


def test_ranks_that_trained_without_fault_are_accused_of_nothing(recorded):
    assert found_in(recorded, "healthy") == {}


def test_a_rank_by_itself_is_not_accused_of_what_is_behind_its_operators(recorded):
    trace = traces.ranks(recorded / "slow network")["rank 0"]
    (finding,) = (each for each in diagnosis.of_trace(trace).findings if each.name == EXPOSED)
    row = traces.communication(recorded / "slow network").loc["rank 0"]
    assert finding.gain == pytest.approx(row["exposed"] / row["step"])
    assert row["overlapped"] > 0
