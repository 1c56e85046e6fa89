"""Shards as they are written: plain tar files, the same for the same samples, by one task or by many."""

import io
import re
import tarfile
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore, MemoryStore
from support.shards import InMemory, numbers, samples, streams

from helpers.loading import shards
from helpers.loading.shards.index import Piece


def content_of(store):
    """What is in a store: each object's content, by its name."""
    return {entry["path"]: bytes(store.get(entry["path"]).bytes()) for page in store.list() for entry in page}


def named(store, index):
    """The samples of all pieces, by their stems; each piece must have as many as the index says."""
    found = {}
    for piece in index.pieces:
        read = shards.read_samples(bytes(store.get_range(piece.shard, start=piece.start, end=piece.end)))
        assert len(read) == piece.samples
        found |= {sample.pop("__key__"): sample for sample in read}
    return found


EXTENSIONS = st.text("abcdefghijklmnopqrstuvwxyzäé0123456789._-", min_size=1, max_size=30).filter(
    lambda extension: not extension.endswith(".") and extension != "__key__"
)
SAMPLES = st.lists(st.dictionaries(EXTENSIONS, st.binary(max_size=1_500), min_size=1, max_size=3), max_size=20)


@given(SAMPLES, st.integers(1, 8_000), st.integers(1, 8_000))
@settings(max_examples=60)
def test_what_is_read_is_what_was_written_and_tarfile_reads_the_same(written, shard_bytes, piece_bytes):
    """By WebDataset's rule: the stem ends at the first dot behind the last slash."""
    store, by_tarfile = MemoryStore(), {}
    index = shards.pack(written, store, shard_bytes=shard_bytes, piece_bytes=piece_bytes)
    assert shards.Index.load(store) == index and len(index) == len(written)
    for name, size in index.shard_bytes.items():
        shard = bytes(store.get(name).bytes())
        assert len(shard) == size
        with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
            for member in tar:
                stem, extension = re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", member.name).groups()
                by_tarfile.setdefault(stem, {})[extension] = tar.extractfile(member).read()
    found = named(store, index)
    assert list(found.values()) == written
    assert by_tarfile == found


def test_a_stem_may_have_a_folder_as_others_write_it():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("a.b/1.png", "a.b/1.seg.png", "c/1.png", "2.png"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(name[-3:].encode()))
    assert shards.read_samples(content.getvalue()) == [
        {"__key__": "a.b/1", "png": b"png", "seg.png": b"png"},
        {"__key__": "c/1", "png": b"png"},
        {"__key__": "2", "png": b"png"},
    ]


@pytest.mark.parametrize("extension", ["a/b", "__key__", "x" * 90, None])
def test_an_extension_that_would_not_come_back_and_a_sample_without_files_are_refused(extension):
    with pytest.raises(ValueError, match="expected a"):
        shards.pack([{} if extension is None else {extension: b""}], MemoryStore())


@pytest.fixture(scope="module")
def index():
    return shards.pack(samples(60), MemoryStore(), shard_bytes=5_000, piece_bytes=2_000)


@given(st.data())
@settings(max_examples=300)
def test_an_index_of_which_a_byte_was_changed_is_refused_or_the_same(index, data):
    content = bytearray(index.to_json())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert shards.Index.from_json(bytes(content)) == index
    except shards.ShardsError as error:
        assert "index.json" in str(error)


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a/b", "..", ""])
def test_an_index_names_files_of_its_folder_only(name):
    with pytest.raises(shards.ShardsError, match="the name of a shard"):
        shards.Index.from_json(shards.Index((Piece(name, 0, 512, 1, 0),)).to_json())


def test_pack_needs_memory_for_one_shard_however_many_there_are():
    class Many:
        def __len__(self):
            return 2_000

        def __getitem__(self, number):
            return {"bin": bytes(10_000)}

    class Nowhere:
        def put(self, *_, **__):
            pass

    shards.pack(Many(), Nowhere(), shard_bytes=1e5, task=0, tasks=1_000)  # imports what it needs
    tracemalloc.start()
    try:
        shards.pack(Many(), Nowhere(), shard_bytes=2e6, piece_bytes=2e5)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 2e6 < most < 1.5 * 2e6


def by_tasks(store, written, tasks, order=None, **options):
    for task in order or range(tasks):
        shards.pack(written, store, task=task, tasks=tasks, shard_bytes=5_000, piece_bytes=2_000, **options)


@given(st.integers(0, 40), st.permutations([*range(9), 1, 5, 8]))
@settings(max_examples=40)
def test_tasks_in_any_order_and_repeated_leave_what_they_leave_once_in_order(count, order):
    straight, mixed = MemoryStore(), MemoryStore()
    by_tasks(straight, samples(count), 9)
    by_tasks(mixed, samples(count), 9, order)
    index = shards.join(straight)
    assert index == shards.join(mixed) == shards.join(mixed) == shards.Index.load(mixed)
    assert content_of(straight) == content_of(mixed)
    assert list(named(mixed, index).values()) == samples(count)
    expected = shards.order(index.samples, seed=0, epoch=0, lanes=4, shuffle=20).tolist()
    assert numbers(streams(InMemory(mixed), index, 4)) == expected


def test_a_task_reads_its_own_samples_only_and_folders_do_not_disturb_each_other():
    class Noted(list):
        read = []

        def __getitem__(self, number):
            self.read.append(number)
            return super().__getitem__(number)

    store = MemoryStore()
    shards.pack(Noted(samples(100)), store, "other/", task=1, tasks=4)
    assert Noted.read == list(range(25, 50))
    for prefix, count in (("train/", 30), ("train/more/", 20)):
        by_tasks(store, samples(count), 2, prefix=prefix)
    assert [len(shards.join(store, prefix)) for prefix in ("train/", "train/more/")] == [30, 20]


class Fatal(list):
    """Samples of which a task reads some, and then ends: as if it were killed, if it catches no exception."""

    def __getitem__(self, number):
        if number == 30:
            raise SystemExit
        return super().__getitem__(number)


def test_a_task_that_was_killed_is_named_and_run_again_and_leaves_nothing(tmp_path):
    store, whole = LocalStore(tmp_path), MemoryStore()
    by_tasks(whole, samples(60), 3)
    shards.join(whole)
    by_tasks(store, samples(60), 3, [0, 2])
    with pytest.raises(SystemExit):
        by_tasks(store, Fatal(samples(60)), 3, [1])
    assert any(name.startswith("shard-00001-") for name in content_of(store)), "it was killed in the middle"
    with pytest.raises(shards.ShardsError, match="left no index: 1"):
        shards.join(store)
    with pytest.raises(shards.ShardsError, match="index.json"):
        shards.Index.load(store)
    (tmp_path / "shard-00001-000003.tar#1").touch()  # what the client leaves if it is killed while it writes
    by_tasks(store, samples(60), 3, [1])
    shards.join(store)
    assert content_of(store) == content_of(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(content_of(whole))


OTHERS = {
    "of-00002.json .*of-00003.json": lambda store: by_tasks(store, samples(60), 2),
    "shard-00001-000000.tar": lambda store: store.delete("shard-00001-000000.tar"),
    "found none": lambda store: store.delete(list(content_of(store))),
}


@pytest.mark.parametrize("message", OTHERS)
def test_what_was_not_written_by_one_run_or_is_lost_is_not_joined(message):
    store = MemoryStore()
    by_tasks(store, samples(60), 3)
    OTHERS[message](store)
    with pytest.raises(shards.ShardsError, match=message):
        shards.join(store)
