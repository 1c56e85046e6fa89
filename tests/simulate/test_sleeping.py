import pytest
import torch
from support.clock import Clock
from torch import nn

from helpers import simulate


@pytest.mark.parametrize(("images", "seconds"), [(1, 0.010), (8, 0.010), (32, 0.040)])
def test_a_simulated_gpu_takes_longer_only_for_more_images_than_fill_it(monkeypatch, images, seconds):
    clock = Clock(monkeypatch, simulate)
    simulate.SimulatedGPU(10, full_at=8)(torch.zeros(images), None)
    assert clock.now == pytest.approx(seconds)
    assert clock.worked == 0


def test_one_that_is_as_a_gpu_takes_so_many_images_a_second_in_any_batch(monkeypatch):
    clock, step = Clock(monkeypatch, simulate), simulate.SimulatedGPU.of("H100")
    for images in (100, 300):
        step(torch.zeros(images), None)
    assert clock.now == pytest.approx(0.224)
    assert str(step) == "simulated GPU (takes 1,786 images/s, as an H100 at ResNet-50)"


def test_a_sleeping_layer_sleeps_forward_and_backward_and_takes_no_cpu_time(monkeypatch):
    clock = Clock(monkeypatch, simulate)
    y = simulate.SleepingLayer(0.01, forward_ms=4, backward_ms=8)(torch.ones(3))
    assert clock.now == pytest.approx(0.004)
    y.sum().backward()
    assert clock.now == pytest.approx(0.012)
    assert clock.worked == 0


def test_a_sleeping_layer_has_the_gradients_of_what_it_computes():
    layers = nn.Sequential(*[simulate.SleepingLayer(40e-6, 0, 0).double() for _ in range(3)])
    x = torch.randn(2, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layers(x), (x, *layers.parameters()))


def test_what_sleeps_is_an_operator_in_a_trace_and_says_what_it_is():
    layer, step = simulate.SleepingLayer(0.5, forward_ms=3, backward_ms=5), simulate.SimulatedGPU(4, full_at=8)
    assert str(step) == "simulated GPU (4 ms a step of up to 8 images)"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        layer(torch.ones(1)).sum().backward()
        step(torch.zeros(1), None)
    spans = {event.name: event.time_range.elapsed_us() for event in profiler.events()}
    assert spans["simulate::sleeping_layer_forward"] >= 3000
    assert spans["simulate::sleeping_layer_backward"] >= 5000
    assert spans["simulate::simulated_gpu_step"] >= 4000
