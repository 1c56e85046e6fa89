"""The monitor sees what a loop does to the machine, and leaves with it."""

import os
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from support.clock import Clock
from torch.utils.data import DataLoader, Dataset

from helpers import config, timing
from helpers.loading import datasets
from helpers.timing import monitor


class Busy(Dataset):
    """Items that take a worker 50 ms of CPU time."""

    def __len__(self):
        return 16

    def __getitem__(self, index):
        compute(0.05)
        return torch.zeros(1), index


class Reads(Dataset):
    """Items for which a file is read."""

    def __init__(self, path):
        self.path = path

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return len(self.path.read_bytes())


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
    workers(monkeypatch, lambda: [pid for pid in found if pid is not None])
    return found


def workers(monkeypatch, numbers):
    """Let multiprocessing know of workers with these numbers."""
    known = SimpleNamespace(active_children=lambda: [SimpleNamespace(pid=pid) for pid in numbers()])
    monkeypatch.setattr(monitor, "multiprocessing", known)


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


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def amount(table, rate):
    """What a rate comes to over the whole table."""
    return table[rate].sum() * monitor.INTERVAL


def test_a_sample_is_taken_ten_times_a_second(clock):
    table = sampled(clock, *[nothing] * 10).table()
    assert table.index.tolist() == pytest.approx([number / 10 for number in range(1, 11)])


def test_samples_are_taken_while_the_block_runs():
    with monitor.Monitor() as watched:
        while len(watched._samples) < 4 and watched._thread.is_alive():
            time.sleep(0.01)
    table = watched.table()
    assert len(table) >= 3
    assert (table.index.diff()[1:] >= 0.9 * monitor.INTERVAL).all()


def test_a_block_too_short_for_a_second_sample_gives_an_empty_table(clock):
    assert sampled(clock).table().empty


def test_each_core_that_this_process_may_use_has_a_column(clock):
    cores = sampled(clock, nothing).table().filter(like="core ")
    assert cores.shape[0] == 1 and cores.shape[1] >= config.cores()  # more, if their time is limited
    assert cores.stack().between(0, 100).all()


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


def test_without_workers_nothing_is_reported_of_them(clock, processes):
    assert sampled(clock, nothing).table().filter(like="workers").empty


@pytest.mark.processes
def test_a_worker_that_computes_is_distinguished_from_one_that_waits(clock):
    def seconds(dataset):
        """CPU time of a worker from the first batch to the last."""
        batches = iter(DataLoader(dataset, 2, num_workers=1))
        next(batches)  # the worker is up
        return amount(sampled(clock, *[lambda: next(batches)] * 7).table(), "workers, CPU in %") / 100

    busy, waiting = seconds(Busy()), seconds(datasets.SleepDataset(16, 0.001))
    assert busy >= 0.45  # five of eight batches at least: two may have been made ahead; Linux counts hundredths
    assert waiting < busy / 2


def test_what_this_process_computes_is_seen(clock):
    table = sampled(clock, *[lambda: compute(0.05)] * 4).table()
    assert amount(table, "main process, CPU in %") / 100 >= 0.17  # Linux counts hundredths of a second


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")
def test_reading_from_the_disk_is_distinguished_from_reading_from_memory(tmp_path, clock):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(20_000_000))
    timing.forget(tmp_path)
    if timing.read_from_disk_mb(path.read_bytes) == 0:
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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")
def test_what_ended_workers_read_is_counted_once(tmp_path, clock):
    (tmp_path / "file").write_bytes(bytes(1_000_000))

    def loaded():
        batches = iter(DataLoader(Reads(tmp_path / "file"), 4, num_workers=1))
        yield next(batches)
        yield list(batches)  # now the worker has ended

    loading = loaded()
    table = sampled(clock, lambda: next(loading), lambda: next(loading), nothing).table()
    assert amount(table, "read in MB/s") == pytest.approx(40, rel=0.2)


def test_the_memory_of_workers_counts_shared_pages_once_in_pss_only(clock):
    batches = iter(DataLoader(datasets.SleepDataset(40, 0.0), 2, num_workers=2))
    next(batches)
    table = sampled(clock, *[nothing] * 12).table()
    assert table["workers, RSS in MB"].max() > 2
    if sys.platform == "linux":
        assert table["workers, PSS in MB"].max() < table["workers, RSS in MB"].max()
        assert table["workers, PSS in MB"].notna().sum() == 1  # dear, so only in every tenth sample


def test_the_thread_ends_with_the_block_also_when_that_raises():
    def threads():
        return [thread.name for thread in threading.enumerate()].count("monitor")

    with pytest.raises(ZeroDivisionError), monitor.Monitor():
        assert threads() == 1
        1 / 0
    assert threads() == 0


def test_a_worker_that_ends_while_it_is_asked_does_no_harm(clock, processes, monkeypatch):
    workers(monkeypatch, lambda: [7])
    table = sampled(clock, nothing, nothing).table()
    assert table["workers, CPU in %"].tolist() == [0, 0]


def test_without_a_gpu_one_line_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    watched = monitor.Monitor()
    assert [line for line in watched.absent if line.startswith("GPU")] == ["GPU: there is none."]


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


@pytest.mark.parametrize(
    "error",
    [
        monitor.pynvml.NVMLError(monitor.pynvml.NVML_ERROR_NOT_SUPPORTED),
        ModuleNotFoundError("nvidia-ml-py does not seem to be installed"),  # as torch says it
    ],
    ids=["not supported", "no pynvml"],
)
def test_a_gpu_whose_use_is_not_reported_has_a_line_and_no_column(clock, monkeypatch, error):
    def refuse(gpu):
        raise error

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "utilization", refuse)
    watched = sampled(clock, nothing)
    assert watched.table().filter(like="GPU").empty
    assert any(line.startswith("GPU 0:") and str(error) in line for line in watched.absent)


def test_elsewhere_than_on_linux_the_disks_of_the_whole_machine_are_watched(clock, processes, monkeypatch):
    monkeypatch.setattr(monitor.sys, "platform", "darwin")
    monkeypatch.setattr(monitor.psutil, "disk_io_counters", lambda: SimpleNamespace(read_bytes=clock.now * 7e6))
    processes[7] = Process()
    watched = sampled(clock, nothing, nothing)
    table = watched.table()
    assert table["all disks in MB/s"].tolist() == pytest.approx([7, 7])
    assert table["workers, RSS in MB"].tolist() == [5, 5]
    assert not {"read in MB/s", "page-cache hits in %", "workers, PSS in MB"} & set(table)
    assert [line.split(":")[0] for line in watched.absent if "Linux" in line] == ["Page cache", "PSS"]
