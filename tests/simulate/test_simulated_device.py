"""A simulated device: what is calculated, and the trace that readers of traces find it in."""

import json

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import asking

from helpers.simulate import SimulatedDevice, simulated_trace
from stepscope import tensorboard, traces

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


def test_in_one_stream_a_copy_takes_its_turn_among_the_kernels():
    device = SimulatedDevice(kernels=1, kernel_us=30, launch_us=1, copy_us=20)
    assert spans_of(device, 2, kind="copy") == [(1, 21), (51, 71)]
    assert spans_of(device, 2, kind="kernel") == [(21, 51), (71, 101)]


def test_in_a_stream_of_its_own_the_next_batch_is_copied_beside_the_kernels_of_this_one():
    device = SimulatedDevice(kernels=1, kernel_us=30, launch_us=1, copy_us=20, streams=2)
    assert spans_of(device, 3, kind="copy") == [(1, 21), (21, 41), (41, 61)]
    assert spans_of(device, 3, kind="kernel") == [(21, 51), (51, 81), (81, 111)]
    assert spans_of(device, 3, lane="stream 20") == spans_of(device, 3, kind="copy")


def test_a_graph_is_launched_once():
    device = SimulatedDevice(kernels=3, kernel_us=4, launch_us=10, graph=True)
    assert spans_of(device, kind="launch") == [(0, 10)]
    assert spans_of(device, kind="kernel") == [(10, 14), (14, 18), (18, 22)]
    assert set(device.run(1).spans["launch"]) == {1}


@settings(deadline=None, max_examples=50)
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
    for dial in ("simulated device", "8 kernels of 40 µs", "10 µs a launch", "copy 60 µs", "2 streams", "asks"):
        assert dial in said
    assert "2 kernels, 35 µs in all, launched at once" in str(SimulatedDevice([("a", 30), ("b", 5)], graph=True))
    with pytest.raises(ValueError, match="1 or 2 streams"):
        SimulatedDevice(streams=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(DEVICES)
def test_readers_of_traces_find_what_was_calculated(tmp_path, device):
    run = device.run(4)
    trace = traces.load(run.write_trace(tmp_path))
    (used,) = traces.accelerators(trace).itertuples()
    kernels = run.spans[run.spans["kind"] == "kernel"]
    assert used.name == "simulated device"
    assert used.utilization == pytest.approx(run.utilization)
    assert used.kernels == len(kernels)
    assert used.kernel_time == pytest.approx((kernels["end"] - kernels["start"]).sum())
    steps = traces.steps(trace)
    assert list(steps.index) == [0, 1, 2, 3]
    assert steps["end"].iloc[-1] == pytest.approx(run.end)
    assert (steps["end"] / 1e3 >= run.ends["device"] - 1e-9).all()


def test_the_trace_has_arrows_from_launches_to_work_and_names_everything_simulated(tmp_path):
    DEVICE.run(3).write_trace(tmp_path)
    content = json.loads((tmp_path / simulated_trace.NAME).read_text())
    events = content["traceEvents"]
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    ends = [(event["id"], event["ts"], event["tid"]) for event in events if event["ph"] == "f"]
    calls, work = {}, set()
    for event in events:
        number = event.get("args", {}).get("correlation")
        if event.get("cat") == "cuda_runtime" and number is not None:
            calls[number] = event["ts"]
        elif event.get("cat") in ("kernel", "gpu_memcpy"):
            work.add((number, event["ts"], event["tid"]))
    assert begins == calls
    assert set(ends) == work and len(ends) == 3 * 6
    assert simulated_trace.NAME.startswith("simulated") and content["simulated"] == str(DEVICE)
    names = [event["args"]["name"] for event in events if event["ph"] == "M"]
    names += [event["name"] for event in events if event.get("cat") == "kernel"]
    assert names and all("simulated" in name for name in names)


@pytest.mark.processes
def test_the_profiler_tab_shows_what_was_calculated(tmp_path):
    run = DEVICE.run(5)
    trace = traces.load(run.write_trace(tmp_path / "simulated"))
    server = tensorboard.start(tmp_path)
    try:
        shown = pd.DataFrame.from_dict(dict(asking.overview(server, "simulated")), orient="index")
        assert (abs(traces.breakdown(trace)[shown.columns] - shown) <= 1).all(axis=None)  # µs
        summary = {
            row["title"]: row["value"] for row in asking.ask(server, "overview", "simulated")["gpu_metrics"]["data"]
        }
        assert summary["Name"] == "simulated device"
        assert summary["GPU Utilization"] == f"{run.utilization * 100:.2f} %"
    finally:
        server.stop()
