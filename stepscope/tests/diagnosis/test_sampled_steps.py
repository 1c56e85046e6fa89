"""Tests of `stepscope.diagnosis.step`: what of a step no operator explains, from samples written by hand."""

import dataclasses

import numpy as np
import pytest

from stepscope.diagnosis import stacks, step

FRAME = stacks.Frame("/home/reader/train.py", 3, "step", 1)
FORWARD = stacks.Frame("/lib/python3/site-packages/torch/nn/modules/module.py", 9, "_call_impl", 1)


def sampled(*frames, waited=0.0):
    """Return two steps of 60 ms, each sampled twice; operators run in 30 ms of each, with a gap of 10 µs, and of 30 ms.

    The long gap is between `b` and `c`.
    """
    halves, operators = ((0, 0.03, 0), (0.03, 0.06, waited)), np.array([[0, 0.01], [0.01001, 0.02], [0.05, 0.06]])
    starts = [0.0, 0.06]
    samples = [stacks.Sample(at + begin, at + end, waits, frames) for at in starts for begin, end, waits in halves]
    return step.Sampled(samples, np.concatenate([operators + at for at in starts]), ["a", "b", "c"] * 2, starts)


def test_what_is_done_in_one_step_only_may_be_a_stall():
    both = sampled(FRAME)
    once = dataclasses.replace(both, samples=both.samples[:2])
    assert [outside.share for outside in once.outside(frozenset())] == [0]


def test_time_without_operators_is_counted_by_function_short_gaps_left_out():
    (found,) = sampled(FRAME, waited=0.03).outside(frozenset())
    assert (found.share, found.line) == (pytest.approx(0.5), "train.py:3")
    assert found.waited == pytest.approx(1 / 3)  # 20 of the 30 ms in the second sample are without an operator


def test_what_is_between_operators_that_are_called_too_often_is_theirs():
    assert sampled(FRAME).outside(frozenset({"b", "c"})) == []
    assert len(sampled(FRAME).outside(frozenset({"a", "b"}))) == 1


def test_what_the_network_does_between_its_operators_is_no_fault():
    assert sampled(FORWARD, FRAME).outside(frozenset()) == []


def test_a_line_that_calls_operators_is_found_by_their_names():
    assert sampled(FRAME).line_of(frozenset({"a", "c"})) == "train.py:3"
    assert sampled(FRAME).line_of(frozenset({"d"})) == ""


def test_no_samples_say_nothing():
    nothing = step.Sampled([], np.empty((0, 2)), [], [])
    assert (nothing.outside(frozenset()), nothing.line_of(frozenset({"a"}))) == ([], "")


def test_one_sample_in_which_the_machine_stood_still_hides_no_line():
    stalled = stacks.Frame("/home/reader/train.py", 8, "step", 1)
    assert stacks.place([(stalled, 0.8), *[(FRAME, 0.001)] * 5]) == "train.py:3"
