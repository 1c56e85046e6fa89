"""Tests of `stepscope.diagnosis.trials`: loops with one setting that slows them, diagnosed as they run."""

import pytest
import torch
from torch import nn

from stepscope import diagnosis
from stepscope.diagnosis import result, trials

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


def test_anomaly_detection_is_tried_without_and_stays_on():
    with torch.autograd.set_detect_anomaly(True):
        tried = trials.run(Step(32, 60), torch.rand(16, 32), threads=1, double=False)
        assert tried.anomaly.after > 0
        assert torch.is_anomaly_enabled()


def test_a_diagnosis_tries_weights_of_64_bits_with_32_and_they_stay_as_they_are(monkeypatch):
    seen, run_trials = [], trials.run
    monkeypatch.setattr(trials, "run", lambda *given, **facts: seen.append(run_trials(*given, **facts)) or seen[0])
    step = Step(1024, 4, torch.float64)
    diagnosis.diagnose([torch.rand(128, 1024, dtype=torch.float64)] * 4, step, steps=5)
    assert seen[0].single.after > 0
    assert {weight.dtype for weight in step.model.parameters()} == {torch.float64}


def test_a_small_batch_is_tried_in_a_larger_one_of_which_a_part_counts():
    sizes, step = set(), Step(1024, 4)
    counted = lambda batch: (sizes.add(len(batch)), step(batch))  # noqa: E731
    tried = trials.run(counted, torch.rand(2, 1024), threads=1, double=False)
    assert tried.larger.after > 0
    assert sizes == {2, 16}


def test_a_step_that_takes_no_other_number_of_items_is_diagnosed_all_the_same():
    def step(batch):
        assert len(batch) == 2

    assert trials.run(step, torch.rand(2, 8), threads=1, double=False).larger == trials.Trial()


def test_a_batch_without_tensors_and_a_network_that_cannot_be_called_again_are_not_tried():
    network = nn.Linear(8, 8).double()
    step = lambda batch: network(input=torch.tensor(batch)).sum().backward()  # noqa: E731
    tried = trials.run(step, [[1.0] * 8], threads=1, double=True)
    assert (tried.larger, tried.single) == (trials.Trial(), trials.Trial())


def test_what_is_set_as_it_should_be_is_not_tried():
    tried = trials.run(Step(1024, 4), torch.rand(16, 1024), threads=1, double=False)
    assert tried == trials.Trials(threads=1, other_threads=1, batch=16)


def test_a_trial_leaves_threads_and_deterministic_algorithms_as_they_were():
    torch.use_deterministic_algorithms(True, warn_only=True)
    tried = trials.run(Step(8, 1), torch.rand(16, 8), threads=2, double=False)
    assert torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    assert torch.get_num_threads() == 1
    assert tried.other.before > 0 and tried.deterministic.before > 0


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("too few threads", dict(threads=1, other_threads=8, other=trials.Trial(10, 4, True))),
        ("too many threads", dict(threads=32, other_threads=8, other=trials.Trial(10, 4, True))),
        ("anomaly detection", dict(anomaly=trials.Trial(10, 4, True))),
        ("deterministic algorithms", dict(deterministic=trials.Trial(10, 4, True))),
        ("numbers of 64 bits", dict(single=trials.Trial(10, 4, True))),
        ("a small batch", dict(batch=2, larger=trials.Trial(10, 4, True))),
    ],
)
def test_a_setting_is_named_only_if_the_other_way_took_less_in_most_rounds(name, facts):
    (found,) = result.findings(trials.RULES, trials.Trials(work=0.5, **facts))
    assert (found.name, found.gain) == (name, pytest.approx(0.3))
    unsure = {
        key: trials.Trial(10, 4, False) if isinstance(fact, trials.Trial) else fact for key, fact in facts.items()
    }
    assert not [*result.findings(trials.RULES, trials.Trials(**unsure))]
