"""Tests of `helpers.diagnosis.steps`: what of a step no operator explains, from samples written by hand."""

import itertools
import time

import numpy as np
import pytest
import torch

from helpers.diagnosis import sampling, steps

FRAME = sampling.Frame("/home/reader/train.py", 3, "step", 1)
FORWARD = sampling.Frame("/lib/python3/site-packages/torch/nn/modules/module.py", 9, "_call_impl", 1)


def sampled(*frames, waited=0.0):
    """Return a step of 60 ms, sampled twice; operators run in 30 ms, and in between is a gap of 10 µs and one of 30 ms.

    The long gap is between `b` and `c`.
    """
    samples = [sampling.Sample(0, 0.03, 0, frames), sampling.Sample(0.03, 0.06, waited, frames)]
    return steps.Sampled(samples, np.array([[0, 0.01], [0.01001, 0.02], [0.05, 0.06]]), ["a", "b", "c"])


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
    nothing = steps.Sampled([], np.empty((0, 2)), [])
    assert (nothing.outside(frozenset()), nothing.line_of(frozenset({"a"}))) == ([], "")


def test_of_steps_with_very_many_operators_a_few_are_sampled_all_the_same():
    assert steps.most(1e6) == steps.LEAST_STEPS
    assert steps.most(0) == steps.MOST_STEPS


def test_the_step_in_which_the_profiler_makes_itself_ready_does_not_count():
    ended = []

    def work():
        time.sleep(0.01)
        torch.ones(1).add(1)

    def take(batch):
        work()
        ended.append(time.perf_counter())

    counted = steps.sample(itertools.repeat(None), take, take, steps=3)
    assert len(ended) == 4
    assert counted.samples and min(each.begin for each in counted.samples) >= ended[0]
