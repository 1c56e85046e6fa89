"""Tests of what is calculated of a GPU: by hand for small steps, and held against figures that others measured."""

import math
import statistics

import pytest
import torch
import torchvision
from torch import nn

from helpers.training import calculated, called_operators

HALF = torch.bfloat16


def training(network, batch, dtype=None, channels_last=False, **optimizer):
    """Return what builds a training step of a network of torchvision's on images of 224 × 224."""

    def build():
        layout = torch.channels_last if channels_last else torch.contiguous_format
        model = getattr(torchvision.models, network)(weights=None).to(memory_format=layout)
        images, labels = torch.empty(batch, 3, 224, 224).to(memory_format=layout), torch.zeros(batch).long()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **optimizer)

        def step():
            with torch.autocast("cpu", dtype or HALF, enabled=dtype is not None):
                loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            sgd.step()
            sgd.zero_grad()

        return step

    return build


# Images per second in training. The first six chose the two constants; timm's are of its files
# results/benchmark-train-amp-{nchw,nhwc}-pt112-cu113-rtx3090.csv, NVIDIA's of DeepLearningExamples, resnet50v1.5.
CHOSEN = {
    ("resnet50", "RTX 3090", HALF, False): (826, "timm, PyTorch 1.12"),
    ("resnet50", "RTX 3090", HALF, True): (1218, "timm, PyTorch 1.12"),
    ("resnet50", "A100", None, False): (938, "NVIDIA, NGC 21.03, TF32"),
    ("resnet50", "A100", HALF, True): (2470, "NVIDIA, NGC 21.03, AMP"),
    ("resnet50", "V100", None, False): (367, "NVIDIA, NGC 21.03, float32"),
    ("resnet50", "V100", torch.float16, True): (1200, "NVIDIA, NGC 21.03, AMP"),
}
HELD_OUT = {
    ("resnet18", "RTX 3090", HALF, False): (2764, "timm, PyTorch 1.12"),
    ("resnet18", "RTX 3090", HALF, True): (3482, "timm, PyTorch 1.12"),
    ("vit_b_16", "RTX 3090", HALF, False): (391, "timm, PyTorch 1.12"),
    ("vit_b_16", "RTX 3090", HALF, True): (393, "timm, PyTorch 1.12"),
    ("convnext_tiny", "RTX 3090", HALF, False): (813, "timm, PyTorch 1.12"),
    ("convnext_tiny", "RTX 3090", HALF, True): (819, "timm, PyTorch 1.12"),
}


@pytest.mark.slow
def test_what_is_calculated_is_near_what_others_measured():
    recorded, speeds = {}, {}
    for case in [*CHOSEN, *HELD_OUT]:
        network, gpu, dtype, channels_last = case
        batch = 256 if network.startswith("resnet") and gpu != "RTX 3090" else 128
        step = network, batch, dtype, channels_last
        if step not in recorded:
            recorded[step] = called_operators.record_without_computing(training(*step))
        speeds[case] = batch / calculated.calculate(recorded[step], gpu).step_ms * 1e3
    off = {case: speeds[case] / measured for case, (measured, _) in {**CHOSEN, **HELD_OUT}.items()}
    distances = [math.exp(abs(math.log(ratio))) for ratio in off.values()]
    assert statistics.median(distances) < 1.10 and max(distances) < 4 / 3, off
    gains = {}
    for network in ("resnet50", "resnet18", "vit_b_16", "convnext_tiny"):
        one, other = ((network, "RTX 3090", HALF, channels_last) for channels_last in (False, True))
        gains[network] = off[other] / off[one]
    assert all(0.85 < gain < 1.15 for gain in gains.values()), gains
    assert abs(statistics.median(gains.values()) - 1) < 0.05, gains


def test_operators_are_those_of_a_step_that_is_computed():
    def build():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)
        )
        images, labels = torch.randn(5, 4, 6, 6), torch.arange(5)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)

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
    assert time(flops=312 * 10**9, grouped=True) == (
        pytest.approx(16 / calculated.COMPUTE),
        "compute",
    )  # no Tensor Core
    assert time(read=((-1, 0, 2039 * 10**6),)) == (pytest.approx(1 / calculated.BANDWIDTH), "memory")
    assert time(kernels=3) == (pytest.approx(3 * calculated.SHORTEST_US / 1e3), "shortest kernel")
    turned, _ = time(read=((-1, 0, 2039 * 10**6),), flops=1, contiguous=True)
    assert turned == pytest.approx(3 / calculated.BANDWIDTH)


def test_a_step_of_many_short_kernels_waits_for_its_launches_unless_a_graph_makes_them():
    recorded = called_operators.record_without_computing(training("resnet18", 1, foreach=False))
    eager, graph = (calculated.calculate(recorded, "H100", graph=graph) for graph in (False, True))
    assert eager.utilization < 0.6
    assert eager.step_ms == pytest.approx(eager.kernels.kernels.sum() * calculated.LAUNCH_US / 1e3, rel=0.01)
    assert graph.utilization == pytest.approx(1)
    at_once = calculated.calculate(called_operators.record_without_computing(training("resnet18", 1)), "H100")
    assert at_once.step_ms < 0.7 * eager.step_ms  # the optimizer's kernels


def test_what_a_compiler_makes_one_kernel_moves_each_tensor_once():
    def build():
        images, weight = torch.empty(1000), torch.empty(1000)
        return lambda: ((images * weight).relu() + images).view(10, 100).sin()

    eager = called_operators.record_without_computing(build)
    (kernel,) = calculated.fused(eager)
    assert kernel.name == "mul + relu + add + sin"
    assert (sum(each.bytes for each in eager), kernel.bytes) == ((3 + 2 + 3 + 2) * 4000, (2 + 1) * 4000)


def test_a_gpu_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="Expected one of T4, .*, found 'Voodoo'"):
        calculated.calculate([], "Voodoo")
