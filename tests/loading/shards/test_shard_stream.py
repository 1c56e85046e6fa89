"""The stream of batches: in one order whoever reads it, interrupted anywhere, ahead of who waits, and soon gone."""

import os
import pickle
import threading
import warnings
import weakref
from multiprocessing.reduction import ForkingPickler

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.ranks import wait_until
from support.shards import InMemory, Watched, numbers, packed, streams

from helpers.data import buckets
from helpers.loading import shards
from helpers.loading.shards import stream as streaming

COUNT = 300


@pytest.fixture(scope="module")
def data():
    """A bucket with 300 samples in 40 pieces, and its index."""
    return packed(COUNT, piece_bytes=7_000)


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=4
    )
)
@settings(max_examples=60)
@pytest.mark.processes
def test_an_epoch_interrupted_anywhere_goes_on_exactly_with_any_ranks_workers_and_batches(data, parts):
    found, state = [], None
    for world, batch, workers, steps in parts:
        ranks = streams(*data, batch, world)
        for each in ranks if state else ():
            each.load_state(state)
        steps = min(steps, len(ranks[0]))
        found += numbers(ranks, workers, steps)
        states = [each.state(steps) for each in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    (last,) = streams(*data, 11, lanes=7, shuffle=90, seed=1)  # the order is that of the state
    last.load_state(state)
    assert found + numbers([last]) == shards.order(data[1].samples, seed=0, epoch=0, lanes=4, shuffle=20).tolist()


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 300), st.integers(1, 12), st.integers(1, 40))
@settings(max_examples=60)
def test_the_last_samples_are_delivered_or_said_to_be_left_out_whoever_goes_on(data, world, batch, steps, more, other):
    before, after = streams(*data, batch, world), streams(*data, other, more)
    state = before[0].state(min(steps, len(before[0])))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for each in after:
            each.load_state(state)
    left, delivered = COUNT - state["done"], len(numbers(after))
    assert delivered == left or (delivered == 0 and all(f"{left} sample" in str(each.message) for each in said))
    assert len(said) == (0 if delivered == left else more)


def test_a_state_of_other_shards_is_refused(data):
    (stream,), (other,) = streams(*data, 7), streams(*packed(COUNT, piece_bytes=9_000), 7)
    with pytest.raises(shards.ShardsError, match=f"{other.index.fingerprint}.*{stream.index.fingerprint}"):
        other.load_state(stream.state(1))


@pytest.mark.parametrize("odd", [{"epoch": None}, {"done": -1}, {"done": COUNT + 1}, {"lanes": 0}, {"seed": 1.5}])
def test_an_odd_state_is_refused_and_changes_nothing(data, odd):
    (stream,) = streams(*data, 7)
    with pytest.raises(shards.ShardsError, match="Expected .*, found"):
        stream.load_state(stream.state(1) | odd)
    with pytest.raises(shards.ShardsError, match="Expected .*, found"):
        stream.load_state({})
    assert stream.state(0)["done"] == 0


def test_a_sample_that_cannot_be_decoded_is_named(data):
    def broken(sample):
        return 1 / (int(sample["__key__"]) - 123)

    with pytest.raises(ZeroDivisionError) as error:
        list(shards.ShardStream(*data, 7, broken, threads=3))
    assert "000000123" in error.value.__notes__[0]


def test_workers_that_persist_see_each_epoch_and_each_state(tmp_path):
    """They hold the dataset as it was when they started, pickled for a process that is started anew."""
    on_disk = packed(COUNT, piece_bytes=7_000, bucket=buckets.Folder(tmp_path / "shards"))
    (stream,), (alone,) = streams(*on_disk, 7), streams(*on_disk, 7)
    kept = pickle.loads(ForkingPickler.dumps(stream))
    for each in (stream, alone):
        each.set_epoch(3)
    state = alone.state(30)
    for change in (lambda each: each.set_epoch(0), lambda each: each.set_epoch(1), lambda each: each.load_state(state)):
        for each in (stream, alone):
            change(each)
        assert numbers([kept]) == numbers([alone])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_of_a_process_that_used_a_store_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "_user", None)
    buckets.Folder(tmp_path).connect()
    child = os.fork()
    if not child:
        try:
            buckets.Folder(tmp_path).connect()
        except RuntimeError as refused:
            os._exit(7 if "multiprocessing_context='forkserver'" in str(refused) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_requests_run_ahead_while_a_batch_is_worked_on_and_stop_where_they_should(data):
    bucket, index = data
    together = threading.Barrier(3, timeout=60)  # each of the first requests waits for the two others
    asked = iter([together.wait] * 6)
    store = Watched(bucket.store, lambda: next(asked, lambda: None)())
    batches = iter(streams(InMemory(store), index, 7, threads=3)[0])
    taken = next(batches).tolist()  # and nothing is asked for from here on
    wait_until(lambda: store.requests >= 6 and not store.now)
    first = store.requests
    for _ in range(10):
        taken += next(batches).tolist()
    needed = len({int(index.first.searchsorted(number, side="right")) for number in taken})
    assert store.most == 3 and first < len(index.pieces) / 2
    assert store.requests <= needed + first
    batches.close()


def test_memory_holds_the_shuffle_buffers_of_the_lanes_and_the_pieces_that_were_read(monkeypatch):
    bucket, index = packed(2_000, piece_bytes=10_000)
    live, read, most = set(), [], 0

    class Sample(dict):  # a plain dict says nobody when it is freed
        pass

    def read_samples(piece):
        nonlocal most
        samples = list(map(Sample, shards.read_samples(piece)))
        read.append(len(samples))
        for number, sample in enumerate(samples):
            live.add((len(read), number))
            weakref.finalize(sample, live.discard, (len(read), number))
        most = max(most, len(live))
        return samples

    monkeypatch.setattr(streaming, "read_samples", read_samples)
    assert set(numbers(streams(bucket, index, 64, lanes=4, shuffle=400))) == set(range(2_000))
    assert len(read) > 80
    assert most <= 1.2 * 400 + 4 * max(read) + 64  # and the batch that is being made
    assert not live, "nothing is kept after the epoch"


def test_leaving_the_loop_waits_for_no_request_and_sends_no_other(data):
    bucket, index = data
    gate, free = threading.Event(), iter(range(4))
    store = Watched(bucket.store, lambda: next(free, None) is None and gate.wait())
    (stream,) = streams(InMemory(store), index, 7, threads=3, lanes=1)
    batches = iter(stream)
    next(batches)
    wait_until(lambda: store.now == 3)  # all threads wait, and more pieces have been asked for
    try:
        batches.close()
        before = store.requests
        waiting = [thread for thread in threading.enumerate() if thread.name.startswith("shards")]
        assert store.now == 3, "the loop was left while requests were on their way"
    finally:
        gate.set()
    for thread in waiting:
        thread.join()
    assert store.requests == before
