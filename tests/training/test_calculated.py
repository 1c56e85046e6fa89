"""Tests of what is calculated of a GPU, by hand for small steps; `test_elsewhere` holds it against others' figures."""

import pytest
import torch
from torch import nn

from helpers.training import calculated, called_operators
from stepscope import traces

HALF = torch.bfloat16


def test_operators_are_those_of_a_step_that_is_computed():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)
        )
        images, labels = torch.randn(5, 4, 6, 6), torch.arange(5)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)

        def step():
            nn.functional.cross_entropy(model(images), labels).backward()
            sgd.step()
            sgd.zero_grad()

        return step

    step = build()
    step()
    computed, alike = called_operators.record(step), called_operators.record_without_computing(build)
    names = [each.name for each in alike if each.name != "copy_"]
    assert names == [each.name for each in computed if each.name != "copy_"]
    assert sum(each.flops for each in computed) == sum(each.flops for each in alike)
    forward, backward = (
        next(each for each in alike if each.name == name) for name in ("convolution", "convolution_backward")
    )
    assert forward.flops == 5 * 2 * (2 * 9) * (8 * 16) and forward.grouped  # two channels of four for each
    assert backward.flops == forward.flops  # for the weight; no image before it needs a gradient


def test_an_operator_takes_the_longest_of_its_limits():
    def time(**facts):
        usual = {"flops": 0, "read": (), "written": (), "dtype": HALF}
        result = calculated.calculate([called_operators.Operator("x", **usual | facts)], "A100")
        return result.kernels.ms.item(), result.kernels.limit.item()

    assert time(flops=312 * 10**9) == (pytest.approx(1 / calculated.COMPUTE), "compute")
    without_tensor_cores = pytest.approx(16 / calculated.COMPUTE)
    assert time(flops=312 * 10**9, grouped=True) == (without_tensor_cores, "compute")
    assert time(read=((-1, 0, 2039 * 10**6),)) == (pytest.approx(1 / calculated.BANDWIDTH), "memory")
    assert time(kernels=3) == (pytest.approx(3 * calculated.SHORTEST_US / 1e3), "shortest kernel")
    turned, _ = time(read=((-1, 0, 2039 * 10**6),), flops=1, contiguous=True)
    assert turned == pytest.approx(3 / calculated.BANDWIDTH)


def test_a_step_of_many_short_kernels_waits_for_its_launches_unless_a_graph_makes_them():
    recorded = calculated.recorded("resnet18", 1, foreach=False)
    eager, graph = (calculated.calculate(recorded, "H100", graph=graph) for graph in (False, True))
    assert (eager.limit, graph.limit) == ("launches", "shortest kernel")
    assert eager.step_ms == pytest.approx(eager.kernels.kernels.sum() * calculated.LAUNCH_US / 1e3, rel=0.01)
    assert graph.step_ms == pytest.approx(graph.kernels.ms.sum() + calculated.LAUNCH_US / 1e3)
    assert graph.steady_ms == pytest.approx(graph.device.run(steps=100).step_us / 1e3, rel=1e-3)
    at_once = calculated.calculate(calculated.recorded("resnet18", 1), "H100")
    assert at_once.step_ms < 0.7 * eager.step_ms  # the optimizer's kernels


def test_what_a_compiler_makes_one_kernel_moves_each_tensor_once():
    def build():
        images, weight = torch.empty(1000), torch.empty(1000)
        return lambda: ((images * weight).relu() + images).view(10, 100).sin()

    eager = called_operators.record_without_computing(build)
    (kernel,) = calculated.fused(eager)
    assert kernel.name == "mul + relu + add + sin"
    assert (sum(each.bytes for each in eager), kernel.bytes) == ((3 + 2 + 3 + 2) * 4000, (2 + 1) * 4000)


def test_its_time_lines_are_a_trace_that_says_so_in_each_name(tmp_path):
    step = calculated.calculate(calculated.recorded("resnet18", 1))
    folder = step.device.run(steps=3).write_trace(tmp_path)
    (used,) = traces.accelerators(folder).itertuples()
    assert used.name == "calculated for H100 GPU" and used.kernels == 3 * step.kernels.kernels.sum()
    assert used.kernel_time == pytest.approx(3e3 * step.kernels.ms.sum())
    assert all("(calculated for H100)" in name for name in traces.kernels(folder).index)


def test_a_device_of_ones_own_takes_the_limits_that_were_measured():
    product = [called_operators.Operator("mm", 2 * 10**9, (), (), torch.float32)]
    own = calculated.Gpu("mine", 0.5, None, 0.5, 10, 8, "measured", reached=(1, 1))
    assert calculated.calculate(product, own).kernels.ms.item() == pytest.approx(4)


def test_a_gpu_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="Expected one of T4, .*, found 'Voodoo'"):
        calculated.calculate([], "Voodoo")
