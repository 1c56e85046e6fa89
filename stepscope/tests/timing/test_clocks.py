import multiprocessing

import pytest
import torch
from support import loops
from torch.utils.data import DataLoader

from stepscope import timing
from stepscope.timing import clocks as clocks_module


def test_the_host_time_of_a_step_excludes_the_time_of_the_device(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(clocks_module, "synchronize", lambda: clock.sleep(0.5))
    assert clocks_module._host_ms(lambda images: clock.sleep(0.003), torch.zeros(4), 5) == pytest.approx(3)


def clocks(loading, compute, loop, workers, host_ms=None):
    def rounds(times):
        return tuple(timing.Timing(1, ms / 1e3, (0.0,), (ms / 1e3,)) for ms in times)

    return timing.TwoClocks(rounds(loading), rounds(compute), rounds(loop), workers, host_ms)


@pytest.mark.parametrize(
    ("workers", "host_ms", "expected"),
    [
        (0, None, 90),  # one after the other
        (2, None, 60),  # the longer one
        (0, 5, 65),  # a GPU computes meanwhile: loading and launching are longer
        (2, 5, 60),
    ],
)
def test_the_loop_is_predicted_from_the_two_clocks(workers, host_ms, expected):
    both = clocks([30, 120], [15, 60], [66, 66], workers, host_ms)
    assert (both.loading_ms, both.compute_ms) == pytest.approx((60, 30))
    assert both.predicted_ms == pytest.approx(expected)
    assert both.error == pytest.approx(66 / expected - 1)


def test_two_clocks_give_means_and_the_ceiling():
    both = clocks([40, 10, 20], [10, 10, 10], [45, 20, 30], workers=1)
    assert both.ceiling == pytest.approx(3)
    assert both.table()["ms a batch"].tolist() == ["20.0", "10.0", "20.0", "30.0"]


OUTCOMES = {"longer": [34.4, 34.6, 34.5], "shorter": [25.4, 25.5, 25.6], "equal": [30, 30.1, 30.2]}


@pytest.mark.parametrize(("outcome", "loop"), (OUTCOMES | {"too noisy to say": [40, 27, 25]}).items())
def test_the_verdict_says_how_far_the_prediction_is_off(loop, outcome):
    assert outcome in clocks([20, 20, 20], [10, 10, 10], loop, workers=0).verdict()


def test_both_clocks_and_the_loop_are_timed_with_compute_on_one_batch(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # else the host alone is timed, too
    seen = []

    def step(items, numbers):
        clock.sleep(0.010)
        seen.append(numbers.tolist())

    loader = DataLoader(loops.SleepDataset(1000, 0.004), batch_size=5)
    both = timing.two_clocks(loader, step, steps=4, rounds=2)
    assert [run.step_ms for run in both.loading] == pytest.approx([20] * 2)
    assert [run.step_ms for run in both.compute] == pytest.approx([10] * 2)
    assert [run.step_ms for run in both.loop] == pytest.approx([30] * 2)
    assert both.host_ms is None
    first = [0, 1, 2, 3, 4]
    assert seen.count(first) == 2 * (2 + 4) + 2  # a warm-up of two, and the first of each loop


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(3), 0


DICTS = [{"image": torch.zeros(3), "target": {"label": index, "boxes": torch.zeros(2, 4)}} for index in range(6)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("dataset", "workers", "steps", "given"),
    [
        (Endless(), 0, 5, torch.Tensor),  # without a length
        (DICTS, 2, 6, dict),  # nested, with fewer batches than asked for, and in whole periods of the workers
    ],
)
def test_two_clocks_take_any_loader(dataset, workers, steps, given):
    seen = set()
    loader = DataLoader(dataset, batch_size=2, num_workers=workers)
    both = timing.two_clocks(loader, lambda *batch: seen.update(map(type, batch)), steps=5, rounds=1)
    assert (seen, both.workers) == ({given}, workers)
    runs = (*both.loading, *both.compute, *both.loop)
    assert {run.images / len(run.durations) for run in runs} == {2}
    assert {len(run.durations) for run in runs} == {steps}
    assert multiprocessing.active_children() == []
