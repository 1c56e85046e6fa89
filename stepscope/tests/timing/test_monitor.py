"""The monitor sees what a loop does to the machine, and leaves with it."""

import os
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from support import loops
from support.clock import Clock
from torch.utils.data import DataLoader

from stepscope import timing
from stepscope.timing import monitor


class Process:
    """Stands in for a process of psutil, which has had so many seconds of a processor."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def cpu_times(self):
        return SimpleNamespace(user=self.seconds / 4, system=self.seconds * 3 / 4)

    def io_counters(self):
        return SimpleNamespace(read_chars=0, read_bytes=0)

    def memory_info(self):
        return SimpleNamespace(rss=5e6)

    def memory_full_info(self):
        return SimpleNamespace(pss=2e6)


@pytest.fixture
def clock(monkeypatch):
    """The monitor's clock, on which time passes between two samples only."""
    return Clock(monkeypatch, monitor)


@pytest.fixture
def processes(monkeypatch):
    """The processes that there are, by their numbers: that of None is this one, the others are its workers."""
    found = {None: Process()}

    def process(pid=None):
        if pid not in found:
            raise monitor.psutil.NoSuchProcess(pid)
        return found[pid]

    monkeypatch.setattr(monitor.psutil, "Process", process)
    workers = lambda: [SimpleNamespace(pid=pid) for pid in found if pid is not None]  # noqa: E731
    monkeypatch.setattr(monitor, "multiprocessing", SimpleNamespace(active_children=workers))
    return found


def sampled(clock, *between):
    """Return a monitor that has taken a sample, and another one after each call of the functions that it is given."""
    watched, left = monitor.Monitor(), list(between)

    def wait(seconds):
        if not left:
            return True
        left.pop(0)()
        clock.sleep(seconds)
        return False

    watched._ended = SimpleNamespace(wait=wait)
    watched._run()
    return watched


def nothing():
    pass


def amount(table, rate):
    """What a rate comes to over the whole table."""
    return table[rate].sum() * monitor.INTERVAL


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system cannot restrict a process to some cores")
def test_the_use_of_a_core_is_under_its_own_number(clock, monkeypatch):
    monkeypatch.setattr(monitor.os, "sched_getaffinity", lambda process: {6, 1, 3})
    monkeypatch.setattr(monitor.psutil, "cpu_percent", lambda percpu: [0, 10, 20, 30, 40])
    (row,) = sampled(clock, nothing).table().filter(like="core ").to_dict("records")
    assert row == {"core 1 in %": 10, "core 3 in %": 30}  # there is no core 6


def test_cpu_time_is_reported_of_this_process_and_of_its_workers_on_average(clock, processes):
    processes.update({7: Process(3), 8: Process(5)})

    def work():
        processes[None].seconds += 0.02
        processes[7].seconds += 0.1
        processes[8].seconds += 0.03

    table = sampled(clock, work, nothing, work, lambda: processes.pop(8), lambda: processes.pop(7)).table()
    assert table["main process, CPU in %"].tolist() == pytest.approx([20, 0, 20, 0, 0])
    assert table["workers, CPU in %"].tolist() == pytest.approx([65, 0, 65, 0, float("nan")], nan_ok=True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")
def test_reading_from_the_disk_is_distinguished_from_reading_from_memory(tmp_path, clock):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(20_000_000))
    timing.forget(tmp_path)
    before = psutil.Process().io_counters().read_bytes
    path.read_bytes()
    if psutil.Process().io_counters().read_bytes == before:
        pytest.skip(f"{tmp_path} is not on a disk: `--basetemp=FOLDER` names another")
    warm = sampled(clock, *[path.read_bytes] * 4).table()
    timing.forget(tmp_path)
    cold = sampled(clock, *[path.read_bytes] * 4).table()
    assert amount(warm, "read in MB/s") == pytest.approx(80, rel=0.1)
    assert amount(cold, "read in MB/s") == pytest.approx(80, rel=0.1)
    assert amount(warm, "from disk in MB/s") < 2
    assert amount(cold, "from disk in MB/s") == pytest.approx(20, rel=0.1)
    assert warm["page-cache hits in %"].min() > 90
    assert cold["page-cache hits in %"].tolist() == pytest.approx([0, 100, 100, 100], abs=10)


def test_the_memory_of_workers_counts_shared_pages_once_in_pss_only(clock):
    batches = iter(DataLoader(loops.SleepDataset(40, 0.0), 2, num_workers=2))
    next(batches)
    table = sampled(clock, *[nothing] * 12).table()
    assert table["workers, RSS in MB"].max() > 2
    if sys.platform == "linux":
        assert table["workers, PSS in MB"].max() < table["workers, RSS in MB"].max()
        assert table["workers, PSS in MB"].notna().sum() == 1  # dear, so only in every tenth sample


def test_samples_are_taken_while_the_block_runs_also_when_that_raises():
    with pytest.raises(ZeroDivisionError), monitor.Monitor() as watched:
        while len(watched._samples) < 4 and watched._thread.is_alive():
            time.sleep(0.01)
        1 / 0
    assert len(watched.table()) >= 3
    assert not watched._thread.is_alive()


@pytest.mark.parametrize("awake", [False, True])
def test_a_gpu_is_watched_but_not_woken(clock, monkeypatch, awake):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: awake)
    monkeypatch.setattr(torch.cuda, "utilization", lambda gpu: 42)
    monkeypatch.setattr(torch.cuda, "device_memory_used", lambda gpu: asked.append(gpu) or 3e9)
    table = sampled(clock, nothing, nothing).table()
    assert table["GPU 0 in %"].tolist() == [42, 42]
    assert ("GPU 0 memory in MB" in table) == bool(asked) == awake


def test_a_gpu_whose_use_is_not_reported_has_a_line_and_no_column(clock, monkeypatch):
    def refuse(gpu):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")  # as torch says it

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    watched = sampled(clock, nothing)
    assert watched.table().filter(like="GPU").empty
    assert any("GPU 0" in line and "nvidia-ml-py" in line for line in watched.absent)


def test_elsewhere_than_on_linux_the_disks_of_the_whole_machine_are_watched(clock, processes, monkeypatch):
    monkeypatch.setattr(monitor.sys, "platform", "darwin")
    monkeypatch.setattr(monitor.psutil, "disk_io_counters", lambda: SimpleNamespace(read_bytes=clock.now * 7e6))
    processes[7] = Process()
    watched = sampled(clock, nothing, nothing)
    table = watched.table()
    assert table["all disks in MB/s"].tolist() == pytest.approx([7, 7])
    assert table["workers, RSS in MB"].tolist() == [5, 5]
    assert not {"read in MB/s", "page-cache hits in %", "workers, PSS in MB"} & set(table)
    assert sum("Linux" in line for line in watched.absent) == 2
