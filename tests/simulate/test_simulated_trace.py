import json

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from support import asking
from support.simulated import DEVICES

from helpers.simulate import SimulatedDevice, simulated_trace
from stepscope import tensorboard, traces

DEVICE = SimulatedDevice(kernels=5, kernel_us=6, launch_us=10, copy_us=20, loading_us=15, streams=2, asks=True)


@pytest.fixture
def events(tmp_path):
    DEVICE.run(3).write_trace(tmp_path)
    return json.loads((tmp_path / simulated_trace.NAME).read_text())["traceEvents"]


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


def test_each_launch_has_an_arrow_to_what_it_launched(events):
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = [event for event in events if event["ph"] == "f"]
    calls = {event["args"]["correlation"]: event for event in events if event.get("cat") == "cuda_runtime"
             if "correlation" in event["args"]}  # fmt: skip
    work = {(event["args"]["correlation"], event["ts"], event["tid"]) for event in events
            if event.get("cat") in ("kernel", "gpu_memcpy")}  # fmt: skip
    assert {number: event["ts"] for number, event in begins.items()} == {n: call["ts"] for n, call in calls.items()}
    assert {(event["id"], event["ts"], event["tid"]) for event in ends} == work
    assert len(ends) == len(work) == 3 * 6


def test_everything_in_the_trace_is_named_simulated(tmp_path, events):
    head = json.loads((tmp_path / simulated_trace.NAME).read_text())
    assert simulated_trace.NAME.startswith("simulated")
    assert head["simulated"] == str(DEVICE) and head["deviceProperties"][0]["name"] == "simulated device"
    labels = [event["args"]["name"] for event in events if event["ph"] == "M"]
    names = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert labels and all("simulated" in each for each in labels)
    assert names and all("(simulated)" in each for each in names)


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
