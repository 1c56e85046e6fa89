"""Pieces kept on this machine's disk: each downloaded once, never wrong, never more than was said."""

import multiprocessing
import os
import random
import signal
from pathlib import Path

import google_crc32c
import pytest
from support.processes import forked, needs_fork
from support.shards import InMemory, Watched, numbers, packed, streams

from helpers.loading.shards import Cache


class Downloads:
    """What is asked for, and a content for each name."""

    def __init__(self, size=100):
        self.size, self.asked = size, []

    def get(self, cache, name):
        def download():
            self.asked.append(name)
            return self.content(name)

        return cache.get(name, google_crc32c.value(self.content(name)), download)

    def content(self, name):
        return name.encode().ljust(self.size, b".")


def kept(cache):
    return sorted(path.name for path in (cache.folder / "pieces").rglob("*") if path.is_file())


def test_a_damaged_copy_is_downloaded_anew(tmp_path):
    cache, downloads = Cache(tmp_path, 1e6), Downloads()
    downloads.get(cache, "a")
    (path,) = tmp_path.glob("pieces/*/a")
    path.write_bytes(downloads.content("a")[:-1])
    assert downloads.get(cache, "a") == downloads.content("a") == path.read_bytes()
    assert downloads.asked == ["a"] * 2


def test_those_that_were_read_longest_ago_are_removed_first_and_what_is_too_large_is_not_kept(tmp_path):
    cache, downloads = Cache(tmp_path, 1_000), Downloads()
    for second, name in enumerate("abcdefghij"):
        downloads.get(cache, name)
        (path,) = (cache.folder / "pieces").glob(f"*/{name}")
        os.utime(path, (second, second))
    downloads.get(cache, "a")  # read now
    downloads.get(cache, "k")
    assert kept(cache) == list("adefghijk"), "b and c are gone, so that a tenth of the limit is free"
    assert sorted(path.name for path in (tmp_path / "locks").iterdir()) == list("adefghijk")
    downloads.get(cache, "b")
    assert downloads.asked == [*"abcdefghijk", "b"]
    downloads.size = 1_001
    assert len(downloads.get(cache, "large")) == 1_001
    assert kept(cache) == list("abdefghijk")


def test_without_a_right_count_the_pieces_are_counted_again(tmp_path):
    """As after a full disk, or a process that was killed while it wrote the count."""
    cache, downloads = Cache(tmp_path, 1_000), Downloads()
    for number in range(20):
        if number == 9:
            (tmp_path / "bytes").write_text("")
        downloads.get(cache, str(number))
        assert cache.size() <= 1_000
    assert int((tmp_path / "bytes").read_text()) == cache.size()


def test_a_cache_changes_nothing_but_the_number_of_requests(tmp_path):
    bucket, index = packed(150)
    count = len(index.pieces)
    for share, requests in ((9, [count]), (1 / 3, range(count + 1, 2 * count))):
        store, cache = Watched(bucket.store), Cache(tmp_path / f"{share}", index.bytes * share)
        (stream,), (plain,) = streams(InMemory(store), index, 7, cache=cache, threads=1), streams(bucket, index, 7)
        for epoch in range(2):
            for each in (stream, plain):
                each.set_epoch(epoch)
            assert numbers([stream]) == numbers([plain])
            assert cache.size() <= index.bytes * share
        assert store.requests in requests


# ---------------------------------------------------------------------------------------------- several processes


@needs_fork
def test_processes_fill_the_cache_at_once_and_download_each_piece_once(tmp_path):
    cache, names, meeting = Cache(tmp_path, 1e9), list("abcdefgh"), multiprocessing.get_context("fork").Barrier(3)

    def read(seed):
        downloads = Downloads()
        meeting.wait()
        for name in random.Random(seed).sample(names, len(names)):
            assert downloads.get(cache, name) == downloads.content(name)
        (tmp_path / f"asked-{seed}").write_text("".join(downloads.asked))

    processes = [forked(read, seed) for seed in range(3)]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 3
    assert sorted("".join(path.read_text() for path in tmp_path.glob("asked-*"))) == names
    assert cache.size() == 800


@needs_fork
def test_a_process_killed_while_it_writes_leaves_nothing_that_counts(tmp_path):
    cache, downloads = Cache(tmp_path, 1e9), Downloads()

    def write():
        Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        downloads.get(cache, "a")

    process = forked(write)
    process.join()
    assert process.exitcode == -signal.SIGKILL and len(kept(cache)) == 2, "the lock, and what was being written"
    assert downloads.get(cache, "a") == downloads.content("a")
    assert downloads.asked == ["a"] and kept(cache) == ["a"]


@needs_fork
def test_where_the_system_refuses_to_write_more_what_fits_is_kept_and_a_warning_says_so(tmp_path):
    cache, downloads = Cache(tmp_path, 1e9), Downloads()

    def write():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
        with pytest.warns(UserWarning, match=f"{tmp_path}: .*File too large"):
            for downloads.size in (1_000, 5_000):
                assert len(downloads.get(cache, str(downloads.size))) == downloads.size

    process = forked(write)
    process.join()
    assert process.exitcode == 0 and kept(cache) == ["1000"]
