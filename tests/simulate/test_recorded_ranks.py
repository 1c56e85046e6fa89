"""Ranks that have really trained with a simulated network, and what `diagnosis.of_ranks` says of them."""

import os
import subprocess
import sys

import pytest
from support import recorded_ranks

from helpers import config
from stepscope import diagnosis, traces


def names(found):
    return [finding.name for finding in found.findings]


# For each recording of support/recorded_ranks.py the finding, and what stands in its change.
RECORDED = {
    "late": ("a straggler", "rank 1: its data on node-local storage"),
    "by hand": ("exposed communication", "DDP(model, bucket_cap_mb=1)"),
    "one bucket": ("exposed communication", "DDP(model, bucket_cap_mb=1)"),
    "slow network": ("exposed communication", "bf16_compress_hook"),
    "small buckets": ("many small operations", "DDP(model, bucket_cap_mb=25)"),
    "buffers": ("buffers broadcast in every forward", "broadcast_buffers=False"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {
        "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6", "PYTHONPATH": str(config.PROJECT),
    }  # fmt: skip
    command = [sys.executable, recorded_ranks.__file__, str(folder)]
    processes = []
    try:
        for rank in range(2):
            log = (folder / f"{rank}.log").open("w")
            own = environment | {"RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
            log.close()
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert codes == [0, 0], "\n".join((folder / f"{rank}.log").read_text() for rank in range(2))
    return folder


@pytest.mark.processes
@pytest.mark.parametrize("fault", RECORDED)
def test_ranks_that_trained_with_one_fault_are_accused_of_just_that(recorded, fault):
    found = diagnosis.of_ranks(recorded / fault)
    name, change = RECORDED[fault]
    assert names(found) == [name], str(found)
    assert change in found.findings[0].change


@pytest.mark.processes
def test_ranks_that_trained_without_fault_are_accused_of_nothing(recorded):
    found = diagnosis.of_ranks(recorded / "healthy")
    assert found.findings == (), str(found)


@pytest.mark.processes
def test_a_rank_by_itself_is_not_accused_of_what_is_behind_its_operators(recorded):
    trace = traces.ranks(recorded / "slow network")["rank 0"]
    (finding,) = (each for each in diagnosis.of_trace(trace).findings if each.name == "exposed communication")
    row = traces.communication(recorded / "slow network").loc["rank 0"]
    assert finding.gain == pytest.approx(row["exposed"] / row["step"])
    assert row["overlapped"] > 0
