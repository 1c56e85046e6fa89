"""The monitor sees what a loop does to the machine, and leaves with it."""

import time
from types import SimpleNamespace

import pytest
from support.clock import Clock

from stepscope.timing import monitor


class Process:
    """Stands in for a process of psutil: what it has had of a processor, in seconds, and what it has read, in bytes."""

    def __init__(self, seconds=0.0):
        self.seconds, self.read, self.from_disk = seconds, 0, 0

    def cpu_times(self):
        return SimpleNamespace(user=self.seconds / 4, system=self.seconds * 3 / 4)

    def io_counters(self):
        return SimpleNamespace(read_chars=self.read, read_bytes=self.from_disk)


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


def test_cpu_time_is_reported_for_this_process_and_for_the_mean_of_its_workers(clock, processes):
    processes.update({7: Process(3), 8: Process(5)})

    def work():
        processes[None].seconds += 0.02
        processes[7].seconds += 0.1
        processes[8].seconds += 0.03

    table = sampled(clock, work, lambda: None, work, lambda: processes.pop(8), lambda: processes.pop(7)).table()
    assert table["main process, CPU in %"].tolist() == pytest.approx([20, 0, 20, 0, 0])
    assert table["workers, CPU in %"].tolist() == pytest.approx([65, 0, 65, 0, float("nan")], nan_ok=True)


def test_a_worker_that_another_thread_is_closing_is_not_taken_for_this_process(clock, processes, monkeypatch):
    monkeypatch.setattr(monitor.multiprocessing, "active_children", lambda: [SimpleNamespace(pid=None)])
    assert "workers, CPU in %" not in sampled(clock, lambda: None).table()


def test_reading_from_the_disk_is_distinguished_from_reading_from_memory(clock, processes):
    processes[7] = Process()

    def read():
        processes[None].read += 20_000_000
        processes[None].from_disk += 5_000_000
        processes[7].read += 10_000_000

    table = sampled(clock, read, lambda: None).table()
    assert table["read in MB/s"].tolist() == pytest.approx([30 / monitor.INTERVAL, 0])
    assert table["from disk in MB/s"].tolist() == pytest.approx([5 / monitor.INTERVAL, 0])


def test_samples_are_taken_while_the_block_runs_also_if_the_block_raises():
    with pytest.raises(ZeroDivisionError), monitor.Monitor() as watched:
        while len(watched._samples) < 4 and watched._thread.is_alive():
            time.sleep(0.01)
        1 / 0
    assert len(watched.table()) >= 3
    assert not watched._thread.is_alive()
