"""The steps of a script: how much of its time is a step, and how much is between two epochs."""

import functools
import itertools
import os
import signal
import sys
import weakref

import pytest
import torch
from support.clock import Clock
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from stepscope.observe import hooks, loop, recorder
from stepscope.observe import watched as watching


class Stream(IterableDataset):
    """Twenty items, and no length."""

    def __iter__(self):
        return iter(range(20))


class Script:
    """Loops of a script in which a step takes 2 s, the evaluation of a batch 5 s, and saving 30 s."""

    def __init__(self, clock, folder):
        self.clock, model, self.reports = clock, nn.Linear(1, 1), []
        model.weight.grad = torch.zeros(1, 1)
        self.optimizer = torch.optim.SGD(model.parameters())
        self.recorder = watching.ScriptRecorder(1, folder, self.report)
        self.steps = self.examine(lambda step: None)
        self.loader, self.validation = self.made(), DataLoader(range(2))

    def report(self, found):
        if "so_far" not in found:
            self.reports.append(found)

    def examine(self, look):
        """Give each step to a function instead of an examination; return the list to which steps are added."""
        steps = []

        def phases():
            while True:
                steps.append((yield))
                look(steps[-1])

        self.recorder.phases.close()
        self.recorder.examine(phases())
        return steps

    @property
    def seconds(self):
        """The duration of each step but the first, before which it is unknown which loader trains."""
        return [step.duration for step in self.steps[1:]]

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

    def evaluate(self):
        for _ in self.validation:
            self.clock.sleep(5)

    def save(self):
        self.clock.sleep(30)

    def fetch_ahead(self, loader):
        """Train as accelerate does, which asks for a batch before the one before it is trained on."""
        batches = iter(loader)
        waiting = next(batches)
        while waiting is not None:
            waiting = next(batches, None)
            self.update()

    def show_meanwhile(self):
        """Look at a batch of another pass over the loader in the middle of the epoch."""
        for number, _ in enumerate(self.loader):
            if number == 9:
                next(iter(self.loader))
            self.update()

    def accumulate(self):
        """Update after each second of 39 batches, and after the last one."""
        self.train(self.loader, each=2)
        self.update()


@pytest.fixture
def watched(monkeypatch, tmp_path):
    watched = Script(Clock(monkeypatch, recorder, watching), tmp_path)
    hooks.install_here(watched.recorder)
    yield watched
    watched.recorder.end()


EPOCHS = {
    "as usual": (20, lambda its: its.train(its.loader)),
    "a new loader each": (20, lambda its: its.train(its.made())),
    "no length": (Stream(), lambda its: its.train(its.loader)),
    "left before the end": (100, lambda its: its.train(itertools.islice(its.loader, 20))),
    "fetched ahead": (20, lambda its: its.fetch_ahead(its.loader)),
    "fetched ahead from a new loader each": (22, lambda its: its.fetch_ahead(its.made(22))),
    "shown meanwhile": (20, Script.show_meanwhile),
    "accumulated": (39, Script.accumulate),
}


@pytest.mark.parametrize("kind", EPOCHS)
@pytest.mark.parametrize("evaluates_first", [False, True])
def test_work_between_epochs_is_no_part_of_a_step(watched, kind, evaluates_first):
    data, train = EPOCHS[kind]
    watched.loader = DataLoader(data if isinstance(data, Stream) else range(data))
    if evaluates_first:
        watched.evaluate()
    for _ in range(4):
        train(watched)
        watched.evaluate()
        watched.save()
    assert set(watched.recorder.pausing.seconds) == {40.0}
    assert watched.recorder.epoch_steps() in (19, 20, 21)  # two batches of a new loader pass before it is known
    assert max(watched.seconds) <= 4


def test_a_pass_over_the_training_data_without_updates_is_no_part_of_a_step(watched):
    for _ in range(4):
        watched.train(watched.loader)
        watched.clock.sleep(20)
        for _ in watched.loader:
            watched.clock.sleep(1)
    assert set(watched.recorder.pausing.seconds) == {40.0} and max(watched.seconds) == 2


def test_work_within_an_epoch_is_part_of_a_step(watched):
    for number, _ in enumerate(DataLoader(range(100), sampler=RandomSampler(range(100), num_samples=500)), 1):
        watched.update()
        if number % 10 == 0:
            watched.evaluate()
    assert watched.recorder.pausing.seconds == []
    assert sum(watched.seconds) == 499 * 2 + 50 * 10 and max(watched.seconds) == 12


def test_a_loop_that_diagnose_runs_meanwhile_is_not_in_the_steps(watched):
    watched.train(watched.loader)
    with hooks.watching(loop.LoopRecorder([])):
        watched.train(watched.made())
    watched.train(watched.loader)
    assert watched.seconds == [2] * 39 and watched.recorder.epoch_steps() == 20


def test_an_evaluation_in_the_first_step_ends_no_epoch(watched):
    for number, _ in enumerate(watched.loader):
        watched.update()
        if number == 0:
            watched.evaluate()
    assert watched.recorder.pausing.lengths == [] and watched.recorder.epoch_steps() == 20


def test_without_a_training_loader_each_step_of_the_optimizer_is_a_step(watched):
    for number in range(1, 41):
        watched.update()
        if number % 10 == 0:
            with torch.no_grad():
                watched.evaluate()
    assert watched.recorder.dataloader is None
    assert sorted(watched.seconds) == [2] * 36 + [12] * 3


def test_a_pause_after_several_epochs_counts_for_the_steps_of_all_these_epochs(watched):
    """As in reinforcement learning: play, then train for four epochs on the recorded games."""
    for _ in range(3):
        watched.clock.sleep(400)
        for _ in range(4):
            watched.train(watched.loader)
    watched.clock.sleep(400)
    watched.train(watched.loader)
    assert watched.recorder.pauses().ms_per_step == 1200e3 / (12 * 20)


def test_waiting_for_a_core_in_a_pause_is_not_taken_from_a_step(watched):
    queued = 0.0
    watched.recorder.queued = lambda: queued
    for _ in range(3):
        watched.fetch_ahead(watched.loader)
        queued += 20
    assert max(max(step.queued_wait, step.queued_work) for step in watched.steps) < 20


def test_after_the_examination_no_object_of_the_script_is_kept(watched):
    watched.train(watched.loader)
    watched.recorder.end()
    loader = weakref.ref(watched.loader)
    watched.train(watched.loader)
    del watched.loader
    assert loader() is None


class Late:
    def __call__(self, *_):
        raise TimeoutError


@pytest.mark.parametrize("handler", [Late().__call__, Late(), functools.partial(Late(), "late")])
def test_an_error_of_the_scripts_signal_handler_is_raised(watched, handler):
    watched.examine(lambda step: os.kill(os.getpid(), signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeoutError):
            watched.train(watched.loader)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert "TimeoutError" in watched.reports[0]["problem"]


def test_an_error_of_an_examination_is_reported_only(watched):
    watched.examine(lambda step: signal.Signals(999))  # by code of the type that signal.SIG_DFL has, too
    watched.train(watched.loader)
    assert "999 is not a valid Signals" in watched.reports[0]["problem"]


@pytest.mark.parametrize("event", ["begin", "batch", "updated", "queued", "began_epoch"])
def test_a_loop_gets_all_its_batches_when_its_recorder_fails(watched, monkeypatch, event):
    watched.train(watched.loader)

    def fail(*arguments):
        raise LookupError("of the recorder")

    monkeypatch.setattr(watched.recorder, event, fail)
    batches = [batch.item() for batch in watched.loader if not watched.update()]
    assert batches == list(range(20)) and watched.recorder.over
    assert "of the recorder" in watched.reports[0]["problem"]


def test_without_another_thread_a_pause_has_no_line(watched, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    interval = sys.getswitchinterval()
    for _ in range(4):
        watched.train(watched.loader)
        watched.save()
    found = watched.recorder.pauses()
    assert (found.mean_ms, found.line) == (30e3, "")
    assert sys.getswitchinterval() == interval
