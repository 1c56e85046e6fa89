"""Who reads which sample when: plain arithmetic, for any numbers of samples, ranks and steps."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shards import UNHURRIED

from helpers.loading import shards
from helpers.loading.shards.ordering import REMAINDERS

PIECES = st.lists(st.integers(0, 12), max_size=30)
SETTINGS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**40),
        "epoch": st.integers(0, 1_000),
        "lanes": st.integers(1, 40),
        "shuffle": st.integers(0, 60),
        "chunk": st.integers(1, 20),
    }
)


@given(PIECES, SETTINGS)
@settings(**UNHURRIED)
def test_each_sample_comes_once_in_an_epoch(pieces, how):
    order = shards.order(np.array(pieces, np.int64), **how)
    assert order.dtype == np.int64
    assert sorted(order) == list(range(sum(pieces)))


@given(PIECES, SETTINGS)
@settings(**UNHURRIED)
def test_the_order_depends_on_its_arguments_alone(pieces, how):
    np.random.seed(0)
    first = shards.order(np.array(pieces, np.int64), **how)
    np.random.seed(1)
    assert (shards.order(pieces, **how) == first).all()


@given(st.tuples(st.integers(0, 50), st.integers(0, 50)), st.tuples(st.integers(0, 50), st.integers(0, 50)))
@settings(**UNHURRIED)
def test_other_seeds_and_other_epochs_have_other_orders(one, other):
    first, second = (shards.order(np.full(30, 10), seed=seed, epoch=epoch) for seed, epoch in (one, other))
    assert (first == second).all() == (one == other)


def test_no_piece_and_one_piece_have_an_order():
    assert shards.order([], seed=0, epoch=0).tolist() == []
    assert shards.order([0, 0], seed=0, epoch=0).tolist() == []
    assert sorted(shards.order([5], seed=0, epoch=0)) == [0, 1, 2, 3, 4]


def test_without_shuffling_one_lane_gives_each_piece_as_it_was_written():
    order = shards.order([4] * 6, seed=0, epoch=0, lanes=1, shuffle=0, chunk=3)
    assert (np.diff(order.reshape(6, 4)) == 1).all()
    assert order.reshape(6, 4)[:, 0].tolist() != [0, 4, 8, 12, 16, 20]


def through_a_buffer(count, size):
    """The numbers as they leave a shuffle buffer: each new one takes the place of one drawn at random."""
    random, waiting, left = np.random.default_rng(0), [], []
    for number in range(count):
        waiting.append(number)
        if len(waiting) > size:
            left.append(waiting.pop(random.integers(len(waiting))))
    return np.array([*left, *random.permutation(waiting)])


def moved(seed, lanes, size):
    """The places that each of 40,000 samples is moved by, and how many of a lane are at most in its buffer."""
    samples = np.full(4_000, 10)
    plain, order = (
        np.argsort(shards.order(samples, seed=seed, epoch=0, lanes=lanes, shuffle=lanes * each, chunk=1))
        for each in (0, size)
    )
    lane = np.argsort(order[np.argsort(plain)][::lanes])  # what leaves the first lane, by when it came
    return order - plain, (np.maximum.accumulate(lane) + 1 - np.arange(len(lane))).max()


@pytest.mark.parametrize("lanes", [1, 8])
def test_samples_are_moved_as_far_as_a_shuffle_buffer_moves_them(lanes):
    buffer = np.argsort(through_a_buffer(40_000, 200)) - np.arange(40_000)
    distance, _ = moved(seed=3, lanes=lanes, size=200)
    assert np.std(distance) == pytest.approx(lanes * np.std(buffer), rel=0.1)


@pytest.mark.parametrize("lanes", [1, 8])
def test_a_buffer_holds_hardly_more_samples_than_it_is_said_to(lanes):
    _, most = moved(seed=3, lanes=lanes, size=200)
    assert 200 < most < 1.2 * 200


@pytest.mark.parametrize("wrong", [{"lanes": 0}, {"shuffle": -1}, {"chunk": 0}])
def test_an_order_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=rf"lanes and chunk of 1 or more.* found .*{next(iter(wrong.values()))}"):
        shards.order([5], seed=0, epoch=0, **wrong)


# ------------------------------------------------------------------------------------------------ how it is divided

EPOCHS = st.tuples(st.integers(0, 300), st.integers(1, 20), st.integers(1, 9), st.integers(0, 300)).map(
    lambda each: (each[0], each[1], each[2], min(each[3], each[0]))
)


def divided(total, batch, world, start, remainder):
    """The positions that all ranks take, step by step: a list of a range a rank for each step."""
    ranks = [
        shards.batches(total, batch, rank=rank, world=world, start=start, remainder=remainder) for rank in range(world)
    ]
    return list(zip(*ranks, strict=True))  # strict: equally many on each rank


@given(EPOCHS, st.sampled_from(REMAINDERS))
@settings(**UNHURRIED)
def test_all_ranks_have_equally_many_batches_and_none_is_empty(epoch, remainder):
    for step in divided(*epoch, remainder):
        sizes = [len(batch) for batch in step]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


@given(EPOCHS, st.sampled_from(REMAINDERS))
@settings(**UNHURRIED)
def test_the_ranks_together_take_the_positions_in_order_step_by_step(epoch, remainder):
    *_, start = epoch
    taken = list(itertools.chain(*itertools.chain(*divided(*epoch, remainder))))
    assert taken == list(range(start, start + len(taken)))


@given(EPOCHS)
@settings(**UNHURRIED)
def test_share_takes_each_position_once_unless_fewer_than_ranks_are_left(epoch):
    total, batch, world, start = epoch
    taken = sum(len(each) for step in divided(*epoch, "share") for each in step)
    assert taken == (total - start if total - start >= world else 0)
    assert all(len(each) <= 2 * batch for step in divided(*epoch, "share") for each in step)


@given(EPOCHS)
@settings(**UNHURRIED)
def test_drop_leaves_out_less_than_a_step(epoch):
    total, batch, world, start = epoch
    steps = divided(*epoch, "drop")
    assert all(len(each) == batch for step in steps for each in step)
    assert len(steps) == (total - start) // (batch * world)


@given(EPOCHS)
@settings(**UNHURRIED)
def test_repeat_fills_the_last_step_up(epoch):
    total, batch, world, start = epoch
    steps = divided(*epoch, "repeat")
    assert all(len(each) == batch for step in steps for each in step)
    assert len(steps) == -(-(total - start) // (batch * world))


@given(EPOCHS, st.integers(1, 9), st.integers(1, 20), st.data())
@settings(**UNHURRIED)
def test_an_interrupted_epoch_goes_on_with_other_ranks_where_it_was(epoch, other_world, other_batch, data):
    total, *_, start = epoch
    steps = divided(*epoch, "share")
    stop = data.draw(st.integers(0, len(steps)))
    begun = list(itertools.chain(*itertools.chain(*steps[:stop])))
    done = begun[-1] + 1 if begun else start
    rest = list(itertools.chain(*itertools.chain(*divided(total, other_batch, other_world, done, "share"))))
    left = total - done if total - done >= other_world else 0
    assert begun + rest == list(range(start, done + left))


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 2, "world": 2}, {"rank": -1}, {"batch": 0}, {"start": 11}, {"start": -1}, {"remainder": "forget"}],
)
def test_a_division_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match=f"found .*{wrong.get('rank', next(iter(wrong.values())))}"):
        shards.batches(**({"total": 10, "batch": 2} | wrong))


# ---------------------------------------------------------------------------------------------- who reads which piece


def readings(order, pieces, batch, readers):
    """How often all pieces are read together, if each reader reads those that it needs."""
    piece = np.repeat(np.arange(len(pieces)), pieces)[order]
    reader = np.arange(len(order)) // batch % readers
    return len(np.unique(piece * readers + reader))


@given(
    st.sampled_from([(lanes, readers) for lanes in (4, 6, 8) for readers in range(1, 9) if lanes % readers == 0]),
    st.integers(1, 20),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(0, 100),
)
@settings(**UNHURRIED)
def test_readers_whose_number_divides_the_lanes_share_no_piece(lanes_and_readers, rounds, chunk, chunks, shuffle):
    """Where whole pieces fill the lanes."""
    lanes, readers = lanes_and_readers
    pieces = np.full(lanes * rounds, chunk * chunks)
    order = shards.order(pieces, seed=0, epoch=0, lanes=lanes, shuffle=shuffle, chunk=chunk)
    assert readings(order, pieces, chunk, readers) == len(pieces)


@pytest.mark.parametrize("count", [50, 500, 5_000])
@pytest.mark.parametrize(("readers", "batch"), [(2, 64), (2, 128), (4, 64), (4, 256), (8, 64), (8, 128)])
def test_where_pieces_differ_readers_share_those_between_two_lanes_only(count, readers, batch):
    pieces = np.random.default_rng(count).integers(30, 41, count)
    order = shards.order(pieces, seed=0, epoch=0)
    turns = 1_024 // batch  # in a round of all lanes
    assert readings(order, pieces, batch, readers) <= len(pieces) + turns - 1


def test_readers_whose_number_does_not_divide_the_lanes_share_nearly_all_pieces():
    """What the docstring warns of; the order stays right."""
    pieces = np.full(3_200, 35)
    order = shards.order(pieces, seed=0, epoch=0)
    assert readings(order, pieces, 64, 3) > 2.9 * len(pieces)
    assert readings(shards.order(pieces, seed=0, epoch=0, lanes=48), pieces, 64, 3) < 1.01 * len(pieces)
