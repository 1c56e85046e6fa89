import pytest
from support.clock import Clock

from helpers import simulate


def test_slow_storage_returns_the_bytes_on_disk_when_a_slow_disk_would(tmp_path, monkeypatch):
    clock = Clock(monkeypatch, simulate)
    storage = simulate.SlowStorage(seconds_per_open=0.02, bytes_per_second=1e6)
    path = tmp_path / "file"
    path.write_bytes(b"content" * 100)
    assert storage.read(path) == b"content" * 100
    assert clock.now == pytest.approx(0.02 + 700 / 1e6)


def test_slow_storage_charges_each_request_and_each_byte():
    storage = simulate.SlowStorage(seconds_per_open=0.5, bytes_per_second=100)
    assert storage.seconds(requests=3, size=200) == 3.5


def test_slow_storage_is_named_with_its_settings():
    assert str(simulate.SlowStorage(2e-3, 50e6)) == "simulated storage (2 ms per open, 50 MB/s)"


@pytest.mark.parametrize("settings", [(-0.001, 1e6), (0.0, 0.0)])
def test_storage_that_cannot_exist_is_refused(settings):
    with pytest.raises(ValueError, match="0 s or more and a throughput above 0"):
        simulate.SlowStorage(*settings)
