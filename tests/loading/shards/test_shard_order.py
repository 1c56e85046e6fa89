"""Who reads which sample when: plain arithmetic, for any numbers of samples, ranks and steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shards import UNHURRIED

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
@settings(**UNHURRIED)
def test_each_sample_comes_once_in_an_order_that_depends_on_the_arguments_alone(pieces, how):
    np.random.seed(0)
    order = shards.order(np.array(pieces, np.int64), **how)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(sum(pieces)))
    np.random.seed(1)
    assert (shards.order(pieces, **how) == order).all()


@given(st.tuples(st.integers(0, 50), st.integers(0, 50)), st.tuples(st.integers(0, 50), st.integers(0, 50)))
@settings(**UNHURRIED)
def test_other_seeds_and_other_epochs_have_other_orders(one, other):
    first, second = (shards.order(np.full(30, 10), seed=seed, epoch=epoch) for seed, epoch in (one, other))
    assert (first == second).all() == (one == other)


def test_samples_move_about_as_far_as_in_a_shuffle_buffer_of_that_size():
    plain, order = (
        np.argsort(shards.order(np.full(4_000, 10), seed=3, epoch=0, lanes=1, shuffle=size)) for size in (0, 200)
    )
    assert np.std(order - plain) == pytest.approx(200, rel=0.1)  # the mean delay is 200 places, and so is its spread
    came = np.argsort(order[np.argsort(plain)])  # what leaves the lane, by when it came
    assert (np.maximum.accumulate(came) + 1 - np.arange(len(came))).max() < 1.2 * 200


# ------------------------------------------------------------------------------------------------ how it is divided

EPOCHS = st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(1, 9), st.integers(0, 300)).map(
    lambda each: (each[0], each[1], each[2], min(each[3], each[0]))
)


def divided(total, batch, world, start):
    """The positions that all ranks take, step by step: a list of a range a rank for each step."""
    ranks = [shards.batches(total, batch, rank=rank, world=world, start=start) for rank in range(world)]
    return list(zip(*ranks, strict=True))  # strict: equally many on each rank


@given(EPOCHS)
@settings(**UNHURRIED)
def test_the_ranks_take_each_position_once_in_order_step_by_step_in_batches_of_like_sizes(epoch):
    total, batch, world, start = epoch
    steps = divided(*epoch)
    for step in steps:
        sizes = [len(each) for each in step]
        assert 1 <= min(sizes) <= max(sizes) <= min(min(sizes) + 1, 2 * batch)
    taken = list(itertools.chain(*itertools.chain(*steps)))
    assert taken == list(range(start, total if total - start >= world else start))


@given(EPOCHS, st.integers(1, 9), st.integers(1, 20), st.data())
@settings(**UNHURRIED)
def test_an_interrupted_epoch_goes_on_with_other_ranks_where_it_was(epoch, other_world, other_batch, data):
    total, *_, start = epoch
    steps = divided(*epoch)
    stop = data.draw(st.integers(0, len(steps)))
    begun = list(itertools.chain(*itertools.chain(*steps[:stop])))
    done = begun[-1] + 1 if begun else start
    rest = list(itertools.chain(*itertools.chain(*divided(total, other_batch, other_world, done))))
    left = total - done if total - done >= other_world else 0
    assert begun + rest == list(range(start, done + left))


# ---------------------------------------------------------------------------------------------- who reads which piece


def readings(order, pieces, batch, readers):
    """How often all pieces are read together, if each reader reads those that it needs."""
    piece = np.repeat(np.arange(len(pieces)), pieces)[order]
    reader = np.arange(len(order)) // batch % readers
    return len(np.unique(piece * readers + reader))


@pytest.mark.parametrize(("readers", "batch"), [(2, 128), (4, 64), (8, 128)])
def test_readers_whose_number_divides_the_lanes_share_pieces_between_two_lanes_only(readers, batch):
    pieces = np.random.default_rng(0).integers(30, 41, 5_000)
    order = shards.order(pieces, seed=0, epoch=0)
    turns = 1_024 // batch  # in a round of all lanes
    assert readings(order, pieces, batch, readers) <= len(pieces) + turns - 1


def test_readers_whose_number_does_not_divide_the_lanes_share_nearly_all_pieces():
    """What the docstring warns of; the order stays right."""
    pieces = np.full(3_200, 35)
    assert readings(shards.order(pieces, seed=0, epoch=0), pieces, 64, 3) > 2.9 * len(pieces)
    assert readings(shards.order(pieces, seed=0, epoch=0, lanes=48), pieces, 64, 3) < 1.01 * len(pieces)


@pytest.mark.parametrize(
    "wrong", [lambda: shards.order([5], seed=0, epoch=0, lanes=0), lambda: shards.batches(10, 2, rank=2, world=2)]
)
def test_what_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="found"):
        wrong()
