import pytest
from hypothesis import given, settings
from support.simulated import DEVICES

from helpers.simulate import SimulatedDevice


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


def test_dials_that_mean_nothing_are_refused():
    with pytest.raises(ValueError, match="1 or 2 streams"):
        SimulatedDevice(streams=3)


def test_a_simulated_device_says_that_it_is_one_and_how_its_dials_are_set():
    said = str(SimulatedDevice(kernels=8, kernel_us=40, copy_us=60, streams=2, asks=True))
    expected = "8 kernels of 40 µs, 10 µs a launch, copy 60 µs, 2 streams, the host asks for the loss"
    assert said == f"simulated device ({expected})"
    assert "2 kernels, 35 µs in all, launched at once" in str(SimulatedDevice([("a", 30), ("b", 5)], graph=True))
