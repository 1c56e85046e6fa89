"""Shards on a real S3 server that is slow, refuses, dies and comes back; and shards that have changed."""

import threading
from dataclasses import replace

import pytest
from support.shards import InMemory, Watched, as_workers, number_of, numbers, packed, samples, streams

from helpers.data import buckets, s3_server
from helpers.loading import shards
from helpers.loading.shards import stream as streaming

needs_server = pytest.mark.skipif(s3_server.program() is None, reason="no package of the server for this machine")
COUNT, PREFIX = 400, "train/"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server.Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def index(server):
    """Of 400 samples in some 30 pieces of 4 shards, on the server."""
    shards.pack(samples(COUNT, 600), server.bucket.connect(), PREFIX, shard_bytes=200_000, piece_bytes=25_000)
    return shards.Index.load(server.bucket.connect(), PREFIX)


@needs_server
@pytest.mark.processes
def test_workers_that_are_interrupted_go_on_exactly_in_others_though_the_server_was_killed(server, index):
    (stream,) = streams(server.bucket, index, 7, prefix=PREFIX, threads=1)
    taken = []
    for step, batch in enumerate(as_workers(stream, 2)):
        taken += batch
        if step == 3:
            server.restart()
        if step == 20:  # by then more pieces have been asked for
            break
    ranks = streams(server.bucket, index, 5, 2, prefix=PREFIX)
    for each in ranks:
        each.load_state(stream.state(21))
    order = shards.order(index.samples, seed=0, epoch=0, lanes=4, shuffle=20)
    assert taken + numbers(ranks, workers=3) == order.tolist()


@needs_server
@pytest.mark.processes
def test_wrong_credentials_are_refused_and_the_shard_is_named_without_a_key(server, index):
    bucket = replace(server.bucket, secret_key="a-wrong-secret")
    with pytest.raises(buckets.StoreError, match=rf"^{bucket}/train/shard-") as error:
        numbers(streams(bucket, index, 7, prefix=PREFIX))
    assert not any(key in str(error.value) for key in ("a-wrong-secret", bucket.access_key))


@needs_server
@pytest.mark.processes
def test_a_shard_is_written_by_one_request_however_large_it_is(server):
    """Of an upload in parts, as the client makes by default, a killed task would leave parts that nobody sees."""
    store = server.bucket.connect()
    shards.pack([{"bin": bytes(12_000_000)}], store, "large/")
    assert store.head("large/shard-00000-000000.tar")["size"] > 12_000_000
    assert "-" not in store.head("large/shard-00000-000000.tar")["e_tag"], "the tag of an object made of parts"


def test_while_a_store_gives_no_answer_a_warning_says_so(monkeypatch):
    monkeypatch.setattr(streaming, "_SAID_AFTER", 0.01)
    bucket, index = packed(60)
    said, texts = threading.Event(), []
    monkeypatch.setattr(streaming.warnings, "warn", lambda text, **_: (said.set(), texts.append(text)))
    (stream,) = streams(InMemory(Watched(bucket.store, said.wait)), index, 7)
    assert sorted(numbers([stream])) == list(range(60))
    assert texts[0].startswith("memory/shard-00000-00000")


def flipped(content, at=20_000):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGES = {
    "missing": (None, "not in the store"),
    "cut off": (lambda content: content[:9_000], "found 9,000"),
    "one byte flipped": (flipped, "CRC32C"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_shard_that_is_not_as_it_was_is_named_with_what_happened_to_it(damage, tmp_path):
    change, message = DAMAGES[damage]
    bucket, index = packed(300, bucket=buckets.Folder(tmp_path))
    store, name = bucket.connect(), "shard-00000-000001.tar"
    content = bytes(store.get(name).bytes())
    store.delete(name) if change is None else store.put(name, change(content))
    with pytest.raises(shards.ShardsError, match=f"^{bucket}/{name}: .*{message}"):
        list(shards.ShardStream(bucket, index, 7, number_of))


def test_a_piece_that_was_damaged_on_its_way_is_asked_for_once_more():
    bucket, index = packed(300)

    class Noisy(Watched):
        def get_range(self, path, **where):
            content = bytes(super().get_range(path, **where))
            return content if self.requests % 2 == 0 else flipped(content, 9)

    noisy = Noisy(bucket.store)
    assert sorted(numbers(streams(InMemory(noisy), index, 10, threads=1))) == list(range(300))
    assert noisy.requests == 2 * len(index.pieces)
