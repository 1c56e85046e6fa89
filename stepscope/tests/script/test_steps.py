"""Tests of `stepscope.script.watch`: what of a script's time is a step, and what is between two epochs."""

import functools
import itertools
import os
import signal
import sys
import time
import weakref

import pytest
import torch
from support.clock import Clock
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from stepscope.script import hooks, pauses, watch


class Seen(watch.Watch):
    """Keeps each step, and diagnoses none."""

    def _diagnose(self):
        self.ended, self.held_at_most = [], 0.0
        while True:
            (step, *held), _ = yield
            self.ended.append(step.duration)
            self.held_at_most = max(self.held_at_most, *held)


class Stream(IterableDataset):
    """Twenty items, and no length."""

    def __iter__(self):
        return iter(range(20))


class Script:
    """Loops of a script in which a step takes 2 s, the evaluation of a batch 5 s, and saving 30 s."""

    def __init__(self, clock, folder):
        self.clock, model = clock, nn.Linear(1, 1)
        model.weight.grad = torch.zeros(1, 1)
        self.optimizer = torch.optim.SGD(model.parameters())
        self.watch = Seen(1, folder, print)
        self.loader, self.validation = self.made(), DataLoader(range(2))

    @staticmethod
    def made(count=20):
        return DataLoader(range(count))

    def update(self):
        self.clock.sleep(2)
        self.optimizer.step()

    def train(self, batches, each=1):
        for number, _ in enumerate(batches, 1):
            if number % each == 0:
                self.update()

    def evaluate(self, loader=None):
        for _ in loader or self.validation:
            self.clock.sleep(5)

    def save(self):
        self.clock.sleep(30)


@pytest.fixture
def script(monkeypatch, tmp_path):
    clock = Clock(monkeypatch, watch)
    script = Script(clock, tmp_path)
    hooks.install_here(script.watch)
    yield script
    script.watch.over = True
    script.watch.pauses.look_away()
    script.watch.phases.close()


def all_kinds(script):
    """Train for four epochs, with all between them that is usual."""
    script.evaluate()
    for _ in range(4):
        script.train(script.loader)
        script.evaluate()
        script.save()


def a_new_loader_for_each_epoch(script):
    for _ in range(4):
        script.train(script.made())
        script.evaluate()
        script.save()


def no_length(script):
    script.loader = DataLoader(Stream())
    all_kinds(script)


def evaluated_on_what_it_trains_with(script):
    script.validation = script.made(2)
    for _ in range(4):
        script.train(script.loader)
        script.clock.sleep(20)
        for _ in script.loader:
            script.clock.sleep(1)


def left_before_the_end(script):
    script.loader = script.made(100)
    for _ in range(4):
        script.train(itertools.islice(script.loader, 20))
        script.evaluate()
        script.save()


def fetched_ahead(script, epochs=4):
    """As accelerate does, which asks for a batch before the one before it is trained on."""
    for _ in range(epochs):
        batches = iter(script.loader)
        waiting = next(batches)
        while waiting is not None:
            waiting = next(batches, None)
            script.update()
        script.evaluate()
        script.save()


def fetched_ahead_from_a_new_loader(script):
    for _ in range(4):
        script.loader = script.made(22)
        fetched_ahead(script, epochs=1)


def shown_meanwhile(script):
    """Some images of another pass over the loader, in the middle of each epoch."""
    for _ in range(4):
        for number, _ in enumerate(script.loader):
            if number == 9:
                next(iter(script.loader))
            script.update()
        script.evaluate()
        script.save()


def updated_after_the_last_batch(script):
    """Of batches whose gradients are accumulated, the rest."""
    script.loader = script.made(39)
    for _ in range(4):
        script.train(script.loader, each=2)
        script.update()
        script.evaluate()
        script.save()


@pytest.mark.parametrize(
    "loop",
    [
        all_kinds,
        a_new_loader_for_each_epoch,
        no_length,
        evaluated_on_what_it_trains_with,
        left_before_the_end,
        fetched_ahead,
        fetched_ahead_from_a_new_loader,
        shown_meanwhile,
        updated_after_the_last_batch,
    ],
)
def test_what_is_between_epochs_is_no_part_of_a_step(script, loop):
    loop(script)
    found = script.watch.pauses
    assert set(found.seconds) == {40.0}, found.seconds
    assert script.watch.length in (19, 20, 21)  # of a new loader two batches are seen before it is known to train
    assert max(script.watch.ended[1:]) <= 4, script.watch.ended  # before the first step it is unknown what trains


def test_what_is_within_epochs_is_part_of_a_step(script):
    for number, _ in enumerate(DataLoader(range(100), sampler=RandomSampler(range(100), num_samples=500)), 1):
        script.update()
        if number % 10 == 0:
            script.evaluate()
    assert script.watch.pauses.seconds == []
    assert sum(script.watch.ended) == 500 * 2 + 50 * 10 and max(script.watch.ended) == 12


def test_own_batches_beside_a_loader_that_evaluates_are_steps_of_the_optimizer(script):
    for number in range(1, 41):
        script.update()
        if number % 10 == 0:
            with torch.no_grad():
                script.evaluate()
    assert script.watch.loader is None
    assert sorted(script.watch.ended[1:]) == [2] * 36 + [12] * 3, script.watch.ended


def test_after_the_diagnosis_no_object_of_the_script_is_kept(script):
    script.train(script.loader)
    script.watch._leave()
    loader = weakref.ref(script.loader)
    script.train(script.loader)
    del script.loader
    assert loader() is None


def test_what_a_child_reads_is_still_there_for_the_script(tmp_path):
    (tmp_path / "items").write_bytes(bytes(range(256)))
    (tmp_path / "log").touch()
    reading, writing = os.pipe()
    os.write(writing, b"an item")
    with (tmp_path / "items").open("rb", buffering=0) as items, (tmp_path / "log").open("a") as log:
        items.read(7)

        def load():
            log.write("loaded")
            log.flush()
            return items.read(3), os.read(reading, 7)

        assert watch._in_child(load) == (bytes([7, 8, 9]), b"")
        assert (items.read(3), os.read(reading, 7)) == (bytes([7, 8, 9]), b"an item")
    assert (tmp_path / "log").read_text() == "loaded"


def test_a_loader_that_is_begun_for_each_step_has_epochs_of_one(script):
    for _ in range(20):
        next(iter(script.loader))
        script.update()
        script.save()
    assert script.watch.pauses.seconds == [] and script.watch.length == 1
    assert script.watch.ended[-1] == 32


def test_a_pause_after_some_epochs_counts_for_the_steps_of_all(script):
    """As in reinforcement learning: play, then train for four epochs on what was played."""
    for _ in range(3):
        script.clock.sleep(400)
        for _ in range(4):
            script.train(script.loader)
    script.clock.sleep(400)
    script.train(script.loader)
    assert script.watch.pauses.apart == 1200 / (12 * 20)


def test_an_evaluation_in_the_first_step_ends_no_epoch(script):
    for number, _ in enumerate(script.loader):
        script.update()
        if number == 0:
            script.evaluate()
    assert script.watch.pauses.lengths == [] and script.watch.length == 20


def test_what_a_pause_waits_for_a_core_is_not_taken_from_a_step(script):
    waited = [0.0]
    script.watch.queued = lambda: waited[0]
    for _ in range(3):
        fetched_ahead(script, epochs=1)
        waited[0] += 20
    assert script.watch.held_at_most < 20


class Late:
    def __call__(self, *_):
        raise TimeoutError


@pytest.mark.parametrize("handler", [Late().__call__, Late(), functools.partial(Late(), "late")])
def test_an_error_of_the_scripts_signal_handler_is_raised(script, monkeypatch, capsys, handler):
    monkeypatch.setattr(signal, "getsignal", lambda number: handler)
    with pytest.raises(TimeoutError) as error:
        handler()
    with pytest.raises(TimeoutError):
        script.watch._failed(error.value)
    assert "TimeoutError" in capsys.readouterr().out


def test_another_error_is_reported_only(script, capsys):
    with pytest.raises(ValueError, match="999") as error:
        signal.Signals(999)  # by code of the type that signal.SIG_DFL has, too
    script.watch._failed(error.value)
    assert "999 is not a valid Signals" in capsys.readouterr().out


def test_a_sampler_looks_no_more_after_so_many_samples():
    before = sys.getswitchinterval()
    for interval in (before, 1e-4):
        sys.setswitchinterval(interval)
        interval = sys.getswitchinterval()
        with pauses.stacks.Sampler(0.001, most=3) as sampler:
            while sampler._thread.is_alive():
                time.sleep(0.01)
            assert sys.getswitchinterval() == interval
        assert len(sampler.samples) == 3
    sys.setswitchinterval(before)


def test_without_another_thread_a_pause_has_no_line(script, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    interval = sys.getswitchinterval()
    all_kinds(script)
    assert set(script.watch.pauses.seconds) == {40.0} and script.watch.pauses.line == ""
    assert sys.getswitchinterval() == interval


def test_the_line_between_epochs_is_that_which_takes_the_time():
    def evaluates():
        for _ in range(30):
            torch.randn(300, 300) @ torch.randn(300, 300)

    found = pauses.Pauses()
    found.steps = 2
    begin = pauses.stacks.time.perf_counter()
    found.ended(begin)
    while pauses.stacks.time.perf_counter() - begin < 0.3:
        evaluates()
    found.begun(end := pauses.stacks.time.perf_counter(), True, 0)
    found.updated(end, 2)
    assert f"{__file__.split('/')[-1]}:{evaluates.__code__.co_firstlineno + 2}:" in found.line
    assert (found.seconds, found.lengths) == ([end - begin], [2])
