import weakref

import pytest
import torch
from support import loops
from support.clock import Simulated
from torch import nn
from torch.utils.data import DataLoader

from stepscope import timing
from stepscope.timing import stopwatch

BATCH = torch.zeros(32, 3, 8, 8), torch.zeros(32, dtype=torch.long)


def test_waiting_for_a_slow_loader_is_separated_from_the_step(clock):
    loader = DataLoader(loops.SleepDataset(100, 0.004), batch_size=5)
    result = timing.loop(loader, loops.SleepStep(5), steps=6, warmup=2)
    assert result.waits == pytest.approx([0.020] * 6)
    assert result.durations == pytest.approx([0.025] * 6)
    assert (result.begin, result.seconds, result.images) == pytest.approx((2 * 0.025, 6 * 0.025, 30))


@pytest.mark.parametrize("workers", [3, 4, 5])
@pytest.mark.parametrize("step_ms", [2.0, 20.0])
def test_the_mean_step_of_workers_in_lockstep_does_not_depend_on_the_first_timed_step(clock, workers, step_ms):
    loader = Simulated(clock, loops.SleepDataset(10_000, 0.036), num_workers=workers)
    for warmup in range(40, 40 + workers):
        run = timing.loop(loader, loops.SleepStep(step_ms), 10, warmup)
        assert len(run.durations) == {3: 12, 4: 12, 5: 10}[workers]
        assert run.step_ms == pytest.approx(max(36 / workers, step_ms))


@pytest.mark.parametrize(("longest", "steps"), [(0.039, 2), (0.043, 4), (0.07, 4), (0.1, 8), (0.13, 12), (9.0, 20)])
def test_a_limit_ends_a_run_between_two_periods_but_in_the_first_one_at_once(clock, longest, steps):
    loader = Simulated(clock, loops.SleepDataset(10_000, 0.036), num_workers=4)
    run = timing.loop(loader, loops.SleepStep(2), 20, warmup=0, longest=longest)
    assert len(run.durations) == steps


class Photos(list):
    """A batch that takes some time of a clock to free."""

    def __init__(self, clock, seconds):
        super().__init__([torch.zeros(4)])
        weakref.finalize(self, clock.sleep, seconds)


def test_a_step_includes_freeing_its_batch_but_no_work_between_steps(clock):
    def batches():
        while True:
            yield Photos(clock, 0.25)

    steps = []
    for step in stopwatch.timed(batches(), lambda images: clock.sleep(1), 3):
        steps.append(step)
        clock.sleep(7)
    assert [step[:3] for step in steps] == [(0, 0, 1.25), (8.25, 0, 1.25), (16.5, 0, 1.25)]


def test_the_warm_up_uses_up_the_prefetched_batches():
    items = loops.SleepDataset(8, 0.0)
    loaders = DataLoader(items, num_workers=2, prefetch_factor=4), DataLoader(items), [items]
    assert [timing.warmup_steps(loader) for loader in loaders] == [2 + 8, 2, 2]


def test_loading_alone_ends_with_the_first_batch_after_which_the_time_is_up(clock):
    loader = DataLoader(loops.SleepDataset(4, seconds=0.125), batch_size=2)
    run = timing.loading(loader, seconds=1)
    assert run.durations == run.waits == (0.25,) * 4
    assert (run.seconds, run.images) == (1, 8)
    assert len(timing.loading(loader, seconds=1.01).durations) == 5


@pytest.mark.parametrize(("seconds", "calls"), [(0.0, 1024), (1e-3, 8), (2.6e-3, 2), (6e-3, 1)])
def test_short_calls_are_repeated_until_they_take_long_enough_to_time(clock, seconds, calls):
    def function():
        seen.append(clock.now)
        clock.sleep(seconds)

    seen = []
    assert timing.each_call_ms(function, repeats=3, warmup=0) == pytest.approx([1e3 * seconds] * 3)
    assert timing.call_ms(lambda: clock.sleep(seconds)) == pytest.approx(1e3 * seconds)
    tried = sum(2**power for power in range(calls.bit_length() - 1))
    assert len(seen) == tried + 3 * calls


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_calls_are_timed_by_the_clock_of_the_gpu_without_waiting_for_each(monkeypatch):
    waited, called, timed = [], [], []
    finish, elapsed = torch.cuda.synchronize, torch.cuda.Event.elapsed_time
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *gpu: (waited.append(1), finish()))
    monkeypatch.setattr(torch.cuda.Event, "elapsed_time", lambda *of: timed.append(elapsed(*of)) or timed[-1])
    numbers = torch.zeros(8, device="cuda")
    monkeypatch.setattr(stopwatch, "_LONG_ENOUGH", float("inf"))
    monkeypatch.setattr(stopwatch, "_MOST_CALLS", 64)
    found = timing.each_call_ms(lambda: called.append(numbers.add_(1)), repeats=4, warmup=0)
    assert found == [ms / 64 for ms in timed[-4:]]
    assert len(called) == numbers[0].item() == 63 + 4 * 64
    assert len(waited) == 1 + 2 * len(timed)  # before and after so many calls


def test_without_a_gpu_the_host_does_not_run_ahead(clock):
    table = timing.run_ahead(lambda images: clock.sleep(0.25), torch.zeros(4), steps=3)
    assert list(table["host"]) == list(table["device"]) == [250, 500, 750]


def test_steps_that_use_a_gpu_only_after_the_warm_up_have_the_times_of_the_host(clock, monkeypatch):
    events = iter([None, None, object()])  # before the steps, and after each
    monkeypatch.setattr(stopwatch, "_now", lambda: next(events))
    table = timing.run_ahead(lambda images: clock.sleep(0.25), torch.zeros(4), steps=2)
    assert list(table["host"]) == list(table["device"]) == [250, 500]


@pytest.fixture
def limit():
    """A limit of half a second a run, and of 8 s a comparison, for what is timed in a test."""
    timing.limit(run=0.5, comparison=8)
    yield 0.5
    timing.limit()


@pytest.mark.parametrize(("seconds", "steps"), [(0.01, 20), (0.1, 5), (5.0, 2)])
def test_a_timed_run_of_slow_steps_has_fewer_steps_but_at_least_two(clock, limit, seconds, steps):
    run = timing.loop([BATCH], lambda *batch: clock.sleep(seconds), 20, warmup=0)
    assert len(run.durations) == len(run.waits) == steps
    assert run.step_ms == pytest.approx(1e3 * seconds)
    assert run.images == 32 * steps


@pytest.mark.parametrize(("seconds", "rounds"), [(0.4, 9), (1, 4), (100, 2)])
def test_a_comparison_of_slow_runs_has_fewer_rounds_but_at_least_two(clock, limit, capsys, seconds, rounds):
    def run():
        clock.sleep(seconds)
        return timing.Timing(1, seconds, (0.0,), (seconds,))

    result = timing.interleaved({"A": run, "B": run}, 9)
    assert {name: len(runs) for name, runs in result.timings.items()} == {"A": rounds, "B": rounds}
    assert (f"{rounds} rounds" in capsys.readouterr().out) == (rounds < 9)


@pytest.mark.parametrize(("seconds", "calls"), [(0.005, 20), (0.125, 4), (30, 2)])
def test_slow_calls_are_repeated_less_often(clock, limit, seconds, calls):
    assert timing.each_call_ms(lambda: clock.sleep(seconds)) == pytest.approx([1e3 * seconds] * calls)


def test_the_warm_up_of_slow_loading_phases_and_stages_ends_early_too(clock, limit):
    class Slow(list):
        num_workers, prefetch_factor = 4, 25

        def __iter__(self):
            for number in range(1000):
                clock.sleep(1)
                seen.append(number)
                yield BATCH

    seen, model = [], nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))
    timing.loading(Slow(), seconds=4)
    assert len(seen) == 4 + 4
    phases = timing.phases(Slow(), model, torch.optim.SGD(model.parameters(), lr=0.1), 20)
    assert len(seen) == 8 + 1 + 2  # a second is longer than a run may be
    assert phases == pytest.approx({"loading": 1000, "copy": 0, "forward": 0, "backward": 0, "optimizer": 0})
    seen.clear()
    timing.stages({"read": lambda item: (seen.append(item), clock.sleep(0.2))}, range(100))
    assert seen == [0, 1, 2] * 2
