import json

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from support import asking
from support.simulated import DEVICES

from helpers import tensorboard, traces
from helpers.simulate import SimulatedDevice, tracing

DEVICE = SimulatedDevice(kernels=5, kernel_us=6, launch_us=10, copy_us=20, loading_us=15, streams=2, asks=True)


@pytest.fixture
def events(tmp_path):
    DEVICE.run(3).write_trace(tmp_path)
    return json.loads((tmp_path / tracing.NAME).read_text())["traceEvents"]


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


def test_what_the_device_idles_is_charged_to_what_the_host_does_meanwhile(tmp_path):
    run = SimulatedDevice(kernels=4, kernel_us=4, launch_us=10, loading_us=30).run(3)
    (gaps,) = traces.gaps(run.write_trace(tmp_path)).itertuples()
    assert gaps.count == 11
    assert gaps.loading == 2 * (30 - 4)  # the last kernel of a step runs meanwhile
    assert gaps.total == pytest.approx(run.end - 40 - 12 * 4)


def test_who_asks_is_found_waiting(tmp_path):
    run = DEVICE.run(3)
    waits = traces.waits(run.write_trace(tmp_path))
    expected = run.spans[run.spans["kind"] == "wait"]
    assert waits["operator"].tolist() == ["aten::item"] * 3
    assert waits["start"].tolist() == pytest.approx(expected["start"].tolist())
    assert waits["end"].tolist() == pytest.approx(expected["end"].tolist())


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
    head = json.loads((tmp_path / tracing.NAME).read_text())
    assert tracing.NAME.startswith("simulated")
    assert head["simulated"] == str(DEVICE) and head["deviceProperties"][0]["name"] == "simulated device"
    labels = [event["args"]["name"] for event in events if event["ph"] == "M"]
    names = [event["name"] for event in events if event.get("cat") == "kernel"]
    assert labels and all("simulated" in each for each in labels)
    assert names and all("(simulated)" in each for each in names)


def test_a_trace_is_replaced_by_the_next_one_but_never_stands_beside_a_recorded_one(tmp_path):
    DEVICE.run(3).write_trace(tmp_path / "run")
    DEVICE.run(5).write_trace(tmp_path / "run")
    assert len(traces.steps(tmp_path / "run")) == 5
    (tmp_path / "run" / tracing.NAME).rename(tmp_path / "run" / "worker.pt.trace.json")
    with pytest.raises(FileExistsError, match=r"without other traces, found worker\.pt\.trace\.json"):
        DEVICE.run(3).write_trace(tmp_path / "run")


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
