"""Pieces kept on this machine's disk: each downloaded once, never wrong, never more than was said."""

import os
import random
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.shards import InMemory, Watched, numbers, packed, streams

from helpers import config, staging
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


def test_a_piece_is_downloaded_once(tmp_path):
    cache, downloads = Cache(tmp_path / "cache", 1e6), Downloads()
    for _ in range(3):
        assert downloads.get(cache, "a") == downloads.content("a")
    assert downloads.get(Cache(tmp_path / "cache", 1e6), "a") == downloads.content("a"), "by another process later"
    assert downloads.asked == ["a"]
    assert cache.size() == 100


def test_an_error_of_the_download_is_raised_and_nothing_is_kept(tmp_path):
    cache = Cache(tmp_path, 1e6)
    with pytest.raises(FileNotFoundError, match="no such shard"):
        cache.get("a", lambda: (_ for _ in ()).throw(FileNotFoundError("no such shard")), lambda _: True)
    assert kept(cache) == []
    assert cache.get("a", lambda: CONTENT, lambda _: True) == CONTENT


def test_a_damaged_copy_is_downloaded_anew(tmp_path):
    cache, downloads = Cache(tmp_path, 1e6), Downloads()
    downloads.get(cache, "a")
    (path,) = tmp_path.glob("pieces/*/a")
    for damage in (b"", b"other", downloads.content("a")[:-1]):
        path.write_bytes(damage)
        assert downloads.get(cache, "a") == downloads.content("a") == path.read_bytes()
    assert downloads.asked == ["a"] * 4


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


@pytest.mark.parametrize("seed", range(3))
def test_the_files_never_exceed_the_limit(tmp_path, seed):
    draw, cache, downloads = random.Random(seed), Cache(tmp_path, 1_000), Downloads()
    for _ in range(80):
        downloads.size = draw.randint(1, 300)
        downloads.get(cache, str(draw.randrange(40)))
        assert cache.size() <= 1_000
    assert cache.size() > 300


def test_a_piece_larger_than_the_limit_is_not_kept_and_removes_nothing(tmp_path):
    cache, downloads = Cache(tmp_path, 1_000), Downloads()
    downloads.get(cache, "a")
    downloads.size = 1_001
    assert len(downloads.get(cache, "b")) == 1_001
    assert kept(cache) == ["a"]


@pytest.mark.parametrize("count", ["", "many", None])
def test_without_a_right_count_the_pieces_are_counted_again(tmp_path, count):
    """As after a full disk, or a process that was killed while it wrote the count."""
    cache, downloads = Cache(tmp_path, 1_000), Downloads()
    for name in "abcdefghi":
        downloads.get(cache, name)
    (tmp_path / "bytes").unlink() if count is None else (tmp_path / "bytes").write_text(count)
    for name in "jklm":
        downloads.get(cache, name)
        assert cache.size() <= 1_000


def test_a_count_that_is_too_high_is_corrected_when_it_matters(tmp_path):
    """As after processes that were killed between counting and writing."""
    cache, downloads = Cache(tmp_path, 1_000), Downloads()
    downloads.get(cache, "a")
    (tmp_path / "bytes").write_text("999")
    downloads.get(cache, "b")
    assert kept(cache) == ["a", "b"]
    assert (tmp_path / "bytes").read_text() == "200"


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_cannot_be_is_refused(tmp_path, limit):
    with pytest.raises(
        ValueError, match=f"Expected a limit of some bytes, found {limit}; to keep nothing, use no cache"
    ):
        Cache(tmp_path, limit)


@pytest.mark.parametrize(
    "error", [staging.NotEnoughDisk(28, "full"), OSError(27, "File too large"), PermissionError(13, "")]
)
def test_where_a_piece_cannot_be_kept_reading_goes_on_and_says_so(tmp_path, monkeypatch, error):
    def full(*_):
        raise error

    monkeypatch.setattr(staging, "write", full)
    cache, downloads = Cache(tmp_path, 1e6), Downloads()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for name in "abab":
            assert downloads.get(cache, name) == downloads.content(name)
    assert downloads.asked == list("abab")
    assert len({str(each.message) for each in said}) == 1
    assert f"{tmp_path}: a piece could not be kept ({os.strerror(error.errno)}). Reading goes on" in str(
        said[0].message
    )


def test_while_pieces_are_removed_others_read_and_nothing_is_wrong(tmp_path):
    cache, downloads = Cache(tmp_path, 1_000), Downloads()

    def read(seed):
        draw = random.Random(seed)
        for _ in range(30):
            name = str(draw.randrange(20))
            assert downloads.get(cache, name) == downloads.content(name)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read, range(6)))
    assert cache.size() <= 1_000 + 5 * 100, "five others may write while one counts"


def test_threads_that_want_the_same_piece_download_it_once(tmp_path):
    cache, downloads, together = Cache(tmp_path, 1e6), Downloads(), threading.Barrier(8)

    def read(_):
        together.wait()
        return downloads.get(cache, "a")

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(8))) == {downloads.content("a")}
    assert downloads.asked == ["a"]


# ------------------------------------------------------------------------------------------------- with a stream


def test_the_second_epoch_comes_from_the_disk_in_its_own_order(tmp_path):
    bucket, index = packed(300)
    store = Watched(bucket.store)
    (stream,) = streams(InMemory(store), index, 7, cache=Cache(tmp_path, 1e9))
    first = numbers([stream])
    assert store.requests == len(index.pieces)
    stream.set_epoch(1)
    second = numbers([stream])
    assert store.requests == len(index.pieces)
    assert sorted(first) == sorted(second) == list(range(300))
    assert first != second


def test_a_small_cache_changes_nothing_but_the_number_of_requests(tmp_path):
    bucket, index = packed(150)
    store, cache = Watched(bucket.store), Cache(tmp_path, index.bytes / 3)
    whole = numbers(streams(bucket, index, 7))
    for _ in range(2):
        assert numbers(streams(InMemory(store), index, 7, cache=cache, threads=1)) == whole
        assert cache.size() <= index.bytes / 3
    assert len(index.pieces) < store.requests


def test_data_whose_shards_have_the_same_names_share_a_cache_and_no_piece(tmp_path):
    cache, data = Cache(tmp_path, 1e9), [packed(count) for count in (80, 60)]
    for requests in ([len(index.pieces) for _, index in data], [0, 0]):
        for (bucket, index), expected in zip(data, requests, strict=True):
            store = Watched(bucket.store)
            assert sorted(numbers(streams(InMemory(store), index, 7, cache=cache))) == list(range(len(index)))
            assert store.requests == expected


# ---------------------------------------------------------------------------------------------- several processes

READER = """
import os, sys, time
from pathlib import Path
from helpers.loading.shards.cache import Cache

assert "torch" not in sys.modules, "takes seconds to import, and a cache needs none of it"
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
def test_thirty_processes_fill_the_cache_at_once_and_download_each_piece_once(tmp_path):
    log, names = tmp_path / "log", [f"piece-{number}" for number in range(8)]
    processes = []
    for number in range(30):
        random.Random(number).shuffle(names)
        processes.append(reader(tmp_path / "cache", log, names))
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
    assert [process.returncode for process in processes] == [0] * 30
    assert sorted(log.read_text().split()) == sorted(names)
    assert Cache(tmp_path / "cache", 1e9).size() == 8 * 7_000


@pytest.mark.processes
@pytest.mark.parametrize(
    "moment",
    [
        "print('now', flush=True); time.sleep(600)",
        "Path.replace = lambda *_: print('now', flush=True) or time.sleep(600)",
    ],
    ids=["while it downloads", "while it writes"],
)
def test_a_process_killed_in_the_middle_leaves_nothing_that_counts(tmp_path, moment):
    log = tmp_path / "log"
    process = reader(tmp_path / "cache", log, ["a"], moment)
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
