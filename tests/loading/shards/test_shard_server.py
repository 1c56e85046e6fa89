"""Shards on a real S3 server that is slow, refuses, dies and comes back."""

import random
import re
import threading
from dataclasses import replace

import pytest
from support.shards import InMemory, number_of, numbers, packed, samples, streams
from torch.utils.data import DataLoader

from helpers import simulate
from helpers.data import stores
from helpers.loading import shards

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not stores.available(), reason="there is no package of the server for this machine"),
    pytest.mark.filterwarnings("ignore:.*asking again"),
]
COUNT, PREFIX = 400, "train/"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with stores.serve(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def index(server):
    """Of 400 samples in some 30 pieces of 4 shards, on the server."""
    shards.pack(samples(COUNT, 600), server.bucket.connect(), PREFIX, shard_bytes=200_000, piece_bytes=25_000, tasks=1)
    return shards.Index.load(server.bucket.connect(), PREFIX)


def order_of(index, epoch):
    return shards.order(index.samples, seed=0, epoch=epoch, lanes=4, shuffle=20).tolist()


def test_a_hundred_epochs_interrupted_anywhere_go_on_exactly_with_other_ranks_and_workers(server, index):
    draw, bucket = random.Random(0), InMemory(server.bucket.connect())
    whole = numbers(streams(bucket, index, 7, prefix=PREFIX))
    assert whole == order_of(index, 0)
    for _ in range(100):
        ranks = streams(bucket, index, draw.randint(3, 20), draw.randint(1, 3), prefix=PREFIX)
        steps = draw.randint(0, len(ranks[0]))
        found, state = numbers(ranks, draw.randint(0, 3), steps), ranks[0].state(steps)
        others = streams(bucket, index, draw.randint(3, 20), draw.randint(1, 3), prefix=PREFIX)
        for each in others:
            each.load_state(state)
        found += numbers(others, draw.randint(0, 3))
        assert found == whole[: len(found)]
        assert COUNT - len(found) < len(others)


def test_worker_processes_that_are_interrupted_go_on_exactly_in_others_though_the_server_was_killed(server, index):
    (stream,) = streams(server.bucket, index, 7, prefix=PREFIX, ahead=2)
    found = []
    for step, batch in enumerate(DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="spawn")):
        found += batch
        if step == 3:
            server.restart()
        if step == 20:  # by then the workers are further
            break
    ranks = streams(server.bucket, index, 5, 2, prefix=PREFIX)
    for each in ranks:
        each.load_state(stream.state(21))
    assert found + numbers(ranks, workers=3) == order_of(index, 0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "epochs", [2, pytest.param(10, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.prove)]
)
def test_while_the_server_is_killed_and_restarted_nothing_is_lost_or_doubled(server, index, epochs):
    draw = random.Random(epochs)
    with simulate.Link(server.bucket.endpoint, first_byte_ms=5, mb_per_s=5) as link:  # requests are always on their way
        (stream,) = streams(server.bucket.through(link), index, 7, prefix=PREFIX, ahead=3)
        for epoch in range(epochs):
            stream.set_epoch(epoch)
            found, killed = [], draw.randrange(len(stream) // 2)
            with pytest.warns(UserWarning, match="asking again"):
                for step, batch in enumerate(stream):
                    found += batch
                    if step == killed:
                        server.kill()
                        back = threading.Timer(draw.uniform(0, 0.3), server.start)
                        back.start()
            back.join()
            assert found == order_of(index, epoch)


def test_a_server_that_stays_away_is_an_error_that_names_what_was_asked(server, index):
    server.kill()
    try:
        with pytest.raises(
            shards.StoreFailed, match=rf"^{server.bucket}/train/shard-.*\.tar: expected an answer .* 0.2 s"
        ):
            numbers(streams(server.bucket, index, 7, prefix=PREFIX, patience=0.2))
    finally:
        server.start()


@pytest.mark.parametrize("wrong", [{"secret_key": "wrong"}, {"access_key": "nobody"}])
def test_wrong_credentials_are_refused_and_the_bucket_is_named(server, index, wrong):
    bucket = replace(server.bucket, **wrong)
    with pytest.raises(
        shards.StoreRefused, match=rf"^{bucket}/train/shard-.*\.tar: the store refuses this. Expected the keys"
    ):
        numbers(streams(bucket, index, 7, prefix=PREFIX))
    for call in (
        lambda store: shards.Index.load(store, PREFIX),
        lambda store: shards.join(store, PREFIX),
        lambda store: shards.pack(samples(3), store, "other/"),
    ):
        with pytest.raises(shards.StoreRefused, match='in S3Store.bucket="course".*: the store refuses this'):
            call(bucket.connect())


def test_no_message_shows_a_key(server, index):
    bucket = replace(server.bucket, secret_key="a-wrong-secret")
    with pytest.raises(shards.StoreRefused) as error:
        numbers(streams(bucket, index, 7, prefix=PREFIX))
    text = f"{error.value} {error.value.__cause__}"
    assert not re.search(f"a-wrong-secret|{server.bucket.access_key}|{server.bucket.secret_key}", str(error.value)), (
        text
    )


def test_a_shard_is_written_by_one_request_however_large_it_is(server):
    """Of an upload in parts, as the client makes by default, a killed task would leave parts that nobody sees."""
    store = server.bucket.connect()
    shards.pack([{"bin": bytes(12_000_000)}], store, "large/")
    assert store.head("large/shard-00000-000000.tar")["size"] > 12_000_000
    assert "-" not in store.head("large/shard-00000-000000.tar")["e_tag"], "the tag of an object made of parts"


DAMAGES = {
    "missing": (None, shards.MissingShard, "in the index, but not in the store"),
    "cut off": (lambda content: content[:-2_000], shards.DamagedShard, "it was cut off"),
    "cut off before a piece": (lambda content: content[:9_000], shards.DamagedShard, "found 9,000: it was cut off"),
    "one byte flipped": (
        lambda content: content[:30_000] + bytes([content[30_000] ^ 1]) + content[30_001:],
        shards.DamagedShard,
        "expected the CRC32C .*: bytes of it are damaged",
    ),
    "replaced": (lambda content: content[5_120:] + content, shards.DamagedShard, "another shard has replaced it"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_that_is_not_as_it_was_is_named(server, damage):
    change, error, message = DAMAGES[damage]
    store, prefix = server.bucket.connect(), f"{damage.replace(' ', '-')}/"
    _, index = packed(300, bucket=InMemory(store), prefix=prefix)
    name = f"{prefix}shard-00000-000001.tar"
    content = bytes(store.get(name).bytes())
    if change is None:
        store.delete(name)
    else:
        store.put(name, change(content))
    with pytest.raises(error, match=f"^{server.bucket}/{name}: .*{message}"):
        list(shards.ShardStream(server.bucket, index, 7, number_of, prefix=prefix))
