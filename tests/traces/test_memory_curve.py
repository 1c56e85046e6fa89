"""Tests of what `helpers.traces` tells of memory."""

import json

import pytest
from support import cuda_trace, recordings

from helpers import traces


def allocation(time, size, address=0x10, *, reserved=0):
    arguments = {"Device Type": 0, "Device Id": -1, "Addr": address, "Bytes": size, "Total Allocated": 0}
    return {"ph": "i", "name": "[memory]", "ts": time, "args": arguments | {"Total Reserved": reserved}}


@pytest.fixture
def trace(tmp_path):
    def write(*events):
        step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#3", "ts": 1000, "dur": 5000, "pid": 1, "tid": 1}
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": [*events, step | {"args": {}}]}))
        return path

    return write


def test_the_curve_follows_allocations_and_releases(trace):
    path = trace(allocation(3000, -4_000_000), allocation(2000, 6_000_000), allocation(1000, 4_000_000))
    curve = traces.memory_curve(path)
    assert curve["time"].tolist() == [0, 1, 2]  # ms since the step's start
    assert curve["allocated"].tolist() == [4, 10, 6]  # MB
    assert set(curve["device"]) == {"CPU"}


def test_what_a_worker_shares_does_not_count(trace):
    shared = [allocation(1100, 9_000_000, 0x20, reserved=9_000_000), allocation(1300, -9_000_000, 0x20)]
    later = [allocation(1400, 1_000_000, 0x20), allocation(1500, -1_000_000, 0x20)]  # the same address, now the allocator's
    curve = traces.memory_curve(trace(allocation(1000, 2_000_000), *shared, *later))
    assert curve["allocated"].tolist() == [2, 3, 2]


def test_a_gpus_memory_is_what_it_states(tmp_path):
    curve = traces.memory_curve(cuda_trace.write(tmp_path / "trace.json"))
    of_gpu = curve[curve["device"] == "GPU 0"]
    assert of_gpu["allocated"].tolist() == pytest.approx([0.008192, 0.073728, 0.008192] * 3)
    assert "CPU" not in set(curve["device"])  # what the hand-written trace maps is shared with a worker


def test_a_recorded_training_step_ends_with_as_much_memory_as_the_step_before(tmp_path):
    recordings.record(tmp_path, workers=0, profile_memory=True)
    curve, steps = traces.memory_curve(tmp_path), traces.steps(tmp_path)
    starts = (steps["start"] - steps["start"].iat[0]) / 1e3
    held = [curve[curve["time"] < start]["allocated"].iat[-1] for start in starts[2:]]
    assert held == pytest.approx([held[0]] * len(held), abs=0.01)
    assert curve["allocated"].max() > 0.1  # the activations


def test_a_profile_without_memory_says_so(trace):
    with pytest.raises(traces.NoMemory, match="profile_memory=True"):
        traces.memory_curve(trace())


def test_a_trace_without_steps_says_so(tmp_path):
    path = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 5, "pid": 1, "tid": 1, "args": {}}
    path.write_text(json.dumps({"traceEvents": [event, allocation(2, 8)]}))
    with pytest.raises(traces.NoSteps):
        traces.memory_curve(path)
