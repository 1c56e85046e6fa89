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


A_MS = 2039 * 10**6  # bytes that an A100 moves in a ms, at its data sheet's bandwidth; and so many operations:
ON_TENSOR_CORES, ON_CUDA_CORES = 312 * 10**9, 19.5 * 10**9


def kernel_of(name="add", of_bytes=0, flops=0, dtype=HALF, compiled=False, **facts):
    operator = called_operators.Operator(name, flops, ((-1, 0, of_bytes),), (), dtype, **facts)
    (kernel,) = calculated.calculate([operator], "A100", compiled=compiled).kernels.itertuples()
    return kernel


def test_a_kernel_that_only_moves_bytes_takes_their_time_by_its_class():
    added = kernel_of(of_bytes=A_MS)
    assert added.ms == pytest.approx(1 / calculated.SHARES["elementwise"], rel=0.01) and added.limit == "memory"
    slow = kernel_of("native_batch_norm", A_MS, native=True).ms
    assert slow > 2 * kernel_of("native_batch_norm", A_MS).ms > 2 * added.ms
    assert kernel_of("native_batch_norm", A_MS, native=True, elementwise=True, compiled=True).ms == added.ms
    assert kernel_of("max_pool2d_with_indices", A_MS).ms > 4 * added.ms


def test_a_product_on_tensor_cores_waits_for_its_bytes_and_computes_then():
    computing, moving = kernel_of("mm", 0, ON_TENSOR_CORES), kernel_of("mm", A_MS, 1)
    assert (computing.limit, moving.limit) == ("compute", "memory")
    assert computing.ms == pytest.approx(1 / calculated.TENSOR_CORES, rel=0.01)
    assert kernel_of("mm", A_MS, ON_TENSOR_CORES).ms == pytest.approx(computing.ms + moving.ms, rel=0.01)
    turned = kernel_of("convolution", A_MS, 1, contiguous=True).ms - moving.ms
    assert turned == pytest.approx(2 / calculated.SHARES["layout"], rel=0.01)


def test_a_product_without_tensor_cores_takes_the_longer_of_two_times():
    def time(name, of_bytes=0, **facts):
        return kernel_of(name, of_bytes, ON_CUDA_CORES, torch.float64, **facts).ms

    assert time("mm") == time("mm", A_MS // 2) == pytest.approx(1 / calculated.CONTIGUOUS, rel=0.01)
    assert time("convolution") == pytest.approx(1 / calculated.CHANNELS_LAST, rel=0.01)
    first, grouped = (
        kernel_of("convolution", 0, ON_CUDA_CORES, **{fact: True}) for fact in ("few_channels", "grouped")
    )
    assert first.ms == pytest.approx(1 / calculated.FEW_CHANNELS, rel=0.01)
    assert grouped.ms == time("convolution")


def test_each_kernel_takes_a_shortest_time():
    kernel = kernel_of(of_bytes=8, kernels=3)
    assert kernel.limit == "shortest kernel"
    assert kernel.ms == pytest.approx(3 * (calculated.SHORTEST_US + calculated.BETWEEN_US) / 1e3)


@pytest.mark.parametrize("cudnn", [92_600, None])
def test_which_batch_normalization_runs_is_asked_of_pytorch_where_it_can_say(monkeypatch, cudnn):
    if torch.backends.cudnn.version() is None and cudnn:
        pytest.skip("this PyTorch has no cuDNN to ask")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

    def native(dtype):
        called_operators._selects_cudnn.cache_clear()
        recorded = called_operators.record_without_computing(
            calculated.training_step("resnet18", 2, 32, channels_last=True, autocast=dtype)
        )
        return {each.native for each in recorded if "batch_norm" in each.name}

    assert [native(dtype) for dtype in (None, torch.float16, HALF)] == [{False}, {False}, {True}]


def test_a_step_of_many_short_kernels_waits_for_the_host_unless_a_graph_starts_them():
    recorded = calculated.recorded("resnet18", 1, foreach=False)
    eager, graph = (calculated.calculate(recorded, "H100", graph=graph) for graph in (False, True))
    assert (eager.limit, graph.limit) == ("launches", "shortest kernel")
    assert eager.step_ms == pytest.approx(eager.host_ms, rel=0.01) == len(recorded) * calculated.HOST_US / 1e3
    assert graph.step_ms == pytest.approx(graph.kernels.ms.sum() + calculated.LAUNCH_US / 1e3)
    assert graph.steady_ms == pytest.approx(graph.device.run(steps=100).step_us / 1e3, rel=1e-3)
    at_once = calculated.calculate(calculated.recorded("resnet18", 1), "H100")
    assert at_once.step_ms < 0.7 * eager.step_ms  # the optimizer's kernels
    compiled = calculated.calculate(recorded, "H100", compiled=True)
    assert compiled.host_ms < eager.host_ms / 3


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
    own = calculated.Gpu("mine", 0.5, None, 0.5, 10, 8, "measured", measured=True)
    assert calculated.calculate(product, own).kernels.ms.item() == pytest.approx(4)


def test_a_gpu_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="Expected one of T4, .*, found 'Voodoo'"):
        calculated.calculate([], "Voodoo")
