"""Who reads which sample when: plain arithmetic, for any numbers of samples, ranks and steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.loading import shards

PIECES = st.lists(st.integers(0, 60), max_size=30)
SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**40),
        "epoch": st.integers(0, 1_000),
        "lanes": st.integers(1, 40),
        "shuffle": st.integers(0, 60),
    }
)


@given(PIECES, SETTINGS)
def test_each_sample_comes_once_in_an_order_that_depends_on_the_arguments_alone(pieces, how):
    np.random.seed(0)
    order = shards.order(np.array(pieces, np.int64), **how)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(sum(pieces)))
    np.random.seed(1)
    assert (shards.order(pieces, **how) == order).all()


def test_other_seeds_and_other_epochs_have_other_orders():
    orders = [shards.order(np.full(30, 10), seed=seed, epoch=epoch) for seed in range(5) for epoch in range(5)]
    assert len({tuple(order) for order in orders}) == 25


def test_samples_move_about_as_far_as_in_a_shuffle_buffer_of_that_size():
    plain, order = (
        np.argsort(shards.order(np.full(4_000, 10), seed=3, epoch=0, lanes=1, shuffle=size)) for size in (0, 200)
    )
    assert np.std(order - plain) == pytest.approx(200, rel=0.1)  # the mean delay is 200 places, and so is its spread
    came = np.argsort(order[np.argsort(plain)])  # what leaves the lane, by when it came
    assert (np.maximum.accumulate(came) + 1 - np.arange(len(came))).max() < 1.2 * 200


def divided(total, batch, world, start):
    """The positions that all ranks take, step by step: a list of a range a rank for each step."""
    ranks = [shards.batches(total, batch, rank=rank, world=world, start=start) for rank in range(world)]
    return list(zip(*ranks, strict=True))  # strict: equally many on each rank


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 9), st.integers(0, 300))
def test_the_ranks_take_each_position_once_in_order_step_by_step_in_batches_of_like_sizes(left, batch, world, start):
    """From any start on: so an epoch that other ranks have begun goes on where they were."""
    total = start + left
    steps = divided(total, batch, world, start)
    for step in steps:
        sizes = [len(each) for each in step]
        assert 1 <= min(sizes) <= max(sizes) <= min(min(sizes) + 1, 2 * batch)
    taken = list(itertools.chain(*itertools.chain(*steps)))
    assert taken == list(range(start, total if left >= world else start))


@pytest.mark.parametrize(
    ("readers", "batch", "lanes", "least", "most"),
    [(2, 128, 32, 1, 1.002), (4, 64, 32, 1, 1.003), (8, 128, 32, 1, 1.002), (3, 64, 32, 2.9, 3), (3, 64, 48, 1, 1.01)],
)
def test_readers_whose_number_divides_the_lanes_hardly_share_pieces(readers, batch, lanes, least, most):
    """How often all pieces are read together, if each reader reads those that it needs."""
    pieces = np.random.default_rng(0).integers(30, 41, 5_000)
    order = shards.order(pieces, seed=0, epoch=0, lanes=lanes)
    piece, reader = np.repeat(np.arange(len(pieces)), pieces)[order], np.arange(len(order)) // batch % readers
    assert least <= len(np.unique(piece * readers + reader)) / len(pieces) <= most


@pytest.mark.parametrize(
    "wrong", [lambda: shards.order([5], seed=0, epoch=0, lanes=0), lambda: shards.batches(10, 2, rank=2, world=2)]
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="found"):
        wrong()
