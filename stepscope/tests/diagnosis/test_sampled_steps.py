"""Tests of `stepscope.diagnosis.step`: what of a step no operator explains, from samples written by hand."""

import dataclasses
import json
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
import torch
from support import cuda_trace
from torch import nn

from stepscope import traces
from stepscope.diagnosis import profile, stacks, step

FRAME = stacks.Frame("/home/reader/train.py", 3, "step", 1)
FORWARD = stacks.Frame("/lib/python3/site-packages/torch/nn/modules/module.py", 9, "_call_impl", 1)
CLIPPING = stacks.Frame("/lib/python3/site-packages/torch/nn/utils/clip_grad.py", 9, "clip_grad_norm_", 1)
FETCH = stacks.Frame("/lib/python3/site-packages/torch/utils/data/_utils/fetch.py", 9, "fetch", 1)


TRAINING = ["training"] * 3
STEP, BETWEEN = (compile("", name, "exec") for name in ("step", "between"))


def sampled(*frames, waited=0.0, kinds=TRAINING, within=STEP):
    """Return two steps of 60 ms, each sampled twice; operators run in 30 ms of each, with a gap of 10 µs, and of 30 ms.

    The long gap is between `b` and `c`. `kinds` are those of the operators.
    """
    halves, operators = ((0, 0.03, 0), (0.03, 0.06, waited)), np.array([[0, 0.01], [0.01001, 0.02], [0.05, 0.06]])
    starts = [0.0, 0.06]
    samples = [
        stacks.Sample(at + begin, at + end, waits, frames, within) for at in starts for begin, end, waits in halves
    ]
    operators = np.concatenate([operators + at for at in starts])
    return step.Sampled(samples, operators, ["a", "b", "c"] * 2, kinds * 2, starts, STEP)


def test_what_is_done_in_one_step_only_may_be_a_stall():
    both = sampled(FRAME)
    assert dataclasses.replace(both, samples=both.samples[:2]).outside(frozenset()).share == 0


def test_time_without_operators_is_counted_short_gaps_left_out():
    found = sampled(FRAME, waited=0.03).outside(frozenset())
    assert (found.share, found.line) == (pytest.approx(0.5), "train.py:3")
    assert found.waited == pytest.approx(1 / 3)  # 20 of the 30 ms in the second sample are without an operator


def test_what_mostly_waits_is_said_to():
    waits = [step._where(step.Outside(share=0.5, waited=waited)) for waited in (0.3, 0.2)]
    assert waits == [", and mostly waits.", "."]


def test_what_is_between_operators_that_are_called_too_often_is_theirs():
    assert sampled(FRAME).outside(frozenset({"b", "c"})).share == 0
    assert sampled(FRAME).outside(frozenset({"a", "b"})).share == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("frames", "kinds", "share"),
    [
        ([FORWARD, FRAME], TRAINING, 0),  # the network between its operators
        ([FORWARD, FRAME], ["tracked", "training", "training"], 0),  # it prepares its images, and trains
        ([FORWARD, FRAME], ["untracked"] * 3, 1),  # it is evaluated
        ([FRAME], ["tracked", "training", "training"], 2 / 3),  # the reader's own line, and the gap
        ([CLIPPING, FRAME], ["untracked", "training", "training"], 0),
    ],
)
def test_operators_that_no_backward_pass_calls_back_are_counted_but_for_those_of_the_training(frames, kinds, share):
    assert sampled(*frames, kinds=kinds).outside(frozenset()).share == pytest.approx(share, abs=1e-3)


def test_a_network_that_teaches_another_is_no_fault():
    teaches = sampled(FORWARD, FRAME, kinds=["untracked", "training", "training"])
    samples = [
        each if number % 2 == 0 else dataclasses.replace(each, frames=(CLIPPING, FRAME))
        for number, each in enumerate(teaches.samples)
    ]
    assert dataclasses.replace(teaches, samples=samples).outside(frozenset()).share == 0


def test_what_is_done_between_steps_is_found_but_for_what_is_loaded():
    found = sampled(FRAME, within=BETWEEN).around()
    assert (found.share, found.line) == (pytest.approx(1), "train.py:3")
    assert sampled(FRAME, FETCH, within=BETWEEN).around().share == 0
    assert sampled(FRAME, within=BETWEEN).outside(frozenset()).share == 0


def test_a_line_that_calls_operators_is_found_by_their_names():
    assert sampled(FRAME).calling(frozenset({"a", "c"})) == ("train.py:3", pytest.approx(1))
    assert sampled(FRAME).calling(frozenset({"a"})) == ("train.py:3", pytest.approx(0.5))
    assert sampled(FRAME).calling(frozenset({"d"})) == ("", 0)


def test_no_samples_say_nothing():
    nothing = step.Sampled([], np.empty((0, 2)), [], [], [], STEP)
    assert (nothing.outside(frozenset()), nothing.around()) == (step.Outside(), step.Outside())
    assert nothing.calling(frozenset({"a"})) == ("", 0)


def test_the_line_is_that_of_the_function_in_which_the_time_is_spread():
    calls = stacks.Frame("/home/reader/train.py", 20, "step", 18)
    loop, other = (stacks.Frame("/home/reader/train.py", line, "evaluate", 9) for line in (10, 11))
    spread = [((calls, loop), 0.001), ((calls, other), 0.0009)] * 5
    assert stacks.hottest(spread) == "train.py:10; also train.py:11, called at train.py:20"
    assert stacks.hottest([((calls, loop), 0.001)] * 5) == "train.py:10, called at train.py:20"
    late = ((FRAME,), 0.001)  # a sample that was taken when the call was over
    assert stacks.hottest([((calls, loop), 0.001)] * 7 + [late] * 3) == "train.py:10, called at train.py:20"


def test_one_sample_in_which_the_machine_stood_still_hides_no_line():
    stalled = stacks.Frame("/home/reader/train.py", 8, "step", 1)
    assert stacks.place([(stalled, 0.8), *[(FRAME, 0.001)] * 5]) == "train.py:3"


def test_a_call_that_holds_the_gil_is_seen_at_its_line():
    numbers = list(range(500_000))

    def encodes():
        for _ in range(8):
            json.dumps(numbers)  # long, and compiled
            for _ in range(20):
                time.sleep(0)  # lets go of the GIL

    def calls():
        encodes()

    with stacks.Sampler(0.001, calls.__code__) as sampler:
        calls()
    seconds = Counter()
    for each in sampler.samples:
        seconds[each.own and each.own.line - encodes.__code__.co_firstlineno] += each.seconds
    assert seconds[2] > 0.5 * seconds.total(), seconds  # of eight calls, a few may be seen late beside others


# What is collected while the sampler looks lets go of the GIL, and threads begin and end meanwhile.
GARBAGE = """
import gc, threading, time
from stepscope.diagnosis.stacks import Sampler

class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(1e-4)

def work():
    Garbage()
    time.sleep(1e-4)

def begin_threads():
    while not end.is_set():
        several = [threading.Thread(target=work) for _ in range(10)]
        for thread in several:
            thread.start()
        for thread in several:
            thread.join()

gc.set_threshold(1)
end = threading.Event()
threads = threading.Thread(target=begin_threads)
with Sampler(1e-4) as sampler:
    threads.start()
    for _ in range(1000):
        work()
    end.set()
    threads.join()
assert sampler.samples and gc.isenabled()
"""


def test_garbage_that_is_collected_meanwhile_stops_no_process():
    subprocess.run([sys.executable, "-c", GARBAGE], check=True, timeout=60)  # without care, none of eight runs ended


def test_where_some_steps_do_more_than_most_two_of_these_are_sampled(tmp_path):
    recorded = profile.read(traces.load(cuda_trace.write(tmp_path / "x.pt.trace.json")))
    assert step.steps_to_sample(recorded, 1000, [50] * 20) == step.LEAST_STEPS
    assert step.steps_to_sample(recorded, 1000, ([50] * 9 + [900]) * 2) == 2 * 10 + 1
    stood_still = [50] * 19 + [900]  # or so it looks
    assert step.steps_to_sample(recorded, 1000, stood_still) == step.LEAST_STEPS


def test_only_what_a_backward_pass_calls_back_trains(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(images):
        logits = model(images.sub(0.5))
        logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        logits.argmax(1)
        with torch.no_grad():
            model(images)

    seen = step.sample([torch.rand(16, 32)] * 4, train, 3, BETWEEN)
    kinds = {(name, kind) for name, kind in zip(seen.names, seen.kinds, strict=True)}
    assert {("aten::sub", "tracked"), ("aten::argmax", "tracked"), ("aten::mean", "training")} < kinds
    assert {kind for name, kind in kinds if name in ("aten::linear", "aten::relu")} == {"training", "untracked"}


@pytest.mark.parametrize("method", [torch.optim.SGD.zero_grad, torch.optim.SGD.step])
def test_what_pytorch_wraps_around_an_optimizers_method_is_part_of_the_training(method):
    wrapper = method.__code__  # of the function that the user's line calls
    assert step._any(step._TRAINING, [stacks.Frame(wrapper.co_filename, 1, wrapper.co_name, 1)])
