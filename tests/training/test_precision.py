import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from helpers.training import precision

TYPES = [each for each in precision.FORMATS if hasattr(torch, each.name)]


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))


@pytest.fixture
def loss(model):
    images, labels = torch.rand(8, 3, 8, 8), torch.arange(8) % 2
    return lambda: nn.functional.cross_entropy(model(images), labels)


@pytest.mark.parametrize("format", TYPES, ids=lambda each: each.name)
def test_the_bits_of_a_format_give_the_numbers_that_pytorch_states(format):
    stated = torch.finfo(getattr(torch, format.name))
    assert (format.largest, format.smallest_normal, format.spacing) == (stated.max, stated.tiny, stated.eps)
    assert 1 + format.exponent + format.mantissa == stated.bits


@pytest.mark.parametrize("format", TYPES, ids=lambda each: each.name)
def test_nothing_lies_between_0_and_the_smallest_number_of_a_format(format):
    smallest = torch.tensor(format.smallest, dtype=torch.float64)
    rounded = torch.stack([smallest, smallest * 0.49]).to(getattr(torch, format.name)).double()
    assert rounded.tolist() == [smallest, 0]


def test_tf32_has_the_range_of_float32_and_the_precision_of_float16():
    of = {each.name: each for each in precision.FORMATS}
    assert of["TF32"].smallest_normal == of["float32"].smallest_normal
    assert of["TF32"].spacing == of["float16"].spacing


def test_autocast_shows_in_the_types_that_operators_give(loss):
    def in_bfloat16():
        with torch.autocast("cpu", torch.bfloat16):
            loss()

    table = precision.operator_types(in_bfloat16)
    assert table.loc["convolution"].to_dict() == {"bfloat16": 1, "float32": 0}
    assert table.loc["_log_softmax"].to_dict() == {"bfloat16": 0, "float32": 1}
    assert set(precision.operator_types(loss).columns) == {"float32"}


def test_gradients_are_those_of_an_ordinary_backward_pass(model, loss):
    found = precision.gradients(model, loss, every=1)
    loss().backward()
    expected = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    torch.testing.assert_close(found["weights"], expected)
    assert found["activations"].numel() == 8 * (3 * 4 * 6 * 6 + 144 + 2)  # of five layers


def test_looking_at_gradients_leaves_the_model_as_it_was(model, loss):
    precision.gradients(model, loss)
    assert all(weight.grad is None for weight in model.parameters())
    assert not any(layer._forward_hooks for layer in model.modules())


def test_only_what_is_too_small_or_too_large_for_float16_is_lost():
    sizes = torch.tensor([0.0, 2.0**-26, -(2.0**-24), 1.0, 60_000.0, -70_000.0])
    assert precision.lost(sizes, 1) == pytest.approx((1 / 5, 1 / 5))
    assert precision.lost(sizes, 4) == pytest.approx((0, 2 / 5))


@settings(deadline=None)
@given(st.floats(-40, 15), st.integers(-20, 20))
@example(-4.999999999999993, -20)  # as a float32 the gradient is 2⁻⁵, so half of the smallest number when scaled
def test_a_loss_scale_shifts_the_range_of_float16(exponent, power):
    gradient = torch.tensor([2.0**exponent])
    zero, infinite = precision.lost(gradient, 2.0**power)
    scaled = gradient.item() * 2.0**power  # exact, in the 53 bits of a Python float
    assert bool(zero) == (scaled <= 2.0**-25)
    assert bool(infinite) == (scaled >= 65_520)  # halfway between the largest number and 2¹⁶


def test_rounded_layers_give_numbers_of_the_format_and_so_do_their_gradients(model, loss):
    given = []
    handles = precision.round_layers(model, torch.float16)
    model.register_forward_hook(lambda model, images, output: given.append(output.detach().clone()))
    loss().backward()
    rounded = [weight.grad.clone() for weight in model.parameters()]
    assert all(torch.equal(each, each.half().float()) for each in [*given, *rounded])
    for handle in handles:
        handle.remove()
    model.zero_grad()
    loss().backward()
    exact = [weight.grad for weight in model.parameters()]
    assert not any(torch.equal(each, each.half().float()) for each in [given[1], *exact[:2]])


def test_a_tiny_loss_scale_loses_the_gradients_where_they_leave_a_layer(model, loss):
    precision.round_layers(model, torch.float16)
    (loss() * 2.0**-30).backward()
    assert all((weight.grad == 0).all() for weight in model.parameters())
