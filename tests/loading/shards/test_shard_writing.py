"""Shards as they are written: plain tar files, the same for the same samples, by one task or by many."""

import io
import re
import tarfile
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import LocalStore, MemoryStore
from support.shards import UNHURRIED, InMemory, numbers, samples, streams

from helpers.loading import shards
from helpers.loading.shards import index as indexes


def content_of(store):
    """What is in a store: each object's content, by its name."""
    return {entry["path"]: bytes(store.get(entry["path"]).bytes()) for page in store.list() for entry in page}


def pieces_of(store, index):
    return [bytes(store.get_range(piece.shard, start=piece.start, end=piece.end)) for piece in index.pieces]


def plain(read):
    """Samples as they were packed, of those that were read."""
    return [{name: bytes(data) for name, data in sample.items() if name != "__key__"} for sample in read]


def named(store, index):
    """The samples of all pieces, by their stems."""
    read = [sample for piece in pieces_of(store, index) for sample in shards.read_samples(piece)]
    return dict(zip([sample["__key__"] for sample in read], plain(read), strict=True))


def webdataset_reads(shard):
    """The samples of a shard by WebDataset's rule: the stem ends at the first dot behind the last slash."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        for member in tar:
            stem, extension = re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", member.name).groups()
            found.setdefault(stem, {})[extension] = tar.extractfile(member).read()
    return found


EXTENSIONS = st.text("abcdefghijklmnopqrstuvwxyzäé0123456789._-", min_size=1, max_size=30).filter(
    lambda extension: not extension.endswith(".") and extension != "__key__"
)
SAMPLES = st.lists(st.dictionaries(EXTENSIONS, st.binary(max_size=1_500), min_size=1, max_size=3), max_size=20)


@given(SAMPLES, st.integers(1, 8_000), st.integers(1, 8_000))
@settings(**UNHURRIED, max_examples=60)
def test_what_is_read_is_what_was_written_whatever_the_sizes(written, shard_bytes, piece_bytes):
    store = MemoryStore()
    index = shards.pack(written, store, shard_bytes=shard_bytes, piece_bytes=piece_bytes)
    assert list(named(store, index).values()) == written
    assert len(index) == len(written)
    assert [len(shards.read_samples(piece)) for piece in pieces_of(store, index)] == index.samples.tolist()


@given(SAMPLES, st.integers(1, 8_000))
@settings(**UNHURRIED, max_examples=30)
def test_tarfile_reads_the_same_by_the_rule_of_webdataset(written, shard_bytes):
    store = MemoryStore()
    index = shards.pack(written, store, shard_bytes=shard_bytes)
    found = {}
    for name in index.shard_bytes:
        found |= webdataset_reads(bytes(store.get(name).bytes()))
    assert found == named(store, index)


def test_a_stem_may_have_a_folder_as_others_write_it():
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in ("a.b/1.png", "a.b/1.seg.png", "c/1.png", "2.png"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(name[-3:].encode()))
    read = shards.read_samples(content.getvalue())
    assert [sample["__key__"] for sample in read] == ["a.b/1", "c/1", "2"]
    assert plain(read) == [{"png": b"png", "seg.png": b"png"}, {"png": b"png"}, {"png": b"png"}]


def test_what_is_no_tar_file_is_refused():
    with pytest.raises(ValueError):
        shards.read_samples(b"no tar file" * 100)


@pytest.mark.parametrize("extension", ["a/b", "", "png.", "__key__", "x" * 90, "ü" * 45])
def test_an_extension_that_would_not_come_back_is_refused(extension):
    with pytest.raises(ValueError, match="expected a short extension without a slash, such as png"):
        shards.pack([{extension: b""}], MemoryStore())


def test_a_sample_without_files_is_refused_since_nobody_could_count_it():
    with pytest.raises(ValueError, match="Sample 1: expected a file or more, found none"):
        shards.pack([{"cls": b"1"}, {}], MemoryStore())


def test_the_same_samples_give_the_same_bytes(tmp_path):
    stores = MemoryStore(), LocalStore(tmp_path)
    for store in stores:
        shards.pack(samples(50), store, shard_bytes=9_000, piece_bytes=3_000)
    assert content_of(stores[0]) == content_of(stores[1])
    assert len(content_of(stores[0])) > 4


def test_the_index_comes_back_from_the_store():
    store = MemoryStore()
    index = shards.pack(samples(50), store, "train/", shard_bytes=9_000, piece_bytes=3_000)
    assert shards.Index.load(store, "train/") == index
    assert shards.Index.load(store, "train/").fingerprint == index.fingerprint
    sizes = {entry["path"]: entry["size"] for page in store.list("train/") for entry in page}
    assert {f"train/{name}": size for name, size in index.shard_bytes.items()}.items() <= sizes.items()


def test_indexes_of_other_samples_have_other_fingerprints():
    few, more = (shards.pack(samples(count), MemoryStore()) for count in (9, 10))
    assert few.fingerprint != more.fingerprint


@pytest.mark.parametrize("found", [b"{}", b"[]", b"no JSON", b'{"version": 1, "pieces": [[1]]}'])
def test_what_is_no_index_is_named(found):
    store = MemoryStore()
    store.put("index.json", found)
    with pytest.raises(shards.NoIndex, match="index.json: expected an index of shards, found something else"):
        shards.Index.load(store)


def test_an_index_of_another_version_is_named(monkeypatch):
    store = MemoryStore()
    with monkeypatch.context() as patch:
        patch.setattr(indexes, "VERSION", 2)
        shards.pack(samples(3), store)
    with pytest.raises(shards.NoIndex, match="expected an index of version 1, found version 2; pack anew"):
        shards.Index.load(store)


def test_where_there_is_no_index_the_way_to_one_is_named():
    with pytest.raises(
        shards.NoIndex, match="train/index.json: expected an index .* found none.*shards.pack.*shards.join"
    ):
        shards.Index.load(MemoryStore(), "train/")


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


# ------------------------------------------------------------------------------------------------------- many tasks


def by_tasks(store, written, tasks, order=None, **options):
    for task in order or range(tasks):
        shards.pack(written, store, task=task, tasks=tasks, shard_bytes=5_000, piece_bytes=2_000, **options)


@given(st.integers(0, 40), st.integers(1, 9), st.randoms(use_true_random=False))
@settings(**UNHURRIED, max_examples=40)
def test_tasks_in_any_order_and_repeated_leave_what_they_leave_once_in_order(count, tasks, random):
    straight, mixed = MemoryStore(), MemoryStore()
    by_tasks(straight, samples(count), tasks)
    order = [*range(tasks), *random.choices(range(tasks), k=3)]
    random.shuffle(order)
    by_tasks(mixed, samples(count), tasks, order)
    assert shards.join(straight) == shards.join(mixed) == shards.join(mixed)
    assert content_of(straight) == content_of(mixed)
    assert list(named(mixed, shards.Index.load(mixed)).values()) == samples(count)


def test_a_task_reads_its_own_samples_only():
    class Watched(list):
        read = []

        def __getitem__(self, number):
            self.read.append(number)
            return super().__getitem__(number)

    shards.pack(Watched(samples(100)), MemoryStore(), task=1, tasks=4)
    assert Watched.read == list(range(25, 50))


class Fragile(list):
    """Samples of which one cannot be read."""

    def __getitem__(self, number):
        if number == 30:
            raise RuntimeError("the task was killed")
        return super().__getitem__(number)


def test_a_task_that_was_killed_is_named_and_run_again():
    store, whole = MemoryStore(), MemoryStore()
    by_tasks(whole, samples(60), 3)
    by_tasks(store, samples(60), 3, [0, 2])
    with pytest.raises(RuntimeError, match="killed"):
        by_tasks(store, Fragile(samples(60)), 3, [1])
    assert any(name.startswith("shard-00001-") for name in content_of(store)), "it was killed in the middle"
    with pytest.raises(shards.UnfinishedShards, match=r"1 task of 3 left no index: 1. Run these again"):
        shards.join(store)
    with pytest.raises(shards.NoIndex):
        shards.Index.load(store)
    by_tasks(store, samples(60), 3, [1])
    assert shards.join(store) == shards.join(whole)
    assert content_of(store) == content_of(whole)


def test_of_many_missing_tasks_some_are_named():
    store = MemoryStore()
    by_tasks(store, samples(60), 40, [7])
    with pytest.raises(shards.UnfinishedShards, match=r"39 tasks of 40 left no index: 0, 1, .*, 20, …. Run"):
        shards.join(store)


def test_the_indexes_of_an_earlier_run_with_other_tasks_are_named():
    store = MemoryStore()
    by_tasks(store, samples(60), 2)
    by_tasks(store, samples(60), 3)
    both = r"index-\*-of-00002.json and index-\*-of-00003.json. Delete those of another run"
    with pytest.raises(shards.UnfinishedShards, match=both):
        shards.join(store)
    store.delete([f"index-0000{task}-of-00002.json" for task in range(2)])
    assert list(named(store, shards.join(store)).values()) == samples(60)


def test_tasks_that_had_other_samples_are_named():
    store = MemoryStore()
    by_tasks(store, samples(60), 3)
    by_tasks(store, samples(80), 3, [1])
    with pytest.raises(shards.UnfinishedShards, match="not all tasks had the same samples. Run all of them again"):
        shards.join(store)


def test_without_any_index_of_a_task_the_way_to_one_is_named():
    with pytest.raises(shards.UnfinishedShards, match="train/ in .*: expected the indexes of one run, found none"):
        shards.join(MemoryStore(), "train/")


def test_a_shard_that_is_lost_before_the_join_is_named():
    store = MemoryStore()
    by_tasks(store, samples(60), 3)
    store.delete("shard-00001-000000.tar")
    with pytest.raises(shards.UnfinishedShards, match="shard-00001-000000.tar in an index, but not there"):
        shards.join(store)


def test_folders_of_one_bucket_do_not_disturb_each_other():
    store = MemoryStore()
    for prefix, count in (("train/", 30), ("train/more/", 20), ("test/", 10)):
        by_tasks(store, samples(count), 2, prefix=prefix)
    assert [len(shards.join(store, prefix)) for prefix in ("train/", "train/more/", "test/")] == [30, 20, 10]


def test_the_order_of_what_many_tasks_wrote_is_that_of_the_index_alone():
    bucket = InMemory()
    by_tasks(bucket.store, samples(60), 7)
    index = shards.join(bucket.store)
    assert (
        numbers(streams(bucket, index, 4)) == shards.order(index.samples, seed=0, epoch=0, lanes=4, shuffle=20).tolist()
    )


@pytest.mark.parametrize("task", [-1, 3])
def test_a_task_that_cannot_be_is_refused(task):
    with pytest.raises(ValueError, match=f"Expected a task from 0 to 2 of 3, found {task}"):
        shards.pack([], MemoryStore(), task=task, tasks=3)
