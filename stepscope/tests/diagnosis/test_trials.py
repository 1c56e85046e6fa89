"""Tests of `stepscope.diagnosis.trials`: loops with one setting that slows them, diagnosed as they run."""

import pytest
import torch
from torch import nn

from stepscope import diagnosis
from stepscope.diagnosis import run, trials

pytestmark = pytest.mark.processes


class Step:
    """A step that trains a network of so many layers."""

    def __init__(self, width, layers, dtype=torch.float32):
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def __call__(self, numbers):
        self.model(numbers).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(autouse=True)
def one_thread(quick, monkeypatch):
    """As many as there are cores for them, or so it seems."""
    monkeypatch.setattr(run, "_threads", lambda *_: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def first(step, batch):
    return diagnosis.diagnose([batch] * 4, step, steps=5).findings[0]


def test_anomaly_detection_is_tried_without_and_stays_on(quick):
    with torch.autograd.set_detect_anomaly(True):
        assert first(Step(32, 60), torch.rand(16, 32)).name == "anomaly detection"
        assert torch.is_anomaly_enabled()


def test_weights_of_64_bits_are_tried_with_32(quick):
    found = first(Step(1024, 4, torch.float64), torch.rand(128, 1024, dtype=torch.float64))
    assert found.name == "numbers of 64 bits"
    assert 0.2 < found.gain < 0.8


def test_a_small_batch_is_tried_in_a_larger_one(quick):
    assert first(Step(1024, 4), torch.rand(2, 1024)).name == "a small batch"


def test_a_trial_leaves_threads_and_deterministic_algorithms_as_they_were(quick):
    torch.use_deterministic_algorithms(True, warn_only=True)
    tried = trials.run(Step(8, 1), torch.rand(16, 8), threads=2, double=False)
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    assert torch.get_num_threads() == 1
    assert tried.other.before > 0 and tried.deterministic.before > 0


@pytest.mark.parametrize(("threads", "other", "name"), [(1, 8, "too few threads"), (32, 8, "too many threads")])
def test_threads_are_named_only_if_another_number_took_less_in_most_rounds(threads, other, name):
    sure, unsure = trials.Trial(10, 4, True), trials.Trial(10, 4, False)
    (found,) = trials.findings(trials.Trials(work=0.5, threads=threads, other_threads=other, other=sure))
    assert (found.name, found.gain) == (name, pytest.approx(0.3))
    assert not [*trials.findings(trials.Trials(threads=threads, other_threads=other, other=unsure))]
