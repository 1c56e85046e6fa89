"""A simulated GPU: what is calculated, and the trace that readers of traces find it in."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.simulate import SimulatedDevice
from stepscope import traces

MICROSECONDS = st.integers(0, 100).map(float)
DEVICES = st.builds(
    SimulatedDevice,
    kernels=st.integers(4, 9),
    kernel_us=MICROSECONDS.map(lambda us: us + 1),
    launch_us=MICROSECONDS.map(lambda us: us + 1),
    copy_us=MICROSECONDS,
    loading_us=MICROSECONDS,
    streams=st.sampled_from([1, 2]),
    asks=st.booleans(),
    graph=st.booleans(),
)
DEVICE = SimulatedDevice(kernels=5, kernel_us=6, launch_us=10, copy_us=20, loading_us=15, streams=2, asks=True)


def spans_of(device, steps=1, **chosen):
    """The (start, end) of the spans of a kind."""
    table = device.run(steps).spans
    for column, value in chosen.items():
        table = table[table[column] == value]
    return list(zip(table["start"], table["end"], strict=True))


def test_short_kernels_run_when_they_are_launched_and_leave_gaps():
    device = SimulatedDevice(kernels=3, kernel_us=4, launch_us=10)
    assert spans_of(device, kind="launch") == [(0, 10), (10, 20), (20, 30)]
    assert spans_of(device, kind="kernel") == [(10, 14), (20, 24), (30, 34)]
    assert device.run(100).step_us == pytest.approx(30, abs=0.1)
    assert device.run(1).utilization == 12 / 34


def test_of_long_kernels_the_host_runs_ahead():
    device = SimulatedDevice(kernels=3, kernel_us=50, launch_us=10)
    assert spans_of(device, kind="kernel") == [(10, 60), (60, 110), (110, 160)]
    assert device.run(2).ends.to_dict("list") == {"host": [0.03, 0.06], "device": [0.16, 0.31]}
    assert device.run(2).ahead_us == pytest.approx(250)
    assert device.run(100).utilization > 0.99


def test_who_asks_waits_until_the_kernels_have_run_and_then_they_wait_for_the_host():
    device = SimulatedDevice(kernels=2, kernel_us=15, launch_us=10, loading_us=5, asks=True)
    assert spans_of(device, 2, kind="wait") == [(25, 45), (70, 90)]
    assert spans_of(device, 2, kind="kernel") == [(15, 30), (30, 45), (60, 75), (75, 90)]
    assert device.run(2).ahead_us == 0


def test_a_copy_takes_its_turn_among_the_kernels_or_runs_beside_those_of_the_batch_before():
    device = SimulatedDevice(kernels=1, kernel_us=30, launch_us=1, copy_us=20)
    assert spans_of(device, 2, kind="copy") == [(1, 21), (51, 71)]
    assert spans_of(device, 2, kind="kernel") == [(21, 51), (71, 101)]
    device = replace(device, streams=2)
    assert spans_of(device, 3, kind="copy") == spans_of(device, 3, lane="stream 20") == [(1, 21), (21, 41), (41, 61)]
    assert spans_of(device, 3, kind="kernel") == [(21, 51), (51, 81), (81, 111)]


def test_a_graph_is_launched_once():
    device = SimulatedDevice(kernels=3, kernel_us=4, launch_us=10, graph=True)
    assert spans_of(device, kind="launch") == [(0, 10)]
    assert spans_of(device, kind="kernel") == [(10, 14), (14, 18), (18, 22)]
    assert set(device.run(1).spans["launch"]) == {1}


@settings(max_examples=50)
@given(DEVICES)
def test_nothing_runs_before_it_was_launched_and_no_line_does_two_things_at_once(device):
    run = device.run(4)
    for _, line in run.spans.groupby("lane"):
        assert (line["start"].to_numpy()[1:] >= line["end"].to_numpy()[:-1] - 1e-6).all()
    launches = run.spans[run.spans["kind"] == "launch"].set_index("launch")["end"]
    launched = run.spans[run.spans["kind"].isin(["kernel", "copy"])]
    assert (launched["start"].to_numpy() >= launches[launched["launch"]].to_numpy()).all()
    assert (launched["kind"] == "copy").sum() == (4 if device.copy_us else 0)
    launches = (1 if device.graph else device.kernels) + bool(device.copy_us)
    host = device.loading_us + launches * device.launch_us
    assert run.step_us >= max(host, device.kernels * device.kernel_us) - 1e-6


def test_a_simulated_device_says_how_its_dials_are_set_and_refuses_what_means_nothing():
    said = str(SimulatedDevice(kernels=8, kernel_us=40, copy_us=60, streams=2, asks=True))
    for dial in ("simulated GPU", "8 kernels of 40 µs", "10 µs a launch", "copy 60 µs", "2 streams", "asks"):
        assert dial in said
    with pytest.raises(ValueError, match="1 or 2 streams"):
        SimulatedDevice(streams=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(DEVICES)
def test_readers_of_traces_find_what_was_calculated(tmp_path, device):
    run = device.run(4)
    trace = traces.load(run.write_trace(tmp_path))
    (used,) = traces.accelerators(trace).itertuples()
    kernels = run.spans[run.spans["kind"] == "kernel"]
    assert used.name == "simulated GPU"
    assert used.utilization == pytest.approx(run.utilization)
    assert used.kernels == len(kernels)
    assert used.kernel_time == pytest.approx((kernels["end"] - kernels["start"]).sum())
    steps = traces.steps(trace)
    assert list(steps.index) == [0, 1, 2, 3]
    assert steps["end"].iloc[-1] == pytest.approx(run.end)
    assert (steps["end"] / 1e3 >= run.ends["device"] - 1e-9).all()


def test_the_trace_has_arrows_from_launches_to_work_and_names_everything_simulated(tmp_path):
    DEVICE.run(3).write_trace(tmp_path)
    content = json.loads((tmp_path / "simulated.pt.trace.json").read_text())
    events = content["traceEvents"]
    arrows = {(event["id"], event["ts"]) for event in events if event["ph"] in "sf"}
    ends = {
        (event["args"]["correlation"], event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "kernel", "gpu_memcpy") and "correlation" in event["args"]
    }
    assert arrows == ends and len(arrows) == 2 * 3 * 6
    assert content["simulated"] == str(DEVICE)
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    names += [event["name"] for event in events if event.get("cat") == "kernel"]
    assert names and all("simulated" in name for name in names)
