"""Files that arrive late, and stores that are far away: before a folder, before a server, and elsewhere."""

import pickle

import pytest
from support.clock import Clock

from helpers import simulate
from helpers.data import buckets
from helpers.simulate import slow_storage


def test_slow_storage_returns_the_bytes_on_disk_when_a_slow_disk_would(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, simulate)
    storage = simulate.SlowStorage(seconds_per_open=0.02, bytes_per_second=1e6)
    assert str(storage) == "simulated storage (20 ms per open, 1 MB/s)"
    path = tmp_path / "file"
    path.write_bytes(b"content" * 100)
    assert storage.read(path) == b"content" * 100
    assert clock.now == pytest.approx(0.02 + 700 / 1e6)


def test_a_link_takes_the_first_byte_and_the_size_by_the_bandwidth():
    store = simulate.SlowStore(None, first_byte_ms=30, mb_per_s=90)
    assert store.seconds(1, 0) == 0.03
    assert store.seconds(1, 90e6) == pytest.approx(1.03)
    assert store.seconds(10, 90e6) == pytest.approx(1.3)
    assert store.seconds(10, 90e6, connections=5) == pytest.approx(0.26)
    assert store.seconds(11, 99e6, connections=5) == pytest.approx(3 * (0.03 + 0.1))
    assert store.seconds(0, 0) == 0


def test_a_slow_store_answers_when_the_formula_says(tmp_path, monkeypatch):
    folder = buckets.Folder(tmp_path)
    folder.connect().put("alphabet", b"abcdefghij" * 100)
    clock = Clock(monkeypatch, simulate)
    place, link = simulate.far_away(folder, first_byte_ms=30, mb_per_s=0.001)
    assert str(link) == "simulated link (30 ms to the first byte, 0.001 MB/s a connection)"
    assert bytes(pickle.loads(pickle.dumps(place)).connect().get("alphabet").bytes()) == b"abcdefghij" * 100
    clock.now, store = 0.0, place.connect()
    assert bytes(store.get_range("alphabet", start=0, end=10)) == b"abcdefghij"
    assert clock.now == pytest.approx(0.03 + 0.01)
    assert bytes(store.get("alphabet").bytes()) == b"abcdefghij" * 100
    assert clock.now == pytest.approx(0.04 + 1.03)
    assert store.counts() == link.counts() == (2, 1010)
    assert link.counts().since((1, 10)) == (1, 1000)


def test_a_server_on_this_machine_is_at_the_end_of_a_simulated_link():
    _, link = simulate.far_away(buckets.Bucket("http://127.0.0.1:9", "course", "key", "secret"), first_byte_ms=7)
    assert str(link).startswith("simulated link (7 ms")


def test_a_store_elsewhere_is_measured_and_counted_and_not_slowed_down(tmp_path, monkeypatch):
    class Elsewhere(buckets.Folder):
        endpoint = "https://objects.example.org"

    seconds = iter([0.02, 0.03, 0.04, 0.10, 0.11, 0.12])  # three of one byte, three of all
    monkeypatch.setattr(slow_storage, "_seconds", lambda store, size: next(seconds))
    place, link = simulate.far_away(Elsewhere(tmp_path), first_byte_ms=9_999, mb_per_s=1e-9)
    assert (link.first_byte_ms, link.mb_per_s) == (pytest.approx(30), pytest.approx(100))
    (tmp_path / "a").write_bytes(b"content")
    assert bytes(place.connect().get("a").bytes()) == b"content"  # with the given dials it would take hours
    assert "measured: 30 ms" in str(link)
    assert not (tmp_path / "course-12" / "trial").exists()
