"""Tests of the curve of memory that `helpers.traces` finds in a trace, and that it is the one of the profiler tab."""

import json
import subprocess
import sys

import pytest
from support import cuda_trace, recordings

from helpers import traces

CPU, GPU = 0, 1


def allocation(time, size, total, address=0x10, *, reserved=0, kind=CPU, device=-1):
    """An allocation, or a release, as the profiler writes it: `total` bytes are allocated afterwards."""
    place = {"Device Type": kind, "Device Id": device, "Addr": address}
    arguments = place | {"Bytes": size, "Total Allocated": total, "Total Reserved": reserved}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": time, "args": arguments}


def mapping(time, size, address):
    """Of memory that a worker shares."""
    return allocation(time, size, 0, address, reserved=size)


def unmapping(time, size, address):
    return allocation(time, -size, 0, address)


@pytest.fixture
def trace(tmp_path):
    def write(*events):
        whole = {"ph": "X", "name": "ProfilerStep#3", "ts": 1000, "dur": 5000, "pid": 1, "tid": 1, "args": {}}
        step, operator = whole | {"cat": "user_annotation"}, whole | {"cat": "cpu_op", "name": "aten::mm", "dur": 4000}
        path = tmp_path / "trace.json"
        path.write_text(json.dumps({"traceEvents": [*events, step, operator]}))
        return path

    return write


def test_the_curve_follows_allocations_and_releases(trace):
    path = trace(
        allocation(3000, -4_000_000, 6_000_000),
        allocation(2000, 6_000_000, 10_000_000),
        allocation(1000, 4_000_000, 4_000_000),
    )
    curve = traces.memory_curve(path)
    assert curve["time"].tolist() == [0, 1, 2]  # ms since the step's start
    assert curve["allocated"].tolist() == [4, 10, 6]  # MB
    assert set(curve["device"]) == {"CPU"}


def test_on_the_cpu_the_curve_counts_from_the_recordings_start(trace):
    path = trace(allocation(1000, 1_000_000, 8_000_000), allocation(2000, -3_000_000, 5_000_000))
    assert traces.memory_curve(path)["allocated"].tolist() == [1, -2]


def test_what_a_worker_shares_does_not_count(trace):
    shared = [mapping(1100, 9_000_000, 0x20), unmapping(1300, 9_000_000, 0x20)]
    later = [allocation(1400, 1_000_000, 3_000_000, 0x20), allocation(1500, -1_000_000, 2_000_000, 0x20)]
    curve = traces.memory_curve(trace(allocation(1000, 2_000_000, 2_000_000), *shared, *later))
    assert curve["allocated"].tolist() == [2, 3, 2]  # the same address was the allocator's later


UNMAPPED = [
    unmapping(1000, 9_000_000, 0x90),  # mapped before the recording
    allocation(1100, 4_000_000, 4_000_000, 0x10),
    unmapping(1200, 9_000_000, 0xA0),
    allocation(1300, 6_000_000, 10_000_000, 0x20),
    allocation(1400, -4_000_000, 6_000_000, 0x10),
    mapping(1500, 6_000_000, 0xB0),
    unmapping(1600, 6_000_000, 0xB0),  # as large as what is allocated
    allocation(1700, -6_000_000, 0, 0x20),
]
SEVERAL_DEVICES = [
    *UNMAPPED,
    allocation(1050, 512, 4096, 0x10, reserved=1 << 21, kind=GPU, device=0),
    allocation(1150, 1024, 1024, 0x10, reserved=1 << 21, kind=GPU, device=1),
    allocation(1250, -512, 3584, 0x10, reserved=1 << 21, kind=GPU, device=0),
    allocation(1350, -1024, 0, 0x10, reserved=0, kind=GPU, device=1),
]


def test_to_unmap_what_was_mapped_before_the_recording_does_not_count(trace):
    assert traces.memory_curve(trace(*UNMAPPED))["allocated"].tolist() == [4, 10, 6, 0]


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


TAB = """
import json, logging, sys, tempfile
logging.disable(logging.ERROR)
from helpers.tensorboard import corrections
corrections.apply()
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator
data = RunProfileData.parse("worker", None, sys.argv[1], tempfile.gettempdir())
page = RunGenerator("worker", None, data).generate_run_profile()
print(json.dumps(page.get_memory_curve(memory_metric="B", patch_for_step_plot=False)["rows"]))
"""


def assert_equal_to_the_tab(path):
    done = subprocess.run([sys.executable, "-c", TAB, str(path)], capture_output=True, text=True, check=True)
    tab = json.loads(done.stdout.splitlines()[-1])
    curve = traces.memory_curve(path)
    assert {device.replace("GPU", "GPU ") for device in tab} == set(curve["device"])
    for device, rows in tab.items():
        times, allocated, _ = zip(*rows, strict=True)
        ours = curve[curve["device"] == device.replace("GPU", "GPU ")]
        # The tab counts time from the recording's first event, and the CPU's memory from the process's first recording
        before = allocated[0] - round(ours["allocated"].iat[0] * 1e6) if device == "CPU" else 0
        assert [round(each * 1e6) + before for each in ours["allocated"]] == list(allocated)
        since_first = ours["time"] - ours["time"].iat[0]
        assert since_first.tolist() == pytest.approx([time - times[0] for time in times], abs=2e-3)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_the_curve_of_a_recording_is_that_of_the_tab(tmp_path, workers):
    recordings.record(tmp_path, workers, profile_memory=True)
    (path,) = tmp_path.iterdir()
    assert_equal_to_the_tab(path)


@pytest.mark.processes
@pytest.mark.parametrize("events", [UNMAPPED, SEVERAL_DEVICES], ids=["unmapped", "several devices"])
def test_the_curve_of_a_hand_made_trace_is_that_of_the_tab(trace, events):
    assert_equal_to_the_tab(trace(*events))


def test_a_profile_without_memory_says_so(trace):
    with pytest.raises(traces.NoMemory, match="profile_memory=True"):
        traces.memory_curve(trace())


def test_a_trace_without_steps_says_so(tmp_path):
    path = tmp_path / "trace.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 5, "pid": 1, "tid": 1, "args": {}}
    path.write_text(json.dumps({"traceEvents": [event, allocation(2, 8, 8)]}))
    with pytest.raises(traces.NoSteps):
        traces.memory_curve(path)
