import collections
import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
from support import loops
from torch.utils.data import DataLoader, Dataset

from stepscope import timing
from stepscope.timing import loaders

Pair = collections.namedtuple("Pair", "images labels")


class Fails(Dataset):
    """Works for a while, then raises, or its process ends itself or is killed."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 20:
            {"raise": self.explode, "exit": lambda: os._exit(3), "kill": lambda: os.kill(os.getpid(), 9)}[self.how]()
        return torch.zeros(3), index

    def explode(self):
        raise loops.UnreadableImage("image 20 is damaged")


@pytest.mark.parametrize(
    ("batch", "given", "size"),
    [
        ((torch.zeros(4, 2), torch.zeros(4)), 2, 4),
        ([torch.zeros(4, 2), torch.zeros(4), {"weights": torch.zeros(4)}], 3, 4),
        (Pair(torch.zeros(4, 2), torch.zeros(4)), 2, 4),
        ({"images": torch.zeros(5, 2), "labels": torch.zeros(5)}, 1, 5),
        (torch.zeros(6, 2), 1, 6),
        ([({"name": "a", "scale": torch.tensor(1.0)}, torch.zeros(7, 2))], 1, 7),
        ("no tensor", 1, 1),
    ],
)
def test_a_step_gets_tuples_and_lists_unpacked_and_other_batches_whole(batch, given, size):
    seen = []
    timing.call(lambda *arguments: seen.extend(arguments), batch)
    assert len(seen) == given
    whole = batch if isinstance(batch, (tuple, list)) else [batch]
    assert all(one is other for one, other in zip(seen, whole, strict=True))
    assert loaders.batch_size(batch) == size


def test_no_worker_is_left_when_a_step_raises():
    loader = DataLoader(loops.SleepDataset(40, 0.0), 2, num_workers=2, persistent_workers=True)
    with pytest.raises(ZeroDivisionError), timing.batches(loader) as batches:
        next(batches)
        1 / 0
    assert multiprocessing.active_children() == []
    with timing.batches(loader) as batches:  # and the loader can be used again, epoch after epoch
        assert sorted({int(next(batches)[1][0]) for _ in range(45)}) == list(range(0, 40, 2))


def test_an_error_in_a_worker_keeps_its_type_and_traceback_and_leaves_no_worker():
    loader = DataLoader(Fails("raise"), 2, num_workers=2)
    with pytest.raises(loops.UnreadableImage, match="(?s)in explode.*image 20") as kept:
        with timing.batches(loader) as batches:
            for _ in range(20):
                next(batches)
    assert multiprocessing.active_children() == []
    assert kept.traceback  # the error is still at hand, as the last one is in a notebook


@pytest.mark.processes
@pytest.mark.skipif(sys.platform == "win32", reason="processes are killed otherwise there")
@pytest.mark.parametrize(("how", "said"), [("exit", "exit code 3"), ("kill", "by SIGKILL|killed by signal")])
def test_a_worker_that_dies_is_named_and_the_other_workers_end(how, said):
    loader = DataLoader(Fails(how), 2, num_workers=2, persistent_workers=True)
    with pytest.raises(timing.WorkerDied, match=said) as kept, timing.batches(loader) as batches:
        for _ in range(20):
            next(batches)
    assert multiprocessing.active_children() == []
    assert "num_workers=0" in str(kept.value)


@pytest.mark.skipif(sys.platform == "win32", reason="processes are killed otherwise there")
@pytest.mark.parametrize(
    ("context", "step"),
    [
        ("fork", lambda batches: time.sleep(600)),  # the news of the death interrupts it
        ("forkserver", lambda batches: [next(batches) for _ in range(100)]),  # the news comes to another process
    ],
)
def test_a_worker_that_dies_during_a_step_is_named_too(context, step):
    loader = DataLoader(loops.SleepDataset(1000, 0.0), 2, num_workers=1, multiprocessing_context=context)
    with pytest.raises(timing.WorkerDied, match="by SIGKILL|killed"), timing.batches(loader) as batches:
        next(batches)
        os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
        step(batches)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("workers", "steps", "whole"), [(0, 7, 7), (1, 7, 7), (3, 7, 9), (3, 9, 9), (8, 2, 8)])
def test_steps_are_rounded_up_to_whole_periods_of_the_workers(workers, steps, whole):
    loader = DataLoader([torch.zeros(1)], num_workers=workers)
    assert timing.whole_periods(loader, steps) == whole
    assert timing.whole_periods([], steps) == steps
    assert timing.whole_periods(loader, sys.maxsize) % max(workers, 1) == 0
