import pytest
import torch
from support.clock import Clock
from torch import nn

from helpers import config
from helpers.training import precision
from stepscope import timing

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


def test_autocast_shows_in_the_types_that_operators_give(loss):
    def in_bfloat16():
        with torch.autocast("cpu", torch.bfloat16):
            loss()

    table = precision.operator_types(in_bfloat16)
    assert table.loc["convolution"].to_dict() == {"bfloat16": 1, "float32": 0}
    assert table.loc["_log_softmax"].to_dict() == {"bfloat16": 0, "float32": 1}
    assert set(precision.operator_types(loss).columns) == {"float32"}


def test_gradients_are_those_of_an_ordinary_backward_pass(model, loss):
    gradients = precision.gradients(model, loss, every=1)
    assert all(weight.grad is None for weight in model.parameters())  # the model is as it was
    assert not any(layer._forward_hooks for layer in model.modules())
    loss().backward()
    expected = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    torch.testing.assert_close(gradients["weights"], expected)
    assert gradients["activations"].numel() == 8 * (3 * 4 * 6 * 6 + 144 + 2)  # of five layers


@pytest.mark.parametrize("scale", [2.0**-20, 1, 2.0**16])
def test_only_what_is_too_small_or_too_large_for_float16_is_lost_and_a_loss_scale_shifts_its_range(scale):
    smallest, largest = 2.0**-25, 65_520.0  # halfway to 0, and halfway between the largest number and 2¹⁶
    scaled = torch.tensor([smallest, -smallest * 1.001, 1, largest * 0.999, -largest, 2 * largest])
    gradients = torch.cat([torch.zeros(2), scaled / scale])
    assert precision.lost(gradients, scale) == pytest.approx((1 / 6, 2 / 6))


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


# Whether a format is fast enough to train in: by a simulated clock

BATCH = torch.zeros(32, 3, 8, 8), torch.zeros(32, dtype=torch.long)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch, timing, precision)


def step_of(clock, seconds_per_image, seen):
    def step(images, labels):
        seen.append(len(images))
        clock.sleep(seconds_per_image * len(images))

    return step


@pytest.mark.parametrize(("count", "parts"), [(1, [1]), (32, [2, 4, 8, 16, 32]), (33, [2, 4, 8, 16, 32, 33])])
def test_a_step_that_is_fast_enough_is_tried_with_all_images(clock, count, parts):
    seen, batch = [], (torch.zeros(count, 1), torch.zeros(count))
    trial = precision.try_step(step_of(clock, 0.004, seen), batch, usual_ms=150)
    assert sorted(set(seen)) == parts
    assert (trial.images, trial.affordable, trial.fast_enough, trial.faster) == (count, count, True, True)
    assert trial.ratio == pytest.approx(0.004 * count / 0.150)


@pytest.mark.parametrize(("times", "images", "affordable"), [(140, 2, 0), (8, 16, 8), (3.1, 32, 16)])
def test_a_step_that_takes_too_long_is_given_up_as_soon_as_that_is_clear(clock, times, images, affordable):
    trial = precision.try_step(step_of(clock, times * 0.150 / 32, []), BATCH, usual_ms=150, baseline="TF32")
    assert (trial.images, trial.affordable, trial.fast_enough, trial.faster) == (images, affordable, False, False)
    assert "TF32" in str(trial) and "too slow" in str(trial)


@pytest.mark.parametrize("times", [0.5, 2.9, 140, 10_000])
@pytest.mark.parametrize("usual", [0.01, 3, 60])
def test_to_find_out_takes_no_longer_than_the_preset_allows_but_for_the_first_call(clock, times, usual):
    precision.try_step(step_of(clock, times * usual / 32, []), BATCH, usual_ms=1e3 * usual)
    first_call = 2 * times * usual / 32
    assert clock.now <= max(config.preset().longest_comparison, first_call)


def test_a_machine_so_busy_that_the_time_is_up_is_not_trained_on_in_this_format(clock):
    usual = config.preset().longest_comparison / 2.5  # seconds
    trial = precision.try_step(step_of(clock, usual / 32, []), BATCH, usual_ms=1e3 * usual)
    assert trial.images == trial.affordable < 32 and not trial.fast_enough
    assert trial.ratio < 1 and not trial.faster  # a part of the images in less time says nothing


def test_a_call_that_something_else_delays_once_counts_by_the_other_one(clock):
    delays = iter([0, 0, 0.9, *[0] * 20])

    def step(images, labels):
        clock.sleep(0.001 * len(images) + next(delays))

    assert precision.try_step(step, BATCH, usual_ms=150).fast_enough
