import itertools
import multiprocessing
import os
import sys
import weakref

import pytest
import torch
from support.clock import Clock
from torch.utils.data import DataLoader

from helpers import simulate, timing
from helpers.loading import datasets
from helpers.timing import clocks as clocks_module
from helpers.timing import stopwatch, system


def run_at(images_per_second):
    seconds = 100 / images_per_second
    return timing.Timing(images=100, seconds=seconds, waits=(0.0,), durations=(seconds,))


def comparison(**rates):
    return timing.Comparison({name: tuple(map(run_at, values)) for name, values in rates.items()})


@pytest.fixture
def clock(monkeypatch):
    """The stopwatch's clock, on which only the items of a SleepDataset and simulated steps take time."""
    return Clock(monkeypatch, timing, datasets, simulate)


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


def test_the_time_that_a_step_keeps_the_host_is_without_that_of_the_device(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(clocks_module, "synchronize", lambda: clock.sleep(0.5))
    assert clocks_module._host_ms(lambda images: clock.sleep(0.003), torch.zeros(4), 5) == pytest.approx(3)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 2), 4),
        ((torch.zeros(5), torch.zeros(3)), 5),
        ({"of": [torch.tensor(1), torch.zeros(6)]}, 6),
        (["a", torch.zeros(7)], 7),
        ([], 1),
        ("text", 1),
    ],
    ids=repr,
)
def test_the_size_of_a_batch_is_the_length_of_its_first_tensor(batch, size):
    assert timing.batch_size(batch) == size


def test_without_tqdm_there_is_no_bar_and_the_rest_goes_on(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)  # as if it were not installed
    assert timing.interleaved({"a": lambda: run_at(1)}, rounds=2).throughputs("a") == [1, 1]
    assert capsys.readouterr().out == capsys.readouterr().err == ""


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


def test_variants_are_timed_interleaved(clock):
    order = []
    variants = {name: lambda name=name: order.append(name) or run_at(1) for name in "ab"}
    timing.interleaved(variants, rounds=3)
    assert "".join(order) == "ababab"


def test_a_ratio_is_taken_round_by_round():
    result = comparison(slow=[100, 50, 200], fast=[200, 100, 400])
    assert result.ratios("fast") == [2, 2, 2]
    assert result.verdict("fast").startswith("fast against slow: 2.00× the throughput, faster in every round")


def test_a_ratio_inside_the_spread_is_no_effect():
    assert "no measurable effect" in comparison(a=[100, 100], b=[101, 99]).verdict("b")


def test_a_ratio_that_differs_by_less_than_a_percent_is_no_effect_however_steady():
    assert "no measurable effect" in comparison(a=[100, 100], b=[100.4, 100.5]).verdict("b")
    assert "faster in every round" in comparison(a=[100, 100], b=[102, 103]).verdict("b")


def test_a_variant_that_is_slower_is_said_to_be():
    assert "0.50× the throughput, slower in every round" in comparison(a=[100, 100], b=[50, 49.9]).verdict("b")


def test_variants_can_be_compared_with_another_than_the_first():
    assert comparison(a=[1], b=[2], c=[6]).ratios("c", to="b") == [3]


def test_the_median_run_is_one_of_the_runs():
    result = comparison(a=[3, 1, 2, 9])
    assert result.median("a").images_per_second == pytest.approx(2)


def test_the_table_has_a_row_for_every_variant():
    table = comparison(a=[100, 120, 110], b=[220, 240, 230]).table()
    assert table.loc["a", "images/s"] == "110"
    assert table.loc["b", "lowest – highest"] == "220 – 240"
    assert table.loc["b", "ratio"] == "2.09×"


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


def test_each_stage_is_called_with_what_the_one_before_returned():
    seen = []
    timing.stages({"double": lambda item: 2 * item, "add": lambda item: item + 1, "look": seen.append}, iter([1, 2]))
    assert seen == [3, 5] * 2  # two passes


def test_stages_are_timed_in_the_second_pass(clock):
    read = set()

    def slow_at_first(item):
        clock.sleep(0.002 if item in read else 60)
        read.add(item)

    spent = timing.stages({"read": slow_at_first, "sleep": lambda item: clock.sleep(0.003), "look": repr}, [1, 2])
    assert list(spent) == ["read", "sleep", "look"]
    assert spent == pytest.approx({"read": 2_000, "sleep": 3_000, "look": 0})  # µs an item


def test_loading_alone_goes_on_until_the_time_is_up_and_not_a_batch_longer(clock):
    loader = DataLoader(datasets.SleepDataset(4, seconds=0.125), batch_size=2)
    run = timing.loading(loader, seconds=1)
    assert run.durations == run.waits == (0.25,) * 4
    assert (run.seconds, run.images) == (1, 8)
    assert len(timing.loading(loader, seconds=1.01).durations) == 5


def test_loading_alone_leaves_no_worker_behind():
    timing.loading(DataLoader(datasets.SleepDataset(8, seconds=0), batch_size=2, num_workers=2), seconds=0.01)
    assert timing.worker_memory_mb() == []


def clocks(loading, compute, loop, workers, host_ms=None):
    def rounds(times):
        return tuple(timing.Timing(1, ms / 1e3, (0.0,), (ms / 1e3,)) for ms in times)

    return timing.TwoClocks(rounds(loading), rounds(compute), rounds(loop), workers, host_ms)


@pytest.mark.parametrize(
    ("workers", "host_ms", "expected"),
    [
        (0, None, [90, 70]),  # in turn
        (2, None, [60, 50]),  # the longer one
        (0, 5, [65, 50]),  # a GPU computes meanwhile; here loading and launching are longer, there computing is
        (2, 5, [60, 50]),
    ],
)
def test_the_loop_is_predicted_from_the_two_clocks_of_each_round(workers, host_ms, expected):
    both = clocks([60, 20], [30, 50], [66, 55], workers, host_ms)
    assert both.predictions == pytest.approx(expected)
    assert both.predicted_ms == pytest.approx(sum(expected) / 2)
    assert both.errors == pytest.approx([66 / expected[0] - 1, 55 / expected[1] - 1])


def test_two_clocks_give_medians_the_ceiling_and_the_error():
    both = clocks([40, 10, 20], [10, 10, 10], [40, 20, 30], workers=1)
    assert (both.loading_ms, both.compute_ms, both.loop_ms) == pytest.approx((20, 10, 30))
    assert both.ceiling == pytest.approx(3)
    assert both.error == pytest.approx(0.5)
    assert both.table().loc["the loop, predicted"].tolist() == ["20.0", "10.0 – 40.0"]
    assert both.table().loc["the loop, measured"].tolist() == ["30.0", "20.0 – 40.0"]


@pytest.mark.parametrize(
    ("loop", "words"),
    [
        ([33, 36], "34.5 ms measured: +15% (+10% to +20%)."),
        ([27, 24], "25.5 ms measured: -15% (-20% to -10%)."),
        ([33, 27], "30.0 ms measured: +0% (-10% to +10%), no measurable difference."),
    ],
)
def test_the_verdict_says_how_far_the_prediction_is_off(loop, words):
    assert clocks([20, 20], [10, 10], loop, workers=0).verdict() == f"30.0 ms predicted, {words}"


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


def test_compute_alone_is_always_on_the_same_batch(clock):
    seen = []
    loader = DataLoader(datasets.SleepDataset(1000, 0.0), batch_size=2)
    timing.two_clocks(loader, lambda items, numbers: seen.append(numbers.tolist()), steps=3, rounds=1)
    assert seen == [[0, 1]] * 5 + [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]  # two of each as a warm-up


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


@pytest.mark.parametrize("counter", ["strace", "psutil"])
def test_system_calls_are_counted(counter, tmp_path, monkeypatch):
    if counter == "psutil":
        monkeypatch.setattr(system.shutil, "which", lambda name: None)
    elif timing.system_calls(lambda: None).name != "strace":
        pytest.skip("no strace (`apt install strace`), or it may not watch this process")
    path = tmp_path / "file"
    path.write_bytes(b"content")

    def read_often():
        for _ in range(200):
            file = os.open(path, os.O_RDONLY)
            os.read(file, 7)
            os.close(file)

    calls = timing.system_calls(read_often)
    assert calls.name == counter
    if calls.empty:
        pytest.skip("this system counts no reads")
    assert 200 <= calls["read"] < 300
    if counter == "strace":
        assert calls["openat"] == calls["close"] == 200
        assert not {"kill", "wait4"} & set(calls.index)


def test_a_function_that_asks_nothing_of_the_system_is_called_once_too():
    called = []
    for _ in range(10):  # most of these make no system call, some one or two
        timing.system_calls(lambda: called.append(1))
    assert len(called) == 10


def test_where_nothing_counts_there_is_nothing_counted(monkeypatch):
    monkeypatch.setattr(system.shutil, "which", lambda name: None)
    monkeypatch.delattr(system.psutil.Process, "io_counters", raising=False)
    called = []
    assert timing.system_calls(lambda: called.append(1)).empty
    assert called == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports it")
def test_a_forgotten_file_is_read_from_the_disk_and_then_from_memory(tmp_path):
    path = tmp_path / "below" / "file"
    path.parent.mkdir()
    path.write_bytes(os.urandom(8_000_000))
    from_memory = timing.read_from_disk_mb(path.read_bytes)
    timing.forget(tmp_path)
    from_disk = timing.read_from_disk_mb(path.read_bytes)
    if from_memory == from_disk == 0:
        pytest.skip(f"{tmp_path} is not on a disk: `--basetemp=FOLDER` names another")
    assert from_disk == pytest.approx(8, rel=0.05)
    assert min(from_memory, timing.read_from_disk_mb(path.read_bytes)) < 1  # unless memory is needed for something else


def test_where_files_cannot_be_forgotten_that_is_said(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert not timing.forget(tmp_path)


def test_each_worker_is_counted_in_the_memory():
    batches = iter(DataLoader(datasets.SleepDataset(40, 0.0), batch_size=2, num_workers=2))
    next(batches)
    memory = timing.worker_memory_mb()
    assert len(memory) == 2
    assert all(megabytes > 1 for megabytes in memory)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
def test_a_list_of_names_grows_in_a_worker_and_an_array_does_not():
    growth = {kind: timing.worker_growth_mb(datasets.FileNames(300_000, kind)) for kind in ("list", "array")}
    assert growth["list"] > 10
    assert growth["array"] < growth["list"] / 3


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_what_the_library_does_inside_a_convolution_is_counted(capfd):
    convolution, images = torch.nn.Conv2d(16, 32, 3), torch.randn(4, 16, 20, 20)

    def forward(memory_format):
        def function():
            convolution.to(memory_format=memory_format)(images.contiguous(memory_format=memory_format))

        return function

    contiguous = timing.onednn(forward(torch.contiguous_format))
    channels_last = timing.onednn(forward(torch.channels_last))
    assert contiguous.loc["convolution", "calls"] == channels_last.loc["convolution", "calls"] == 1
    assert contiguous.loc["reorder", "calls"] > channels_last["calls"].get("reorder", 0)
    assert (contiguous["ms"] > 0).all()
    os.write(1, b"visible again\n")
    assert capfd.readouterr().out == "visible again\n"


def test_a_function_without_convolutions_asks_nothing_of_the_library():
    assert timing.onednn(lambda: None).empty


def test_without_onednn_nothing_is_counted(monkeypatch):
    called = []
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "verbose", None)
    assert timing.onednn(lambda: called.append(1)).empty
    assert called == [1]
