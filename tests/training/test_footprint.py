import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.training import footprint


def peak(features=250, wrapper=lambda each: each, batch=1_000, to_none=True):
    """Of a step with two square layers: each has 4 × features² bytes of weights, and keeps 4 × batch × features."""
    layers = [nn.Sequential(nn.Linear(features, features, bias=False), nn.Sigmoid()) for _ in range(2)]
    model = nn.Sequential(*map(wrapper, layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    images = torch.zeros(batch, features)

    def step():
        model(images).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)

    return footprint.peak_bytes(model, optimizer, step)


def test_weights_momentum_the_batch_and_what_forward_and_backward_make_count_once():
    weights, activation = 4 * 2 * 250 * 250, 4 * 1_000 * 250
    # Where the last layer's gradients are made there are the batch, what the first layer gave, and two gradients
    last = weights // 2
    assert peak() == 2 * weights + 4 * activation + last + 8  # 8: the sum, and its gradient


def test_gradients_that_are_filled_with_zeros_exist_while_the_next_step_climbs():
    weights = 4 * 2 * 250 * 250
    assert peak(to_none=False) == peak() + weights // 2 + weights // 2


def test_a_step_that_is_not_computed_has_the_same_peak_and_takes_no_memory():
    real = peak()
    with FakeTensorMode():
        assert peak() == real
        assert peak(batch=100_000_000) > 10**11  # bytes: more than this machine has


def test_a_tensor_that_was_freed_counts_no_more():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def one_after_the_other():
        for _ in range(5):
            torch.zeros(10**6).sum()

    assert 4 * 10**6 <= footprint.peak_bytes(model, optimizer, one_after_the_other) < 4 * 10**6 + 100
