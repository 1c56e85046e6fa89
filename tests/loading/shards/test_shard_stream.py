"""The stream of batches: in one order whoever reads it, interrupted anywhere, ahead of who waits, and soon gone."""

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shards import UNHURRIED, InMemory, Watched, as_workers, number_of, numbers, packed, streams
from torch.utils.data import DataLoader

from helpers import config
from helpers.data import stores
from helpers.loading import shards
from helpers.loading.shards import stream as streaming

COUNT = 300
needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")


@pytest.fixture(scope="module")
def data():
    """A bucket with 300 samples in 40 pieces, and its index."""
    return packed(COUNT, piece_bytes=7_000)


@pytest.fixture
def whole(data):
    """An epoch's samples, in batches of 7."""
    return numbers(streams(*data, 7))


def shards_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("shards")]


# -------------------------------------------------------------------------------------------------- one order for all


def test_an_epoch_has_each_sample_once_in_the_order_of_the_index(data, whole):
    _, index = data
    assert sorted(whole) == list(range(COUNT))
    assert whole == shards.order(index.samples, seed=0, epoch=0, lanes=4, shuffle=20).tolist()


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_ranks_and_workers_together_have_the_order_of_one_process(data, whole, world, workers):
    assert numbers(streams(*data, 7, world), workers) == whole


@pytest.mark.parametrize("batch", [1, 5, 64, 300])
def test_a_batch_of_another_size_is_of_the_same_order(data, whole, batch):
    assert numbers(streams(*data, batch)) == whole


def test_a_state_goes_on_in_its_own_order_whatever_the_stream_was_made_with(data):
    (stream,), (other,) = streams(*data, 7, chunk=5, shuffle=90), streams(*data, 11, lanes=7, seed=1)
    other.load_state(stream.state(3))
    assert numbers([other]) == numbers([stream])[21:]


@given(
    st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 40), st.integers(0, 4), st.integers(0, 30)), min_size=1, max_size=4
    )
)
@settings(**UNHURRIED, max_examples=60)
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
    (last,) = streams(*data, 11)
    last.load_state(state)
    assert found + numbers([last]) == numbers(streams(*data, 7))


def test_each_epoch_and_each_seed_has_its_own_order(data, whole):
    (other_seed,), (stream,) = streams(*data, 7, seed=1), streams(*data, 7)
    stream.set_epoch(1)
    orders = [whole, numbers([other_seed]), numbers([stream])]
    assert all(sorted(order) == list(range(COUNT)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_a_new_epoch_begins_at_its_start(data, whole):
    (stream,) = streams(*data, 7)
    stream.load_state(stream.state(5))
    assert len(stream) == 43 - 5
    stream.set_epoch(0)
    assert numbers([stream]) == whole


@pytest.mark.parametrize(("remainder", "count"), [("share", 300), ("drop", 280), ("repeat", 320)])
def test_the_remainder_is_shared_dropped_or_repeated(data, remainder, count):
    ranks = streams(*data, 10, 4, remainder=remainder)
    whole = numbers(streams(*data, 7))
    assert numbers(ranks, workers=2) == (whole + whole)[:count]
    assert [len(stream) for stream in ranks] == [-(-count // 40)] * 4
    end = ranks[0].state(len(ranks[0]))
    assert end["done"] == min(count, 300)
    ranks[1].load_state(end)
    assert len(ranks[1]) == 0


def test_nothing_comes_of_no_samples():
    assert numbers(streams(*packed(0), 7, 2), workers=2) == []


def test_a_state_of_other_shards_is_refused(data):
    (stream,), (other,) = streams(*data, 7), streams(*packed(COUNT, piece_bytes=9_000), 7)
    with pytest.raises(
        shards.OtherShards, match=f"{other.index.fingerprint}.*found one of others .{stream.index.fingerprint}"
    ):
        other.load_state(stream.state(1))


@pytest.mark.parametrize("steps", [-1, 44])
def test_a_state_after_steps_that_cannot_be_is_refused(data, steps):
    with pytest.raises(ValueError, match=f"Expected 0 to 43 steps, as many as there are batches, found {steps}"):
        streams(*data, 7)[0].state(steps)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"world": 0, "rank": 0}, {"threads": 0}, {"ahead": 0}, {"chunk": 0}])
def test_a_stream_that_cannot_be_is_refused_before_a_worker_starts(data, wrong):
    with pytest.raises(ValueError, match="Expected .* found"):
        shards.ShardStream(*data, **{"batch": 7, "decode": number_of} | wrong)


def test_a_sample_that_cannot_be_decoded_is_named(data):
    def broken(sample):
        return 1 / (int(sample["__key__"]) - 123)

    with pytest.raises(ZeroDivisionError) as error:
        list(shards.ShardStream(*data, 7, broken))
    assert error.value.__notes__ == ["This happened in decode, with sample 000000123 of memory/."]


# ------------------------------------------------------------------------------------------------ worker processes


@pytest.fixture
def on_disk(tmp_path):
    return packed(COUNT, piece_bytes=7_000, bucket=stores.Folder(tmp_path / "shards"))


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize(("start", "workers"), [("spawn", 1), ("forkserver", 3)])
def test_worker_processes_have_the_order_of_one_process(on_disk, whole, start, workers):
    if start not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {start}")
    (stream,) = streams(*on_disk, 7)
    loader = DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=start)
    assert [number for batch in loader for number in batch] == whole


@pytest.mark.processes
def test_workers_that_persist_see_each_epoch_and_each_state(on_disk):
    """They hold the dataset as it was when they started."""
    (stream,), (alone,) = streams(*on_disk, 7), streams(*on_disk, 7)
    loader = DataLoader(
        stream, batch_size=None, num_workers=2, multiprocessing_context="spawn", persistent_workers=True
    )
    for each in (stream, alone):
        each.set_epoch(3)
    state = alone.state(30)
    for change in (lambda each: each.set_epoch(0), lambda each: each.set_epoch(1), lambda each: each.load_state(state)):
        for each in (stream, alone):
            change(each)
        assert [number for batch in loader for number in batch] == numbers([alone])


@needs_fork
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # of newer Pythons; the child only reads
def test_forked_workers_see_a_new_epoch_too(data):
    (stream,) = streams(*data, 7)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(stream.epoch)
    stream.set_epoch(5)
    os.write(write, b"\n")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    os.close(read)
    os.close(write)


@needs_fork
@pytest.mark.processes
def test_a_forked_worker_of_a_process_that_used_the_store_gets_an_error(on_disk):
    (stream,) = streams(*on_disk, 7)
    next(iter(stream))
    with pytest.raises(shards.ForkedAfterUse, match="expected a process that began without .*forkserver"):
        next(iter(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork")))
    gc.collect()  # the loader, which waits for its worker when it is collected


FORK = """
import os
from pathlib import Path
from obstore.store import MemoryStore
from helpers.loading.shards import asking

class Bucket:
    def connect(self):
        return MemoryStore()

def named_threads():
    return [path for path in Path("/proc/self/task").glob("*/comm") if path.read_text().startswith("tokio")]

{before}
child = os.fork()
if not child:
    try:
        asking.connect(Bucket())
    except asking.ForkedAfterUse as error:
        print("noticed", flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
USED = """
MemoryStore().put("a", b"content")
while not named_threads():  # a thread gets its name a moment after it starts
    pass
"""


@needs_fork
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's threads")
@pytest.mark.parametrize(("before", "printed"), [(USED, "noticed\n"), ("", "")], ids=["used", "unused"])
def test_a_use_of_the_client_by_any_call_is_noticed_at_the_fork(before, printed):
    script = FORK.format(before=before)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=config.PROJECT)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr


def test_a_stream_can_be_pickled(data):
    (stream,) = streams(stores.Folder("anywhere"), data[1], 7)
    stream.set_epoch(4)
    copy = pickle.loads(pickle.dumps(stream))
    assert copy.state(9) == stream.state(9)


def test_collated_batches_are_tensors_by_default(data):
    batch = next(iter(shards.ShardStream(*data, 7, number_of)))
    assert isinstance(batch, torch.Tensor) and batch.shape == (7,)


# ---------------------------------------------------------------------------------------- what runs ahead, and memory


def test_as_many_requests_as_threads_are_on_their_way_at_a_time(data):
    bucket, index = data
    together = threading.Barrier(5, timeout=60)  # each waits for the four others
    asked = iter([together.wait] * 10)
    store = Watched(bucket.store, lambda: next(asked, lambda: None)())
    assert sorted(numbers(streams(InMemory(store), index, 7, threads=5))) == list(range(COUNT))
    assert store.most == 5


def test_requests_run_ahead_while_a_batch_is_worked_on_and_stop_where_they_should(data):
    bucket, index = data
    answered = threading.Semaphore(0)
    store = Watched(bucket.store, answered.release)
    batches = iter(streams(InMemory(store), index, 7, threads=2, ahead=6)[0])
    next(batches)  # and nothing is asked for from here on
    for _ in range(6):
        answered.acquire()
    wait_for(lambda: not store.now)
    first = store.requests
    taken = set()
    for _ in range(10):
        taken.update(next(batches))
    needed = len({int(index.first.searchsorted(number, side="right")) for number in taken})
    assert 6 <= first < len(index.pieces) / 2
    assert store.requests <= needed + first
    batches.close()


def test_each_piece_is_asked_for_once(data):
    bucket, index = data
    store = Watched(bucket.store)
    numbers(streams(InMemory(store), index, 7, 4, chunk=7))
    assert store.requests <= len(index.pieces) + 3 + 3, "four readers share pieces between two lanes, and the last step"
    store.requests = 0
    numbers(streams(InMemory(store), index, 7))
    assert store.requests == len(index.pieces)


@pytest.mark.parametrize("remainder", ["share", "repeat"])
@pytest.mark.parametrize(("lanes", "shuffle"), [(1, 0), (1, 400), (4, 400)])
def test_memory_holds_the_shuffle_buffers_of_the_lanes_and_what_was_asked_for(monkeypatch, lanes, shuffle, remainder):
    bucket, index = packed(2_000, piece_bytes=10_000)
    store, live, pieces, read = Watched(bucket.store), set(), set(), []
    most_live = most_ahead = 0

    class Sample(dict):  # a plain dict says nobody when it is freed
        pass

    class Samples(list):
        pass

    def read_samples(piece):
        nonlocal most_live, most_ahead
        samples = Samples(map(Sample, shards.read_samples(piece)))
        read.append(len(samples))
        weakref.finalize(samples, pieces.discard, len(read))
        pieces.add(len(read))
        assert len(pieces) <= 3 * shuffle / min(index.samples) + 2 * lanes  # lists, mostly of samples that are gone
        for number, sample in enumerate(samples):
            live.add((len(read), number))
            weakref.finalize(sample, live.discard, (len(read), number))
        most_live, most_ahead = max(most_live, len(live)), max(most_ahead, store.requests - len(read))
        return samples

    monkeypatch.setattr(streaming, "read_samples", read_samples)
    options = {"lanes": lanes, "shuffle": shuffle, "remainder": remainder, "threads": 2, "ahead": 6}
    assert set(numbers(streams(InMemory(store), index, 64, **options))) == set(range(2_000))
    assert len(read) > 80
    # The batch that is being made is there, too.
    assert most_live <= 1.2 * shuffle + lanes * max(read) + 64
    assert most_ahead <= 6
    assert not live and not pieces, "nothing is kept after the epoch"


# ------------------------------------------------------------------------------------------------------ leaving early


def wait_for(state):
    """Wait until a state is reached; the time-out of the test is for one that never is."""
    while not state():
        threading.Event().wait(0.01)


def test_leaving_the_loop_waits_for_no_request_and_sends_no_other(data):
    bucket, index = data
    gate, free = threading.Event(), iter(range(4))
    store = Watched(bucket.store, lambda: next(free, None) is None and gate.wait())
    (stream,) = streams(InMemory(store), index, 7, threads=3, ahead=12, lanes=1)
    batches = iter(stream)
    next(batches)
    wait_for(lambda: store.now == 3)  # all threads wait, and more pieces have been asked for
    try:
        batches.close()
        before, waiting = store.requests, shards_threads()
        assert store.now == 3, "the loop was left while requests were on their way"
    finally:
        gate.set()
    for thread in waiting:
        thread.join()
    assert store.requests == before


def test_leaving_the_loop_while_the_store_is_down_ends_the_asking(data):
    """The threads would else ask for as long as their patience lasts."""
    bucket, index = data
    failing, free = threading.Semaphore(0), iter(range(4))

    def before():
        if next(free, None) is None:
            failing.release()
            raise OSError("the store is down")

    (stream,) = streams(InMemory(Watched(bucket.store, before)), index, 7, threads=3, ahead=12, lanes=1, patience=1e6)
    batches = iter(stream)
    with pytest.warns(UserWarning, match="the store is down"):
        next(batches)
        for _ in range(3):
            failing.acquire()
    waiting = shards_threads()
    assert waiting
    batches.close()
    for thread in waiting:
        thread.join()


def test_an_error_in_decode_ends_the_threads_too(data):
    def broken(sample):
        raise RuntimeError("no image")

    with pytest.raises(RuntimeError, match="no image") as error:
        list(shards.ShardStream(*data, 7, broken, threads=3))
    for thread in shards_threads():
        thread.join()
    assert error.value.__traceback__, "its frames are still there, and yet no thread is"


def test_an_epoch_leaves_no_thread(data, whole):
    for thread in shards_threads():
        thread.join()
    assert not shards_threads()


EXIT = """
import sys, threading, warnings
warnings.simplefilter("ignore")
from obstore.store import MemoryStore
from support.shards import InMemory, Watched, packed, streams

bucket, index = packed(300, piece_bytes=7_000)
failing = threading.Semaphore(0)
free = iter(range(5))

def before():
    if next(free, None) is None:
        failing.release()
        raise OSError("the store is down")

(stream,) = streams(InMemory(Watched(bucket.store, before)), index, 7, patience=10**6, threads=3, ahead=12, lanes=1)
batches = iter(stream)
next(batches)
for _ in range(3):
    failing.acquire()
{end}
"""


@pytest.mark.processes
@pytest.mark.parametrize("end", ["", "raise RuntimeError('in the step')"], ids=["at the end", "by an error"])
def test_the_interpreter_exits_while_the_store_is_down_and_the_loop_was_not_left(end):
    """The threads would else go on asking for as long as their patience lasts: here for twelve days."""
    path = [str(config.PROJECT), str(config.PROJECT / "tests")]
    script = f"import sys; sys.path[:0] = {path}\n{EXIT.format(end=end)}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ("in the step" in done.stderr) == bool(end), done.stderr
    assert done.returncode == bool(end)


def test_simulated_workers_are_told_apart(data):
    """Of the tests themselves: what simulates workers must divide the batches."""
    (stream,) = streams(*data, 7)
    assert [len(batch) for batch in as_workers(stream, 3)] == [7] * 42 + [6]
