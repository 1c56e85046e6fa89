"""Tests of `stepscope.diagnosis` by traces: each finding where there is just this fault, and none without any."""

import dataclasses
import json

import numpy as np
import pytest
from support import cuda_trace
from support.written import write

from stepscope import diagnosis, rules, traces
from stepscope.cli import main
from stepscope.facts import saving
from stepscope.facts.host import GpuLines, Host, Work
from stepscope.observe import host, profile, sampler
from stepscope.report.findings import Finding
from stepscope.rules import conclusion

PRODUCT = cuda_trace.TENSOR_CORE_PRODUCT

# For each fault of a loop on a GPU the key of the finding, and the verdict.
FAULTS = {
    "workers too slow": (dict(loading=15_000, host_work=0), "loader.too-slow", "loading"),
    "no workers": (
        dict(loading=15_000, host_work=0, loader=cuda_trace.ALONE), "loader.no-workers", "loading",
    ),
    "pageable memory": (dict(memory="Pageable", copy=1500), "copies.pageable", "copies"),
    "blocking copy": (dict(blocking=True), "copies.blocking", "copies"),
    "large copy": (dict(copy=1500), "copies.large", "copies"),
    "copy within": (dict(within=1000), "copies.within-device", "copies"),
    "item": (dict(read="aten::item"), "device.synchronization", "synchronization"),
    "cpu": (dict(read="aten::to"), "device.synchronization", "synchronization"),
    "mask": (dict(read="aten::nonzero"), "device.synchronization", "synchronization"),
    "short kernels": (
        dict(kernels=((PRODUCT, 10),) * 200, launch=45, host_work=0), "device.launch-bound", "launches",
    ),
    "slow Python": (dict(host_work=13_000), "device.host-does-other-work", "launches"),
    "float32": (
        dict(kernels=((cuda_trace.PRODUCT, 975),) * 10), "device.float32", "compute",
    ),
    "NCHW": (
        dict(kernels=((PRODUCT, 975), (cuda_trace.CONVERSION, 300)) * 8), "device.layout-conversions", "compute",
    ),
    "small batch": (dict(blocks=20), "device.small-batch", "compute"),
    "all-reduce": (dict(exchange=1500), "communication.exposed", "communication"),
    "stacks": (
        dict(kernels=((PRODUCT, 80),) * 10, copy=20, host_work=700, frames=2600, settings=("with_stack",)),
        "profiler.overhead", "unknown",
    ),
}  # fmt: skip
REMEDIES = {"item": ".item() once", "cpu": ".cpu() once", "mask": "torch.where"}  # of the operator that waits


@pytest.fixture
def file(tmp_path):
    return tmp_path / "loop.pt.trace.json"


def keys(found):
    return [finding.key for finding in found.findings]


@pytest.mark.parametrize("fault", ["short kernels", "item", None])
def test_a_single_stalled_step_is_left_out_with_its_gap(fault, file):
    options = {"steps": 8} | (FAULTS[fault][0] if fault else {})
    usual = diagnosis.facts_of_trace(traces.load(cuda_trace.Loop(**options).write(file)))
    stalled = diagnosis.facts_of_trace(traces.load(cuda_trace.Loop(stall=500_000, **options).write(file)))
    assert (stalled.profile.steps, stalled.profile.stall_ms) == (7, pytest.approx(500, abs=20))
    assert not stalled.profile.begins_epoch
    assert stalled.device.long_us <= usual.device.long_us and stalled.device.launches == usual.device.launches
    assert stalled.profile.step_ms == pytest.approx(usual.profile.step_ms, rel=0.1)
    found, expected = rules.diagnose(stalled), rules.diagnose(usual)
    assert (found.verdict, keys(found)) == (expected.verdict, keys(expected))


def test_a_stall_in_the_first_step_loses_no_number_of_events(file):
    loop = cuda_trace.Loop(steps=8, frames=3, stall=500_000, stalled=0)
    facts = diagnosis.facts_of_trace(traces.load(loop.write(file)))
    assert facts.profile.stall_ms > 400 and facts.profile.frames == 8 * 3


def test_two_steps_suffice_where_no_worker_loads(file):
    for loader, verdict in ((cuda_trace.ALONE, "synchronization"), (cuda_trace.WORKERS, "unknown")):
        loop = cuda_trace.Loop(read="aten::item", loader=loader, steps=2)
        assert diagnosis.of_trace(loop.write(file)).verdict == verdict


def test_a_wait_for_the_gpu_and_the_work_of_its_line_are_one_finding(file):
    facts = diagnosis.facts_of_trace(traces.load(cuda_trace.Loop(read="aten::item", host_work=4000).write(file)))
    alone = rules.diagnose(facts).findings[0]
    line = "train.py:7: total += loss.item()"
    its = Host(outside=Work(share=0.3, ms=3.0, line=line), on_gpu=GpuLines(waiting=line, launching="train.py:3"))
    found = rules.diagnose(dataclasses.replace(facts, host=its)).findings[0]
    assert (found.key, found.line, found.change) == ("device.synchronization", line, alone.change)
    assert line in found.evidence and alone.gain <= found.gain < alone.gain + 0.2


@pytest.mark.parametrize(("waits", "first"), [(0.1, "host.other-work-in-steps"), (0.45, "device.synchronization")])
def test_a_line_that_mostly_works_by_itself_is_no_synchronization(waits, first):
    line, texts = "train.py:7: metric.update(outputs.cpu())", ("Evidence.", "# change", "topic")
    of_gpu = Finding("device.synchronization", "a wait", "synchronization", waits, *texts, line)
    of_host = Finding("host.other-work-in-steps", "other work", "host", 0.5, *texts, line, (0.4, 0.6))
    (found,) = conclusion.together([of_gpu, of_host], wait=0.0)
    assert (found.key, found.gain) == (first, 0.5)


def test_faster_kernels_gain_nothing_while_the_gpu_waits_for_its_launches(file):
    """They would end sooner, and the GPU would wait for longer."""
    loop = cuda_trace.Loop(kernels=((cuda_trace.PRODUCT, 20),) * 200, launch=45, host_work=0)
    found = diagnosis.of_trace(loop.write(file))
    assert keys(found) == ["device.launch-bound"]


@pytest.mark.parametrize("us", [4, 10])
@pytest.mark.parametrize("graph", [True, False])
def test_the_time_that_a_gpu_needs_between_any_two_kernels_is_no_riddle(file, us, graph):
    """The simulated GPU takes 1 µs from a kernel to the next one."""
    content = cuda_trace.Loop(copy=20, host_work=100, launch=3, kernels=((PRODUCT, us),) * 600).trace()
    if graph:  # all kernels of a step have one launch
        step = 0
        for event in content["traceEvents"]:
            step += "enumerate" in event["name"]
            if event["cat"] == "kernel" or "Launch" in event["name"]:
                event["args"]["correlation"] = 1_000_000 + step
    file.write_text(json.dumps(content))
    found = diagnosis.of_trace(file)
    assert (found.verdict, found.unknown) == ("nothing wrong", ())


@pytest.mark.parametrize(
    ("name", "minor", "ratio", "tf32"),
    [("A100", 0, 16, True), ("A10", 6, 4, True), ("GeForce RTX 3060 Laptop GPU", 6, 2, False)],
)
def test_tf32_comes_first_where_it_is_faster_than_float32(name, minor, ratio, tf32, file):
    device = cuda_trace.DEVICE | {"computeMinor": minor, "name": f"NVIDIA {name}"}
    loop = cuda_trace.Loop(kernels=((cuda_trace.PRODUCT, 975),) * 10, device=device)
    (found,) = diagnosis.of_trace(loop.write(file)).findings
    assert found.change.startswith("torch.set_float32_matmul_precision" if tf32 else "with torch.autocast")
    assert f"up to {ratio} times" in found.evidence


@pytest.mark.parametrize(("fault", "old"), [*((fault, False) for fault in FAULTS), ("item", True)])
def test_a_loop_with_one_fault_is_accused_of_just_that(fault, old, file):
    options, key, verdict = FAULTS[fault]
    trace = cuda_trace.Loop(**options).write(file, old)
    found = diagnosis.of_trace(trace)
    assert keys(found) == [key]
    assert found.verdict == verdict
    assert 0.05 <= found.findings[0].gain < 1
    assert REMEDIES.get(fault, "") in found.findings[0].change
    saving.write(diagnosis.facts_of_trace(traces.load(trace)), saved := file.with_name(saving.NAME))
    assert diagnosis.of_facts(saved) == found


HEALTHY = {
    "as it is": {},
    "hidden behind the kernels": dict(loading=5000, loader=cuda_trace.ALONE, host_work=4000, steps=50),
    "a synchronization that costs nothing": dict(read="aten::item", host_work=0, loading=10),
}


@pytest.mark.parametrize("options", HEALTHY.values(), ids=HEALTHY)
def test_a_loop_without_fault_is_accused_of_nothing(options, file):
    found = diagnosis.of_trace(cuda_trace.Loop(**options).write(file))
    assert (found.verdict, found.findings) == ("nothing wrong", ())


@pytest.mark.processes
def test_a_gain_is_the_time_that_the_fixed_loop_would_save(file):
    def step_ms(**options):
        return profile.read(traces.load(cuda_trace.Loop(steps=20, **options).write(file))).step_ms

    healthy = step_ms()
    for fault in ("blocking copy", "item", "slow Python", "all-reduce", "copy within"):
        options, _, _ = FAULTS[fault]
        slow = step_ms(**options)
        (finding,) = diagnosis.of_trace(file).findings
        # No less than is saved, up to 1 µs between two kernels; little more, as by the launch of the first kernel.
        assert -0.002 <= finding.gain * slow - (slow - healthy) < 0.03 * slow


def test_a_value_read_in_some_steps_only_is_no_fault(file):
    seldom = cuda_trace.Loop(read="aten::item", read_in=2)
    assert "synchronization" not in diagnosis.of_trace(seldom.write(file)).verdict
    often = cuda_trace.Loop(read="aten::item", read_in=4)
    assert diagnosis.of_trace(often.write(file)).verdict == "synchronization"


def test_two_devices_gain_no_more_than_one(file):
    loop = cuda_trace.Loop(**FAULTS["float32"][0])
    (alone,), content = diagnosis.of_trace(loop.write(file)).findings, loop.trace()
    content["deviceProperties"].append(cuda_trace.DEVICE | {"id": 1})
    kernels = [each for each in content["traceEvents"] if each["cat"] == "kernel"]
    content["traceEvents"] += [each | {"args": each["args"] | {"device": 1}} for each in kernels]
    file.write_text(json.dumps(content))
    (finding,) = diagnosis.of_trace(file).findings
    assert finding.gain == pytest.approx(alone.gain)


@pytest.mark.parametrize(
    ("properties", "advice", "ratio"),
    [
        ({"computeMajor": 8, "computeMinor": 0}, "bfloat16", 16),
        ({"computeMajor": 8, "computeMinor": 9}, "bfloat16", 4),
        ({"computeMajor": 7, "computeMinor": 5}, "float16", 8),
        ({"computeMajor": 6, "computeMinor": 1}, None, None),
        ({"computeMajor": 7, "computeMinor": 5, "name": "NVIDIA GeForce GTX 1660"}, None, None),
        ({"computeMajor": 9, "computeMinor": 0, "warpSize": 64}, None, None),  # AMD counts otherwise
    ],
)
def test_tensor_cores_are_advised_only_where_there_are_some(file, properties, advice, ratio):
    device = cuda_trace.DEVICE | properties
    loop = cuda_trace.Loop(kernels=((cuda_trace.PRODUCT, 975),) * 10, device=device)
    found = diagnosis.of_trace(loop.write(file))
    assert [f"torch.{advice})" in finding.change for finding in found.findings] == ([True] if advice else [])
    # They multiply so many times as fast at most: a part of the time stays.
    share = profile.read(traces.load(file)).shares["Kernel"]
    assert [finding.gain for finding in found.findings] == ([pytest.approx(share * (1 - 1 / ratio))] if advice else [])


def test_too_few_steps_or_none_give_no_verdict(file):
    loop = cuda_trace.Loop(blocking=True, steps=2)
    content = loop.trace()
    content["traceEvents"] = [each for each in content["traceEvents"] if "ProfilerStep" not in each["name"]]
    file.write_text(json.dumps(content))
    for diagnosed, advice in (
        (diagnosis.of_trace(file), "profiler.step()"),
        (diagnosis.of_trace(loop.write(file)), "active=8"),
    ):
        assert (diagnosed.verdict, diagnosed.findings) == ("unknown", ())
        assert advice in diagnosed.reason


def test_a_trace_that_lost_kernels_gives_no_verdict(file):
    loop = cuda_trace.Loop(blocking=True)
    content = loop.trace()
    kernels = [each for each in content["traceEvents"] if each.get("cat") == "kernel"]
    content["traceEvents"] = [each for each in content["traceEvents"] if each not in kernels[: len(kernels) // 4]]
    assert diagnosis.of_trace(loop.write(file)).verdict != "unknown"
    file.write_text(json.dumps(content))
    found = diagnosis.of_trace(file)
    assert found.verdict == "unknown" and f"{len(kernels) // 4:,} of {len(kernels):,} launches" in found.reason
    assert found.reason in "".join(traces.accelerators(file).attrs["unknown"])


def on_cpu(loading_us, operators_us, **named):
    """Return five steps of 10 ms without an accelerator."""
    taken = (0, loading_us, loading_us + operators_us, 10_000)
    return cuda_trace.on_cpu([[start + each for each in taken] for start in range(0, 50_000, 10_000)], **named)


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        (on_cpu(200, 9700), "nothing wrong"),
        (on_cpu(6000, 3900), "loading"),
        (on_cpu(6000, 3900, loader=cuda_trace.WORKERS), "loading"),
        (on_cpu(200, 5000), "unknown"),  # Python, mostly
        (on_cpu(200, 9700, operator="aten::cudnn_convolution"), "unknown"),  # recorded without the GPU's kernels
        (on_cpu(200, 9700, operator="launch", category="mtia_runtime"), "unknown"),  # of another accelerator
    ],
)
def test_traces_without_an_accelerator_are_distinguished(file, content, verdict):
    assert diagnosis.of_trace(write(file, content)).verdict == verdict


def with_short_operators(count, name, around=(), stall=0):
    """Return five steps of 10 ms, of which operators of 5 µs take a half, with 5 µs between them.

    The last operator of each step takes `stall` µs more.
    """
    content = on_cpu(0, 0)
    for begin in range(0, 50_000, 10_000):
        starts = range(begin, begin + 10 * count, 10)
        lengths = [5] * (count - 1) + [5 + stall]
        content += [
            cuda_trace._event("cpu_op", name, at, at + length) for at, length in zip(starts, lengths, strict=True)
        ]
        content += [cuda_trace._event("user_annotation", each, begin, begin + 10 * count) for each in around]
    return content


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (with_short_operators(200, "aten::select"), ["host.small-operators"]),
        (with_short_operators(90, "aten::select"), []),  # too few
        (with_short_operators(200, "autograd::engine::evaluate_function: AccumulateGrad"), []),
        (with_short_operators(120, "aten::add_", ["Optimizer.step#SGD.step"]), ["host.optimizer-by-weight"]),
        (with_short_operators(90, "aten::add_", ["Optimizer.step#SGD.step"]), []),  # less than a tenth of a step
        (with_short_operators(80, "aten::add_", ["Optimizer.step#SGD.step"], stall=2_000), []),
        (with_short_operators(120, "aten::add_", ["Optimizer.step#Adadelta.step"]), []),  # no faster way on a CPU
    ],
)
def test_operators_that_are_short_and_called_often_are_found(file, content, found):
    diagnosed = diagnosis.of_trace(write(file, content))
    assert keys(diagnosed) == found
    assert [finding.verdict for finding in diagnosed.findings] == ["host"] * len(found)


def test_short_operators_take_the_time_that_the_rest_of_sampled_steps_leaves(file):
    code = compile("", "step", "exec")
    line = sampler.Frame("/home/reader/train.py", 3, "step", 1)
    halves = [sampler.Sample(begin, begin + 0.03, 0, (line,), code) for begin in (0, 0.03)]
    sampled = host.Sampled(halves, np.array([[0, 0.01]]), ["aten::select"], ["tracked"], [0.0], code, sampler.Site())
    trace = traces.load(write(file, with_short_operators(200, "aten::select")))
    recorded = profile.read(trace)
    work = host.read(trace, recorded, sampled)
    assert (work.calls.sampled_share, work.sampled_ms) == (0.5, pytest.approx(60))
    assert rules.host.view(work, recorded, step_ms=60).calls.most == pytest.approx(0.5, abs=0.02)


def test_a_trace_does_not_show_why_loading_is_slow_and_its_diagnosis_says_so(file):
    found = diagnosis.of_trace(cuda_trace.Loop(loading=15_000).write(file))
    assert "diagnose(loader, step)" in found.unknown[0]
    assert diagnosis.of_trace(cuda_trace.Loop(blocking=True).write(file)).unknown == ()


def test_ranks_are_refused_as_one_trace_and_shown_one_by_one_in_the_shell(tmp_path, capsys):
    for rank, fault in enumerate(("blocking copy", "item")):
        content = cuda_trace.Loop(**FAULTS[fault][0]).trace()
        content["distributedInfo"] = {"rank": rank}
        (tmp_path / f"host{rank}.1.pt.trace.json").write_text(json.dumps(content))
    with pytest.raises(traces.SeveralRecordings):
        diagnosis.of_trace(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 0
    verdicts = [part.split(".")[0] for part in capsys.readouterr().out.split("Verdict: ")[1:]]
    assert verdicts == ["copies", "synchronization", "unknown"]  # each by itself, and both together


def test_names_in_a_trace_cannot_command_the_terminal(file):
    loop = cuda_trace.Loop(device=cuda_trace.DEVICE | {"name": "GPU\x1b[2J"})
    assert "\x1b" not in str(diagnosis.of_trace(loop.write(file)))
