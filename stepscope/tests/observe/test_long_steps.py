"""Work that only some steps do: how often, for how long, and at which line."""

import time
from functools import partial

import pytest
from torch.utils.data import DataLoader

from stepscope.observe import long_steps
from stepscope.observe.long_steps import factor
from stepscope.observe.recorder import StepRecord
from stepscope.observe.sampler import Frame, Sample, Site

pytestmark = pytest.mark.processes
STEP_S, LONG_S = 0.002, 0.08  # a busy machine may stall for as long as a short one


def trains(seconds=STEP_S):
    time.sleep(seconds)


def evaluates():
    time.sleep(LONG_S)


class Steps:
    """Steps of which every `every`-th step, or only step number `once`, does or waits for more."""

    def __init__(self, long, every=None, once=None):
        self.long, self.every, self.once, self.count = long, every, once, 0

    def __call__(self, batch):
        self.count += 1
        trains()
        if self.count == self.once or (self.every and self.count % self.every == 0):
            self.long()


@pytest.mark.parametrize("every", [7, 15])
def test_work_of_every_nth_step_has_its_period_its_time_and_its_line(facts_of, quick, every):
    found = facts_of(DataLoader(range(10_000)), Steps(evaluates, every), 20).loop
    assert (found.long.every, found.long.distinct) == (every, True), found.long
    assert 1e3 * LONG_S <= found.long.mean_ms - found.long.usual_ms < 3e3 * LONG_S
    assert f"test_long_steps.py:{evaluates.__code__.co_firstlineno + 1}: " in found.long.line
    assert found.work_ms < 1e3 * (STEP_S + LONG_S / 10)


def test_more_of_the_same_work_does_not_count_as_other_work(facts_of, quick):
    class Larger(Steps):
        def __call__(self, batch):
            self.count += 1
            trains(STEP_S if self.count % 5 else LONG_S)

    found = facts_of(DataLoader(range(10_000)), Larger(trains), 20).loop
    assert found.long.count > 1 and not found.long.distinct


class Slow(list):
    """A sampler that takes long to begin an epoch."""

    def __iter__(self):
        time.sleep(LONG_S)
        return super().__iter__()


def test_the_start_of_an_epoch_is_no_work_of_a_step(facts_of, quick):
    found = facts_of(DataLoader(range(20), sampler=Slow(range(20))), Steps(evaluates), 20).loop
    assert found.long.mean_ms < 1e3 * LONG_S  # a step that a busy machine delays may count


def test_one_stall_is_not_sought_for_ever(facts_of, quick):
    found = facts_of(DataLoader(range(10_000)), Steps(evaluates, once=12), 20).loop
    assert not (found.long.distinct and found.long.mean_ms >= 1e3 * LONG_S)  # a busy machine may stall again, briefly


def test_a_script_that_ends_while_long_steps_are_sought_is_diagnosed(script):
    recorder, optimizer, reports = script(20)
    # Longer than the stalls of a busy machine, which would count instead
    step = Steps(partial(time.sleep, 4 * LONG_S), every=30)
    for number, batch in enumerate(DataLoader(range(10_000))):
        step(batch)
        optimizer.step()
        if number == 130:
            break
    recorder.end()
    assert reports[0]["facts"]["loop"]["long"]["count"] > 0


def test_only_steps_that_cost_a_share_of_the_time_are_long():
    def records(longest, usual=1.0):
        return [StepRecord(0.0, 0.0, each, 0.0, 0.0, False) for each in [usual] * 19 + [longest]]

    assert factor([records(1.8), records(0.002, usual=0.0005), records(1.0, usual=0.0)]) == float("inf")
    assert factor([records(1.0), records(9.0)]) == 3.0


TRAIN, EVALUATE, CLOSE = (
    Frame("/home/reader/train.py", line, name, line) for line, name in ((3, "train"), (9, "evaluate"), (12, "close"))
)


def stepped(durations):
    return [StepRecord(sum(durations[:n]), 0.0, each, 0.0, 0.0, False) for n, each in enumerate(durations)]


def sampled(durations, frame_of):
    """Return samples of the steps' time, one of each second, in the function that `frame_of` names for the step."""
    steps = [step for step, seconds in enumerate(durations) for _ in range(int(seconds))]
    return [Sample(t + 0.1, t + 0.9, 0.0, (frame_of(step),)) for t, step in enumerate(steps)]


def test_a_stall_while_steps_were_timed_is_no_long_step():
    durations = [1.0] * 10 + [80.0]
    samples = sampled(durations, lambda step: EVALUATE if step == 10 else TRAIN)
    found = long_steps.read(stepped([1.0] * 19 + [4.0]), stepped(durations), samples, 3.0, Site())
    assert (found.count, found.mean_ms, found.line) == (1, pytest.approx(80e3), "train.py:9")


def test_a_stall_at_a_line_of_its_own_does_not_change_the_period():
    durations = [50.0 if step in (9, 12, 19, 29) else 1.0 for step in range(30)]
    samples = sampled(durations, lambda step: TRAIN if durations[step] == 1.0 else CLOSE if step == 12 else EVALUATE)
    found = long_steps.read(stepped([1.0] * 19 + [50.0]), stepped(durations), samples, 3.0, Site())
    assert (found.count, found.every, found.line) == (3, 10.0, "train.py:9")


def test_a_long_step_of_which_the_sampler_saw_little_counts_for_the_period():
    """A busy machine held the sampler up in the second of four."""
    durations = [50.0 if step % 10 == 9 else 1.0 for step in range(40)]
    samples = sampled(durations, lambda step: TRAIN if durations[step] == 1.0 else EVALUATE)
    missed = sum(durations[:19]) + 5
    samples = [each for each in samples if not missed < each.begin < missed + 45]
    found = long_steps.read(stepped([1.0] * 19 + [50.0]), stepped(durations), samples, 3.0, Site())
    assert (found.count, found.every) == (4, 10.0)
