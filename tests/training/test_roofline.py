import pytest
import torch

from helpers import config, training
from helpers.training import roofline

LIMITS = roofline.Limits(tflops=2.0, gb_per_second=100.0)


def placed(flops=0, moved=1, loading=0.0, kernels=None):
    return roofline.Placed(
        roofline.Work(flops, moved), LIMITS, step_ms=10.0, loading_share=loading, kernel_share=kernels
    )


def test_operations_of_a_step_are_those_of_its_layers_forward_and_backward():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 4 * 4, 10))
    step = training.TrainingStep(model, torch.optim.SGD(model.parameters(), lr=0.1))
    work = roofline.work_of(step, torch.randn(5, 3, 6, 6), torch.arange(5))
    forward = {"conv": 5 * 2 * (3 * 9) * (8 * 16), "linear": 5 * 2 * 128 * 10}
    # Backward does each product again for the weights, and again for what came before the layer, if anything did.
    assert work.flops == 2 * forward["conv"] + 3 * forward["linear"]


def test_bytes_of_a_step_are_those_that_its_operators_read_and_write():
    left, right = torch.ones(1000), torch.ones(1000)
    assert roofline.work_of(lambda left, right: left + right, left, right).bytes == 3 * 4000
    assert roofline.work_of(lambda left, right: left.view(10, 100).t().detach(), left, right).bytes == 0
    assert roofline.work_of(lambda left, right: torch.empty_like(left), left, right).bytes == 0


def test_a_step_is_placed_by_operations_and_time():
    step = placed(flops=5e9, moved=5e7)
    assert step.tflops == 0.5
    assert step.share_of_peak == 0.25
    assert step.work.intensity == 100
    assert step.shares["memory"] == 0.05
    assert LIMITS.ridge == 20


@pytest.mark.parametrize(
    ("step", "bound"),
    [
        (placed(flops=1.6e10, moved=1e8), "compute"),
        (placed(flops=1e9, moved=8e8), "memory"),
        (placed(flops=1e9, moved=1e8, loading=0.7), "input"),
        (placed(flops=1e9, moved=1e8, loading=0.1, kernels=0.3), "launch"),
        (placed(flops=1.2e10, moved=1e8, kernels=0.99), "compute"),
    ],
)
def test_a_step_is_bound_by_the_limit_that_takes_the_largest_share_of_it(step, bound):
    assert step.bound == bound
    assert f"{bound}-bound" in step.verdict()


def test_limits_are_those_of_the_fastest_call_in_two_turns(monkeypatch):
    turns = [[4.0, 2.0, 3.0], [6.0, 3.0], [9.0, 5.0]], [[6.0, 3.0], [4.0, 2.5], [7.0, 2.0]]
    milliseconds = iter(turns[0] + turns[1])  # product, copy and addition, twice
    monkeypatch.setattr(config, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(roofline.timing, "each_call_ms", lambda function: next(milliseconds))
    found = roofline.limits()
    assert found.tflops == pytest.approx(2 * 1024**3 / 0.002 / 1e12)
    assert found.gb_per_second == pytest.approx(2 * 256 * 2**20 / 0.002 / 1e9)
