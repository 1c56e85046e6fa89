"""Tests of the numbers that a loop's facts derive from its timed steps."""

import pytest

from stepscope.facts.loop import Loop, Step

USUAL = [Step(2, 10)] * 3


def loop(*steps, total_ms=0.0, **changes):
    return Loop(steps, total_ms, **changes)


@pytest.mark.parametrize(
    ("steps", "wait_ms", "work_ms"),
    [
        (USUAL, 2, 8),
        ([*USUAL, Step(50, 60, first=True)], 2, 8),
        ([Step(2, 10, first=True)] * 3, 2, 8),  # each epoch has one step
        ([Step(12, 20, queued_wait_ms=10)] * 3, 2, 8),  # other processes had the cores
        ([Step(2, 10, queued_wait_ms=3)] * 3, 0, 8),
        ([Step(2, 20, queued_work_ms=10)] * 3, 2, 8),
        ([Step(2, 10, queued_work_ms=9)] * 3, 2, 0),
        ([*USUAL, Step(200, 208)], 2, 8),  # a single stall counts as the next longest
        ([*USUAL, Step(2, 300)], 2, 8),
        ([*USUAL, Step(6, 14), Step(6, 14), Step(2, 12)], 20 / 6, 8),
    ],
)
def test_the_mean_step_excludes_unusual_steps_and_waits_for_cores(steps, wait_ms, work_ms):
    found = loop(*steps)
    assert (found.wait_ms, found.work_ms) == (pytest.approx(wait_ms), pytest.approx(work_ms))


def test_the_usual_wait_is_the_median():
    assert loop(*USUAL, Step(8, 16), Step(9, 17)).usual_wait_ms == 2


def test_asynchronous_steps_share_the_time_until_the_gpu_has_finished():
    found = loop(Step(50, 60, first=True), *USUAL, total_ms=96.0, asynchronous=True)
    assert (found.wait_ms, found.work_ms, found.least_ms) == (2, pytest.approx((96 - 50 - 6) / 4), 0)
    assert loop(*USUAL, Step(2, 300), asynchronous=True).hiccup_ms == 0


def test_the_fastest_step_excludes_queued_work():
    assert loop(*USUAL, Step(2, 7), Step(2, 10, queued_work_ms=9)).least_ms == 5
    assert loop(Step(2, 10, queued_work_ms=9)).least_ms == 0


def test_one_step_that_is_far_longer_than_all_other_steps_is_a_hiccup():
    assert loop(*USUAL, Step(2, 31)).hiccup_ms == 31
    assert loop(*USUAL, Step(2, 29)).hiccup_ms == loop(*USUAL, Step(2, 31), Step(2, 31)).hiccup_ms == 0
    assert loop(*USUAL, Step(2, 31, first=True)).hiccup_ms == 0
