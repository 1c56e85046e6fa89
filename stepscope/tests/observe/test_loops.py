"""Facts of loops, most of them by a clock on which only sleeping takes time: from `diagnose`, and of a script."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from support import loops
from support.clock import Busy, Simulated, once
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stepscope import diagnosis, rules, thresholds
from stepscope.facts import saving
from stepscope.facts.host import Optimizer
from stepscope.observe import contention, examination, loop, recorder, watched

pytestmark = pytest.mark.processes  # a second or more each


USUAL = (1000, 0.004)  # items, and the seconds of one: a batch takes 32 ms
RESTARTED = dict(starting=0.06, ending=0.04)


@pytest.mark.parametrize(
    ("items", "settings", "step_ms", "expected"),
    [
        (USUAL, dict(num_workers=2), 100, dict(wait_ms=0, usual_wait_ms=0, start_ms=32, epoch_steps=125)),
        (USUAL, dict(num_workers=1), 10, dict(wait_ms=22, usual_wait_ms=22, start_ms=32, epoch_steps=125)),
        (USUAL, dict(), 10, dict(wait_ms=32, usual_wait_ms=32, start_ms=32, epoch_steps=125)),
        # Workers that are restarted every epoch, workers that persist, and irregular loading
        ((32, 0.001), dict(num_workers=2) | RESTARTED, 25, dict(wait_ms=0, start_ms=108, epoch_steps=4)),
        ((32, 0.001), dict(num_workers=2, persistent_workers=True), 25, dict(wait_ms=0, start_ms=8, epoch_steps=4)),
        ((1000, 0.0001, 64, 0.2), dict(num_workers=2), 20, dict(wait_ms=3 * 120.7 / 24, usual_wait_ms=0)),
        # Each fifth step waits for all: 24 steps would be no whole number of these periods
        (USUAL, dict(num_workers=5), 2, dict(wait_ms=32 / 5 - 2)),
        ((160, 0.001), dict(num_workers=2), 20, dict(wait_ms=0, start_ms=8, epoch_steps=20)),
    ],
)
def test_the_times_of_a_loop_are_exact(facts_of, clock, items, settings, step_ms, expected):
    loader = Simulated(clock, loops.SleepDataset(*items), 8, **settings)
    timed = facts_of(loader, loops.SleepStep(step_ms), 24).loop
    assert {name: getattr(timed, name) for name in expected} == pytest.approx(expected, abs=0.01)
    assert (timed.work_ms, timed.workers) == (pytest.approx(step_ms), settings.get("num_workers", 0))
    assert not timed.only_first


def test_diagnose_also_times_the_arrival_of_a_ready_batch(clock):
    loader = Simulated(clock, loops.SleepDataset(*USUAL), 8, num_workers=1)
    assert loop.observe(loader, loops.SleepStep(10), 8, Path("profile")).loop.transfer_ms == 0  # though steps wait


@pytest.mark.parametrize(("count", "pauses", "start_ms"), [(4, [0.2] * 9, 200), (100, [0, 0.8], 0)])
def test_the_usual_start_of_an_epoch_does_not_count_as_a_wait(clock, count, pauses, start_ms):
    class SlowStart:
        def __iter__(self):
            clock.sleep(pauses.pop(0))
            yield from [(torch.zeros(1), torch.zeros(1))] * count

    timed = loop.observe(SlowStart(), loops.SleepStep(5), 9, Path("profile")).loop
    assert (timed.start_ms, timed.work_ms) == pytest.approx((start_ms, 5))
    assert (timed.wait_ms, timed.usual_wait_ms) == (0, 0)


def test_workers_that_a_wrapper_starts_again_are_seen(facts_of, clock):
    class Remade:
        def __iter__(self):
            settings = dict(num_workers=2, persistent_workers=True) | RESTARTED
            yield from Simulated(clock, loops.SleepDataset(32, 0.001), 8, **settings)

    timed = facts_of(Remade(), loops.SleepStep(25), 8).loop
    assert timed.start_ms == pytest.approx(108)
    assert timed.epoch_steps in (3, 4)  # two batches of a new loader pass before it is known to train a script


def test_a_loop_that_takes_only_the_first_batch_of_each_iterator_is_seen(facts_of, clock):
    class First:
        def __iter__(self):
            yield next(iter(loader))

    loader = Simulated(clock, loops.SleepDataset(1000, 0.001), 8, num_workers=2, starting=0.06)
    timed = facts_of(First(), loops.SleepStep(5), 8).loop
    assert timed.only_first and not timed.pauses.count  # work between epochs of one step is part of the step
    assert (timed.epoch_steps, timed.start_ms) == (1, pytest.approx(68))


@pytest.mark.parametrize(("step_s", "workers"), [(3, 0), (10, 0), (10, 2), (40, 5)])
def test_long_steps_are_examined_by_few_of_them_in_whole_periods_of_the_workers(facts_of, clock, step_s, workers):
    loader = Simulated(clock, loops.SleepDataset(100_000, 0.001), 8, num_workers=workers)
    loop = facts_of(loader, loops.SleepStep(1e3 * step_s), 20).loop
    assert 4 <= len(loop.steps) < 20 and len(loop.steps) % max(1, workers) == 0
    assert loop.work_ms == pytest.approx(1e3 * step_s, rel=0.01)
    assert clock.now < 180 or step_s > 10


def test_more_long_steps_are_timed_if_more_are_wanted(facts_of, clock):
    loader, step = Simulated(clock, loops.SleepDataset(100_000, 0.001), 8), loops.SleepStep(3000)
    few, many = (len(facts_of(loader, step, count).loop.steps) for count in (20, 40))
    assert few < many


@pytest.mark.parametrize(("workers", "late"), [(0, 0.013), (2, 0.2)])
def test_one_wait_that_no_item_needs_is_not_blamed_on_loading(facts_of, clock, workers, late):
    loader = Simulated(clock, Busy(clock, 1e-4, once(clock, late, at=60)), 8, num_workers=workers)
    facts = facts_of(loader, loops.SleepStep(20), 8)
    assert facts.loop.wait_ms < 1
    assert rules.diagnose(facts).findings == ()


@pytest.mark.parametrize("steps_of_an_epoch", [8, 125])
def test_what_a_gpu_still_computes_at_the_end_of_an_epoch_belongs_to_the_steps(
    facts_of, clock, monkeypatch, steps_of_an_epoch
):
    done = 0.0

    def step(*_):  # launched in 5 ms, computed in 50 ms
        nonlocal done
        clock.sleep(0.005)
        done = max(done, clock.now) + 0.05

    for module in (examination, watched):
        monkeypatch.setattr(module, "synchronize", lambda gpu: clock.sleep(max(0.0, done - clock.now)))
    loader = Simulated(clock, loops.SleepDataset(8 * steps_of_an_epoch, 0.0), 8)
    timed = facts_of(loader, step, 20).loop
    assert timed.total_ms / len(timed.steps) == pytest.approx(50, rel=0.02)


@pytest.mark.parametrize("at", [4, 11, 16])
def test_a_step_that_takes_long_once_is_accused_of_nothing(facts_of, clock, at):
    slow = once(clock, 0.8, at)
    facts = facts_of(Simulated(clock, Busy(clock, 1e-4), 8), lambda *_: (clock.sleep(0.02), slow()), 8)
    assert facts.loop.work_ms == pytest.approx(20, rel=0.01)
    assert rules.diagnose(facts).verdict == "nothing wrong"


def test_time_in_which_other_processes_have_the_core_is_neither_loading_nor_work(facts_of, clock):
    loader = Simulated(clock, Busy(clock, 0.005, lambda: clock.hold(0.001)), 8)
    facts = facts_of(loader, lambda *_: (clock.work(0.02), clock.hold(0.1)), 8)
    assert (facts.loop.wait_ms, facts.loop.work_ms) == pytest.approx((40, 20))
    assert facts.machine.held_share == pytest.approx(108 / 168, rel=0.05)


def test_time_in_which_the_loops_own_workers_have_the_core_is_part_of_its_steps(facts_of, clock, monkeypatch):
    monkeypatch.setattr(contention, "_cpu_of_others", lambda: 0.0)
    loader = Simulated(clock, Busy(clock, 1e-4), 8, num_workers=1)
    facts = facts_of(loader, lambda *_: (clock.work(0.02), clock.hold(0.1)), 8)
    assert facts.loop.work_ms == pytest.approx(120)


class Order(BatchSampler):
    """Batches of two items in order; notes at the start of each epoch whether a profiler records."""

    def __init__(self, count):
        super().__init__(range(2 * count), 2, drop_last=False)
        self.recorded = []

    def __iter__(self):
        self.recorded.append(torch.autograd._profiler_enabled())
        return super().__iter__()


@pytest.mark.parametrize(("count", "crosses"), [(30, False), (9, False), (4, True)])
def test_steps_are_profiled_within_an_epoch_if_one_is_long_enough(facts_of, quick, monkeypatch, count, crosses):
    monkeypatch.setattr(thresholds, "MOST_SAMPLED_STEPS", 10)
    order = Order(count)
    facts = facts_of(DataLoader(loops.SleepDataset(60, 0), batch_sampler=order), loops.SleepStep(2), 18)
    assert any(order.recorded) == crosses
    stalled = facts.profile.stall_ms > 0  # on a busy machine one is left out
    assert (facts.profile.steps + stalled, facts.loop.epoch_steps) == (4, count)
    assert facts.host.sampled_ms is not None
    assert facts.loader.settings.batch_size == 2  # the DataLoader itself knows none


def test_a_loader_that_is_not_a_dataloader_is_diagnosed(clock):
    found = diagnosis.diagnose([(torch.zeros(4), torch.zeros(4))] * 3, loops.SleepStep(5), steps=4)
    assert found.verdict == "nothing wrong"
    assert (loader := saving.read(Path("diagnosis", saving.NAME)).loader).kind == "list" and not loader.settings


def test_the_optimizer_of_a_loop_is_known(facts_of, quick):
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    optimizer = torch.optim.AdamW([{"params": weights[:2]}, {"params": weights[2:]}], foreach=True)
    facts = facts_of(DataLoader(range(100)), lambda batch: optimizer.step(), 3)
    assert facts.optimizer == Optimizer("AdamW", 2, 3, ("fused",), "cpu", "float32", 1 / 3)


@pytest.mark.parametrize(
    ("options", "faster"),
    [
        ({}, ("fused",)),
        ({"fused": True}, ()),
        ({"foreach": False}, ("fused", "foreach")),
        ({"foreach": True}, ("fused",)),
    ],
)
def test_no_option_is_advised_that_a_gpus_optimizer_has_or_that_excludes_one_it_has(options, faster):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **options)
    assert recorder.faster(optimizer, "cuda") == faster
    assert recorder.faster(torch.optim.RMSprop([torch.nn.Parameter(torch.zeros(1))]), "cuda") == ()


@pytest.mark.processes
def test_after_a_diagnosis_or_an_error_no_worker_is_left_and_a_dataloader_is_as_it_was(quick):
    def fail(images, labels):
        raise ZeroDivisionError("the loss is gone")

    loader = DataLoader(loops.SleepDataset(1000, 0.0001), 4, num_workers=2, persistent_workers=True)
    methods = DataLoader.__iter__, _BaseDataLoaderIter.__next__
    for step, error in ((fail, ZeroDivisionError), (lambda images: None, TypeError)):
        with pytest.raises(error) as caught:
            diagnosis.diagnose(loader, step)
        assert "2 arguments" in caught.value.__notes__[0]
        assert multiprocessing.active_children() == []
    diagnosis.diagnose(loader, lambda *batch: None, steps=3)
    assert multiprocessing.active_children() == []
    assert (DataLoader.__iter__, _BaseDataLoaderIter.__next__) == methods
    assert len(list(loader)) == 250
    loader._iterator._shutdown_workers()  # the kept errors hold this frame, and so the loader


def test_loaders_without_batches_are_refused(quick):
    with pytest.raises(ValueError, match="yields no batch"):
        diagnosis.diagnose([], lambda batch: None)


def test_a_loop_of_several_ranks_is_refused_since_it_would_hang(quick, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(RuntimeError, match="torchrun"):
        diagnosis.diagnose([(torch.zeros(1),)], lambda batch: None)


def test_a_profiler_that_runs_already_is_named(quick):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="profiler"):
            diagnosis.diagnose([(torch.zeros(1),)], lambda batch: None)


def test_the_gpu_that_is_asked_is_that_of_the_weights(monkeypatch):
    class Weight(torch.nn.Parameter):
        is_cuda, device = True, torch.device("cuda", 1)

    asked = []
    monkeypatch.setattr("stepscope.timing.stopwatch._uses_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", asked.append)
    watching = recorder.Recorder()
    watching.updated(torch.optim.SGD([Weight(torch.zeros(1))]))
    watching.synchronizes = True
    watching.end_step()
    assert asked == [torch.device("cuda", 1)]
