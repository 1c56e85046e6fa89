"""Tests of the curve of memory that `stepscope.traces` finds in a trace, and that it is the one of the profiler tab."""

import pytest
from support import cuda_trace, recordings
from support.asking import parsed_by_the_plugin
from support.written import event, step
from support.written import write as write_trace

from stepscope import traces


def allocation(time, size, total, address=0x10, *, reserved=0):
    """An allocation, or a release, as the profiler writes it: `total` bytes are allocated afterwards."""
    place = {"Device Type": 0, "Device Id": -1, "Addr": address}
    arguments = place | {"Bytes": size, "Total Allocated": total, "Total Reserved": reserved}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": time, "args": arguments}


def mapping(time, size, address):
    """Of memory that a worker shares; of less than none, its end."""
    return allocation(time, size, 0, address, reserved=max(size, 0))


@pytest.fixture
def trace(tmp_path):
    def write(*events):
        return write_trace(tmp_path / "trace.json", [*events, step(3, 1000, 6000), event("cpu_op", "mm", 1000, 5000)])

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


def test_memory_shared_with_a_worker_does_not_count(trace):
    before = mapping(1050, -9_000_000, 0x90)  # mapped before the recording
    shared = [before, mapping(1100, 2_000_000, 0x20), mapping(1300, -2_000_000, 0x20)]  # as large as what is allocated
    later = [allocation(1400, 1_000_000, 3_000_000, 0x20), allocation(1500, -1_000_000, 2_000_000, 0x20)]
    curve = traces.memory_curve(trace(allocation(1000, 2_000_000, 2_000_000), *shared, *later))
    assert curve["allocated"].tolist() == [2, 3, 2]  # the same address was the allocator's later


def test_memory_allocated_before_the_recording_counts_only_on_a_gpu(trace):
    on_gpu = allocation(1200, 1_000_000, 9_000_000)
    on_gpu["args"] |= {"Device Type": 1, "Device Id": 0}
    curve = traces.memory_curve(trace(allocation(1000, 2_000_000, 7_000_000), on_gpu))
    assert dict(zip(curve["device"], curve["allocated"], strict=True)) == {"CPU": 2, "GPU 0": 9}


@pytest.mark.processes
def test_the_curve_equals_the_curve_of_the_tab(tmp_path):
    recordings.record(tmp_path / "run", 2, profile_memory=True)
    files = [*(tmp_path / "run").iterdir(), cuda_trace.write(tmp_path / "trace.json")]
    wanted = "page.get_memory_curve(memory_metric='B', patch_for_step_plot=False)['rows']"
    for file, tab in zip(files, parsed_by_the_plugin(files, wanted), strict=True):
        curve = traces.memory_curve(file)
        assert {device.replace("GPU", "GPU ") for device in tab} == set(curve["device"])
        for device, rows in tab.items():
            times, allocated, _ = zip(*rows, strict=True)
            ours = curve[curve["device"] == device.replace("GPU", "GPU ")]
            # The tab counts time from the first event, and the CPU's memory from the process's first recording
            before = allocated[0] - round(ours["allocated"].iat[0] * 1e6) if device == "CPU" else 0
            assert [round(each * 1e6) + before for each in ours["allocated"]] == list(allocated)
            since_first = ours["time"] - ours["time"].iat[0]
            assert since_first.tolist() == pytest.approx([time - times[0] for time in times], abs=2e-3)


def test_the_error_for_a_profile_without_memory_names_the_option(trace):
    with pytest.raises(traces.TraceError, match="profile_memory=True"):
        traces.memory_curve(trace())
