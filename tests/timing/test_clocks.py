import multiprocessing
import os

import pytest
import torch
from torch.utils.data import DataLoader

from helpers import simulate, timing
from helpers.loading import datasets
from helpers.timing import clocks as clocks_module


def test_the_time_that_a_step_keeps_the_host_is_without_that_of_the_device(clock, monkeypatch):
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


def test_a_gpu_that_computes_longer_than_the_host_loads_and_launches_sets_the_pace():
    assert clocks([20], [50], [50], workers=0, host_ms=5).predicted_ms == pytest.approx(50)


def test_two_clocks_give_means_the_ceiling_and_the_error():
    both = clocks([40, 10, 20], [10, 10, 10], [45, 20, 30], workers=1)
    assert (both.loading_ms, both.compute_ms, both.loop_ms) == pytest.approx((20, 10, 30))
    assert both.ceiling == pytest.approx(3)
    assert both.error == pytest.approx(0.5)
    assert both.table()["ms a batch"].tolist() == ["20.0", "10.0", "20.0", "30.0"]
    assert both.table().loc["compute alone", "95% interval"] == "10.0 – 10.0"


def test_the_interval_of_the_error_follows_from_how_the_rounds_differ_in_it():
    steady = clocks([10, 20, 40], [5, 5, 5], [11, 22, 44], workers=1)  # each round 10% longer than its own prediction
    assert steady.ratio.lowest == pytest.approx(1.1)
    assert steady.ratio.highest == pytest.approx(1.1)
    assert timing.outcome(clocks([20, 20, 20], [5, 5, 5], [11, 22, 44], workers=1).ratio) == "too noisy to say"


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ([34.4, 34.6, 34.5], "34.5 ms measured: +15% (+14% to +16%), longer."),
        ([25.4, 25.5, 25.6], "25.5 ms measured: -15% (-16% to -14%), shorter."),
        ([30, 30.1, 30.2], "30.1 ms measured: +0% (+0% to +1%), equal within 2%."),
        ([40, 27, 25], "30.0 ms measured: +0% (-47% to +87%), too noisy to say."),
    ],
)
def test_the_verdict_says_how_far_the_prediction_is_off(loop, words):
    assert clocks([20, 20, 20], [10, 10, 10], loop, workers=0).verdict() == f"30.0 ms predicted, {words}"


def test_both_clocks_and_the_loop_are_timed(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    loader = DataLoader(datasets.SleepDataset(100, 0.004), batch_size=5)
    both = timing.two_clocks(loader, simulate.SimulatedAccelerator(10), steps=4, rounds=2)
    assert [run.step_ms for run in both.loading] == pytest.approx([20] * 2)
    assert [run.step_ms for run in both.compute] == pytest.approx([10] * 2)
    assert [run.step_ms for run in both.loop] == pytest.approx([30] * 2)
    assert both.compute[0].waits == (0,) * 4  # nothing is loaded
    assert both.host_ms is None


@pytest.mark.processes
def test_with_workers_whole_bursts_are_timed(clock):
    loader = DataLoader(datasets.SleepDataset(200, 0.0), batch_size=2, num_workers=3)
    both = timing.two_clocks(loader, lambda *batch: None, steps=4, rounds=1)
    assert both.workers == 3
    assert len(both.loading[0].durations) == len(both.loop[0].durations) == 6


def test_compute_alone_is_always_on_the_same_batch(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # else the host alone is timed, too
    seen = []
    loader = DataLoader(datasets.SleepDataset(1000, 0.0), batch_size=2)
    timing.two_clocks(loader, lambda items, numbers: seen.append(numbers.tolist()), steps=3, rounds=1)
    loaded = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert seen in ([[0, 1]] * 5 + loaded, loaded + [[0, 1]] * 5)  # two of each as a warm-up; in random order


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(3), 0


class Dicts(torch.utils.data.Dataset):
    def __init__(self, fails=None):
        self.fails = fails

    def __len__(self):
        return 6

    def __getitem__(self, index):
        if self.fails == "raise" and index == 3:
            raise datasets.UnreadableImage("image 3 is damaged")
        if self.fails == "die" and index == 3:
            os._exit(1)
        return {"image": torch.zeros(3), "target": {"label": index, "boxes": torch.zeros(2, 4)}}


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "given"),
    [
        (Endless(), [torch.Tensor, torch.Tensor]),  # without a length
        (Dicts(), [dict]),  # nested, and with fewer batches than asked for
    ],
)
def test_two_clocks_take_any_loader(dataset, given, workers):
    seen = []
    loader = DataLoader(dataset, batch_size=2, num_workers=workers)
    both = timing.two_clocks(loader, lambda *batch: seen.append([type(part) for part in batch]), steps=5, rounds=1)
    assert all(types == given for types in seen)
    assert {run.images / len(run.durations) for run in (*both.loading, *both.compute, *both.loop)} == {2}
    assert multiprocessing.active_children() == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fails", "error", "match"),
    [("raise", datasets.UnreadableImage, "in DataLoader worker"), ("die", timing.WorkerDied, "exit code 1")],
)
def test_two_clocks_of_a_loader_that_fails_end_its_workers(fails, error, match):
    with pytest.raises(error, match=match):
        timing.two_clocks(DataLoader(Dicts(fails), 1, num_workers=2), lambda batch: None, steps=5, rounds=1)
    assert multiprocessing.active_children() == []


@pytest.mark.processes
def test_two_clocks_of_a_step_that_fails_end_the_workers():
    def step(batch):
        if multiprocessing.active_children():  # not in compute alone, but in the loop
            raise ZeroDivisionError("of the step")

    with pytest.raises(ZeroDivisionError, match="of the step"):
        timing.two_clocks(DataLoader(Dicts(), 1, num_workers=2), step, steps=5, rounds=1)
    assert multiprocessing.active_children() == []


def test_a_loader_that_can_be_gone_through_only_once_is_distinguished_from_an_empty_one():
    with pytest.raises(ValueError, match="generator"):
        timing.two_clocks((batch for batch in [torch.zeros(2)] * 5), lambda batch: None, steps=2, rounds=1)
