"""Trials of steps with another setting, as they run."""

from pathlib import Path

import pytest
import torch
from torch import nn

from stepscope.base import machine
from stepscope.facts.trials import Trial, Trials
from stepscope.observe import loop, trials

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("one_thread")]


class Step:
    """A step that trains a network of so many layers."""

    def __init__(self, width, layers, dtype=torch.float32):
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def __call__(self, numbers):
        self.model(numbers).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_weights_of_64_bits_are_tried_with_32_and_stay_as_they_are():
    step = Step(1024, 4, torch.float64)
    facts = loop.observe([torch.rand(128, 1024, dtype=torch.float64)] * 4, step, 5, Path("profile"))
    assert facts.trials.single.after_ms > 0
    assert {weight.dtype for weight in step.model.parameters()} == {torch.float64}


@pytest.mark.parametrize(("gigabytes", "tried"), [(1000, {2, 16}), (0.1, set())])
def test_a_small_batch_is_tried_as_a_part_of_a_larger_one_that_fits(monkeypatch, gigabytes, tried):
    monkeypatch.setattr(machine, "available_memory", lambda: gigabytes * 1e9)
    sizes, step = set(), Step(1024, 4)
    counted = lambda batch: (sizes.add(len(batch)), step(batch))  # noqa: E731
    found = trials.run(counted, torch.rand(2, 1024), threads=1, double=False)
    assert sizes == tried and (found.larger.after_ms > 0) == bool(tried)


@pytest.mark.parametrize("batch", [torch.rand(2, 8), [[1.0] * 8]])
def test_a_step_that_takes_no_other_batch_and_a_network_that_cannot_be_called_again_are_not_tried(batch):
    network = nn.Linear(8, 8).double()

    def step(numbers):
        network(input=torch.as_tensor(numbers).double().view(len(batch), 8)).sum().backward()

    tried = trials.run(step, batch, threads=1, double=True)
    assert (tried.larger, tried.single) == (Trial(), Trial())


def test_settings_that_slow_no_step_are_not_tried():
    tried = trials.run(Step(1024, 4), torch.rand(16, 1024), threads=1, double=False)
    assert tried == Trials(threads=1, other_threads=1, batch=16)


def test_threads_and_modes_of_pytorch_are_tried_and_stay_as_they_were():
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.autograd.set_detect_anomaly(True):
        tried = trials.run(Step(8, 1), torch.rand(16, 8), threads=2, double=False)
        assert torch.is_anomaly_enabled()
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    assert torch.get_num_threads() == 1
    assert all(each.after_ms > 0 for each in (tried.other, tried.anomaly, tried.deterministic))
