import os
import sys

import psutil
import pytest
import torch
from support import loops
from torch.utils.data import DataLoader

from stepscope import timing


class Late:
    """Images that take some time of a clock to copy."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def to(self, device, non_blocking):
        self.clock.sleep(self.seconds)
        return torch.zeros(4, 3, 2, 2)


def test_a_step_is_split_into_its_phases(clock):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.register_forward_hook(lambda *_: clock.sleep(0.005))
    model[1].weight.register_hook(lambda gradient: clock.sleep(0.007))
    optimizer.register_step_post_hook(lambda *_: clock.sleep(0.002))

    def batches():
        for number in range(9):
            clock.sleep(3 if number < 2 else 0.020)  # the first two are the warm-up
            yield Late(clock, 0.003), torch.zeros(4, dtype=torch.long)

    phases = timing.phases(batches(), model, optimizer, steps=5)
    assert phases == pytest.approx({"loading": 20, "copy": 3, "forward": 5, "backward": 7, "optimizer": 2})


def test_stages_are_timed_in_the_second_pass(clock):
    read = set()

    def slow_at_first(item):
        clock.sleep(0.002 if item in read else 60)
        read.add(item)

    spent = timing.stages({"read": slow_at_first, "sleep": lambda item: clock.sleep(0.003), "look": repr}, [1, 2])
    assert list(spent) == ["read", "sleep", "look"]
    assert spent == pytest.approx({"read": 2_000, "sleep": 3_000, "look": 0})  # µs an item


def from_disk_mb(function):
    """Megabytes that the disk delivers to this process while `function` runs."""
    before = psutil.Process().io_counters().read_bytes
    function()
    return (psutil.Process().io_counters().read_bytes - before) / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")
def test_a_forgotten_file_is_read_from_the_disk_and_a_warmed_one_from_memory(tmp_path):
    path = tmp_path / "below" / "file"
    path.parent.mkdir()
    path.write_bytes(os.urandom(8_000_000))
    timing.forget(tmp_path)
    cold = from_disk_mb(path.read_bytes)
    if cold == 0:
        pytest.skip(f"{tmp_path} is not on a disk: `--basetemp=FOLDER` names another")
    timing.forget(tmp_path)
    timing.warm(tmp_path)
    assert cold == pytest.approx(8, rel=0.05)
    assert from_disk_mb(path.read_bytes) < 1


def test_each_worker_is_counted_in_the_memory():
    batches = iter(DataLoader(loops.SleepDataset(40, 0.0), batch_size=2, num_workers=2))
    next(batches)
    memory = timing.worker_memory_mb()
    assert len(memory) == 2
    assert all(megabytes > 1 for megabytes in memory)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
def test_a_list_of_names_grows_in_a_worker_and_an_array_does_not():
    growth = {kind: timing.worker_growth_mb(loops.Names(kind)) for kind in (list, loops.array)}
    assert growth[list] > 8
    assert growth[loops.array] < growth[list] / 3
