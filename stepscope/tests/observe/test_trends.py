"""Steps and memory that grow are told from steps and memory that only vary."""

import mmap
import random
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from stepscope.observe import keeping, trends
from stepscope.observe.recorder import StepRecord

pytestmark = pytest.mark.processes  # a second or more each

MB = 2_000_000
NUMBERS = DataLoader(TensorDataset(torch.zeros(64, 1)), 1)


def steps(*seconds):
    """Return steps of these durations."""
    return [StepRecord(0.0, 0.0, each, 0.0, 0.0, False) for each in seconds]


def growing(count, base, slope, noise, seed):
    chooser = random.Random(seed)
    return steps(*(base + number * slope + chooser.expovariate(1 / noise) for number in range(count)))


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_grow_are_found_beside_noise_in_each_phase(seed):
    # The profiler lengthens the second phase and the third
    phases = [growing(count, base, 0.004, 0.01, seed) for count, base in [(20, 0.05), (8, 0.3), (40, 0.2)]]
    assert trends.longer_s(phases) == pytest.approx(0.004, abs=0.002)
    assert trends.longer_s([each[::-1] for each in phases]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_steps_that_vary_do_not_grow(seed):
    assert trends.longer_s([growing(count, 0.05, 0.0, 0.02, seed) for count in (20, 8, 40)]) == 0


def test_a_machine_that_grows_busy_in_one_phase_is_no_trend():
    assert trends.longer_s([growing(20, 0.05, 0.004, 0.001, 0), growing(8, 0.1, 0.0, 0.001, 0)]) == 0
    assert trends.longer_s([growing(20, 0.05, 0.004, 0.001, 0)]) == 0


@pytest.mark.parametrize(
    ("sizes", "growth"),
    [
        ([MB * step for step in range(20)], MB),
        ([MB * step + 300_000 * (step % 2) for step in range(20)], MB),
        ([MB * min(step, 9) for step in range(20)], 0),  # caches that are full
        ([MB * (step % 5) for step in range(20)], 0),
        ([MB // 4 * step for step in range(20)], 0),
        ([-MB * step for step in range(20)], 0),
        ([0] * 20, 0),
        ([0, MB * 9], 0),
    ],
)
def test_memory_grows_if_it_does_so_until_the_last_step(sizes, growth):
    assert trends.steady_growth(sizes) == pytest.approx(growth, rel=0.1)


class Logged:
    def __init__(self):
        self.outputs = {}

    def log(self, tensor):
        self.outputs[len(self.outputs)] = tensor


def test_the_line_is_named_that_keeps_what_each_step_makes(facts_of, quick):
    logged = Logged()

    def step(batch):
        logged.log(torch.ones(MB, dtype=torch.float16))

    trend = facts_of(NUMBERS, step, 20).loop.trend
    # On a busy machine another test's memory may be freed meanwhile: then nothing grows for certain
    assert bool(trend.kept) == bool(trend.grown_bytes)
    assert trend.kept[-38:] in ("", "self.outputs[len(self.outputs)] = tensor"[-38:])


def test_a_collection_that_grows_by_an_array_is_found_by_its_name():
    data, losses, logged = [torch.zeros(1)] * 100, [], Logged()
    before = keeping.sizes()
    assert keeping.line(before) == ""
    losses.append((len(data), np.zeros(1)))
    assert keeping.line(before).endswith(": losses.append((len(data), np.zeros(1)))")
    logged.log(torch.zeros(1))  # Python's garbage collector does not know an empty dict
    before = keeping.sizes()
    logged.log(torch.zeros(1))
    assert keeping.line(before).endswith(": self.outputs[len(self.outputs)] = tensor")
    before = keeping.sizes()
    losses.append(0.5)  # a number
    assert keeping.line(before) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the memory of a process alone")
@pytest.mark.parametrize("keeps", [True, False])
def test_the_memory_of_a_script_grows_with_what_its_steps_keep(facts_of, quick, keeps):
    kept, size = [], 8 * MB  # more than the tests before it may give back meanwhile

    def step(batch):
        kept.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))  # from the system, not a heap
        kept[-1].write(b"1" * size)
        if not keeps:
            kept.clear()

    grown = facts_of(NUMBERS, step, 20).loop.trend.grown_bytes
    assert grown == pytest.approx(size if keeps else 0, rel=0.2)
