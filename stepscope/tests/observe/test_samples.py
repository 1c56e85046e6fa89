"""The work of the host in sampled steps, from samples written by hand; and the sampler itself."""

import dataclasses
import importlib
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from support import cuda_trace, loops
from torch import nn
from torch.utils.data import DataLoader

from stepscope import thresholds, traces
from stepscope.facts.host import Work
from stepscope.observe import host, loop, profile, sampler
from stepscope.observe.sampler import Frame, Sample, Sampler
from stepscope.timing import profiling

pytestmark = pytest.mark.processes  # a second or more each

FRAME = Frame("/home/reader/train.py", 3, "step", 1)
FORWARD = Frame("/lib/python3/site-packages/torch/nn/modules/module.py", 9, "_call_impl", 1)
CLIPPING = Frame("/lib/python3/site-packages/torch/nn/utils/clip_grad.py", 9, "clip_grad_norm_", 1)
FETCH = Frame("/lib/python3/site-packages/torch/utils/data/_utils/fetch.py", 9, "fetch", 1)
WRAPPERS = [method.__code__ for method in (torch.optim.SGD.zero_grad, torch.optim.SGD.step)]  # which the user calls
OF_TRAINING = [CLIPPING, *(Frame(code.co_filename, 1, code.co_name, 1) for code in WRAPPERS)]
TRAINING = ["training"] * 3
CALLS_FIT, MAIN, TRAINS = (
    Frame("/home/reader/train.py", line, name, line - 1)
    for line, name in ((90, "<module>"), (50, "main"), (20, "train"))
)
FIT, RUN, MOVES, DRAWS = (
    Frame(f"/lib/python3/site-packages/fitter/{file}", 9, name, 1, name)
    for file, name in (("trainer.py", "Trainer.fit"), ("loops.py", "Loop.run"), ("data.py", "to_device"),
                       ("callbacks/progress.py", "Bar.on_batch_end"))
)  # fmt: skip
DELEGATES = Frame("/lib/python3/site-packages/scaler/scaler.py", 9, "__call__", 1)
OPTIMIZER, REQUEST = OF_TRAINING[-1], Frame("/lib/python3/site-packages/torch/utils/data/dataloader.py", 9, "next", 1)
IN_A_FRAMEWORK = sampler.Site((CALLS_FIT, FIT, RUN, OPTIMIZER), (CALLS_FIT, FIT, RUN, REQUEST))
IN_TRAIN = sampler.Site((CALLS_FIT, MAIN, TRAINS, DELEGATES, OPTIMIZER), (CALLS_FIT, MAIN, TRAINS, REQUEST))
HERE = sampler.Site()
STEP, BETWEEN = (compile("", name, "exec") for name in ("step", "between"))


def sampled(*frames, waited=0.0, kinds=TRAINING, within=STEP, site=HERE, often=frozenset()):
    """Return two steps of 60 ms, each sampled twice; operators run in 30 ms of each, with a gap of 10 µs, and of 30 ms.

    The long gap is between `b` and `c`. `kinds` are those of the operators.
    """
    halves, operators = ((0, 0.03, 0), (0.03, 0.06, waited)), np.array([[0, 0.01], [0.01001, 0.02], [0.05, 0.06]])
    starts = [0.0, 0.06]
    samples = [Sample(at + begin, at + end, waits, frames, within) for at in starts for begin, end, waits in halves]
    operators = np.concatenate([operators + at for at in starts])
    return host.Sampled(samples, operators, ["a", "b", "c"] * 2, kinds * 2, starts, STEP, site, often)


def test_work_in_only_one_step_counts_as_a_stall():
    both = sampled(FRAME)
    assert dataclasses.replace(both, samples=both.samples[:2]).outside().share == 0


def test_time_without_operators_counts_except_for_short_gaps():
    found = sampled(FRAME, waited=0.03).outside()
    assert (found.share, found.line) == (pytest.approx(0.5), "train.py:3")
    assert found.waited == pytest.approx(1 / 3)  # 20 of the 30 ms in the second sample are without an operator


@pytest.mark.parametrize(
    ("frames", "kinds", "often", "share"),
    [
        ([FRAME], TRAINING, "bc", 0),  # the gap is between operators that are called too often
        ([FRAME], TRAINING, "ab", 1 / 2),
        ([FORWARD, FRAME], TRAINING, "", 0),  # the network between its operators
        ([FORWARD, FRAME], ["tracked", "training", "training"], "", 0),  # it prepares its images, and trains
        ([FORWARD, FRAME], ["untracked"] * 3, "", 1),  # it is evaluated
        ([FRAME], ["tracked", "training", "training"], "", 2 / 3),  # the reader's own line, and the gap
        *(([frame, FRAME], ["untracked", "training", "training"], "", 0) for frame in OF_TRAINING),
    ],
)
def test_operators_without_a_backward_counterpart_count_unless_they_belong_to_training(frames, kinds, often, share):
    assert sampled(*frames, kinds=kinds, often=frozenset(often)).outside().share == pytest.approx(share, abs=1e-3)


def test_a_network_that_teaches_another_network_is_not_a_fault():
    teaches = sampled(FORWARD, FRAME, kinds=["untracked", "training", "training"])
    samples = [
        each if number % 2 == 0 else dataclasses.replace(each, frames=(CLIPPING, FRAME))
        for number, each in enumerate(teaches.samples)
    ]
    found = dataclasses.replace(teaches, samples=samples)
    assert found.outside().share == 0
    evaluated = found.evaluated()
    assert (evaluated.share, evaluated.line) == (pytest.approx(1 / 6, abs=0.01), "train.py:3")


def test_work_of_a_trained_network_that_no_gradient_needs_is_seen_with_its_line():
    masks = Frame("/home/reader/model.py", 7, "forward", 5)
    network = sampled(masks, FORWARD, FRAME, kinds=["tracked", "training", "training"])
    assert (network.constant().share, network.constant().line) == (
        pytest.approx(1 / 6),
        "model.py:7, called at train.py:3",
    )
    assert sampled(masks, FORWARD, FRAME, kinds=["tracked", "untracked", "untracked"]).constant() == Work()


def test_work_between_steps_is_found_but_loading_is_not():
    found = sampled(FRAME, within=BETWEEN).around()
    assert (found.share, found.line) == (pytest.approx(1), "train.py:3")
    assert sampled(FRAME, FETCH, within=BETWEEN).around().share == 0
    assert sampled(FRAME, within=BETWEEN).outside().share == 0


def test_a_line_that_calls_operators_is_found_by_their_names():
    assert sampled(FRAME).calling(frozenset({"a", "c"})) == ("train.py:3", pytest.approx(1), 1)
    assert sampled(FRAME).calling(frozenset({"a"})) == ("train.py:3", pytest.approx(0.5), 1)
    assert sampled(FRAME).calling(frozenset({"d"})) == ("", 0, 1)
    assert sampled(CLIPPING, FRAME).calling(frozenset({"a", "c"})) == ("", pytest.approx(1), 1)


def test_the_calls_of_a_line_are_those_of_its_function():
    one, other = (Frame("/home/reader/train.py", line, name, line) for line, name in ((5, "measure"), (9, "forward")))
    whole = sampled(FRAME)
    samples = [
        dataclasses.replace(each, frames=(other if number == 3 else one,)) for number, each in enumerate(whole.samples)
    ]
    found = dataclasses.replace(whole, samples=samples).calling(frozenset({"a", "b", "c"}))
    assert found == ("train.py:5", pytest.approx(1), pytest.approx(5 / 6))  # `c` is in the second half of a step


def test_without_samples_nothing_is_found():
    nothing = host.Sampled([], np.empty((0, 2)), [], [], [], STEP, HERE)
    assert (nothing.outside(), nothing.around()) == (Work(), Work())
    assert nothing.calling(frozenset({"a"})) == ("", 0, 1)


def test_the_line_is_in_the_function_whose_lines_share_the_time():
    calls = Frame("/home/reader/train.py", 20, "step", 18)
    loop, other = (Frame("/home/reader/train.py", line, "evaluate", 9) for line in (10, 11))
    spread = [((calls, loop), 0.001), ((calls, other), 0.0009)] * 5
    assert sampler.hottest(spread) == "train.py:10; also train.py:11, called at train.py:20"
    assert sampler.hottest([((calls, loop), 0.001)] * 5) == "train.py:10, called at train.py:20"
    late = ((FRAME,), 0.001)  # a sample that was taken when the call was over
    assert sampler.hottest([((calls, loop), 0.001)] * 7 + [late] * 3) == "train.py:10, called at train.py:20"
    layer, inside = (Frame("/home/reader/model.py", line, f"f{line}", line) for line in (5, 2))
    by_three_ways = [((calls, dataclasses.replace(loop, line=line), layer, inside), 0.001) for line in (60, 61, 62)] * 5
    assert sampler.hottest(by_three_ways) == "model.py:2, called at model.py:5, called at train.py:20"
    chain = (calls, *(Frame("/home/reader/train.py", line, f"f{line}", line) for line in (30, 40, 50)))
    assert sampler.hottest([(chain, 0.001)] * 5) == "train.py:50, called at train.py:40, called at train.py:20"


def test_lines_are_named_from_the_function_that_updates_the_weights():
    measures = dataclasses.replace(TRAINS, line=30)
    found = sampled(FRAME, measures, MAIN, CALLS_FIT, site=IN_TRAIN).outside()
    assert found.line == "train.py:3, called at train.py:30"
    beside = sampled(FRAME, MAIN, CALLS_FIT, site=IN_TRAIN).outside()
    assert beside.line == "train.py:3, called at train.py:50"


def test_the_line_that_calls_a_framework_is_never_named_but_the_lines_that_the_framework_calls_are():
    callback = dataclasses.replace(FRAME, line=40, name="on_batch_end")
    found = sampled(FRAME, callback, RUN, FIT, CALLS_FIT, site=IN_A_FRAMEWORK)
    assert found.outside().line == "train.py:3, called at train.py:40"
    assert found.framework().work == Work()


@pytest.mark.parametrize(
    ("frame", "parts"),
    [
        (MOVES, []),
        (DRAWS, [("Bar.on_batch_end", "progress")]),
        (
            dataclasses.replace(MOVES, qualified="Trainer._maybe_log_save_evaluate"),
            [("Trainer._maybe_log_save_evaluate", "logging")],
        ),
    ],
)
def test_the_own_work_of_a_framework_is_not_work_of_a_line(frame, parts):
    found = sampled(frame, RUN, FIT, CALLS_FIT, site=IN_A_FRAMEWORK)
    assert found.outside() == Work()
    framework = found.framework()
    assert (framework.name, framework.work.line, framework.work.share) == ("fitter", "", pytest.approx(0.5))
    assert [(each.name, each.kind) for each in framework.parts] == parts


@pytest.mark.parametrize("frame", OF_TRAINING)
@pytest.mark.parametrize(("calls", "site"), [([RUN, FIT, CALLS_FIT], IN_A_FRAMEWORK), ([DELEGATES, TRAINS], IN_TRAIN)])
def test_training_that_another_package_calls_is_training(frame, calls, site):
    found = sampled(frame, *calls, site=site)
    assert (found.outside(), found.framework().work) == (Work(), Work())


def test_a_framework_works_within_the_closure_that_an_optimizer_calls():
    found = sampled(MOVES, OPTIMIZER, RUN, FIT, CALLS_FIT, site=IN_A_FRAMEWORK)
    assert found.framework().work.share == pytest.approx(0.5)


def test_generated_code_is_not_the_users():
    names = ["<ipython-input-3-0a1b>", "/tmp/ipykernel_7/12.py", "<string>", "<eval_with_key>.2", sampler._GENERATED]
    own = [Frame(name, 1, "call", 1).own for name in names]
    assert own == [True, True, False, False, False]


def test_a_line_shows_no_folder_of_its_user(tmp_path):
    (tmp_path / "train.py").write_text('open("/home/ada/images/x.npy"), 6 / 3 / 2, "~/y", "a/b"\n')
    shown = str(sampler.Frame(str(tmp_path / "train.py"), 1, "load", 1))
    assert shown == 'train.py:1: open("…/x.npy"), 6 / 3 / 2, "…/y", "a/b"'


def test_one_sample_in_which_the_machine_stood_still_hides_no_line():
    stalled = Frame("/home/reader/train.py", 8, "step", 1)
    assert sampler.place([(stalled, 0.8), *[(FRAME, 0.001)] * 5]) == "train.py:3"


def test_a_call_that_holds_the_gil_is_seen_at_its_line():
    numbers = list(range(500_000))

    def encodes():
        for _ in range(8):
            json.dumps(numbers)  # long, and compiled
            for _ in range(20):
                time.sleep(0)  # lets go of the GIL

    def calls():
        encodes()

    with Sampler(0.001, calls.__code__) as looking:
        calls()
    seconds = Counter()
    for each in looking.samples:
        seconds[each.own and each.own.line - encodes.__code__.co_firstlineno] += each.seconds
    assert seconds[2] > 0.5 * seconds.total(), seconds  # of eight calls, a few may be seen late beside others


def test_the_lines_that_get_a_batch_and_that_do_other_work_are_known(facts_of, quick):
    def load(index):
        time.sleep(0.005)

    def step(*batch):
        time.sleep(0.01)

    facts = facts_of(DataLoader(loops.Calls(load), 2), step, 5)
    for function, text in ((load, facts.loop.line), (step, facts.host.outside.line)):
        assert text.startswith(f"test_samples.py:{function.__code__.co_firstlineno + 1}: time.sleep")


FITTER = """
import time

def fit(loader, step, optimizer, over):
    while not over():
        for batch in loader:
            step(batch)
            optimizer.step()
            time.sleep(0.01)
            if over():
                break
"""


def test_a_package_that_runs_the_loop_is_known_and_so_is_the_line_that_it_calls(script, tmp_path, monkeypatch):
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "fitter.py").write_text(FITTER)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    recorder, optimizer, reports = script(5)

    def step(batch):
        time.sleep(0.01)

    loader = DataLoader(range(1000))
    importlib.import_module("fitter").fit(loader, step, optimizer, lambda: recorder.over)
    found = reports[0]["facts"]["host"]
    assert found["outside"]["line"] == f"test_samples.py:{step.__code__.co_firstlineno + 1}: time.sleep(0.01)"
    assert found["framework"]["name"] == "fitter" and found["framework"]["work"]["share"] > 0


class Network(nn.Module):
    """Has many weights, of which a batch needs few, or all at once."""

    def __init__(self, count, rows):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(rows, 10) for _ in range(count))

    def forward(self, numbers):
        return numbers @ torch.stack([weight[:64] for weight in self.weights]).sum(0)


@pytest.mark.parametrize(
    ("count", "rows", "foreach", "share"),
    [(200, 64, False, lambda host: host.optimizer.share), (1, 1_000_000, None, lambda host: host.updates)],
)
def test_the_share_of_an_optimizer_and_the_lines_of_both_passes_are_known(one_thread, count, rows, foreach, share):
    model = Network(count, rows)
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach)

    def step(numbers):
        loss = model(numbers).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    host = loop.observe([torch.rand(8, 64)] * 8, step, 5, Path("profile")).host
    assert share(host) > 0
    backward, update = (f"test_samples.py:{step.__code__.co_firstlineno + line}: " for line in (2, 3))
    assert (host.optimizer.line if count > 1 else host.updates_line).startswith(update)
    assert host.backward_line.startswith(backward)


# What is collected while the sampler looks lets go of the GIL, and threads begin and end meanwhile.
GARBAGE = """
import gc, threading, time
from stepscope.observe.sampler import Sampler

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


def test_garbage_collection_during_sampling_stops_no_process():
    subprocess.run([sys.executable, "-c", GARBAGE], check=True, timeout=60)  # without care, none of eight runs ended


def test_a_sampler_stops_after_the_maximum_number_of_samples():
    before = sys.getswitchinterval()
    for interval in (before, 1e-4):
        sys.setswitchinterval(interval)
        interval = sys.getswitchinterval()
        with Sampler(0.001, most=3) as looking:
            while looking._thread.is_alive():
                time.sleep(0.01)
            assert sys.getswitchinterval() == interval
        assert len(looking.samples) == 3
    sys.setswitchinterval(before)


def test_enough_steps_are_sampled_to_include_two_with_more_work(tmp_path):
    recorded = profile.read(traces.load(cuda_trace.write(tmp_path / "x.pt.trace.json")))
    assert host.steps_to_sample(recorded, 1000, [50] * 20) == thresholds.LEAST_SAMPLED_STEPS
    assert host.steps_to_sample(recorded, 1000, ([50] * 9 + [900]) * 2) == 2 * 10 + 1
    stood_still = [50] * 19 + [900]  # or so it looks
    assert host.steps_to_sample(recorded, 1000, stood_still) == thresholds.LEAST_SAMPLED_STEPS


def test_only_operators_with_a_backward_counterpart_belong_to_training(tmp_path):
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
        model(images).exp()

    trace = traces.load(profiling.record([torch.rand(16, 32)] * 4, train, tmp_path / "run", active=3))
    seen = host.of_samples(trace, [], [0.0, 1.0], STEP, HERE)
    kinds = {*zip(seen.names, seen.kinds, strict=True)}
    assert {("aten::sub", "tracked"), ("aten::argmax", "tracked"), ("aten::mean", "training")} < kinds
    assert ("aten::exp", "recorded") in kinds
    three = {kind for name, kind in kinds if name in ("aten::linear", "aten::relu")}
    assert three == {"training", "recorded", "untracked"}


def test_the_lines_at_which_host_and_gpu_wait_for_each_other_are_named():
    lines = {each: dataclasses.replace(FRAME, line=line) for each, line in (("first", 4), ("second", 5))}
    steps = sampled(FRAME)
    samples = [
        dataclasses.replace(each, frames=(lines["second" if number % 2 else "first"],))
        for number, each in enumerate(steps.samples)
    ]
    none, first, second = np.empty((0, 2)), np.array([[0, 0.02], [0.06, 0.08]]), np.array([[0.04, 0.05], [0.1, 0.11]])
    launches = np.array([[0.001, 0.002], [0.041, 0.042], [0.043, 0.044], [0.101, 0.102], [0.103, 0.104]])
    seen = dataclasses.replace(steps, samples=samples, gpu=host.Gpu(first, none, second, launches))
    assert dataclasses.astuple(seen.lines_of_gpu()) == ("train.py:4", "", "train.py:5", "train.py:5", 0.0)
    scaler = dataclasses.replace(FRAME, file=torch.amp.grad_scaler.__file__, name="step")
    samples = [
        dataclasses.replace(each, frames=(scaler, *each.frames) if each.begin >= 0.06 else each.frames)
        for each in samples
    ]
    assert dataclasses.replace(seen, samples=samples).lines_of_gpu().scaling == pytest.approx(0.5)
    assert not any(dataclasses.astuple(steps.lines_of_gpu()))  # on a CPU


def test_waits_gaps_and_launches_are_read_from_a_trace_of_a_gpu(tmp_path):
    loop = cuda_trace.Loop(read="aten::item", host_work=9000, copy=3000, blocking=True)
    trace = traces.load(loop.write(tmp_path / "host_1.1.pt.trace.json"))
    gpu = host.of_samples(trace, [], [0.0, 1.0], STEP, HERE).gpu
    assert len(gpu.launches) == loop.steps * len(loop.kernels)
    assert (np.diff(gpu.copies) > 2.5e-3).all() and len(gpu.copies) == loop.steps
    assert np.diff(gpu.waits).sum() / loop.steps == pytest.approx(9.57e-3, rel=0.02)  # for the kernels
    assert (np.diff(gpu.gaps) > 8e-3).all() and len(gpu.gaps) >= loop.steps - 1  # for the host's work


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.LBFGS])
def test_the_closure_of_an_optimizer_is_no_update(tmp_path, kind):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = kind(model.parameters())

    def train(images):
        def closure():
            loss = model(images).square().mean()
            loss.detach().exp()
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)

    trace = traces.load(profiling.record([torch.rand(16, 32)] * 4, train, tmp_path / "run", active=3))
    operators = host._outermost(trace)
    updates = set(operators.loc[operators["optimizer"], "name"])
    assert updates and updates.isdisjoint({"aten::linear", "aten::relu", "aten::square", "aten::mean", "aten::exp"})


def test_passes_through_the_same_graph_and_dense_gradients_of_embeddings_are_seen(tmp_path):
    words, network = nn.Embedding(20_000, 32), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def train(ids, again):
        loss = network(words(ids).mean(1)).square().mean()
        loss.backward(retain_graph=again)
        if again:
            loss.backward()

    for again in (False, True):
        steps = [(torch.randint(20_000, (16, 8)), again)] * 4
        trace = traces.load(profiling.record(steps, train, tmp_path / f"{again}", active=3))
        found = host.read(trace, profile.read(trace), host.of_samples(trace, [], [0.0, 1.0], STEP, HERE))
        assert 0 < found.embedding < 1
        assert (found.repeated > 0) == again
