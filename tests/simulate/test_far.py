"""A place seen from far away: before a folder, before a server on this machine, and elsewhere."""

import pytest

from helpers import simulate
from helpers.data import stores
from helpers.simulate import far


def test_a_folder_is_behind_the_dials(tmp_path):
    place, link = simulate.far_away(stores.Folder(tmp_path), first_byte_ms=1, mb_per_s=50)
    store = place.connect()
    store.put("a", b"content")
    assert bytes(store.get_range("a", start=3, end=7)) == b"tent"
    assert link.counts().requests == 2
    assert link.seconds(1, 50e6) == pytest.approx(1.001)


@pytest.mark.processes
@pytest.mark.skipif(not stores.available(), reason="there is no package of the server for this machine")
def test_a_server_on_this_machine_is_behind_a_link(tmp_path):
    with stores.serve(tmp_path) as server:
        place, link = simulate.far_away(server.bucket, first_byte_ms=1, mb_per_s=50)
        place.connect().put("a", b"content")
        assert bytes(server.bucket.connect().get("a").bytes()) == b"content"
        assert link.counts().requests == 1
        link.stop()


def test_a_store_elsewhere_is_measured_and_counted_and_not_slowed_down(tmp_path, monkeypatch):
    class Elsewhere(stores.Folder):
        endpoint = "https://objects.example.org"

    seconds = iter([0.02, 0.03, 0.04, 0.10, 0.11, 0.12])  # three of one byte, three of all
    monkeypatch.setattr(far, "_seconds", lambda store, size: next(seconds))
    place, link = simulate.far_away(Elsewhere(tmp_path), first_byte_ms=9_999, mb_per_s=1e-9)
    assert (link.first_byte_ms, link.mb_per_s) == (pytest.approx(30), pytest.approx(100))
    store = place.connect()
    store.put("a", b"content")  # with these dials it would take hours
    assert bytes(store.get("a").bytes()) == b"content"
    assert "measured: 30 ms" in str(link)
    assert not (tmp_path / "course-12" / "trial").exists()
    link.stop()
