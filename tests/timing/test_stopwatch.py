import itertools
import multiprocessing
import weakref

import pytest
import torch
from torch.utils.data import DataLoader

from helpers import simulate, timing
from helpers.loading import datasets
from helpers.timing import stopwatch


def test_a_loop_counts_the_images_of_the_timed_steps_only(clock):
    seen = []
    batch = (torch.zeros(4, 1), torch.zeros(4))
    result = timing.loop([batch], lambda images, labels: seen.append(len(images)), steps=5, warmup=3)
    assert len(seen) == 8
    assert result.images == 20
    assert len(result.waits) == len(result.durations) == 5


def test_waiting_for_a_slow_loader_is_separated_from_the_step(clock):
    loader = DataLoader(datasets.SleepDataset(100, 0.004), batch_size=5)
    result = timing.loop(loader, simulate.SimulatedAccelerator(5), steps=6, warmup=2)
    assert result.waits == pytest.approx([0.020] * 6)
    assert result.durations == pytest.approx([0.025] * 6)
    assert (result.begin, result.seconds) == pytest.approx((2 * 0.025, 6 * 0.025))


class Photos(list):
    """A batch that takes some time of a clock to free."""

    def __init__(self, clock, seconds):
        super().__init__([torch.zeros(4)])
        weakref.finalize(self, clock.sleep, seconds)


def test_to_free_a_batch_counts_as_a_part_of_its_own_step_and_not_as_waiting(clock):
    def batches():
        while True:
            yield Photos(clock, 0.25)

    taken = list(stopwatch.timed(batches(), lambda images: clock.sleep(1), 3))
    assert [(each.wait, each.duration) for each in taken] == [(0, 1.25)] * 3


def test_what_is_done_between_two_steps_is_timed_with_neither(clock):
    durations = []
    for each in stopwatch.timed(itertools.repeat(torch.zeros(4)), lambda images: clock.sleep(1), 3):
        durations.append((each.begin, each.duration, each.images))
        clock.sleep(7)
    assert durations == [(0, 1, 4), (8, 1, 4), (16, 1, 4)]


@pytest.mark.parametrize(("longest", "steps"), [(100, 5), (3, 3), (0, 2)])
def test_the_timed_loop_ends_by_count_or_by_time_but_takes_two_steps(clock, longest, steps):
    taken = stopwatch.timed(itertools.repeat(torch.zeros(4)), lambda images: clock.sleep(1), 5, longest)
    assert len(list(taken)) == steps


def test_the_device_has_finished_before_the_first_step_and_after_the_last(clock, monkeypatch):
    seen = []
    monkeypatch.setattr(stopwatch, "synchronize", lambda: seen.append("finished"))
    list(stopwatch.timed(itertools.repeat(torch.zeros(4)), lambda images: seen.append("step"), 2))
    assert seen == ["finished", "step", "step", "finished"]


def test_the_stopwatch_goes_by_the_clock_on_the_wall():
    loader = DataLoader(datasets.SleepDataset(100, 0.004), batch_size=5)
    result = timing.loop(loader, simulate.SimulatedAccelerator(5), steps=6)
    assert min(result.waits) >= 0.020
    assert min(duration - wait for duration, wait in zip(result.durations, result.waits, strict=True)) >= 0.005
    assert result.seconds >= 0.025 * len(result.durations)


def test_a_loop_leaves_no_worker_behind():
    loader = DataLoader(datasets.SleepDataset(40, 0.0), batch_size=2, num_workers=2)
    timing.loop(loader, lambda images, labels: None, steps=3)
    assert multiprocessing.active_children() == []


def test_warming_up_uses_what_the_workers_prefetched():
    items = datasets.SleepDataset(8, 0.0)
    assert timing.warmup_steps(DataLoader(items, num_workers=3, prefetch_factor=4)) == 2 + 12
    assert timing.warmup_steps(DataLoader(items)) == 2
    assert timing.warmup_steps([items]) == 2


def test_loading_alone_goes_on_until_the_time_is_up_and_not_a_batch_longer(clock):
    loader = DataLoader(datasets.SleepDataset(4, seconds=0.125), batch_size=2)
    run = timing.loading(loader, seconds=1)
    assert run.durations == run.waits == (0.25,) * 4
    assert (run.seconds, run.images) == (1, 8)
    assert len(timing.loading(loader, seconds=1.01).durations) == 5


def test_loading_alone_leaves_no_worker_behind():
    timing.loading(DataLoader(datasets.SleepDataset(8, seconds=0), batch_size=2, num_workers=2), seconds=0.01)
    assert timing.worker_memory_mb() == []


def test_a_loop_without_a_step_to_time_says_so():
    with pytest.raises(ValueError, match="at least one step"):
        timing.loop([torch.zeros(4)], lambda images: None, steps=0)


def test_a_call_of_microseconds_is_timed_by_many_in_a_row(clock, monkeypatch):
    def finish():  # to wait for the device, and to read the clock, takes longer than the call
        clock.sleep(40e-6)

    monkeypatch.setattr(stopwatch, "synchronize", finish)
    read = clock.perf_counter
    monkeypatch.setattr(clock, "perf_counter", lambda: (clock.sleep(20e-6), read())[1])
    assert timing.each_call_ms(lambda: clock.sleep(5e-6)) == pytest.approx([5e-3] * 20, rel=0.01)
    assert timing.call_ms(lambda: clock.sleep(5e-6)) == pytest.approx(5e-3, rel=0.01)


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 1024), (1e-3, 8), (2.6e-3, 2), (6e-3, 1)])
def test_calls_are_as_many_in_a_row_as_take_long_enough_to_time(clock, seconds, calls):
    def function():
        seen.append(clock.now)
        clock.sleep(seconds)

    seen = []
    assert timing.each_call_ms(function, repeats=3, warmup=0) == pytest.approx([1e3 * seconds] * 3)
    tried = sum(2**power for power in range(calls.bit_length() - 1))
    assert len(seen) == tried + 3 * calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_calls_are_timed_by_its_own_clock_and_not_waited_for_one_by_one(monkeypatch):
    waited, called, timed = [], [], []
    finish, elapsed = torch.cuda.synchronize, torch.cuda.Event.elapsed_time
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (waited.append(1), finish()))
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *of: timed.append(elapsed(*of)) or timed[-1])
    numbers = torch.zeros(8, device="cuda")
    monkeypatch.setattr(stopwatch, "_LONG_ENOUGH", float("inf"))
    monkeypatch.setattr(stopwatch, "_MOST_CALLS", 64)
    found = timing.each_call_ms(lambda: called.append(numbers.add_(1)), repeats=4, warmup=0)
    assert found == [ms / 64 for ms in timed[-4:]]
    assert len(called) == numbers[0].item() == 63 + 4 * 64
    assert len(waited) == 1 + 2 * len(timed)  # before and after so many calls


def test_without_a_gpu_the_host_runs_ahead_of_nothing(clock):
    found = timing.run_ahead(lambda images: clock.sleep(0.25), torch.zeros(4), steps=3)
    assert list(found["host"]) == list(found["device"]) == [250, 500, 750]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_asked_once_when_it_ended_each_step(monkeypatch):
    waited, finish = [], torch.cuda.synchronize
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: (waited.append(1), finish()))
    numbers = torch.zeros(8, device="cuda")
    found = timing.run_ahead(lambda batch: batch.add_(1), numbers, steps=5, warmup=2)
    assert numbers[0].item() == 7
    assert len(waited) == 2  # after the warm-up, and at the end
    assert len(found) == 5 and found["device"].is_monotonic_increasing and found["host"].is_monotonic_increasing
