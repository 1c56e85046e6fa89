"""What the tests of observing share: a short look, and a clock on which only sleeping and working take time."""

import cProfile
import math
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import cuda_trace, loops
from support.clock import Clock
from support.written import write
from torch import nn

from stepscope import observe, thresholds, timing
from stepscope.base import machine
from stepscope.facts import saving
from stepscope.facts.trials import Modes
from stepscope.observe import contention, hazards, hooks, items, loop, sampler, watched
from stepscope.observe import profiled as profiled_steps


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Look for a short time, as on a machine without a GPU, and write the profile to a folder of the test.

    A process that has not used a GPU is not asked for one: that would begin to use it.
    """

    def available():
        assert not sys._getframe(1).f_globals["__name__"].startswith("stepscope")
        return False

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(thresholds, "ITEMS_S", 0.3)
    monkeypatch.setattr(thresholds, "PROFILED_STEPS", 4)
    monkeypatch.setattr(thresholds, "STEPS_SAMPLED_S", 0.2)
    monkeypatch.setattr(torch.cuda, "is_available", available)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


@pytest.fixture
def one_thread(quick, monkeypatch):
    """Two threads would wait for each other on a busy machine, for longer than a small step takes."""
    monkeypatch.setattr(loop, "_threads", lambda _: None)
    monkeypatch.setattr(hazards, "modes", Modes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class SharedClock(Clock):
    """A clock of a machine with other processes. Others have had the cores for `queued` seconds."""

    queued = queued_sampler = 0.0

    def of_task(self, task="thread-self"):
        """Return how long a task has been queued, as `contention.queued` does."""
        return self.queued_sampler if str(task).startswith("self/task") else self.queued

    def hold(self, seconds):
        """Let others have the cores while the loop is ready to work."""
        self.sleep(seconds)
        self.queued += seconds

    def hold_sampler(self, seconds):
        """Let others have the cores while the sampler, if it runs, is ready to work, and the loop waits for it."""
        if any(thread.name == "sampler" for thread in threading.enumerate()):
            self.sleep(seconds)
            self.queued_sampler += seconds


@pytest.fixture
def clock(quick, monkeypatch):
    """A clock for the whole of an examination: the facts are exact."""
    clock = SharedClock(monkeypatch, observe, timing, loops)
    monkeypatch.setattr(sampler, "time", time)  # its thread sleeps, and uses the clock on the wall
    monkeypatch.setattr(thresholds, "ITEM_SAMPLE_S", 60)  # so it takes no sample, and hardly works
    monkeypatch.setattr(sampler.Sampler, "worked", property(lambda _: 0.0, lambda *_: None), raising=False)
    monkeypatch.setattr(thresholds, "LEAST_SAMPLED_MS", math.inf)  # no step is sampled, and nothing is tried
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(hazards, "modes", Modes)
    monkeypatch.setattr(contention, "queued", clock.of_task)
    monkeypatch.setattr(contention, "queue_clock", lambda *thread: clock.of_task)
    monkeypatch.setattr(contention, "_cpu_of_others", lambda: clock.queued + clock.queued_sampler)

    def tick():
        clock.sleep(1e-12)  # each call takes some time
        return clock.now

    monkeypatch.setattr(items, "cProfile", SimpleNamespace(Profile=lambda *timer: cProfile.Profile(*timer or [tick])))

    def profiled(examined, folder, active):
        """Let the steps pass, and write the trace that the profiler would write by this clock."""
        yield  # the profiler's warm-up
        steps = []
        for _ in range(active):
            begin, wait, duration, *_ = yield
            steps.append((begin, begin + wait, begin + duration, begin + duration))
        kind = cuda_trace.WORKERS if examined.recorder.num_workers else cuda_trace.ALONE
        write(folder / "loop.pt.trace.json", cuda_trace.on_cpu(1e6 * np.array(steps), loader=kind))
        return []

    monkeypatch.setattr(profiled_steps.ProfiledSteps, "_profiled", profiled)
    return clock


def diagnose(loader, step, count):
    """Return the facts of a loop that `diagnose` runs."""
    return loop.observe(loader, step, count, Path("profile"))


def watched_script(count):
    """Watch this process as a script that trains a weight; return the recorder, the optimizer and the reports."""
    reports, weight = [], nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    recorder = watched.ScriptRecorder(count, Path("profile"), reports.append)
    hooks.install_here(recorder)
    return recorder, torch.optim.SGD([weight]), reports


@pytest.fixture
def script(quick):
    """The function `watched_script`; the process is watched for a short time."""
    return watched_script


def run(loader, step, count):
    """Return the facts of a loop that a script runs, as ``stepscope run`` records them."""
    recorder, optimizer, reports = watched_script(count)
    while not recorder.over:
        for batch in loader:
            timing.call(step, batch)
            optimizer.step()
            if recorder.over:
                break
    assert "facts" in reports[-1], reports[-1]["problem"]
    return saving.of_json({"version": saving.VERSION, "facts": reports[-1]["facts"]})


@pytest.fixture(params=[diagnose, run])
def facts_of(request):
    """Both ways to examine a loop: a function of a loader, a step, and the number of steps to time."""
    return request.param
