"""The monitor sees what a loop does to the machine, and leaves with it."""

import os
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from helpers import config, datasets, disk, measure, monitor


class Busy(Dataset):
    """Items that take a worker all its processor time."""

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        end = time.thread_time() + 0.01
        while time.thread_time() < end:
            pass
        return torch.zeros(1), index


class Reads(Dataset):
    """Items for which a file is read."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.01)
        return len(self.path.read_bytes())


def watch(run):
    with monitor.Monitor() as watched:
        run()
    return watched.table()


def amount(table, rate):
    """What a rate comes to over the whole table."""
    elapsed = table.index.to_series().diff().fillna(monitor.INTERVAL)
    return (table[rate] * elapsed).sum()


def loop_over(dataset, seconds=1.0):
    return lambda: measure.loading(DataLoader(dataset, 2, num_workers=1), seconds)


def test_a_sample_is_taken_ten_times_a_second():
    table = watch(lambda: time.sleep(1.05))
    assert 2 <= len(table) <= 10  # fewer on a machine that is busy
    assert (table.index.diff()[1:] >= 0.9 * monitor.INTERVAL).all()


def test_a_block_too_short_for_a_sample_gives_an_empty_table():
    assert watch(lambda: None).empty


def test_each_core_that_this_process_may_use_has_a_column():
    table = watch(lambda: time.sleep(0.3))
    cores = table.filter(like="core ")
    assert cores.shape[1] == config.cores()
    assert cores.stack().between(0, 100).all()


def test_a_worker_that_computes_is_told_from_one_that_waits():
    busy = watch(loop_over(Busy()))["workers, CPU in %"].mean()
    waiting = watch(loop_over(datasets.SleepDataset(10_000, 0.02)))["workers, CPU in %"].mean()
    assert waiting < busy / 2  # however little of a core the busy one gets
    assert busy <= 130  # of one core; Linux counts hundredths of a second


def test_this_process_is_told_from_its_workers():
    def compute():
        end = time.thread_time() + 0.4
        while time.thread_time() < end:
            pass

    table = watch(compute)
    assert "workers, CPU in %" not in table
    assert 20 < amount(table, "main process, CPU in %") < 60


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_reading_from_the_disk_is_told_from_reading_from_memory(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(20_000_000))

    def read():
        time.sleep(0.2)
        for _ in range(4):
            path.read_bytes()
            time.sleep(0.1)

    disk.forget(tmp_path)
    if measure.read_from_disk_mb(path.read_bytes) == 0:
        pytest.skip("no page cache to forget")
    warm = watch(read)
    disk.forget(tmp_path)
    cold = watch(read)
    assert amount(warm, "read in MB/s") == pytest.approx(80, rel=0.1)
    assert amount(cold, "read in MB/s") == pytest.approx(80, rel=0.1)
    assert amount(warm, "from disk in MB/s") < 2
    assert amount(cold, "from disk in MB/s") == pytest.approx(20, rel=0.1)
    assert warm["page-cache hits in %"].min() > 90 > 60 > cold["page-cache hits in %"].min()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_what_ended_workers_read_is_counted_once(tmp_path):
    (tmp_path / "file").write_bytes(bytes(1_000_000))
    loader = DataLoader(Reads(tmp_path / "file"), 4, num_workers=1)
    table = watch(lambda: [list(loader), time.sleep(0.3)])
    assert amount(table, "read in MB/s") == pytest.approx(40, rel=0.2)


def test_the_memory_of_workers_counts_shared_pages_once_in_pss_only():
    table = watch(lambda: measure.loading(DataLoader(datasets.SleepDataset(10_000, 0.01), 2, num_workers=2), 1.5))
    assert table["workers, RSS in MB"].max() > 2
    if sys.platform == "linux":
        assert table["workers, PSS in MB"].max() < table["workers, RSS in MB"].max()
        assert table["workers, PSS in MB"].notna().sum() < len(table)  # dear, so not in every sample


def test_the_thread_ends_with_the_block_also_when_that_raises():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), monitor.Monitor():
        assert threading.active_count() == before + 1
        1 / 0
    assert threading.active_count() == before


def test_a_worker_that_ends_while_it_is_asked_does_no_harm(monkeypatch):
    def gone(pid=None):
        if pid is None:
            return process(pid)
        raise monitor.psutil.NoSuchProcess(pid)

    process = monitor.psutil.Process
    monkeypatch.setattr(monitor.psutil, "Process", gone)
    table = watch(loop_over(datasets.SleepDataset(1_000, 0.001), seconds=0.4))
    assert len(table) >= 2


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    watched = monitor.Monitor()
    assert [line for line in watched.absent if line.startswith("GPU")] == ["GPU: there is none."]


@pytest.mark.parametrize("awake", [False, True])
def test_a_gpu_is_watched_but_not_woken(monkeypatch, awake):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: awake)
    monkeypatch.setattr(torch.cuda, "utilization", lambda gpu: 42)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: asked.append(gpu) or 3e9)
    table = watch(lambda: time.sleep(0.3))
    assert (table["GPU 0 in %"] == 42).all()
    assert ("GPU 0 memory in MB" in table) == bool(asked) == awake


def test_a_gpu_that_does_not_tell_has_a_line_and_no_column(monkeypatch):
    def refuse(gpu):
        raise monitor.pynvml.NVMLError(monitor.pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    with monitor.Monitor() as watched:
        time.sleep(0.25)
    assert watched.table().filter(like="GPU").empty
    assert any(line.startswith("GPU 0: its driver does not tell") for line in watched.absent)


def test_elsewhere_than_on_linux_the_disks_of_the_whole_machine_are_watched(monkeypatch):
    monkeypatch.setattr(monitor.sys, "platform", "darwin")
    monkeypatch.setattr(monitor.psutil, "disk_io_counters", lambda: type("Counters", (), {"read_bytes": time.time() * 7e6}))
    with monitor.Monitor() as watched:
        measure.loading(DataLoader(datasets.SleepDataset(1_000, 0.001), 2, num_workers=1), 0.5)
    table = watched.table()
    assert table["all disks in MB/s"].mean() == pytest.approx(7, rel=0.2)
    assert not {"read in MB/s", "page-cache hits in %", "workers, PSS in MB"} & set(table)
    assert [line.split(":")[0] for line in watched.absent if "Linux" in line] == ["Page cache", "PSS"]
