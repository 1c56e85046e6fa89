"""Tests of `stepscope.diagnosis` by loops that run, most of them by a clock on which only sleeping takes time."""

import cProfile
import gc
import io
import itertools
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from support import cuda_trace, loops
from support.clock import Clock
from support.written import write
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info
from torchvision.transforms import v2

from stepscope import diagnosis, timing
from stepscope.base import machine
from stepscope.diagnosis import items, run, stacks, trials
from stepscope.timing import stopwatch


@pytest.fixture
def clock(quick, monkeypatch):
    """A clock that all of a diagnosis goes by, its profiles too: what it finds is exact."""
    clock = Clock(monkeypatch, run, items, timing, loops)
    monkeypatch.setattr(stacks, "queued", lambda *process: 0.0)
    # The sampler's thread goes by the clock on the wall
    monkeypatch.setattr(stacks.Sampler, "worked", property(lambda _: 0.0, lambda *_: None), raising=False)
    monkeypatch.setattr(items, "cProfile", SimpleNamespace(Profile=lambda *timer: cProfile.Profile(*timer or [tick])))
    monkeypatch.setattr(machine, "cores", lambda: 8)

    def tick():
        """Give the profiler the time, so that each call takes some, but hardly any."""
        clock.sleep(1e-12)
        return clock.now

    def record(loader, step, folder, active):
        """Run the loop as the profiler does, and write the trace that it would write by this clock."""
        warmup = timing.warmup_steps(loader) + 1
        with timing.batches(loader) as batches:
            taken = list(stopwatch.timed(batches, step, warmup + active))[warmup:]
        folder.mkdir(parents=True)
        steps = [(each.begin, each.begin + each.wait, *[each.begin + each.duration] * 2) for each in taken]
        class_ = cuda_trace.WORKERS if loader.num_workers else cuda_trace.ALONE
        write(folder / "loop.pt.trace.json", cuda_trace.on_cpu(1e6 * np.array(steps), loader=class_))

    monkeypatch.setattr(run.profiling, "record", record)
    monkeypatch.setattr(run.steps, "steps_to_sample", lambda *_: 0)  # the sampler goes by the clock on the wall
    monkeypatch.setattr(run.trials, "run", lambda *_, **__: trials.Trials())  # as trials do
    return clock


@pytest.fixture
def held(clock, monkeypatch):
    """Return a function that lets others have the cores for so many seconds of the clock.

    The loop is ready meanwhile, or it waits for the sampler, which is.
    """
    queued = {"loop": 0.0, "sampler": 0.0}

    def ready(process="thread-self"):
        return queued["sampler" if str(process).startswith("self/task") else "loop"]

    monkeypatch.setattr(stacks, "queued", ready)
    monkeypatch.setattr(stacks, "_others", lambda: sum(queued.values()))

    def held(seconds, which="loop"):
        clock.sleep(seconds)
        queued[which] += seconds

    return held


class Simulated(DataLoader):
    """Loads in this process, and by its clock takes the time that it would with workers, each of which has a core.

    `starting` and `ending` are the times that it takes to start them, and to end them. What another loader would do
    with no workers, this does, too.
    """

    def __init__(self, clock, *arguments, starting=0.0, ending=0.0, **settings):
        super().__init__(*arguments, **settings)
        self.clock, self.starting, self.ending = clock, starting, ending

    def __iter__(self):
        batches = iter(DataLoader(self.dataset, self.batch_size))
        if not self.num_workers:
            yield from batches
            return
        ready = [self.clock.now + self.starting] * self.num_workers
        asked = deque([self.clock.now] * self.num_workers * self.prefetch_factor)
        for number in range(len(self)):
            now, worker = self.clock.now, number % self.num_workers
            batch = next(batches)
            ready[worker] = max(ready[worker], asked.popleft()) + self.clock.now - now
            self.clock.now = max(now, ready[worker])
            asked.append(self.clock.now)
            yield batch
        self.clock.now += self.ending


class Busy(Dataset):
    """Items that take a core for some time of a clock."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        self.clock.work(self.seconds)
        return torch.zeros(1), index


class Photos(Dataset):
    """Photos of 1600 × 1200 pixels, decoded and resized whenever one is asked for, or only one of both."""

    def __init__(self, decoded):
        self.file, self.resize = io.BytesIO(), v2.Resize(64)
        image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))
        image = image.resize((1600, 1200))
        image.save(self.file, "jpeg")
        self.image = image if decoded else None

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        image = self.image or Image.open(self.file).convert("RGB")
        return torch.from_numpy(np.array(self.resize(image) if self.image else image.crop((0, 0, 8, 8)))), index


class Files(Busy):
    """Reads a small file for each item, from storage that takes some time."""

    def __init__(self, clock, seconds, path):
        super().__init__(clock, seconds)
        self.path = path

    def __getitem__(self, index):
        return self.read_file(), index

    def read_file(self):
        self.clock.sleep(self.seconds)
        return len(self.path.read_bytes())


def simulated(clock, dataset, batch_size=8, step_ms=10, steps=6, **settings):
    loader = Simulated(clock, dataset, batch_size, **settings)
    return diagnosis.diagnose(loader, loops.SleepStep(step_ms), steps=steps)


def test_a_loop_that_keeps_up_is_accused_of_nothing(clock):
    found = simulated(clock, loops.SleepDataset(1000, 0.0005), step_ms=100, num_workers=2)
    assert (found.verdict, found.findings, found.unknown) == ("nothing wrong", (), ())
    assert found.step_ms == pytest.approx(100)


class Interrupted(Busy):
    """One item takes far longer than the others, once: something else had the core, or so it looks."""

    def __init__(self, clock, seconds, late, at=40):
        super().__init__(clock, seconds)
        self.taken, self.late, self.at = itertools.count(), late, at

    def __getitem__(self, index):
        if next(self.taken) == self.at:
            self.clock.sleep(self.late)
        return super().__getitem__(index)


@pytest.mark.parametrize(("workers", "late"), [(0, 0.013), (2, 0.2)])
def test_one_wait_that_no_item_needs_is_not_blamed_on_loading(clock, monkeypatch, workers, late):
    monkeypatch.setattr(items, "SECONDS", 0.03)
    found = simulated(clock, Interrupted(clock, 1e-5, late, at=60), step_ms=20, steps=8, num_workers=workers)
    assert (found.verdict, found.findings) == ("nothing wrong", ())


@pytest.mark.parametrize("at", [3, 10, 15])
def test_a_step_that_takes_long_once_is_accused_of_nothing(clock, monkeypatch, at):
    monkeypatch.setattr(items, "SECONDS", 0.03)
    calls = itertools.count()
    step = lambda *batch: clock.sleep(0.8 if next(calls) == at else 0.02)  # noqa: E731
    found = diagnosis.diagnose(Simulated(clock, Busy(clock, 1e-5), 8), step, steps=8)
    assert (found.verdict, found.findings) == ("nothing wrong", ())
    assert "Not tried: bfloat16" in found.reason
    assert found.step_ms == pytest.approx(20, rel=0.01)
    assert ("one of 800 ms" in dict(found.evidence)["stopwatch"]) == (at == 3)  # later ones are not timed


def at_most(fault, rest):
    """Return the gain stated for a fault of a step whose rest takes always the same time."""
    return fault / (fault + run.LESS * rest)


def test_what_others_take_of_the_core_is_not_blamed_on_loading(clock, held):
    class Shared(Busy):
        def __getitem__(self, index):
            held(0.001)
            return super().__getitem__(index)

    found = simulated(clock, Shared(clock, 1e-5), step_ms=20, steps=8)
    assert (found.verdict, found.findings) == ("nothing wrong", ())


def test_what_others_take_of_the_core_is_no_work_of_the_step(clock, held):
    loader = Simulated(clock, Busy(clock, 0.005), 8)
    found = diagnosis.diagnose(loader, lambda *_: (clock.work(0.02), held(0.1)), steps=8)
    gains = {finding.name: finding.gain for finding in found.findings}  # the dataset's own work may come first
    assert gains["loading in the loop itself"] == pytest.approx(at_most(40, 20), abs=0.01)


def test_what_the_loops_own_workers_take_of_the_core_is_part_of_its_steps(clock, held, monkeypatch):
    monkeypatch.setattr(stacks, "_others", lambda: 0.0)
    loader = Simulated(clock, Busy(clock, 1e-5), 8, num_workers=1)
    assert diagnosis.diagnose(loader, lambda *_: (clock.work(0.02), held(0.1)), steps=8).step_ms == pytest.approx(
        120, 0.01
    )


def test_a_step_for_which_others_had_the_cores_is_not_the_fastest():
    steps = [(SimpleNamespace(duration=0.03, wait=0.01), 0.0, held) for held in (0.0, 0.005, 0.021)]
    assert (run._least(steps), run._least(steps[2:])) == (pytest.approx(0.015), 0.0)


@pytest.mark.parametrize(("item", "verdict"), [(0.005, "loading"), (0.001, "unknown"), (1e-5, "unknown")])
def test_a_verdict_that_a_busy_machine_may_have_turned_is_unknown(clock, held, monkeypatch, item, verdict):
    monkeypatch.setattr(run, "BUSY", 0.1)
    loader = Simulated(clock, Busy(clock, item), 8)
    found = diagnosis.diagnose(loader, lambda *_: (clock.work(0.01), held(0.05)), steps=12)
    assert (found.verdict, "quiet machine" in found.reason) == (verdict, verdict == "unknown")


def test_what_this_process_and_its_children_work_is_not_that_of_others(monkeypatch):
    now = psutil.cpu_times()
    monkeypatch.setattr(stacks.psutil, "cpu_times", lambda: now)  # as if nobody worked
    program = "import time\nwhile time.process_time() < 0.3: pass"
    before = stacks._others()
    subprocess.run([sys.executable, "-c", program], check=True)
    ended = stacks._others() - before
    with subprocess.Popen([sys.executable, "-c", f"{program}\ninput()"], stdin=subprocess.PIPE) as child:
        while sum(psutil.Process(child.pid).cpu_times()[:2]) < 0.2:  # counted in ticks of 10 ms
            time.sleep(0.01)
        both = stacks._others() - before
        child.communicate(b"\n")
    assert ended <= -0.15 and both - ended <= -0.15


@pytest.mark.parametrize(
    ("workers", "name", "step_ms", "change"),
    [(1, "too few workers", 32, "num_workers=4)"), (0, "loading in the loop itself", 42, "num_workers=4)")],
)
def test_the_number_of_workers_is_found_with_its_gain(clock, workers, name, step_ms, change, names):
    found = simulated(clock, loops.SleepDataset(1000, 0.004), num_workers=workers)
    assert (found.verdict, sorted(names(found))) == ("loading", sorted([name, "items that wait"]))  # they gain alike
    assert found.step_ms == pytest.approx(step_ms)
    assert [finding.gain for finding in found.findings] == pytest.approx([at_most(step_ms - 10, 10)] * 2, rel=1e-4)
    assert change in {finding.name: finding.change for finding in found.findings}[name]


def test_restarting_workers_gains_what_it_adds_to_a_step(clock, names):
    times = dict(starting=0.06, ending=0.04, step_ms=25)
    found = simulated(clock, loops.SleepDataset(8, 0.001), 2, num_workers=2, **times)
    assert names(found)[0] == "workers restarted every epoch"
    assert found.findings[0].gain == pytest.approx(at_most(25, 25))  # 0.1 s for four steps of 25 ms
    assert found.step_ms == pytest.approx(50)


@pytest.mark.parametrize(("decoded", "part"), [(False, "decoding"), (True, "resizing")])
def test_decoding_and_resizing_are_found(quick, monkeypatch, decoded, part):
    monkeypatch.setattr(items, "cProfile", SimpleNamespace(Profile=lambda *_: cProfile.Profile(time.thread_time)))
    parts = items.load(DataLoader(Photos(decoded), 2)).parts
    assert max(parts, key=parts.get) == part


def test_many_small_files_are_found(clock, names):
    found = simulated(clock, Files(clock, 0.004, Path(__file__)), step_ms=20)
    # Which is first: whether a line is seen
    assert sorted(names(found)) == ["loading in the loop itself", "many small files"]


def test_irregular_items_are_found_with_their_share(clock, names):
    irregular = loops.SleepDataset(10_000, 0.0001, hiccup_every=64, hiccup_seconds=0.2)
    found = simulated(clock, irregular, step_ms=1, steps=24)
    assert names(found) == ["loading in the loop itself", "irregular items"]
    assert "97%" in found.findings[1].evidence
    assert int(re.search(r"item (\d+),", found.findings[1].evidence)[1]) % 64 == 63


@pytest.mark.parametrize("at", [0, 1, 10, 30, 50])
@pytest.mark.parametrize("where", ["items", "whole batches", "collating"])
def test_an_interruption_at_any_time_changes_nothing(clock, where, at):
    class Whole(Interrupted):
        def __getitems__(self, indices):
            self.clock.work(0.01 * len(indices))
            return [self[index] for index in indices]

    def load(late):
        once = (Whole if where == "whole batches" else Interrupted)(clock, 0.01, late, at)
        if where == "collating":
            return items.load(DataLoader(Busy(clock, 0.01), 2, collate_fn=lambda batch: once[0]))
        return items.load(DataLoader(once, 2))

    usual, sample = load(0), load(0.835)
    assert sample.ms == pytest.approx(usual.ms, rel=0.01)
    assert (sample.irregular.count, sample.waits) == (0, {})
    assert sample.parts == pytest.approx(usual.parts, abs=0.01)


@pytest.mark.parametrize("at", [2, 5, 9])
def test_where_others_have_the_cores_a_short_interruption_is_not_what_the_items_wait(clock, held, at):
    """It takes as long as an item, most of which others had the cores."""

    class Contended(Interrupted):
        def __getitem__(self, index):
            held(0.027)
            return super().__getitem__(index)

    sample = items.load(DataLoader(Contended(clock, 0.003, 0.029, at), 2))
    assert (sample.ms, sample.cpu_ms, sample.waits) == (pytest.approx(3, rel=0.01), pytest.approx(3, rel=0.01), {})


def test_what_items_wait_for_the_sampler_while_others_have_the_cores_is_no_wait_of_theirs(clock, held):
    class Sampled(Busy):
        def __getitem__(self, index):
            held(0.002, "sampler")
            return super().__getitem__(index)

    sample = items.load(DataLoader(Sampled(clock, 0.003), 2))
    assert (sample.ms, sample.cpu_ms, sample.waits) == (pytest.approx(3, rel=0.01), pytest.approx(3, rel=0.01), {})


@pytest.mark.parametrize(("in_slow_items", "in_collating"), [(0.0, 0.01), (0.1, 0.0)])
def test_where_others_have_the_cores_irregular_items_are_found_with_their_share(held, in_slow_items, in_collating):
    class Slow(loops.SleepDataset):
        def __getitem__(self, index):
            held(in_slow_items if index % 64 == 63 else 0)
            return super().__getitem__(index)

    slow = Slow(10_000, 0.0001, hiccup_every=64, hiccup_seconds=0.3)
    sample = items.load(DataLoader(slow, 8, collate_fn=lambda batch: held(in_collating)))
    assert (sample.irregular.share, sample.waiting) == pytest.approx((0.3 / 0.3064, 0), abs=0.05)
    assert sample.irregular.slowest_ms == pytest.approx(300, rel=0.01)


def test_irregular_loading_is_found(clock, names):
    irregular = loops.SleepDataset(10_000, 0.0001, hiccup_every=32, hiccup_seconds=0.2)
    found = simulated(clock, irregular, batch_size=4, step_ms=20, steps=24, num_workers=2)
    assert names(found) == ["irregular loading"]


class Stream(IterableDataset):
    """Items without an end in sight, and without a length."""

    def __init__(self, count=10_000):
        self.count = count

    def __iter__(self):
        for index in range(self.count):
            yield torch.zeros(3), index


@pytest.mark.processes
@pytest.mark.parametrize("settings", [{"num_workers": 2}, {"batch_size": None}], ids=str)
def test_iterable_datasets_without_a_length_are_looked_at(quick, settings):
    loader = DataLoader(Stream(), **{"batch_size": 4} | settings)
    found = diagnosis.diagnose(loader, loops.SleepStep(5), steps=4)
    assert not any("how" in text for text in found.unknown)  # but why it waits may be, on a busy machine
    assert any(name == "an item" for name, _ in found.evidence)


def test_the_size_of_batches_from_a_sampler_is_reported(quick):
    loader = DataLoader(loops.SleepDataset(64, 0.0), batch_sampler=BatchSampler(range(64), 4, drop_last=False))
    found = diagnosis.diagnose(loader, loops.SleepStep(5), steps=4)
    assert "batch_size=4," in dict(found.evidence)["DataLoader"]


def test_an_epoch_shorter_than_what_is_asked_for_is_begun_again(quick):
    calls = []
    loader = DataLoader(Stream(3), batch_size=2)
    diagnosis.diagnose(loader, lambda images, labels: calls.append(len(images)), steps=9)
    assert len(calls) == 2 + 9 + 2 + 1 + 4  # warm-up and timed; warm-up, the profiler's own, and recorded
    assert calls[:4] == [2, 1, 2, 1]


def test_loaders_that_are_none_of_torchs_are_watched_all_the_same(clock):
    batches = [(torch.zeros(4), torch.zeros(4))] * 3
    found = diagnosis.diagnose(batches, loops.SleepStep(5), steps=4)
    assert found.verdict == "nothing wrong"
    assert "the loader is a list" in found.unknown[0]


class OnlyInWorkers(loops.SleepDataset):
    """Cannot be loaded in the main process."""

    def __getitem__(self, index):
        return torch.full((2,), get_worker_info().id), index


def test_what_cannot_be_loaded_in_this_process_is_said(quick):
    loader = DataLoader(OnlyInWorkers(1000, 0), 8, num_workers=1)
    found = diagnosis.diagnose(loader, loops.SleepStep(10), steps=6)
    assert "how long an item takes" in found.unknown[0] and "AttributeError" in found.unknown[0]


class Opener(loops.SleepDataset):
    """Opens its file when the first item is asked for, as a dataset should; notes how many threads it has then."""

    file, threads, ended = None, set(), []

    def __getitem__(self, index):
        self.file = self.file or open(os.devnull)
        self.threads.add(torch.get_num_threads())
        return torch.zeros(1), index

    def __del__(self):
        self.ended.append(self)


def test_items_are_loaded_as_in_a_worker_with_one_thread_and_what_they_open_is_not_left_open(quick):
    dataset, threads = Opener(1000, 0), torch.get_num_threads()
    torch.set_num_threads(2)
    items.load(DataLoader(dataset, 4))
    assert (dataset.threads, torch.get_num_threads(), dataset.file) == ({1}, 2, None)
    gc.collect()
    assert not dataset.ended  # a copy, too, may have deleted what the dataset uses
    torch.set_num_threads(threads)


class SlowStart:
    """Epochs that begin with a pause."""

    def __init__(self, clock, count, pauses):
        self.clock, self.count, self.pauses = clock, count, pauses

    def __iter__(self):
        self.clock.sleep(next(self.pauses))
        yield from [(torch.zeros(1), torch.zeros(1))] * self.count


def test_the_start_of_an_epoch_is_no_usual_wait(clock):
    loader = SlowStart(clock, 4, itertools.repeat(0.2))
    seen, *_ = run.watch(loader, loops.SleepStep(5), count=9, folder=Path("profile"))
    assert (seen.start, seen.step) == pytest.approx((200, 5))
    assert (seen.wait, seen.usual_wait, seen.epoch) == (0, 0, 4)


def test_one_slow_start_of_an_epoch_is_no_restart(clock):
    loader = SlowStart(clock, 100, itertools.chain([0, 0.8], itertools.repeat(0)))
    seen, *_ = run.watch(loader, loops.SleepStep(5), count=9, folder=Path("profile"))
    assert seen.start == 0


@pytest.mark.processes
def test_a_step_that_fails_leaves_no_worker_and_a_persistent_loader_works_afterwards(quick):
    def step(images, labels):
        raise ZeroDivisionError("the loss is gone")

    loader = DataLoader(loops.SleepDataset(1000, 0.0001), 4, num_workers=2, persistent_workers=True)
    with pytest.raises(ZeroDivisionError):
        diagnosis.diagnose(loader, step)
    assert multiprocessing.active_children() == []
    with pytest.raises(TypeError) as caught:
        diagnosis.diagnose(loader, lambda images: None)
    assert "2 arguments" in caught.value.__notes__[0]
    diagnosis.diagnose(loader, lambda *batch: None, steps=3)
    assert multiprocessing.active_children() == []
    assert len(list(loader)) == 250
    loader._iterator._shutdown_workers()  # the kept errors hold this frame, and so the loader


def test_loaders_without_batches_are_refused(quick):
    with pytest.raises(ValueError, match="yields no batch"):
        diagnosis.diagnose([], lambda batch: None)


def test_a_profiler_that_runs_already_is_named(quick):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(RuntimeError, match="profiler"):
            diagnosis.diagnose([(torch.zeros(1),)], lambda batch: None)
