"""Pieces kept on this machine's disk: each downloaded once, never wrong, never more than was said."""

import os
import random
import subprocess
import sys

import pytest
from support.shards import InMemory, Watched, numbers, packed, streams

from helpers import config
from helpers.loading.shards import Cache

CONTENT = b"piece" * 20  # 100 bytes


class Downloads:
    """What is asked for, and a content for each name."""

    def __init__(self, size=100):
        self.size, self.asked = size, []

    def get(self, cache, name):
        def download():
            self.asked.append(name)
            return self.content(name)

        return cache.get(name, download, lambda content: content == self.content(name))

    def content(self, name):
        return name.encode().ljust(self.size, b".")


def kept(cache):
    return sorted(path.name for path in (cache.folder / "pieces").rglob("*") if path.is_file())


def at(cache, name, second):
    """Let a piece have been read last at a time."""
    (path,) = (cache.folder / "pieces").glob(f"*/{name}")
    os.utime(path, (second, second))


def test_a_damaged_copy_is_downloaded_anew(tmp_path):
    cache, downloads = Cache(tmp_path, 1e6), Downloads()
    downloads.get(cache, "a")
    (path,) = tmp_path.glob("pieces/*/a")
    path.write_bytes(downloads.content("a")[:-1])
    assert downloads.get(cache, "a") == downloads.content("a") == path.read_bytes()
    assert downloads.asked == ["a"] * 2


def test_those_that_were_read_longest_ago_are_removed_first(tmp_path):
    cache, downloads = Cache(tmp_path, 1_000), Downloads()
    for second, name in enumerate("abcdefghij"):
        downloads.get(cache, name)
        at(cache, name, second)
    downloads.get(cache, "a")  # read now
    downloads.get(cache, "k")
    assert kept(cache) == list("adefghijk"), "b and c are gone, so that a tenth of the limit is free"
    assert sorted(path.name for path in (tmp_path / "locks").iterdir()) == list("adefghijk")
    downloads.get(cache, "b")
    assert downloads.asked == [*"abcdefghijk", "b"]
    assert kept(cache) == list("abdefghijk")


def test_a_piece_larger_than_the_limit_is_not_kept_and_removes_nothing(tmp_path):
    cache, downloads = Cache(tmp_path, 1_000), Downloads()
    downloads.get(cache, "a")
    downloads.size = 1_001
    assert len(downloads.get(cache, "b")) == 1_001
    assert kept(cache) == ["a"]


def test_without_a_right_count_the_pieces_are_counted_again(tmp_path):
    """As after a full disk, or a process that was killed while it wrote the count."""
    cache, downloads = Cache(tmp_path, 1_000), Downloads()
    for number in range(20):
        if number == 9:
            (tmp_path / "bytes").write_text("")
        downloads.get(cache, str(number))
        assert cache.size() <= 1_000
    assert int((tmp_path / "bytes").read_text()) == cache.size()


# ------------------------------------------------------------------------------------------------- with a stream


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

READER = """
import sys, time
from pathlib import Path
from helpers.loading.shards.cache import Cache

folder, log, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(",")
cache = Cache(folder, 1e9)

def download(name):
    with log.open("a") as file:
        file.write(name + chr(10))
    {download}
    return name.encode() * 1000

print("ready", flush=True)
sys.stdin.readline()
for name in names:
    found = cache.get(name, lambda: download(name), lambda content: content == name.encode() * 1000)
    assert found == name.encode() * 1000
"""


def reader(folder, log, names, download="pass"):
    """Start a process that reads pieces when a line is written to it."""
    command = [sys.executable, "-c", READER.format(download=download), folder, log, ",".join(names)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=config.PROJECT)


@pytest.mark.processes
def test_processes_fill_the_cache_at_once_and_download_each_piece_once(tmp_path):
    log, names = tmp_path / "log", [f"piece-{number}" for number in range(8)]
    processes = []
    for number in range(3):
        random.Random(number).shuffle(names)
        processes.append(reader(tmp_path / "cache", log, names))
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 3
    assert sorted(log.read_text().split()) == sorted(names)
    assert Cache(tmp_path / "cache", 1e9).size() == 8 * 7_000


@pytest.mark.processes
def test_a_process_killed_while_it_writes_leaves_nothing_that_counts(tmp_path):
    moment = "Path.replace = lambda *_: print('now', flush=True) or time.sleep(600)"
    process = reader(tmp_path / "cache", tmp_path / "log", ["a"], moment)
    process.stdin.write("\n")
    process.stdin.flush()
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n", "now\n"]
    process.kill()
    process.communicate()
    cache = Cache(tmp_path / "cache", 1e9)
    asked = []
    assert cache.get("a", lambda: asked.append(1) or CONTENT, lambda content: content == CONTENT) == CONTENT
    assert asked == [1]
    assert kept(cache) == ["a"], "what it was writing is gone"


FULL = """
import resource
from helpers.loading.shards.cache import Cache

resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
cache = Cache({folder!r}, 1e9)
for _ in range(2):
    for size in (1_000, 5_000):
        assert cache.get(str(size), lambda: bytes(size), lambda content: content == bytes(size)) == bytes(size)
print(cache.size())
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="this system has no such limit")
def test_where_the_system_refuses_to_write_more_what_fits_is_kept(tmp_path):
    command = [sys.executable, "-c", FULL.format(folder=str(tmp_path / "cache"))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=config.PROJECT)
    assert done.stdout == "1000\n", done.stderr
    assert done.stderr.count("a piece could not be kept (File too large)") == 1
