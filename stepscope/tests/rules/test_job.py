"""Tests of `diagnosis.of_ranks`: each finding where the ranks of a job have just this fault, and none without any."""

import math

import pytest
from support import cuda_trace
from support.rank_traces import ddp, job, write

from stepscope import diagnosis, traces
from stepscope.cli import main
from stepscope.facts import saving

# For each fault of a job the key of the finding, and a part of the change.
FAULTS = {
    "by hand": (dict(by_hand=True), "communication.late", "DDP(model, bucket_cap_mb=10)"),
    "one bucket": (dict(buckets=1, milliseconds=60), "communication.late", "DDP(model, bucket_cap_mb=10)"),
    "slow network": (dict(milliseconds=20), "communication.overlapped", "bf16_compress_hook"),
    "sharded": (
        dict(operation="all_gather", by_hand=True), "communication.sharded", "set_modules_to_forward_prefetch",
    ),
    "late in loading": (dict(loading={1: 50}), "communication.straggler", "rank 1: its data on node-local storage"),
    "late in Python": (dict(python={0: 50}), "communication.straggler", "rank 0: work that only this rank does"),
    "slower": (dict(slower={2: 1.4}, ranks=4), "communication.straggler", "rank 2: batches as large"),
    "small buckets": (
        dict(buckets=200, megabytes=10, milliseconds=1.5),
        "communication.small-operations", "DDP(model, bucket_cap_mb=25)",
    ),
    "SyncBatchNorm": (
        dict(buckets=200, megabytes=0.1, milliseconds=1.5, operation="all_gather"),
        "communication.small-operations", "BatchNorm",
    ),
    "buffers": (dict(broadcast=15), "communication.buffers", "broadcast_buffers = False"),
    "uneven": (dict(extra={1: 1}), "communication.unequal", "Join"),
}  # fmt: skip


def keys(found):
    return [finding.key for finding in found.findings]


def step_ms(folder):
    return float(traces.communication(folder)["step"].mean())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_with_one_fault_is_accused_of_just_that(fault, tmp_path):
    options, key, change = FAULTS[fault]
    found = diagnosis.of_ranks(ddp(tmp_path, **options))
    assert keys(found) == [key]
    assert (found.verdict, "% of a step" in found.reason) == ("communication", fault != "uneven")
    assert change in found.findings[0].change
    saving.write(diagnosis.facts_of_ranks(tmp_path), tmp_path / saving.JOB)
    assert diagnosis.of_facts(tmp_path / saving.JOB) == found


@pytest.mark.parametrize(("passes", "key"), [(4, "communication.each-pass"), (1, "communication.overlapped")])
def test_gradients_that_each_of_several_backward_passes_exchanges_are_told_from_buckets(passes, key, tmp_path):
    found = diagnosis.of_ranks(write(tmp_path, job([[[1000] * 4] * 6] * 2, transfer=1500), passes=passes))
    assert keys(found) == [key]
    if passes > 1:  # 6 ms are exchanged, for three of four passes in vain
        assert found.findings[0].gain == pytest.approx(0.75 * 6 / step_ms(tmp_path), abs=0.02)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_job_without_fault_is_accused_of_nothing(ranks, tmp_path):
    found = diagnosis.of_ranks(ddp(tmp_path, ranks=ranks))
    assert (found.verdict, found.findings) == ("nothing wrong", ())
    assert ("efficiency", "96%") in found.evidence


@pytest.mark.parametrize(
    ("fault", "fixed"),
    [
        ("by hand", dict(milliseconds=0)),
        ("slow network", dict(milliseconds=0)),
        ("late in loading", {}),
        ("late in Python", {}),
        ("slower", dict(ranks=4)),
        ("small buckets", dict(milliseconds=0)),
        ("buffers", {}),
    ],
)
def test_a_gain_is_the_time_that_the_fixed_job_would_save(fault, fixed, tmp_path):
    slow = step_ms(ddp(tmp_path / "slow", **FAULTS[fault][0]))
    healthy = step_ms(ddp(tmp_path / "healthy", **fixed))
    (finding,) = diagnosis.of_ranks(tmp_path / "slow").findings
    assert finding.gain * slow == pytest.approx(slow - healthy, abs=1)


def test_a_job_that_hangs_is_named_before_the_findings_that_cost_time(tmp_path):
    found = diagnosis.of_ranks(ddp(tmp_path, extra={1: 1}, by_hand=True))
    assert keys(found) == ["communication.unequal", "communication.late"]
    assert math.isinf(found.findings[0].gain)
    assert "rank 0" in found.findings[0].evidence and "all_reduce" in found.findings[0].evidence
    assert "inf" not in str(found)


def test_ranks_that_wait_in_turns_have_no_straggler_and_make_a_verdict_impossible(tmp_path):
    found = diagnosis.of_ranks(ddp(tmp_path, late=lambda step, rank: 100 * (step % 2 == rank), milliseconds=1))
    assert (found.verdict, found.findings) == ("unknown", ())
    assert "each time for a different rank" in found.reason


def test_a_rank_that_is_late_behind_overlapped_buckets_makes_a_verdict_impossible_at_least(tmp_path):
    assert diagnosis.of_ranks(ddp(tmp_path, loading={1: 15})).verdict in ("unknown", "communication")


def test_among_many_ranks_the_ranks_that_wait_least_have_a_line(tmp_path):
    found = diagnosis.of_ranks(ddp(tmp_path, ranks=12, loading={11: 50}))
    rows = [name for name, _ in found.evidence if name.startswith("rank ")]
    assert len(rows) == 8 and "rank 11" in rows
    assert "all ranks" in dict(found.evidence)


def test_without_sizes_small_operations_are_unknown_and_not_accused(tmp_path):
    found = diagnosis.of_ranks(ddp(tmp_path, **FAULTS["small buckets"][0], shapes=False))
    assert keys(found) == ["communication.overlapped"]
    assert any("record_shapes=True" in text for text in found.unknown)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(ranks=1), "the trace of one rank only"),
        (dict(steps=2), "The traces hold 2 steps"),
        (dict(buckets=0), "no operation that exchanges data"),
        (dict(marked=False), "profiler.step()"),
    ],
)
def test_traces_that_do_not_suffice_give_no_verdict(options, reason, tmp_path):
    found = diagnosis.of_ranks(ddp(tmp_path, **options))
    assert found.verdict == "unknown"
    assert reason in found.reason


def test_traces_of_processes_that_did_not_train_together_are_shown_one_by_one(tmp_path, capsys):
    for name in ("a", "b"):
        cuda_trace.Loop().write(tmp_path / f"{name}.1.pt.trace.json")
    assert main(["diagnose", str(tmp_path)]) == 0
    assert "together" not in capsys.readouterr().out
