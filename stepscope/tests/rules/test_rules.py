"""Tests of `stepscope.rules` by tables: for each rule facts in which it is found, and facts in which it is not."""

import math
import re
from dataclasses import replace

import pytest
from support import generated
from support.made_facts import DEVICE, IDLE, NO_PARTS, ON_GPU, of_gpu, of_job, of_loop, of_trace

from stepscope import rules
from stepscope.cli import main
from stepscope.facts import Facts
from stepscope.facts.batches import Batch
from stepscope.facts.hazards import Compilation, Growth, Objects
from stepscope.facts.host import Calls, Framework, GpuLines, Gradients, Host, Operator, Optimizer, Part, Work
from stepscope.facts.job import Exchanges
from stepscope.facts.loader import REST, WAITING, Irregular, Loader, Sampling
from stepscope.facts.loop import GpuMemory, LongSteps, Pauses, Step, Trend
from stepscope.facts.trials import Modes, Trial, Trials
from stepscope.report.findings import VERDICTS

FASTER, UNSURE = Trial(10, 4, True), Trial(10, 4, False)
# Loops: too slow items in workers that use both cores; workers that keep up; quick items; a batch of tiny items.
SLOW = dict(step=34, wait=24, cores=2)
KEEPS_UP = dict(step=50, wait=8, workers=4)
QUICK = dict(cores=2, cpu_ms=0.1, ms=0.1)
TINY = dict(
    step=30, wait=20, cores=2, ms=0.01, cpu_ms=0.01, batch=2000, parts=NO_PARTS | {REST: 0.75, "collating": 0.25}
)
RARE = Irregular(3, 0.96, usual_ms=0.1, slowest_ms=30.0, slowest="7")


def item(part, share=1.0, **changes):
    """Return the facts of a loop that waits for its items, of which one part takes a share."""
    return of_loop(**SLOW, parts=NO_PARTS | {part: share}, **changes)


def yielded(times):
    """Return the facts of a loop whose epochs have each item so often."""
    facts = of_loop(40, 0.5)
    return replace(facts, loader=replace(facts.loader, yielded=times))


def calls(share, **changes):
    return Calls(share, (Operator("aten::add_", 120.0),), 5.0, **changes)


def of_host(step=40, wait=0, **changes):
    return of_loop(step, wait, host=Host(**changes))


def of_framework(*parts, name="lightning", share=0.4):
    return Framework(name, Work(share, 40 * share), parts)


def tried(**changes):
    return of_loop(trials=Trials(**changes))


def going_back(gradients):
    return replace(of_host(phases=PASSES), gradients=gradients)


PASSES = {"forward": 0.3, "backward": 0.5, "update": 0.1}
EVALUATES = LongSteps(3, every=10.0, usual_ms=39.5, least_ms=200.0, mean_ms=239.5, other=0.9)
SMALL = Exchanges(200.0, 20.0, ("all_gather",), 1e6, 5e3, 5e3)
# For each rule: facts in which only this rule is found, the gain, and facts in which it is not found.
CASES = {
    "loader.iterator-for-each-batch": (
        of_loop(50, 30, only_first=True, epoch_steps=1, start_ms=62.0), 0.6,
        of_loop(50, 30, only_first=False, epoch_steps=1, start_ms=62.0),
    ),
    "loader.workers-restarted": (of_loop(40, 0.5, restart=10), 10 / 50, of_loop(40, 0.5, restart=0.5)),
    "loader.sampler": (
        of_loop(40, 0.5, start_ms=72.0, sampling=Sampling("Sorted", 40.0, 0.1)), 20.1 / 60,
        of_loop(40, 0.5, start_ms=72.0, sampling=Sampling("Sorted", 1.0, 0.1)),
    ),
    "loop.work-between-epochs": (of_loop(40, 0.5, apart=40), 40 / 80, of_loop(40, 0.5, apart=10)),
    "loop.work-in-some-steps": (
        of_loop(40, 0.5, long=EVALUATES), 20 / 60, of_loop(40, 0.5, long=replace(EVALUATES, other=0.4)),
    ),
    "loop.growing-steps": (
        of_loop(40, 0.5, trend=Trend(0.5, 16.0)), 8 / 40, of_loop(40, 0.5, trend=Trend(0.1, 16.0)),
    ),
    "loader.too-slow": (of_trace(DataLoader=0.4), 0.4, of_trace(DataLoader=0.4, in_process=True)),
    "loader.too-many-workers": (of_loop(40, 0.5, workers=17), 0.5 / 40, of_loop(40, 0.5, workers=16)),
    # 32 ms by 4 is less than the 10 ms that are left
    "loader.too-few-workers": (of_loop(34, 24, workers=1), 24 / 34, of_loop(**SLOW)),
    "loader.items-on-gpu": (
        of_loop(8, 1.3, workers=0, loaded=False, on_gpu=True), 1.3 / 8,
        of_loop(8, 0.1, workers=0, loaded=False, on_gpu=True),
    ),
    "loader.no-workers": (of_loop(8, 1.3, workers=0, **QUICK), 1.3 / 8, of_loop(12, 0.8, workers=0, **QUICK)),
    "loader.workers-slower-than-none": (
        of_loop(12, 2, workers=4, ms=0.01, cpu_ms=0.01, transfer_ms=2), 0.054,
        of_loop(184, 155, cores=2, ms=2.0, cpu_ms=2.0, transfer_ms=2),  # other processes have the cores
    ),
    "items.irregular": (item(REST, irregular=RARE), 24 / 34, item(REST, irregular=replace(RARE, share=0.04))),
    "items.waiting": (item(REST, waits={REST: 1.0}), 24 / 34, item("reading", waits={"reading": 1.0})),
    # A part that dominates counts as all of an item
    "items.decoding": (of_loop(40, 36, cores=2, parts=NO_PARTS | {"decoding": 0.8}), 36 / 40, item("decoding", 0.04)),
    "items.resizing": (item("resizing"), 24 / 34, item("resizing", 0.04)),
    "items.transforms": (item("transforming"), 24 / 34, item("transforming", 0.04)),
    "items.collating": (item("collating"), 24 / 34, item("collating", 0.04)),
    "items.dataset": (item(REST), 24 / 34, item(REST, 0.04)),
    "items.one-by-one": (of_loop(**TINY), 20 / 30, of_loop(**TINY, together=True)),
    "items.small-files": (item("opening"), 24 / 34, item("opening", file_bytes=20e6)),
    "items.reading": (item("reading", file_bytes=20e6), 24 / 34, item("reading")),
    "loader.irregular": (of_loop(**KEEPS_UP, usual=0.2), 8 / 50, of_loop(**KEEPS_UP)),
    "loader.pickled-batches": (
        of_loop(**KEEPS_UP, transfer_ms=6, pickled_bytes=1e7), 8 / 50,
        of_loop(**KEEPS_UP, transfer_ms=6, pickled_bytes=9e4),
    ),
    "loader.many-tensors": (
        of_loop(**KEEPS_UP, transfer_ms=6, tensors=64), 6 / 50, of_loop(**KEEPS_UP, transfer_ms=6, tensors=15),
    ),
    "loader.transfer": (of_loop(**KEEPS_UP, transfer_ms=6), 6 / 50, of_loop(20, 2.5, workers=4, transfer_ms=2.5)),
    "batch.padding": (
        replace(of_loop(40, 4), batch=Batch(0.6, 100, 90)), 0.9 * 0.6,
        replace(of_loop(40, 4), batch=Batch(0.4, 100, 90)),
    ),
    "loader.equal-workers": (yielded(2), 0.5, yielded(1)),
    "host.optimizer-by-weight": (of_host(optimizer=calls(0.3)), 0.3, of_host(optimizer=calls(0.09))),
    "host.small-operators": (of_host(calls=calls(0.3)), 0.3, of_host(calls=calls(0.09))),
    "host.elementwise": (of_host(elementwise=0.4), 0.4, of_host(elementwise=0.29)),
    "host.updates": (of_host(updates=0.6), 0.6, of_host(updates=0.49)),
    "host.other-work-in-steps": (of_host(outside=Work(0.3, 12)), 0.3, of_host(outside=Work(0.09, 3.6))),
    "host.constant-work": (of_host(constant=Work(0.3, 12)), 0.3, of_host(constant=Work(0.09, 3.6))),
    "host.framework-parts": (
        of_host(framework=of_framework(Part("CSVLogger.save", "logging", 0.3))), 0.3,
        of_host(framework=of_framework(Part("CSVLogger.save", "logging", 0.04))),
    ),
    "host.other-work-between-steps": (of_host(wait=12, around=Work(0.3, 12)), 0.3, of_host(around=Work(0.09, 3.6))),
    "backward.unused-gradients": (
        going_back(Gradients(100, 60)), 0.3, going_back(Gradients(100, 4, 4)),
    ),
    "backward.dense-embedding": (
        replace(of_host(embedding=0.1, phases=PASSES), optimizer=Optimizer("SGD", largest=0.8)), 0.1 + 0.8 * 0.1,
        replace(of_host(embedding=0.04, phases=PASSES), optimizer=Optimizer("SGD", largest=0.8)),
    ),
    "backward.repeated": (
        of_host(repeated=0.6, phases=PASSES), 0.3, of_host(repeated=0.08, phases=PASSES),
    ),
    "settings.few-threads": (
        tried(threads=1, other_threads=8, other=FASTER), 0.6, tried(threads=1, other_threads=8, other=UNSURE),
    ),
    "settings.many-threads": (
        tried(threads=32, other_threads=8, other=FASTER), 0.6, tried(threads=1, other_threads=8, other=FASTER),
    ),
    "settings.anomaly-detection": (tried(anomaly=FASTER), 0.6, tried(anomaly=UNSURE)),
    "settings.deterministic": (tried(deterministic=FASTER), 0.6, tried(deterministic=UNSURE)),
    "settings.float64": (tried(single=FASTER), 0.6, tried(single=UNSURE)),
    "settings.small-batch": (tried(batch=2, larger=FASTER), 0.6, tried(batch=2, larger=UNSURE)),
    "profiler.overhead": (
        of_trace(operators=100_000, recorded_us=1e5), 0.2, of_loop(profile=of_trace(operators=1_000_000).profile),
    ),
    "communication.exposed": (of_trace(communication=0.2), 0.2, of_trace(communication=0.04)),
    "device.synchronization": (of_gpu({"Other": 0.3}, synchronizing=0.3), 0.3, of_gpu(synchronizing=0.3)),
    "copies.pageable": (of_gpu(copying=0.2, pageable=0.2), 0.2, of_gpu(copying=0.2, pageable=0.05)),
    "copies.blocking": (of_gpu(copying=0.1, blocked=0.1), 0.2, of_gpu(copying=0.1, blocked=0.04)),
    "copies.large": (of_gpu(copying=0.2), 0.2, of_gpu(copying=0.2, blocked=0.1)),
    "copies.within-device": (of_gpu(within=0.1), 0.1, of_gpu(within=0.04)),
    "device.launch-bound": (of_gpu({"Other": 0.17}, short_us=1000.0), 0.2, of_gpu({"Other": 0.17}, short_us=200.0)),
    "device.host-does-other-work": (
        of_gpu({"Other": 0.17}, long_us=1000.0), 0.2, of_gpu({"Other": 0.17}, long_us=1000.0, waiting=0.16),
    ),
    "device.float32": (of_gpu(float32=0.8), 0.75, of_gpu(float32=0.8, capability=None)),
    "device.layout-conversions": (of_gpu(layouts=0.1), 0.1, of_gpu(layouts=0.04)),
    "device.memory-bound": (
        of_gpu(classes={"elementwise": 0.2, "normalization": 0.2, "pooling": 0.1}), 0.3,
        of_gpu(classes={"elementwise": 0.2, "normalization": 0.2, "compiled": 0.1}),
    ),
    "device.small-batch": (of_gpu(fill=0.4), 0.97 * 0.6, of_gpu(fill=0.5)),
    "communication.unequal": (of_job(unequal=("An all_reduce lacks rank 0.",)), math.inf, of_job()),
    "communication.straggler": (of_job(straggler="rank 1", late_ms=20.0, late_in="loading"), 0.2, of_job(waiting=20.0)),
    "communication.buffers": (of_job(transfer=15.0, buffers=Exchanges(1.0, 15.0)), 0.15, of_job(transfer=15.0)),
    "communication.small-operations": (
        of_job(transfer=20.0, gradients=SMALL, small=SMALL), 0.2, of_job(transfer=20.0, gradients=SMALL),
    ),
    "communication.each-pass": (
        of_job(transfer=20.0, exchanging_passes=4.0, exchanging_ms=40.0, backward="train.py:9"), 0.3,
        of_job(transfer=20.0, exchanging_passes=1.0, exchanging_ms=40.0),
    ),
    "communication.sharded": (of_job(transfer=20.0, sharded=True), 0.2, of_job(transfer=20.0)),
    "communication.late": (of_job(transfer=20.0, overlapped=4.0), 0.2, of_job(transfer=20.0)),
    "communication.overlapped": (of_job(transfer=20.0), 0.2, of_job(transfer=20.0, overlapped=4.0)),
}  # fmt: skip


def gains(facts):
    return {finding.key: finding.gain for finding in rules.diagnose(facts).findings}


@pytest.mark.parametrize("key", CASES)
def test_each_rule_alone_is_found_in_its_facts_and_not_in_similar_facts(key):
    found, gain, beside = CASES[key]
    assert gains(found) == {key: pytest.approx(gain, abs=0.001)}
    assert key not in gains(beside)


def test_no_rule_is_without_a_case_and_no_two_rules_have_one_key():
    assert sorted(rule.key for rule in rules.ALL) == sorted(CASES)


@pytest.mark.parametrize(
    ("allocated", "retries", "said"),
    [
        (1, 0, "10 times as large, and more"),
        (8, 0, "8 GB of tensors, 9 GB with what the allocator keeps, of 80 GB: try batches 4 times as large"),
        (60, 0, "60 GB of tensors, 9 GB with what the allocator keeps, of 80 GB"),
        (70, 3, "3 times it was full"),
    ],
)
def test_the_memory_of_the_gpu_is_said_with_what_fits_or_that_it_was_full(allocated, retries, said):
    facts = of_loop()
    memory = GpuMemory(int(80e9), int(40e9), int(allocated * 1e9), int(9e9), retries)
    evidence = dict(rules.diagnose(replace(facts, machine=replace(facts.machine, memory=memory))).evidence)
    assert said in evidence["memory of the GPU"] and ("batches" in evidence["memory of the GPU"]) == (allocated < 10)


@pytest.mark.parametrize("rule", rules.ALL, ids=lambda rule: rule.key)
def test_each_rule_has_a_key_a_name_a_meaning_and_a_remedy(rule):
    assert re.fullmatch(r"[a-z]+\.[a-z0-9]+(-[a-z0-9]+)*", rule.key)
    assert rule.name and rule.topic and rule.verdict in VERDICTS
    assert rule.means[0].isupper() and rule.means.endswith(".")
    assert rule.remedy and not re.search("[{}]|<function", rule.remedy)


def test_the_page_of_rules_holds_all_rules_as_the_shell_lists_them(capsys):
    assert generated.PAGE.read_text(encoding="utf-8") == generated.page()
    assert main(["rules"]) == 0
    listed = re.findall(r"^(\S+): ", capsys.readouterr().out, re.MULTILINE)
    assert listed == re.findall(r"^\| `(\S+)` \| .+ \| .+ \| `.+` \|$", rules.page(), re.MULTILINE)
    assert listed == [rule.key for rule in rules.ALL]


@pytest.mark.parametrize(
    "facts",
    [
        of_loop(40, 0.5),
        of_loop(40, 0.5, workers=16),
        of_loop(40, 0.0, workers=0, ms=0.001),
        of_loop(20, 2.5, workers=4, transfer_ms=2.5),  # a batch has to arrive
        of_loop(40, 0.5, workers=30, cpu_ms=0.1),  # they wait for storage, which takes no core
        of_trace(),
        of_gpu(),
        of_job(),
    ],
)
def test_facts_without_a_fault_give_no_finding(facts):
    found = rules.diagnose(facts)
    assert (found.verdict, found.findings) == ("nothing wrong", ())


# Facts, the rule that is found in them beside what the items do, its gain, and the workers that are advised.
NUMBERS_OF_WORKERS = {
    "waiting": (dict(**SLOW, cpu_ms=0.1), "loader.too-few-workers", 24 / 34, 4),
    "cores": (dict(step=42, wait=32, workers=0, cores=2), "loader.no-workers", 26 / 42, 2),
    # All cores work in the step already: what workers do, they cannot
    "crowded": (dict(step=42, wait=32, workers=0, cores=2, cpu=76), "loader.no-workers", 4 / 42, 2),
    # Five times as long as the items by themselves: the machine is busy
    "busy": (dict(step=170, wait=160, workers=0, cores=2), "loader.no-workers", 90 / 170, 2),
    "unknown items": (dict(step=34, wait=24, workers=0, loaded=False), "loader.no-workers", 24 / 34, 2),
    # Each of them starts in each epoch, too
    "restarted": (
        dict(step=40, wait=0.5, workers=17, restart=20), "loader.too-many-workers", (0.5 + 20 * 9 / 17) / 60, 8,
    ),
    "fewer": (dict(step=40, wait=0.5, workers=17, restart=20), "loader.workers-restarted", 20 / 60, 8),
}  # fmt: skip


@pytest.mark.parametrize("case", NUMBERS_OF_WORKERS)
def test_the_number_of_workers_is_advised_with_its_gain(case):
    facts, key, gain, workers = NUMBERS_OF_WORKERS[case]
    finding = next(each for each in rules.diagnose(of_loop(**facts)).findings if each.key == key)
    assert finding.gain == pytest.approx(gain, abs=0.001)
    assert f"num_workers={workers})" in finding.change


@pytest.mark.parametrize("changed", [False, True])
def test_persistent_workers_need_a_loader_that_is_made_once(changed):
    (found,) = rules.diagnose(of_loop(40, 0.5, restart=10, loader_changed=changed)).findings
    assert ("make it once" in found.change) is changed


def test_a_wait_counts_as_far_as_the_gpu_waits_as_well():
    gpu = of_gpu({"DataLoader": 0.2})
    facts = replace(of_loop(34, 24, workers=1, asynchronous=True), profile=gpu.profile, device=gpu.device)
    assert gains(facts) == {"loader.too-few-workers": pytest.approx(0.2)}


def test_a_wait_for_the_only_batch_of_an_epoch_includes_the_start_of_the_workers():
    facts = of_loop(50, 30, workers=1, asynchronous=True, epoch_steps=1, start_ms=52.0)
    assert gains(facts)["loader.workers-restarted"] == pytest.approx(18 / 50)  # the worker needs 32 ms for a batch
    assert gains(facts)["loader.too-few-workers"] == pytest.approx(10 / 50)


def test_the_waiting_of_items_and_their_work_are_findings_with_a_line_each():
    lines = {WAITING: "train.py:3: ask()", REST: "train.py:4: sort()"}
    waiting, working = rules.diagnose(item(REST, waits={REST: 0.75}, lines=lines)).findings
    assert (waiting.key, waiting.gain, waiting.line) == ("items.waiting", pytest.approx(24 / 34), "train.py:3: ask()")
    assert (working.key, working.gain, working.line) == ("items.dataset", pytest.approx(0.25), "train.py:4: sort()")
    assert waiting.line in waiting.evidence and working.line in working.evidence


def test_workers_on_the_cores_that_the_step_needs_are_found_though_the_step_does_not_wait():
    facts = dict(step=60, wait=0.5, cores=2, parts=NO_PARTS | {"decoding": 1.0})  # 32 items of 1 ms
    assert gains(of_loop(**facts, cpu=40)) == {}  # there is a core to spare
    assert gains(of_loop(**facts, cpu=85)) == {"items.decoding": pytest.approx(32 / 60 * 59.5 / 60)}
    # Threads that wait for each other leave cores idle, for which workers are queued all the same
    assert gains(of_loop(**facts, cpu=70, queued_ms=16)) == {"items.decoding": pytest.approx(32 / 60 * 59.5 / 60)}
    assert gains(of_loop(**facts, cpu=70, queued_ms=15)) == {}
    assert gains(of_loop(**facts, cpu=70, queued_ms=16, asynchronous=True)) == {}


def test_whatever_workers_do_on_the_cores_that_the_step_needs_is_found():
    crowded = dict(step=40, wait=2, workers=1, cores=2, cpu=60, ms=0.8, cpu_ms=0.8)
    for part, key in {"opening": "items.small-files", REST: "items.dataset"}.items():
        (found,) = rules.diagnose(of_loop(**crowded, parts=NO_PARTS | {part: 1.0})).findings
        assert (found.key, found.gain) == (key, pytest.approx(0.8 * 32 / 40 * 38 / 40))
        assert "cores that the step needs" in found.evidence
    waits = of_loop(**crowded, parts=NO_PARTS | {"opening": 1.0}, waits={"opening": 1.0})
    assert not rules.diagnose(waits).findings  # an item that waits takes no core


def test_slow_items_gain_the_wait_and_the_time_that_the_step_loses_to_their_workers():
    facts = dict(step=50, wait=10, workers=1, cores=2, parts=NO_PARTS | {"decoding": 1.0}, ms=1.25, cpu_ms=1.25)
    alone, beside = (rules.diagnose(of_loop(**facts, cpu=cpu)).findings[0].gain for cpu in (5, 60))
    assert alone == pytest.approx(10 / 50)
    assert beside == pytest.approx(10 / 50 + 40 / 50 * 40 / 50)  # a batch takes 40 ms of a core


def test_only_the_function_of_the_line_counts_and_the_rest_of_the_item_stays():
    facts = item("decoding", 0.6, lines={"decoding": "train.py:3: load()"}, function_shares={"decoding": 0.5})
    finding = next(each for each in rules.diagnose(facts).findings if each.key == "items.decoding")
    assert finding.gain == pytest.approx(0.3)
    assert finding.range[1] > 0.6


def test_findings_of_one_line_are_one_with_their_sum():
    parts = NO_PARTS | {"reading": 0.5, REST: 0.3, "collating": 0.2}
    apart, together = (
        gains(of_loop(**SLOW, parts=parts, lines={"reading": "train.py:3", REST: line}))
        for line in ("train.py:9", "train.py:3")
    )
    assert apart["items.small-files"] == pytest.approx(0.5)
    assert apart["items.dataset"] == pytest.approx(0.3)
    assert together["items.small-files"] == pytest.approx(24 / 34)  # no more than the wait
    assert "items.dataset" not in together
    line = "train.py:3: blur(read(index)), in {} of shop, called at train.py:9: self.load(index)"
    lines = {part: line.format(method) for part, method in {"reading": "Shop.read", REST: "Blur.__call__"}.items()}
    assert len(gains(of_loop(**SLOW, parts=parts, lines=lines))) == 3
    saving, calling = Work(0.3, 12, line="train.py:3: save()"), calls(0.2, line="train.py:3: save(), called at t.py:9")
    assert gains(of_host(outside=saving, calls=calling)) == {"host.other-work-in-steps": pytest.approx(0.5)}


def test_arrays_in_a_pipe_are_named_before_the_findings_that_follow_from_them():
    facts = of_loop(80, 70, workers=4, transfer_ms=75, pickled_bytes=6e6, tensors=128, ms=0.01, batch=100)
    pipe = ["loader.pickled-batches", "loader.many-tensors", "loader.workers-slower-than-none"]
    assert [*gains(facts)] == pipe


@pytest.mark.parametrize("usual", [0.2, 8])
def test_workers_that_wait_for_a_core_are_no_fault_of_the_loop_and_make_a_verdict_impossible(usual):
    loop = dict(**KEEPS_UP, usual=usual, transfer_ms=0.5)
    found = rules.diagnose(of_loop(**loop, queued_ms=12))
    assert (found.verdict, found.findings) == ("unknown", ())
    assert "12 ms" in found.reason
    other = rules.diagnose(of_loop(**loop, queued_ms=0.1))
    assert "not known" in "".join([other.reason, *other.unknown])


@pytest.mark.parametrize(
    "facts", [of_loop(58, 16, workers=4, transfer_ms=15), of_loop(34, 24, workers=1), of_loop(42, 32, workers=0)]
)
def test_a_wait_that_is_explained_is_not_doubted(facts):
    found = rules.diagnose(facts)
    assert (found.verdict, found.unknown) == ("loading", ())


def test_a_wait_that_making_a_batch_does_not_explain_is_doubted():
    found = rules.diagnose(of_loop(42, 32, workers=0, ms=0.1))
    assert "not known" in found.reason + "".join(found.unknown)


@pytest.mark.parametrize(("step_ms", "share"), [(60, 0.4), (50, 0.4), (30, 0.3)])
def test_short_operators_gain_the_mean_of_their_own_share_and_of_their_samples(step_ms, share):
    sampled = dict(calls=calls(0.3, sampled_share=0.5), sampled_ms=60.0)
    assert gains(of_host(step_ms, **sampled)) == {"host.small-operators": pytest.approx(share)}  # not if far slower


def test_recurrent_cells_gain_no_more_than_a_part_of_their_time_since_a_longer_call_computes_as_much():
    cells = Calls(0.6, (Operator("aten::lstm_cell", 98.0),), 258.0)
    (finding,) = rules.diagnose(of_host(calls=cells)).findings
    assert finding.gain < 0.6 and finding.range[0] == 0


def test_a_framework_is_told_the_settings_of_the_parts_that_take_much_time():
    progress, logging, saving = (Part(kind, kind, 0.2) for kind in ("progress", "logging", "saving"))
    (both,) = rules.diagnose(of_host(framework=of_framework(progress, replace(logging, share=0.1)))).findings
    assert "enable_progress_bar=False" in both.change and "log_every_n_steps" in both.change
    (one,) = rules.diagnose(of_host(framework=of_framework(saving, name="transformers"))).findings
    assert "save_steps" in one.change and "logging" not in one.change
    (unknown,) = rules.diagnose(of_host(framework=of_framework(saving, name="ignite"))).findings
    assert "(" not in unknown.change and "ignite" in unknown.evidence


def test_the_own_work_of_a_framework_is_shown_and_no_fault():
    found = rules.diagnose(of_host(framework=of_framework()))
    assert not found.findings
    assert any(name == "framework" and "lightning" in text for name, text in found.evidence)


@pytest.mark.parametrize(("ms", "share"), [(12, 0.3), (16, 0.35), (24, 0.45)])
def test_other_work_takes_a_larger_share_of_a_step_that_no_profiler_slows(ms, share):
    (finding,) = rules.diagnose(of_host(outside=Work(0.3, ms, 0.2, "train.py:3: save()"))).findings
    assert (finding.gain, finding.line) == (pytest.approx(share), "train.py:3: save()")
    assert finding.range[0] < 0.3 and finding.range[1] > min(1.0, ms / 40) - 1e-9
    assert "waits" in finding.evidence
    assert "waits" not in rules.diagnose(of_host(outside=Work(0.3, ms, 0.1))).findings[0].evidence


def test_work_between_steps_gains_no_more_than_the_wait():
    assert gains(of_host(wait=16, around=Work(0.3, 30.0))) == {"host.other-work-between-steps": pytest.approx(0.35)}


def test_padding_gains_no_more_than_the_time_that_depends_on_the_length_of_sequences():
    fixed = Batch(0.4, 100, 70)  # to the longest of the batch, a third of its positions would be padding
    assert gains(replace(of_loop(40, 4), batch=fixed)) == {"batch.padding": pytest.approx(0.9 * 0.3)}
    facts = replace(of_host(updates=0.5, outside=Work(0.05, 2)), batch=Batch(0.8, 100, 90))
    assert gains(facts)["batch.padding"] == pytest.approx(0.8 * 0.45)
    gpu = of_gpu({"Kernel": 0.5})  # which else waits for the host
    facts = replace(of_loop(40, 0.5, asynchronous=True), profile=gpu.profile, device=gpu.device)
    assert gains(replace(facts, batch=Batch(0.8, 100, 90)))["batch.padding"] == pytest.approx(0.8 * 0.5)


def test_work_of_the_host_gains_no_more_than_the_time_in_which_the_gpu_waits_for_the_host():
    facts = replace(of_gpu({"Other": 0.1, "CPU Exec": 0.1}), host=Host(optimizer=calls(0.3)))
    assert gains(facts) == {"host.optimizer-by-weight": pytest.approx(0.2)}


def test_a_setting_gains_time_only_while_the_loop_does_not_wait():
    facts = of_loop(40, 20, trials=Trials(anomaly=FASTER))
    assert gains(facts)["settings.anomaly-detection"] == pytest.approx(0.3)


@pytest.mark.parametrize("part", ["opening", "decoding"])
def test_a_file_that_an_item_opens_again_is_to_be_opened_once(part):
    (found,) = rules.diagnose(item(part, opened_again=0.5)).findings
    assert "50% of the files" in found.evidence and "once for an item" in found.change


@pytest.mark.parametrize(
    ("facts", "key", "ends"),
    [
        (replace(of_host(debugging=0.3), modes=Modes(8, anomaly=True)), "settings.anomaly-detection", (0.3, 0.3)),
        (
            replace(of_host(phases=PASSES), optimizer=Optimizer("Adam", dtype="float64")),
            "settings.float64", (0.25 * 0.9, 0.7 * 0.9),
        ),
        (
            replace(of_loop(profile=of_gpu().profile), optimizer=Optimizer("Adam", dtype="float64")),
            "settings.float64", (0.4 * 0.97, 0.95 * 0.97),
        ),
    ],
)  # fmt: skip
def test_a_script_that_must_not_change_is_told_of_its_settings_by_an_estimate(facts, key, ends):
    (found,) = rules.diagnose(facts).findings
    assert found.key == key and found.range[0] < ends[0] and found.range[1] > ends[1]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (of_host(recomputed=0.2), "Activation checkpointing repeats"),
        (replace(of_loop(), compilation=Compilation(8, 20.0, "train.py:5")), "functions again 8 times, for 20.0 s"),
        (of_host(evaluated=Work(0.2, 8, line="train.py:9: model(x)")), "20% of a step, mostly at train.py:9"),
        (replace(of_loop(cores=8, cpu=40.0), modes=Modes(threads=1)), "PyTorch computes with 1 thread"),
    ],
)
def test_a_setting_that_may_be_needed_is_no_fault_and_makes_nothing_wrong_impossible(facts, said):
    found = rules.diagnose(facts)
    assert (found.verdict, found.findings) == ("unknown", ()) and said in found.reason
    busy = replace(of_loop(cores=8, cpu=300.0), modes=Modes(threads=1))  # or its libraries have threads of their own
    usual = replace(of_loop(cores=8, cpu=40.0), modes=Modes(threads=4, physical_cores=4))  # each core counts twice
    assert [rules.diagnose(each).verdict for each in (busy, usual)] == ["nothing wrong"] * 2


def test_a_change_that_may_gain_next_to_nothing_gives_no_verdict_and_comes_last():
    slight, large = Work(0.12, 4.8), Work(0.5, 20)
    for work, least in ((slight, 0.0), (Work(0.15, 6), 0.02)):  # less than a change is worth
        found = rules.diagnose(of_host(outside=work))
        assert (found.verdict, [each.key for each in found.findings]) == ("unknown", ["host.other-work-in-steps"])
        assert found.findings[0].range[0] == pytest.approx(least, abs=0.001)
        assert "may gain much or next to nothing" in found.reason
    found = rules.diagnose(of_host(outside=slight, elementwise=0.4))
    assert (found.verdict, found.findings[0].key) == ("compute", "host.elementwise")
    assert rules.diagnose(of_host(outside=large)).verdict == "host"


def test_other_work_of_a_single_long_step_is_named_with_a_question():
    once = replace(EVALUATES, count=1, every=40.0, line="train.py:9: evaluate()")
    found = rules.diagnose(of_loop(40, 0.5, long=once))
    assert (found.verdict, found.findings[0].line) == ("unknown", once.line)
    assert found.findings[0].range[0] == 0 and "come again?" in found.findings[0].evidence
    stalled = rules.diagnose(of_loop(40, 0.5, long=replace(once, other=0.2)))
    assert (stalled.verdict, stalled.findings) == ("unknown", ())


def test_a_network_that_trains_in_every_nth_step_is_no_fault():
    assert rules.diagnose(of_loop(40, 0.5, long=replace(EVALUATES, training=0.4))).verdict == "nothing wrong"


def test_only_the_calls_of_the_named_function_count():
    all_, part = (rules.diagnose(of_host(calls=calls(0.6, line_share=share))).findings[0] for share in (1.0, 0.5))
    assert (all_.gain, part.gain) == (0.6, 0.3)


def test_evaluation_that_records_operators_for_nothing_is_told_how_not_to():
    def change(recorded):
        return rules.diagnose(of_host(outside=Work(0.5, 20, recorded=recorded))).findings[0].change

    assert "no_grad" in change(0.3) and "no_grad" not in change(0.2)


def test_pauses_for_the_workers_of_another_loader_are_told_to_keep_them():
    pauses = Pauses(3, 80.0, 40.0, "train.py:9: for batch in loader:", of_workers=0.6)
    (found,) = rules.diagnose(of_loop(40, 0.5, pauses=pauses)).findings
    assert "persistent_workers=True" in found.change and "60% of it" in found.evidence


def test_a_rank_alone_does_not_say_what_its_communication_can_gain():
    rank = of_loop(profile=of_trace(communication=0.6).profile)
    assert rules.diagnose(rank).findings[0].key == "communication.exposed"
    among = rules.diagnose(rank, alone=False)
    assert (among.verdict, among.findings) == ("unknown", ()) and "all ranks together" in among.reason


def test_a_gain_in_a_loop_has_a_range_and_a_gain_in_a_trace_is_the_largest_possible():
    (of_a_loop,), (of_a_trace,) = (
        rules.diagnose(facts).findings for facts in (of_loop(34, 24, workers=1), of_trace(DataLoader=0.4))
    )
    least, most = of_a_loop.range
    assert 0 < least < of_a_loop.gain < most < 1
    assert of_a_trace.range is None


def test_a_change_gains_time_until_loading_is_the_next_limit():
    saving = Host(outside=Work(0.9, 36, line="train.py:3: save()"))
    (free,) = rules.diagnose(of_loop(40, 0.5, host=saving, workers=4, ms=0.1, cpu_ms=0.1)).findings
    (limited,) = rules.diagnose(of_loop(40, 0.5, host=saving, workers=4, ms=1.0, cpu_ms=0.1)).findings  # 8 ms a batch
    assert free.gain == pytest.approx(0.9, abs=0.02) and limited.gain == pytest.approx(0.8)
    assert "8.0 ms" in limited.evidence.removeprefix(free.evidence)
    (both,) = rules.diagnose(of_loop(40, 0.5, host=saving, workers=4, ms=4.9, cpu_ms=0.1)).findings
    assert both.gain == free.gain and both.range[0] == 0  # only faster loading and this change together


def test_a_gain_on_the_gpu_counts_in_the_step_without_the_work_between_epochs():
    slow, healthy = of_gpu(within=0.2), of_gpu()
    alone, with_pauses = (
        rules.diagnose(replace(of_loop(10, apart=apart), profile=slow.profile, device=slow.device)) for apart in (0, 30)
    )
    assert [each.key for each in with_pauses.findings] == ["loop.work-between-epochs", "copies.within-device"]
    assert with_pauses.findings[1].gain / alone.findings[0].gain == pytest.approx(1 / 4, abs=0.05)
    some = rules.diagnose(replace(of_loop(10, apart=2), profile=healthy.profile, device=healthy.device))
    assert some.reason.endswith("Work between epochs takes 17% of the time.")


def test_the_largest_gain_gives_the_verdict_unless_a_finding_with_a_line_gains_about_as_much():
    found = rules.diagnose(of_gpu(within=0.1, fill=0.4))
    assert [each.key for each in found.findings] == ["device.small-batch", "copies.within-device"]
    assert (found.verdict, found.reason.startswith("The operators")) == ("compute", True)
    saving = Work(0.5, 20, line="train.py:3: save()")
    found = rules.diagnose(of_loop(host=Host(outside=saving), trials=Trials(anomaly=FASTER)))
    assert [each.key for each in found.findings] == ["host.other-work-in-steps", "settings.anomaly-detection"]
    assert found.verdict == "host" and found.findings[0].gain < found.findings[1].gain
    found = rules.diagnose(of_loop(host=Host(outside=replace(saving, share=0.3, ms=12)), trials=Trials(anomaly=FASTER)))
    assert found.verdict == "settings"


# The host's work takes most of a step, but of the fastest step loading takes most.
TURNS = of_loop(100, 45, workers=0, ms=3.0, cpu_ms=3.0, host=Host(outside=Work(1.0, 100)), held=0.2)
TURNS = replace(TURNS, loop=replace(TURNS.loop, steps=(Step(45, 56), *[Step(45, 102)] * 19)))


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (of_loop(34, 24, workers=1, held=0.2), "loading"),
        (of_loop(**KEEPS_UP, transfer_ms=6, held=0.2), "unknown"),
        (of_loop(62, 20, workers=4, transfer_ms=18, held=0.09), "loading"),
        (of_loop(40, held=0.2), "unknown"),
        (TURNS, "unknown"),
        (replace(TURNS, machine=of_loop().machine), "host"),
        (of_loop(profile=of_gpu().profile, held=0.2), "nothing wrong"),
    ],
)
def test_a_verdict_that_a_busy_machine_may_have_changed_is_unknown(facts, verdict):
    found = rules.diagnose(facts)
    assert found.verdict == verdict
    assert ("20%" in found.reason) == (verdict == "unknown")


@pytest.mark.parametrize(("mean", "verdict"), [(239.5, "unknown"), (80.0, "nothing wrong")])
def test_long_steps_with_the_work_of_all_steps_are_doubted_if_they_take_far_longer(mean, verdict):
    found = rules.diagnose(of_loop(40, 0.5, long=replace(EVALUATES, other=0.1, mean_ms=mean)))
    assert (found.verdict, found.findings) == (verdict, ())
    assert ("one in 10 steps" in found.reason) is (verdict == "unknown")


@pytest.mark.parametrize(
    ("optimizer", "change"),
    [
        (Optimizer(), "SGD(model.parameters(), …, fused=True)"),
        (Optimizer("AdamW", 2, 150, ("fused", "foreach")), "AdamW(model.parameters(), …, fused=True)"),
        (Optimizer("RMSprop", 1, 150, ("foreach",)), "RMSprop(model.parameters(), …, foreach=True)"),
        (Optimizer("Adam", 150, 150, ("fused", "foreach")), "# 150 parameter groups for 150 weight tensors"),
        (Optimizer("LBFGS", 1, 150), "# LBFGS updates one"),
    ],
)
def test_the_advice_names_the_optimizer_of_the_script_and_options_that_it_has(optimizer, change):
    facts = replace(of_host(optimizer=calls(0.3)), optimizer=optimizer)
    assert rules.diagnose(facts).findings[0].change.startswith(change)


def test_a_finding_that_holds_at_any_load_comes_before_the_doubt_of_a_busy_machine():
    found = rules.diagnose(of_loop(40, 14, workers=1, held=0.2))
    assert found.verdict == "loading" and found.findings[0].gain < 0.4
    assert any("20%" in each for each in found.unknown)


def test_nothing_wrong_says_where_the_time_goes_and_which_changes_were_not_tried():
    phases = {"forward": 0.5, "backward": 0.3, "update": 0.1}
    untried, tried = (
        rules.diagnose(of_loop(host=Host(phases=phases), trials=trials)) for trials in (None, Trials(threads=2))
    )
    assert untried.verdict == "nothing wrong"
    row = dict(untried.evidence)["in a step"]
    assert all(part in row for part in ("forward 50%", "backward 30%", "update 10%", "other 10%"))
    assert "threads" in untried.reason and "threads" not in tried.reason


def test_steps_that_train_on_equal_items_are_saved_however_slow_loading_is():
    slow = of_loop(40, 0.5, workers=4, ms=4.9, cpu_ms=0.1)  # 39 ms a batch
    (finding,) = rules.diagnose(replace(slow, loader=replace(slow.loader, yielded=4))).findings
    assert finding.key == "loader.equal-workers" and finding.gain == pytest.approx(0.75)
    assert finding.range[0] > 0.5


def test_facts_that_do_not_suffice_give_no_verdict():
    assert rules.diagnose(Facts(problem="No step is marked.")).reason == "No step is marked."
    lost = replace(of_gpu(within=0.2).profile, lost_kernels="A quarter of the kernels is lost.")
    for facts in (Facts(lost, device=of_gpu(within=0.2).device), of_loop(34, 24, workers=1, profile=lost)):
        found = rules.diagnose(facts)
        assert (found.verdict, found.reason) == ("unknown", lost.lost_kernels)
    mostly_python = replace(of_trace(Other=0.4).profile, shares=IDLE | {"Other": 0.4, "CPU Exec": 0.6})
    assert rules.diagnose(of_loop(profile=mostly_python)).verdict == "unknown"
    assert rules.diagnose(of_loop(34, 24, workers=1, profile=mostly_python)).verdict == "loading"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(loader=None), "there is no loader"),
        (dict(loader=Loader("Wrapped")), "Wrapped"),
        (dict(loader=replace(of_loop(loaded=False).loader, unknown="OSError: no such file")), "OSError: no such file"),
        (dict(machine=replace(of_loop().machine, cuda=True)), "GPU"),
    ],
)
def test_the_parts_of_a_loop_that_could_not_be_examined_are_named(changes, text):
    (unknown,) = rules.diagnose(replace(of_loop(), **changes)).unknown
    assert text in unknown
    assert rules.diagnose(of_loop()).unknown == ()


@pytest.mark.parametrize(
    ("part", "changes", "has", "lacks"),
    [
        ("transforming", {}, "PILToTensor", "ahead"),  # facts of an older version
        ("transforming", dict(libraries={"PIL": 0.1, "torchvision": 0.2}), "PILToTensor", "ahead"),
        ("transforming", dict(libraries={"scipy": 0.5}), "ahead of time", "PIL"),
        ("resizing", dict(libraries={"monai": 0.5, "nibabel": 0.1}), "CacheDataset", "image"),
        ("decoding", dict(libraries={"soundfile": 0.5}), "ahead of time", "image"),
        (REST, dict(libraries={"pandas": 0.6}), "arrays", "epoch"),
        (REST, dict(libraries={"pandas": 0.01}), "epoch", "arrays"),
        ("reading", dict(opened=0.0, hdf5_reads=60.0), "[...]", "pack"),
        ("reading", dict(opened=0.0, hdf5_reads=1.0), "slices", "pack"),
        ("reading", dict(opened=0.0), "pack", "HDF5"),
    ],
)
def test_the_change_fits_the_items(part, changes, has, lacks):
    found, *_ = rules.diagnose(item(part, **changes)).findings
    assert has in found.change and lacks not in found.change


def test_a_warning_of_pytorch_is_repeated_once():
    loop = of_loop(**SLOW, parts=NO_PARTS | {"reading": 0.6, REST: 0.4}, opened=0.0, warnings=("This is slow.",))
    found = rules.diagnose(loop).findings
    assert len(found) > 1 and sum("This is slow." in each.evidence for each in found) == 1


@pytest.mark.parametrize(
    ("why", "has", "lacks"),
    [
        ("tensor 'x' size mismatch at index 1. expected 390, actual 349", "mark_dynamic(x, 1)", "drop_last"),
        ("tensor 'L['batch']' size mismatch at index 0. expected 8, actual 3", "mark_dynamic(batch, 0)", "L["),
        ("tensor 'x' size mismatch at index 0. expected 8, actual 3", "drop_last=True", "index 1"),
        ("___check_type_id(L['scale'], 77)", "without compiling it.", "dynamic"),
        ("", "without compiling it.", "dynamic"),
    ],
)
def test_recompilations_have_a_change_only_for_the_size_that_changes(why, has, lacks):
    text = dict(rules.diagnose(replace(of_loop(), compilation=Compilation(3, 2.5, "a.py:7", why, 8))).evidence)
    assert has in text["compiled again"].partition("whose guard")[2] + text["compiled again"]
    assert lacks not in text["compiled again"].partition("After 8")[2]


def test_problems_that_cost_no_time_are_rows_of_the_evidence():
    facts = of_loop()
    loader = replace(
        facts.loader,
        generators=("Photos.transform[0].numbers",),
        growth=Growth(3e6, 20, (Objects("Photos.names", 200_000),)),
    )
    compilation = Compilation(3, 2.5, "train.py:7", "size mismatch", 8, ("train.py:9",))
    rows = dict(rules.diagnose(replace(facts, loader=loader, compilation=compilation)).evidence)
    texts = {
        "random numbers": "Photos.transform[0].numbers",
        "workers' memory": "Photos.names (200,000 objects)",
        "compiled again": "train.py:7",
        "graph breaks": "train.py:9",
    }
    assert all(text in rows[name] for name, text in texts.items())
    assert rows.keys() - dict(rules.diagnose(facts).evidence).keys() == texts.keys()


@pytest.mark.parametrize(
    ("wait", "asynchronous", "verdict"), [(30.0, False, "loading"), (0.0, False, "unknown"), (30.0, True, "unknown")]
)
def test_a_loop_whose_steps_were_not_profiled_can_only_be_accused_of_its_loading(wait, asynchronous, verdict):
    whole = of_loop(40.0, wait, workers=0, asynchronous=asynchronous)
    found = rules.diagnose(replace(whole, profile=None, host=None, problem="Few steps."))
    assert found.verdict == verdict and "Few steps." in (*found.unknown, found.reason)
    assert {each.verdict for each in found.findings} <= {"loading"}


def test_a_script_that_profiles_itself_is_told_to_stop_before_anything_is_blamed():
    facts = of_loop(**SLOW, tracers=("cProfile",), held=0.5)
    for each in (facts, replace(facts, profile=None, host=None, problem="Few steps.")):
        found = rules.diagnose(each)
        assert found.verdict == "unknown" and "cProfile" in found.reason


@pytest.mark.parametrize("device", ["mps", "xpu", "xla"])
def test_an_accelerator_whose_time_is_not_seen_is_named(device):
    def verdict(facts, device):
        found = rules.diagnose(replace(facts, optimizer=Optimizer("SGD", device=device)))
        return found.verdict, device in found.reason

    early = dict(profile=None, host=None, problem="Few steps.")
    for facts in (of_loop(**SLOW), of_loop(), replace(of_loop(**SLOW), **early)):
        assert verdict(facts, device) == ("unknown", True)
        assert verdict(facts, "cpu") == (rules.diagnose(facts).verdict, False)


@pytest.mark.parametrize("wait", [0.0, 24.0])
def test_a_gpu_that_the_profiler_cannot_record_is_named_and_no_cpu_is_blamed(wait):
    facts = replace(of_loop(34, wait, asynchronous=True), optimizer=Optimizer("SGD", device="cuda"))
    facts = replace(facts, machine=replace(facts.machine, cuda=True))
    found = rules.diagnose(facts)
    assert found.verdict == "unknown" and "CUPTI" in found.reason
    assert not any("Is the model on the GPU" in each for each in found.unknown)
    seen = replace(facts, profile=ON_GPU)
    assert rules.diagnose(seen).verdict == "nothing wrong"


@pytest.mark.parametrize(
    ("step", "launches", "products"), [(8.0, 0.4, 0.2), (6.0, 0.2, 0.48 / 0.8), (5.0, None, 0.48 / 0.625)]
)
def test_a_gpu_that_idles_only_while_the_profiler_slows_the_host_lacks_no_launches(step, launches, products):
    """Its kernels run for 4.8 ms of a step of 8 ms in the trace, most of them on products in float32."""
    profile = replace(ON_GPU, step_ms=8.0, shares=IDLE | {"Kernel": 0.6, "Runtime": 0.25, "CPU Exec": 0.15})
    device = replace(DEVICE, kernels=0.6, short_us=1.0, all_us=1.0, float32=0.512)  # 15 of 16 parts can be saved
    found = gains(replace(of_loop(step, profile=profile, asynchronous=True), device=device))
    expected = {"device.float32": products} | ({} if launches is None else {"device.launch-bound": launches})
    assert found == pytest.approx(expected, abs=0.01)


def test_the_change_fits_what_is_known_of_the_loop():
    def change(facts, **others):
        (found,) = rules.diagnose(replace(facts, **others)).findings
        return found.change

    reads = of_gpu({"Other": 0.3}, synchronizing=0.3)
    adam = Optimizer("Adam", faster=("fused",), device="cuda")
    assert ".detach()" in change(reads, optimizer=adam)
    scaled = Host(on_gpu=GpuLines(scaling=0.9))
    assert change(reads, optimizer=adam, host=scaled).startswith("Adam(model.parameters(), …, fused=True)")
    volta = replace(reads, device=replace(reads.device, capability=(7, 0)))
    assert "bfloat16" in change(reads, host=scaled) and "bfloat16" not in change(volta, host=scaled)

    loader = of_loop(libraries={"pandas": 0.9}).loader
    pinned = replace(loader, settings=replace(loader.settings, pin_memory=True))
    pageable, large = of_gpu(copying=0.2, pageable=0.2), of_gpu(copying=0.2)
    assert "pin_memory=True" in change(pageable, loader=loader)
    assert "pin_memory=True" not in change(pageable, loader=pinned)
    assert "PILToTensor" in change(large) and "PILToTensor" not in change(large, loader=loader)

    assert "channels_last_3d" in change(of_gpu(layouts=0.1, volumes=True))


def test_the_range_of_few_timed_steps_is_shown():
    facts = of_loop()
    few = replace(facts, loop=replace(facts.loop, steps=(Step(0.0, 3_000.0), Step(0.0, 3_500.0), Step(0.0, 3_100.0))))
    shown = [dict(rules.diagnose(each).evidence)["stopwatch"] for each in (few, facts)]
    assert "3,000 ms to 3,500 ms" in shown[0] and " to " not in shown[1]


def test_a_loop_that_ended_early_is_not_declared_healthy():
    found = rules.diagnose(replace(of_loop(), problem="Few steps."))
    assert (found.verdict, found.reason) == ("unknown", "Few steps.")


def test_different_durations_do_not_look_equal():
    close = Trial(13.4, 12.6, True)
    for trials in (
        Trials(threads=4, other_threads=2, other=close),
        Trials(anomaly=close),
        Trials(batch=2, larger=close),
    ):
        (found,) = rules.diagnose(of_loop(trials=trials)).findings
        assert "13.4 ms" in found.evidence and "12.6 ms" in found.evidence
    stopwatch = dict(rules.diagnose(of_loop(40.0, apart=0.1)).evidence)["stopwatch"]
    assert stopwatch.count("40 ms") == 1


@pytest.mark.parametrize(("blocked", "said"), [(0.001, False), (0.04, True)])
def test_a_wait_for_copies_is_mentioned_only_if_there_is_one(blocked, said):
    facts = of_gpu({"Memcpy": 0.2, "Kernel": 0.8}, copying=0.2, blocked=blocked)
    found = {each.key: each.evidence for each in rules.diagnose(facts).findings}
    assert ("waits for copies" in found["copies.large"]) == said
