import pytest
import torch
from support.clock import Clock

from helpers import simulate


@pytest.mark.parametrize(("images", "seconds"), [(1, 0.010), (8, 0.010), (32, 0.040)])
def test_a_simulated_accelerator_takes_longer_only_for_more_images_than_fill_it(monkeypatch, images, seconds):
    clock = Clock(monkeypatch, simulate)
    simulate.SimulatedAccelerator(10, full_at=8)(torch.zeros(images), None)
    assert clock.now == pytest.approx(seconds)


def test_a_simulated_accelerator_takes_no_cpu_time(monkeypatch):
    clock = Clock(monkeypatch, simulate)
    simulate.SimulatedAccelerator(10)(torch.zeros(1), None)
    assert (clock.now, clock.worked) == (0.010, 0)


def test_a_simulated_accelerator_says_that_it_is_one():
    assert str(simulate.SimulatedAccelerator(5)) == "simulated accelerator (5 ms a step)"
    assert str(simulate.SimulatedAccelerator(10, full_at=8)) == "simulated accelerator (10 ms a step of up to 8 images)"


def test_the_simulated_step_is_an_operator_in_a_trace():
    step = simulate.SimulatedAccelerator(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            step(torch.zeros(1), None)
    events = [event for event in profiler.events() if event.name == "simulate::simulated_accelerator_step"]
    waits = [event.time_range.elapsed_us() for event in events]
    assert len(waits) == 2
    assert min(waits) >= 3000
