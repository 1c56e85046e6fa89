"""Tests of settings that are changed from outside: what they do, and that they are given back."""

import pytest
import torch
from torch import nn

from stepscope.observe import settings


def gradients(passes, scale=None, factor=1.0):
    """Return the gradients of a network after some backward passes."""
    torch.manual_seed(0)
    network = nn.Linear(4, 2)
    inputs = torch.randn(passes, 3, 4)
    scale = scale and scale(lambda: [*network.parameters()])
    for rows in inputs:
        loss = (network(rows) ** 2).mean() * factor
        loss.backward() if scale is None else scale.backward(torch.Tensor.backward, loss)
    return [weight.grad for weight in network.parameters()], scale


@pytest.mark.parametrize("passes", [1, 3])
def test_a_scaled_loss_gives_the_gradients_of_the_loss_after_each_pass(passes):
    (usual, _), (scaled, scale) = gradients(passes), gradients(passes, settings.LossScale)
    assert not scale.overflowed()
    for one, other in zip(usual, scaled, strict=True):
        torch.testing.assert_close(one, other)


def test_an_overflow_is_seen_and_halves_the_scale():
    _, scale = gradients(1, settings.LossScale, factor=float("inf"))
    before = scale.scale.item()
    assert scale.overflowed()
    scale.update()
    assert scale.scale.item() == before / 2 and not scale.overflowed()


def test_options_of_an_optimizer_and_settings_of_pytorch_are_given_back():
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    before = dict(optimizer.param_groups[0])
    undo = settings.set_optimizer(optimizer, {"fused": True})
    assert optimizer.param_groups[0]["fused"] and not settings.can_fuse(optimizer)
    undo()
    assert {name: optimizer.param_groups[0][name] for name in before} == before
    threads, tf32 = torch.get_num_threads(), settings.uses_tf32()
    with settings.torch_with({"threads": threads + 1, "tf32": True}):
        assert torch.get_num_threads() == threads + 1 and settings.uses_tf32()
    assert (torch.get_num_threads(), settings.uses_tf32()) == (threads, tf32)
    with pytest.raises(KeyError), settings.torch_with({"threads": threads + 1, "tf32": True}):
        raise KeyError
    assert (torch.get_num_threads(), settings.uses_tf32()) == (threads, tf32)  # after an error, too


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="PyTorch before 2.9")
def test_tf32_works_where_a_script_has_set_its_newer_name():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision = conv.fp32_precision = "ieee"
        assert not settings.uses_tf32()
        with settings.torch_with({"tf32": True}):
            assert settings.uses_tf32() and conv.fp32_precision == "tf32"
        assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "ieee")
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


def test_a_networks_own_forward_and_layout_are_given_back():
    network = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    own = network.forward = lambda images: nn.Conv2d.forward(network, images) * 2
    change = settings.NetworkChange({"autocast": "bfloat16", "channels_last": True})
    with change.watching():
        network(torch.randn(1, 3, 8, 8))
    assert network.forward is not own and change.changed == ["Conv2d"]
    change.restore()
    assert network.forward is own and "_stepscope_forward" not in vars(network)
    assert network.weight.is_contiguous(memory_format=torch.channels_last)
