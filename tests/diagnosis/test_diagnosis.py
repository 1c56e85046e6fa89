"""Tests of `helpers.diagnosis`: each finding where there is just this fault, and none where there is none."""

import ast
import cProfile
import dataclasses
import gzip
import html
import itertools
import json
import os
import re
import tempfile
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from support import cuda_trace
from support.clock import Clock
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchvision.transforms import v2

from helpers import config, diagnosis, simulate, timing, traces
from helpers.__main__ import main
from helpers.diagnosis import items, loading, queueing, recorded, result, watching
from helpers.lessons import topics
from helpers.loading import datasets
from helpers.timing import stopwatch

# ---------------------------------------------------------------- traces

PRODUCT = cuda_trace.TENSOR_CORE_PRODUCT

# For each fault of a loop on a GPU the finding, and the verdict.
FAULTS = {
    "workers too slow": (dict(loading=15_000, host_work=0), "loading too slowly", "loading"),
    "no workers": (
        dict(loading=15_000, host_work=0, loader="_SingleProcessDataLoaderIter"),
        "loading in the loop itself", "loading",
    ),
    "pageable memory": (dict(memory="Pageable", copy=1500), "pageable copies", "copies"),
    "blocking copy": (dict(blocking=True), "copies that block", "copies"),
    "large copy": (dict(copy=1500), "large copies", "copies"),
    "copy within": (dict(within=1000), "copies within the GPU", "copies"),
    "item": (dict(read="aten::item"), "a synchronization in every step", "synchronization"),
    "cpu": (dict(read="aten::to"), "a synchronization in every step", "synchronization"),
    "mask": (dict(read="aten::nonzero"), "a synchronization in every step", "synchronization"),
    "short kernels": (
        dict(kernels=((PRODUCT, 10),) * 200, launch=45, host_work=0), "launch-bound steps", "launches",
    ),
    "slow Python": (dict(host_work=13_000), "the host does something else", "launches"),
    "float32": (
        dict(kernels=((cuda_trace.PRODUCT, 975),) * 10), "float32 without Tensor Cores", "compute",
    ),
    "NCHW": (
        dict(kernels=((PRODUCT, 975), (cuda_trace.CONVERSION, 300)) * 8), "layout conversions", "compute",
    ),
    "small batch": (dict(blocks=20), "a batch too small to fill the GPU", "compute"),
    "all-reduce": (dict(exchange=1500), "exposed communication", "communication"),
    "stacks": (
        dict(kernels=((PRODUCT, 80),) * 10, copy=20, host_work=700, frames=2600, settings=("with_stack",)),
        "the profiler itself in the way", "unknown",
    ),
}  # fmt: skip


@pytest.fixture
def file(tmp_path):
    return tmp_path / "loop.pt.trace.json"


def names(found):
    return [finding.name for finding in found.findings]


@pytest.mark.parametrize("old", [False, True], ids=["today", "torch 1.12"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_loop_with_one_fault_is_accused_of_just_that(fault, old, file):
    options, name, verdict = FAULTS[fault]
    found = diagnosis.of_trace(cuda_trace.Loop(**options).write(file, old))
    assert names(found) == [name]
    assert found.verdict == verdict
    assert 0.05 <= found.findings[0].gain < 1


@pytest.mark.parametrize("old", [False, True], ids=["today", "torch 1.12"])
def test_a_loop_without_fault_is_accused_of_nothing(file, old):
    found = diagnosis.of_trace(cuda_trace.Loop().write(file, old))
    assert (found.verdict, found.findings) == ("nothing wrong", ())


def test_what_is_hidden_behind_the_kernels_is_no_fault(file):
    hidden = cuda_trace.Loop(loading=5000, loader="_SingleProcessDataLoaderIter", host_work=4000, steps=50)
    assert diagnosis.of_trace(hidden.write(file)).findings == ()


@pytest.mark.processes
def test_a_gain_is_the_time_that_the_fixed_loop_would_save(file):
    def step_ms(**options):
        return recorded.read(traces.load(cuda_trace.Loop(steps=20, **options).write(file))).step_ms

    healthy = step_ms()
    for fault in ("blocking copy", "item", "slow Python", "all-reduce", "copy within"):
        options, _, _ = FAULTS[fault]
        slow = step_ms(**options)
        (finding,) = diagnosis.of_trace(file).findings
        # No less than is saved, up to 1 µs between two kernels; little more, as by the launch of the first kernel.
        assert -0.001 <= finding.gain * slow - (slow - healthy) < 0.03 * slow


def test_the_bound_is_stated_as_a_factor_and_as_milliseconds():
    finding = result.Finding("a fault", "copies", 0.2, "", "", "a topic")
    assert finding.bound(50) == "at most 1.25× (or −10 ms of a step of 50 ms)"
    assert dataclasses.replace(finding, gain=0.8).bound(5) == "at most 5.0× (or −4.0 ms of a step of 5.0 ms)"
    assert dataclasses.replace(finding, gain=1.0).bound(5) == "at most 100× and more (or −5.0 ms of a step of 5.0 ms)"
    assert dataclasses.replace(finding, gain=0.01).bound(5) == "less than 5.0% of a step"


def test_the_largest_gain_comes_first_and_gives_the_verdict(file):
    found = diagnosis.of_trace(cuda_trace.Loop(blocks=40, exchange=1500).write(file))
    assert names(found) == ["a batch too small to fill the GPU", "exposed communication"]
    assert found.verdict == "compute"
    assert found.findings[0].gain > found.findings[1].gain


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


def test_a_synchronization_that_costs_nothing_is_no_fault(file):
    cheap = cuda_trace.Loop(read="aten::item", host_work=0, loading=10)
    assert diagnosis.of_trace(cheap.write(file)).findings == ()


def test_the_remedy_of_a_synchronization_is_that_of_the_operator_that_waits(file):
    changes = {
        read: diagnosis.of_trace(cuda_trace.Loop(read=read).write(file)).findings[0].change
        for read in ("aten::item", "aten::to", "aten::nonzero")
    }
    assert ".item() once" in changes["aten::item"]
    assert ".cpu() once" in changes["aten::to"]
    assert "torch.where" in changes["aten::nonzero"]


@pytest.mark.parametrize(
    ("properties", "advice", "ratio"),
    [
        ({"computeMajor": 8, "computeMinor": 0}, "bfloat16", 16),
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
    share = recorded.read(traces.load(file)).shares["Kernel"]
    assert [finding.gain for finding in found.findings] == ([pytest.approx(share * (1 - 1 / ratio))] if advice else [])


@pytest.mark.parametrize("steps", [1, 2])
def test_too_few_steps_give_no_verdict(file, steps):
    found = diagnosis.of_trace(cuda_trace.Loop(blocking=True, steps=steps).write(file))
    assert (found.verdict, found.findings) == ("unknown", ())
    assert "active=8" in found.reason


def test_a_trace_without_steps_gives_no_verdict(file):
    content = cuda_trace.Loop(blocking=True).trace()
    content["traceEvents"] = [each for each in content["traceEvents"] if "ProfilerStep" not in each["name"]]
    file.write_text(json.dumps(content))
    found = diagnosis.of_trace(file)
    assert (found.verdict, found.findings) == ("unknown", ())
    assert "profiler.step()" in found.reason


OPTIMIZER = "an optimizer that goes weight by weight"
ALONE, WORKERS = "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"


def on_cpu(loading_us, operators_us, *, operator="aten::conv2d", category="cpu_op", class_=ALONE):
    """Return five steps of 10 ms without an accelerator."""
    events = []
    for number in range(5):
        start = number * 10_000
        for name, kind, begin, end in (
            (f"ProfilerStep#{number}", "user_annotation", 0, 10_000),
            (f"enumerate(DataLoader)#{class_}.__next__", "user_annotation", 0, loading_us),
            (operator, category, loading_us, loading_us + operators_us),
        ):
            events.append(cuda_trace._event(kind, name, start + begin, start + end))
    return {"schemaVersion": 1, "traceEvents": events}


@pytest.mark.parametrize(
    ("content", "verdict"),
    [
        (on_cpu(200, 9700), "nothing wrong"),
        (on_cpu(6000, 3900), "loading"),
        (on_cpu(6000, 3900, class_=WORKERS), "loading"),
        (on_cpu(200, 5000), "unknown"),  # Python, mostly
        (on_cpu(200, 9700, operator="aten::cudnn_convolution"), "unknown"),  # recorded without the GPU's kernels
    ],
)
def test_traces_without_an_accelerator_are_distinguished(file, content, verdict):
    file.write_text(json.dumps(content))
    assert diagnosis.of_trace(file).verdict == verdict


def with_short_operators(count, name, around=()):
    """Return five steps of 10 ms, of which operators of 5 µs take a half, with 5 µs between them."""
    content = on_cpu(0, 0)
    for number in range(5):
        for each in range(count):
            start = number * 10_000 + 10 * each
            content["traceEvents"].append(cuda_trace._event("cpu_op", name, start, start + 5))
        for annotation in around:
            end = number * 10_000 + 10 * count
            content["traceEvents"].append(cuda_trace._event("user_annotation", annotation, number * 10_000, end))
    return content


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (with_short_operators(200, "aten::select"), ["many small operators"]),
        (with_short_operators(90, "aten::select"), []),  # too few
        (with_short_operators(200, "autograd::engine::evaluate_function: AccumulateGrad"), []),
        (with_short_operators(120, "aten::add_", ["Optimizer.step#SGD.step"]), [OPTIMIZER]),
        (with_short_operators(90, "aten::add_", ["Optimizer.step#SGD.step"]), []),  # less than a tenth of a step
    ],
)
def test_operators_that_are_short_and_called_often_are_found(file, content, found):
    file.write_text(json.dumps(content))
    diagnosed = diagnosis.of_trace(file)
    assert names(diagnosed) == found
    assert [finding.verdict for finding in diagnosed.findings] == ["host"] * len(found)


def test_an_accelerator_that_is_unknown_is_named(file):
    content = on_cpu(200, 9700)
    content["traceEvents"].append(cuda_trace._event("mtia_runtime", "launch", 300, 400))
    file.write_text(json.dumps(content))
    found = diagnosis.of_trace(file)
    assert found.verdict == "unknown"
    assert "mtia_runtime" in found.reason


def test_the_number_of_workers_is_read_from_the_periodic_stall(file):
    content = on_cpu(100, 3000, class_=WORKERS)
    events = []
    for round in range(3):
        for each in content["traceEvents"][:9]:  # three steps, of which the last one waits
            step, shift = int(each["ts"] - cuda_trace.BEGIN) // 10_000, round * 30_000
            longer = 9000 if step == 2 and "DataLoader" in each["name"] else each["dur"]
            name = f"ProfilerStep#{round * 3 + step}" if "Step" in each["name"] else each["name"]
            events.append(each | {"ts": each["ts"] + shift, "dur": longer, "name": name})
    file.write_text(json.dumps(content | {"traceEvents": events}))
    (finding,) = diagnosis.of_trace(file).findings
    assert "seem to be 3 workers" in finding.evidence


def test_what_the_loader_alone_can_show_is_said_to_be_unknown(file):
    found = diagnosis.of_trace(cuda_trace.Loop(loading=15_000).write(file))
    assert "diagnose(loader, step)" in found.unknown[0]
    assert diagnosis.of_trace(cuda_trace.Loop(blocking=True).write(file)).unknown == ()


# ---------------------------------------------------------------- what the findings stand on


def test_waits_name_the_operator_and_the_way_of_the_copy(tmp_path):
    table = traces.waits(cuda_trace.write(tmp_path / "trace.json"))
    assert table.groupby("call").size().to_dict() == {"cudaMemcpyAsync": 3, "cudaStreamSynchronize": 3}
    assert set(table["operator"]) == {"aten::item"}
    assert set(table["copy"]) == {"from the device"}
    assert table["step"].tolist() == [4, 4, 5, 5, 6, 6]
    assert (table["end"] - table["start"]).tolist() == [5, 70] * 3
    assert traces.waits(tmp_path / "trace.json").equals(table)


def test_waits_without_an_accelerator_are_none(file):
    file.write_text(json.dumps(on_cpu(100, 3000)))
    assert traces.waits(file).empty
    assert traces.exposed_copies(file).sum().sum() == 0


def test_exposed_copies_are_those_of_the_breakdown_by_their_names(tmp_path):
    table = traces.exposed_copies(cuda_trace.write(tmp_path / "trace.json"))
    expected = {"Memcpy HtoD (Pinned -> Device)": 100, "Memcpy DtoH (Device -> Pageable)": 5}
    assert table.mean().to_dict() == expected
    assert sum(expected.values()) == cuda_trace.BREAKDOWN["Memcpy"]


def test_idle_times_sum_up_to_the_gaps(tmp_path):
    path = cuda_trace.write(tmp_path / "trace.json")
    table = traces.idle(path)
    assert len(table) == cuda_trace.GAPS["count"]
    assert (table["end"] - table["start"]).sum() == cuda_trace.GAPS["total"]
    assert table[list(cuda_trace.IN_GAPS)].sum().to_dict() == cuda_trace.IN_GAPS


def test_fill_leaves_out_the_kernels_that_exchange_data(tmp_path):
    path = cuda_trace.write(tmp_path / "trace.json")
    working = 200 * 1.0 + 20 * 0.5 + 40 * 1.0 + 100 * 0.8 + 60 * 0.5 + 60 * 0.5  # as in SM_EFFICIENCY, without ⑥
    assert traces.fill(path) == pytest.approx(working / 480)


def test_kernel_time_is_that_of_the_chosen_names_once(tmp_path):
    path = cuda_trace.write(tmp_path / "trace.json")
    assert traces.kernel_time(path, lambda name: True) == 3 * 480
    assert traces.kernel_time(path, traces.multiplies_float32) == 300
    assert traces.kernel_time(path, traces.converts_layout) == 0


# Kernels' names as public profiles show them: Kineto's samples and Holistic Trace Analysis's test data (V100, A100);
# cuBLAS on H100.
FLOAT32 = [
    "volta_sgemm_128x64_nn",
    "ampere_sgemm_128x128_tn",
    "volta_scudnn_128x128_stridedB_splitK_medium_nn_v1",
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
    "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1",
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int, int, int, float…)",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*, int, …)",
    "void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int, int, int, float const*, int, float*, …)",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(T1::Params)",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4_execute_kernel…",
]
NOT_FLOAT32 = [
    PRODUCT,
    "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4>(cutlass_80_tensorop_s1688gemm…)",
    "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_nn",
    "nvjet_tst_112x64_64x9_2x1_v_bz_bias_TNN",
    "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x128x16_stage4_warpsize2x2x1",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x32_stage3_warpsize2x2x1_tensor16x8x8_execute_kernel…",
    "ampere_gcgemm_64x64_nt",
    "void at::native::vectorized_elementwise_kernel"
    "<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct, float const*…)",
    "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)",
]


@pytest.mark.parametrize("name", FLOAT32)
def test_products_in_float32_are_known(name):
    assert traces.multiplies_float32(name)


@pytest.mark.parametrize("name", NOT_FLOAT32)
def test_other_kernels_are_no_products_in_float32(name):
    assert not traces.multiplies_float32(name)


def test_layout_conversions_are_known():
    assert traces.converts_layout(cuda_trace.CONVERSION)
    assert traces.converts_layout("void nhwcToNchwKernel<__half, __half, float, true, false>(…)")
    assert not traces.converts_layout("void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(…)")
    assert not traces.converts_layout("volta_fp16_s884cudnn_fp16_256x128_ldg8_relu_f2f_exp_small_nhwc2nchw_tn_v1")


def test_the_settings_of_the_profiler_are_read(file):
    content = on_cpu(100, 3000) | {"with_stack": 1, "record_shapes": 0}
    content["traceEvents"].append(cuda_trace._event("python_function", "train.py(3): main", 0, 9))
    file.write_text(json.dumps(content))
    (span,) = traces.load(file).spans
    assert span.settings == {"with_stack"}
    assert span.counts["python_function"] == 1


# ---------------------------------------------------------------- folders and files that are no single trace


def test_ranks_are_refused_as_one_trace_and_shown_one_by_one_in_the_shell(tmp_path, capsys):
    for rank, fault in enumerate(("blocking copy", "item")):
        content = cuda_trace.Loop(**FAULTS[fault][0]).trace()
        content["distributedInfo"] = {"rank": rank}
        (tmp_path / f"host{rank}.1.pt.trace.json").write_text(json.dumps(content))
    with pytest.raises(traces.SeveralRecordings):
        diagnosis.of_trace(tmp_path)
    assert main(["diagnose", str(tmp_path)]) == 0
    _, together, first, second = capsys.readouterr().out.split("Verdict: ")
    assert together.startswith("unknown. The traces of 2 ranks hold no operation in which they exchange data.")
    assert first.startswith("copies.") and second.startswith("synchronization.")


def test_the_shell_names_what_is_wrong_with_a_file_and_goes_on(tmp_path, capsys):
    good, bad = (tmp_path / name for name in ("good", "bad"))
    for folder in (good, bad):
        folder.mkdir()
    path = cuda_trace.Loop().write(good / "a.pt.trace.json")
    (bad / "a.pt.trace.json.gz").write_bytes(gzip.compress(path.read_bytes())[:-200])
    assert main(["diagnose", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "TruncatedTrace" in shown and "Verdict: nothing wrong." in shown
    assert main(["diagnose", str(tmp_path / "none")]) == 1
    assert "NoTraces" in capsys.readouterr().out


def test_another_profilers_file_is_refused(tmp_path):
    (tmp_path / "perf.json").write_text('{"functions": []}')
    with pytest.raises(traces.ForeignFile):
        diagnosis.of_trace(tmp_path / "perf.json")


# ---------------------------------------------------------------- loading, from figures

NONE = dict.fromkeys([*items.PARTS, items.REST], 0.0)
ITEMS = items.Items(100, 1.0, 1.0, 32, NONE | {"decoding": 1.0}, opened=1.0, file_bytes=50e3, slowest="decode")


def known(step, wait, workers, *, usual=None, cores=8, restart=0.0, transfer=0.0, queued=0.0, **of_items):
    usual = wait if usual is None else usual
    loaded = dataclasses.replace(ITEMS, **of_items)
    return loading.Loading(step, wait, usual, workers, cores, restart, loaded, transfer, queued)


def of_loading(*arguments, **facts):
    return {finding.name: finding for finding in loading.findings(known(*arguments, **facts))}


@pytest.mark.parametrize(
    "facts",
    [
        dict(step=40, wait=0.5, workers=2),
        dict(step=40, wait=0.5, workers=8),
        dict(step=40, wait=0.5, workers=16),
        dict(step=40, wait=0.0, workers=0, ms=0.001),
        dict(step=40, wait=0.5, workers=2, restart=0.5),
        dict(step=40, wait=0.5, workers=30, cpu_ms=0.1),  # they wait for storage, which takes no core
    ],
)
def test_loading_that_keeps_up_is_accused_of_nothing(facts):
    assert of_loading(**facts) == {}


def test_for_too_few_workers_it_is_said_how_many_it_takes():
    found = of_loading(step=34, wait=24, workers=1)
    assert found["too few workers"].change == "DataLoader(…, num_workers=4)"  # 32 ms by 4 is less than the 10 ms left
    assert found["too few workers"].gain == pytest.approx(24 / 34)


def test_more_workers_than_cores_are_not_advised_for_work_that_takes_a_core():
    assert "too few workers" not in of_loading(step=34, wait=24, workers=2, cores=2)
    found = of_loading(step=34, wait=24, workers=2, cores=2, cpu_ms=0.1)
    assert found["too few workers"].change == "DataLoader(…, num_workers=4)"


def test_a_gain_by_workers_is_bounded_by_the_cores():
    found = of_loading(step=42, wait=32, workers=0, cores=2)  # 32 ms of work on two cores take 16 ms
    assert found["loading in the loop itself"].gain == pytest.approx((42 - 16) / 42)


def test_a_gain_by_workers_is_that_of_a_machine_as_busy_as_it_was():
    found = of_loading(step=170, wait=160, workers=0, cores=2)  # five times as long as the items by themselves
    assert found["loading in the loop itself"].gain == pytest.approx((170 - 5 * 16) / 170)


def test_workers_are_not_advised_for_less_than_it_takes_to_get_a_batch_from_them():
    assert "loading in the loop itself" in of_loading(step=13, wait=1.3, workers=0, cores=2, cpu_ms=0.1, ms=0.1)
    assert "loading in the loop itself" not in of_loading(step=12, wait=0.8, workers=0, cores=2, cpu_ms=0.1, ms=0.1)


def test_what_an_item_waits_and_what_it_works_are_findings_of_their_own():
    parts, waits = NONE | {items.REST: 1.0}, {items.REST: 0.75}
    lines = {items.WAITING: "train.py:3: ask()", items.REST: "train.py:4: sort()"}
    found = of_loading(step=34, wait=24, workers=2, cores=2, parts=parts, waits=waits, lines=lines)
    assert list(found) == ["items that wait", "the dataset's own work"]
    assert [each.gain for each in found.values()] == pytest.approx([24 / 34, 0.25])
    assert "train.py:3" in found["items that wait"].evidence
    assert "train.py:4" in found["the dataset's own work"].evidence


def test_more_workers_than_can_work_are_too_many_even_if_nothing_is_lost():
    found = of_loading(step=40, wait=0.5, workers=17)
    assert list(found) == ["too many workers"]
    assert found["too many workers"].gain < result.WORTH


def test_workers_that_take_longer_than_none_are_found():
    found = of_loading(step=12, wait=2, workers=4, ms=0.01, cpu_ms=0.01, transfer=2)
    assert found["workers slower than none"].change == "DataLoader(…, num_workers=0)"


def test_workers_are_not_slower_than_none_where_the_transfer_from_them_takes_less_than_a_batch():
    """The loop waits far longer than one process takes for a batch: others have the cores."""
    found = of_loading(step=184, wait=155, workers=2, cores=2, ms=2.0, cpu_ms=2.0, transfer=2)
    assert "workers slower than none" not in found


def test_irregular_loading_is_distinguished_from_slow_transfer():
    busy = dict(step=50, wait=8, workers=4)
    assert list(of_loading(usual=0.2, **busy)) == ["irregular loading"]
    assert list(of_loading(usual=8, transfer=6, **busy)) == ["transfer from the workers"]
    assert of_loading(usual=8, transfer=6, **busy)["transfer from the workers"].gain == pytest.approx(6 / 50)


@pytest.mark.parametrize("usual", [0.2, 8])
def test_workers_that_wait_for_a_core_are_no_fault_of_the_loop_and_make_a_verdict_impossible(usual):
    facts = known(step=50, wait=8, workers=4, usual=usual, transfer=0.5, queued=12)
    assert not list(loading.findings(facts))
    assert "ready to work for 12 ms" in loading.doubt(facts)
    assert "not known" in loading.doubt(dataclasses.replace(facts, queued=0.1))


@pytest.mark.parametrize(
    "facts",
    [
        dict(step=50, wait=8, workers=4, transfer=7),  # a finding of its own
        dict(step=34, wait=24, workers=1),  # too few
        dict(step=42, wait=32, workers=0),
        dict(step=40, wait=0.5, workers=2),
    ],
)
def test_a_wait_that_is_explained_is_not_doubted(facts):
    assert loading.doubt(known(**facts)) is None


def test_a_restart_is_weighed_against_the_step():
    assert list(of_loading(step=40, wait=0.5, workers=2, restart=10)) == ["workers restarted every epoch"]


@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("decoding", "decoding at every read"),
        ("resizing", "resizing at every read"),
        ("opening", "many small files"),
        ("reading", "many small files"),
        ("transforming", "transforms of each image"),
        ("collating", "collating item by item"),
        (items.REST, "the dataset's own work"),
    ],
)
def test_the_part_that_takes_the_time_of_an_item_is_named(part, name):
    parts = NONE | {part: 1.0}
    assert list(of_loading(step=34, wait=24, workers=2, cores=2, parts=parts)) == [name]


def test_large_files_are_not_called_small():
    parts = NONE | {"reading": 1.0}
    assert list(of_loading(step=34, wait=24, workers=2, cores=2, parts=parts, file_bytes=20e6)) == ["slow reading"]


# ---------------------------------------------------------------- loops that run


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """Look for a short time, as on a machine without a GPU, and write the profile to a folder of the test."""
    monkeypatch.setenv("COURSE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(items, "SECONDS", 0.2)
    monkeypatch.setattr(watching, "PROFILED", 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path


@pytest.fixture
def clock(quick, monkeypatch):
    """A clock that all of a diagnosis goes by, its profiles too: what it finds is exact."""
    clock = Clock(monkeypatch, watching, items, timing, datasets, simulate)
    monkeypatch.setattr(queueing, "_seconds", lambda process: 0.0)
    monkeypatch.setattr(items, "cProfile", SimpleNamespace(Profile=lambda *timer: cProfile.Profile(*timer or [tick])))
    monkeypatch.setattr(config, "cores", lambda: 8)

    def tick():
        """Give the profiler the time, so that each call takes some, but hardly any."""
        clock.sleep(1e-9)
        return clock.now

    def record(loader, step, folder, active):
        """Run the loop as the profiler does, and write the trace that it would write by this clock."""
        warmup = timing.warmup_steps(loader) + 1
        with timing.batches(loader) as batches:
            taken = list(stopwatch.timed(batches, step, warmup + active))[warmup:]
        folder.mkdir(parents=True)
        content = on_the_clock(taken, WORKERS if loader.num_workers else ALONE)
        (folder / "loop.pt.trace.json").write_text(json.dumps(content))

    monkeypatch.setattr(watching.profiling, "record", record)
    return clock


def on_the_clock(steps, class_):
    """Return a trace of steps that were timed."""
    events = []
    for number, taken in enumerate(steps):
        start, loaded, end = taken.begin, taken.begin + taken.wait, taken.begin + taken.duration
        for name, category, begin, until in (
            (f"ProfilerStep#{number}", "user_annotation", start, end),
            (f"enumerate(DataLoader)#{class_}.__next__", "user_annotation", start, loaded),
            ("simulate::simulated_accelerator_step", "cpu_op", loaded, end),
        ):
            events.append(cuda_trace._event(category, name, begin * 1e6, until * 1e6))
    return {"schemaVersion": 1, "traceEvents": events}


class Simulated(DataLoader):
    """Loads in this process, and by its clock takes the time that it would with workers, each of which has a core.

    `starting` and `ending` are the times that it takes to start them, and to end them. What another loader would do
    with no workers, this does, too.
    """

    def __init__(self, clock, *arguments, starting=0.0, ending=0.0, **settings):
        super().__init__(*arguments, **settings)
        self.clock, self.starting, self.ending = clock, starting, ending

    def __iter__(self):
        batches = iter(DataLoader(self.dataset, self.batch_size))
        if not self.num_workers:
            yield from batches
            return
        ready = [self.clock.now + self.starting] * self.num_workers
        asked = deque([self.clock.now] * self.num_workers * self.prefetch_factor)
        for number in range(len(self)):
            now, worker = self.clock.now, number % self.num_workers
            batch = next(batches)
            ready[worker] = max(ready[worker], asked.popleft()) + self.clock.now - now
            self.clock.now = max(now, ready[worker])
            asked.append(self.clock.now)
            yield batch
        self.clock.now += self.ending


class Busy(Dataset):
    """Items that take a core for some time of a clock."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def __len__(self):
        return 10_000

    def __getitem__(self, index):
        self.clock.work(self.seconds)
        return torch.zeros(1), index


class Resized(Dataset):
    """Images in memory, each resized whenever it is asked for."""

    def __init__(self):
        self.image = Image.fromarray(np.zeros((800, 800, 3), dtype=np.uint8))
        self.resize = v2.Resize(64)

    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        return torch.from_numpy(np.array(self.resize(self.image))), index


@pytest.fixture(scope="module")
def photos_folder(tmp_path_factory):
    """Two photos of 1600 × 1200 pixels in a class folder."""
    folder = tmp_path_factory.mktemp("photos")
    (folder / "noise").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    for number in range(2):
        Image.fromarray(noise).resize((1600, 1200)).save(folder / "noise" / f"{number}.jpg", quality=80)
    return folder


@pytest.fixture(scope="module")
def png_folder(tmp_path_factory):
    """200 PNG files of 8 × 8 pixels, and their labels."""
    folder = tmp_path_factory.mktemp("png")
    for number in range(200):
        Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
    (folder / "labels.csv").write_text("file,label\n" + "".join(f"{number}.png,0\n" for number in range(200)))
    return folder


def watched(dataset, batch_size=8, step_ms=10, steps=6, **settings):
    step = simulate.SimulatedAccelerator(step_ms)
    return diagnosis.diagnose(DataLoader(dataset, batch_size, **settings), step, steps=steps)


def simulated(clock, dataset, batch_size=8, step_ms=10, steps=6, **settings):
    step = simulate.SimulatedAccelerator(step_ms)
    return diagnosis.diagnose(Simulated(clock, dataset, batch_size, **settings), step, steps=steps)


def corner(image):
    """Return a part of an image that takes no time to copy."""
    return v2.functional.pil_to_tensor(image.crop((0, 0, 8, 8)))


def test_a_loop_that_keeps_up_is_accused_of_nothing(clock):
    found = simulated(clock, datasets.SleepDataset(1000, 0.0005), step_ms=100, num_workers=2)
    assert (found.verdict, found.findings, found.unknown) == ("nothing wrong", (), ())
    assert found.step_ms == pytest.approx(100)


class Interrupted(Busy):
    """One item takes far longer than the others, once: something else had the core, or so it looks."""

    def __init__(self, clock, seconds, late):
        super().__init__(clock, seconds)
        self.taken, self.late = itertools.count(), late

    def __getitem__(self, index):
        if next(self.taken) == 40:
            self.clock.sleep(self.late)
        return super().__getitem__(index)


def test_a_wait_that_no_item_needs_is_not_blamed_on_loading(clock):
    found = simulated(clock, Interrupted(clock, 1e-5, late=0.013), step_ms=20, steps=8)
    assert (found.verdict, found.findings) == ("nothing wrong", ())


def test_what_others_take_of_the_core_is_not_blamed_on_loading(clock, monkeypatch):
    class Shared(Busy):
        def __getitem__(self, index):
            self.clock.sleep(0.001)
            queued[0] += 0.001
            return super().__getitem__(index)

    queued = [0.0]
    monkeypatch.setattr(queueing, "of_this_thread", lambda: queued[0])
    found = simulated(clock, Shared(clock, 1e-5), step_ms=20, steps=8)
    assert (found.verdict, found.findings) == ("nothing wrong", ())


def test_too_few_workers_are_found(clock):
    found = simulated(clock, datasets.SleepDataset(1000, 0.004), num_workers=1)
    assert (found.verdict, names(found)) == ("loading", ["too few workers", "items that wait"])
    assert found.step_ms == pytest.approx(32)
    assert [finding.gain for finding in found.findings] == pytest.approx([22 / 32, 22 / 32])
    assert found.findings[0].change == "DataLoader(…, num_workers=4)"


def test_loading_in_the_loop_itself_is_found(clock):
    found = simulated(clock, datasets.SleepDataset(1000, 0.004))
    assert (found.verdict, names(found)) == ("loading", ["loading in the loop itself", "items that wait"])
    assert [finding.gain for finding in found.findings] == pytest.approx([32 / 42, 32 / 42], rel=1e-4)


@pytest.mark.processes
@pytest.mark.parametrize(("workers", "name"), [(0, "loading in the loop itself"), (1, "too few workers")])
def test_loading_that_takes_long_by_the_clock_on_the_wall_is_found(quick, workers, name):
    found = watched(datasets.SleepDataset(1000, 0.1), batch_size=2, step_ms=1, steps=4, num_workers=workers)
    assert found.verdict == "loading"
    assert name in names(found)
    assert found.step_ms >= 100


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_too_many_workers_are_found(clock, monkeypatch):
    monkeypatch.setattr(config, "cores", lambda: 1)
    found = simulated(clock, Busy(clock, 0.0005), batch_size=2, step_ms=80, num_workers=4)
    assert names(found) == ["too many workers"]
    assert found.findings[0].change == "DataLoader(…, num_workers=1)"


def start_slowly(worker):
    time.sleep(0.1)


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_restarted_every_epoch_are_found(quick, persistent):
    settings = dict(num_workers=1, persistent_workers=persistent, worker_init_fn=start_slowly)
    found = watched(datasets.SleepDataset(4, 0.0005), 2, step_ms=1, steps=2, **settings)
    assert ("workers restarted every epoch" in names(found)) is not persistent


def test_restarting_workers_gains_what_it_adds_to_a_step(clock):
    times = dict(starting=0.06, ending=0.04, step_ms=25)
    found = simulated(clock, datasets.SleepDataset(8, 0.001), 2, num_workers=2, **times)
    assert names(found)[0] == "workers restarted every epoch"
    assert found.findings[0].gain == pytest.approx(25 / 50)  # 0.1 s for four steps of 25 ms
    assert found.step_ms == pytest.approx(50)


def test_what_a_wait_is_that_no_finding_explains_is_unknown(clock, monkeypatch):
    monkeypatch.setattr(loading, "doubt", lambda facts: "The loop waits, and nobody knows why.")
    found = simulated(clock, datasets.SleepDataset(8, 0.001), 2, num_workers=2, starting=0.1, step_ms=25)
    assert "workers restarted every epoch" in names(found)
    assert found.unknown == ("The loop waits, and nobody knows why.",)
    assert f"gains are of a step of {found.step_ms:.0f} ms" in dict(found.evidence)["stopwatch"]


def found_in_items(dataset, monkeypatch):
    """Return what items are found to spend time on, the most first; of CPU time, not that on the wall."""
    monkeypatch.setattr(items, "cProfile", SimpleNamespace(Profile=lambda *_: cProfile.Profile(time.thread_time)))
    parts = items.load(DataLoader(dataset, 2)).parts
    found = of_loading(step=34, wait=24, workers=2, cores=2, parts=parts)
    return sorted(found, key=lambda name: -found[name].gain)


def test_decoding_is_found(quick, photos_folder, monkeypatch):
    found = found_in_items(datasets.JpegDataset(photos_folder, corner), monkeypatch)
    assert found[0] == "decoding at every read"
    assert not {"resizing at every read", "many small files"} & set(found)


def test_resizing_is_found(quick, monkeypatch):
    found = found_in_items(Resized(), monkeypatch)
    assert found[0] == "resizing at every read"
    assert not {"decoding at every read", "many small files"} & set(found)


def test_many_small_files_are_found(clock, png_folder):
    slow = datasets.PngDataset(png_folder, corner, storage=simulate.SlowStorage(0.004, 50e6))
    found = simulated(clock, slow, step_ms=20)
    assert names(found) == ["loading in the loop itself", "many small files"]
    assert "opens a file once, 0 kB each time" in found.findings[1].evidence


def test_irregular_items_are_found_with_their_share(clock):
    irregular = datasets.SleepDataset(10_000, 0.0001, hiccup_every=64, hiccup_seconds=0.2)
    found = simulated(clock, irregular, step_ms=1, steps=24)
    assert names(found) == ["loading in the loop itself", "irregular items"]
    assert "take 97% of the time" in found.findings[1].evidence
    assert re.search(r"the slowest, item \d*, 200 ms, most 0.10 ms", found.findings[1].evidence)


def test_irregular_loading_is_found(clock):
    irregular = datasets.SleepDataset(10_000, 0.0001, hiccup_every=32, hiccup_seconds=0.2)
    found = simulated(clock, irregular, batch_size=4, step_ms=20, steps=24, num_workers=2)
    assert names(found) == ["irregular loading"]


# ---------------------------------------------------------------- loaders and steps of every kind


class Dicts(Dataset):
    """Items that are dicts, in a list of the size that is asked for."""

    def __init__(self, count, convert=dict):
        self.count, self.convert = count, convert

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(0.0001)
        return self.convert(image=torch.zeros(3), label=index)


class Stream(IterableDataset):
    """Items without an end in sight, and without a length."""

    def __init__(self, count=10_000):
        self.count = count

    def __iter__(self):
        for index in range(self.count):
            yield torch.zeros(3), index


def nested(image, label):
    return {"images": [image, (image, label)], "label": label}


def pair_and_more(image, label):
    return image, label, {"more": label}


@pytest.mark.parametrize(
    ("convert", "expected"),
    [(dict, (dict,)), (nested, (dict,)), (pair_and_more, (torch.Tensor, torch.Tensor, dict))],
    ids=["dict", "nested", "tuple"],
)
def test_batches_of_any_kind_reach_the_step(quick, convert, expected):
    seen = set()
    loader = DataLoader(Dicts(1000, convert), batch_size=4)
    found = diagnosis.diagnose(loader, lambda *batch: seen.add(tuple(map(type, batch))), steps=3)
    assert seen == {expected}
    assert any(name == "an item" for name, _ in found.evidence)


@pytest.mark.processes
@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"batch_size": None}], ids=str)
def test_iterable_datasets_without_a_length_are_looked_at(quick, settings):
    loader = DataLoader(Stream(), **{"batch_size": 4} | settings)
    found = diagnosis.diagnose(loader, simulate.SimulatedAccelerator(5), steps=4)
    assert not any("how" in text for text in found.unknown)  # but why it waits may be, on a busy machine
    assert any(name == "an item" for name, _ in found.evidence)


def test_an_epoch_shorter_than_what_is_asked_for_is_begun_again(quick):
    calls = []
    loader = DataLoader(Stream(3), batch_size=2)
    diagnosis.diagnose(loader, lambda images, labels: calls.append(len(images)), steps=9)
    assert len(calls) == 2 + 9 + 2 + 1 + 4  # warm-up and timed; warm-up, the profiler's own, and recorded
    assert calls[:4] == [2, 1, 2, 1]


def test_loaders_that_are_none_of_torchs_are_watched_all_the_same(clock):
    batches = [(torch.zeros(4), torch.zeros(4))] * 3
    found = diagnosis.diagnose(batches, simulate.SimulatedAccelerator(5), steps=4)
    assert found.verdict == "nothing wrong"
    assert "the loader is a list" in found.unknown[0]


class OnlyInWorkers(Dicts):
    """Cannot be loaded in the main process."""

    def __getitem__(self, index):
        return torch.full((2,), get_worker_info().id), index


def test_what_cannot_be_loaded_in_this_process_is_said(quick):
    found = watched(OnlyInWorkers(1000), num_workers=1)
    assert "how long an item takes" in found.unknown[0] and "AttributeError" in found.unknown[0]


class Opener(Dicts):
    """Opens its file when the first item is asked for, as a dataset should."""

    file = None

    def __getitem__(self, index):
        self.file = self.file or open(os.devnull)
        return torch.zeros(1), index


@pytest.mark.processes
def test_what_a_dataset_opens_is_not_left_open_in_it(quick):
    dataset = Opener(1000)
    watched(dataset, num_workers=1)
    assert dataset.file is None


class Threads(Dicts):
    """Notes with how many threads its items are loaded."""

    seen = set()

    def __getitem__(self, index):
        self.seen.add(torch.get_num_threads())
        return torch.zeros(1), index


def test_items_are_loaded_with_one_thread_as_in_a_worker(quick):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    items.load(DataLoader(Threads(1000), 4))
    assert (Threads.seen, torch.get_num_threads()) == ({1}, 2)
    torch.set_num_threads(threads)


class SlowStart:
    """Epochs of four batches that begin with a pause."""

    def __init__(self, clock):
        self.clock = clock

    def __iter__(self):
        self.clock.sleep(0.2)
        yield from [(torch.zeros(1), torch.zeros(1))] * 4


def test_the_start_of_an_epoch_is_no_usual_wait(clock):
    seen = watching.watch(SlowStart(clock), simulate.SimulatedAccelerator(5), steps=9)
    assert (seen.start, seen.step) == pytest.approx((200, 5))
    assert (seen.wait, seen.usual_wait, seen.epoch) == (0, 0, 4)


# ---------------------------------------------------------------- what fails


class Failing(Dicts):
    """Fails, or ends its process, when an item is asked for."""

    def __init__(self, fail):
        super().__init__(1000)
        self.fail = fail

    def __getitem__(self, index):
        if index == 40:
            self.fail()
        return torch.zeros(1), index


def damaged():
    raise OSError("photo 40 is damaged")


def killed():
    os._exit(3)


def children():
    """Return the processes that this one started and that still run, those of multiprocessing's own left out."""
    found = set()
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            if not re.search("resource_tracker|forkserver", " ".join(each.cmdline())):
                found.add(each)
    return found


@pytest.fixture
def left():
    """Returns the processes that a test has started and that still run; in the end there must be none."""
    before = children()
    yield lambda: children() - before
    assert children() <= before


@pytest.mark.parametrize("settings", [{}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_an_error_in_the_dataset_is_shown_with_its_own_traceback(quick, left, settings):
    with pytest.raises(watching.LoaderFailed, match="OSError: .*photo 40 is damaged") as caught:
        watched(Failing(damaged), step_ms=1, **settings)
    assert ("in damaged" in str(caught.value)) == bool(settings)  # without workers it is in the usual traceback
    assert isinstance(caught.value.__cause__, OSError)
    assert left() == set()  # though the error is kept


def test_a_worker_that_dies_is_an_error_of_the_loader(quick, left):
    with pytest.raises(timing.WorkerDied, match="exit code 3"):
        watched(Failing(killed), step_ms=1, num_workers=2)


def test_a_worker_that_is_killed_during_a_step_is_no_error_of_the_step(quick):
    def step(images, labels):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")  # as PyTorch raises it anywhere

    with pytest.raises(timing.WorkerDied, match="pid 7"):
        diagnosis.diagnose([(torch.zeros(1), torch.zeros(1))], step)


@pytest.mark.processes
def test_a_step_that_fails_is_named_and_no_worker_is_left(quick, left):
    def step(images, labels):
        raise ZeroDivisionError("the loss is gone")

    loader = DataLoader(Dicts(1000, pair_and_more), 4, num_workers=2, persistent_workers=True)
    with pytest.raises(watching.StepFailed, match="ZeroDivisionError: the loss is gone"):
        diagnosis.diagnose(loader, lambda images, labels, more: step(images, labels))
    assert left() == set()
    with pytest.raises(watching.StepFailed, match="called with 3 arguments"):
        diagnosis.diagnose(loader, step)
    assert len(list(loader)) == 250  # it still works
    loader._iterator._shutdown_workers()  # the kept errors hold this frame, and so the loader


@pytest.mark.processes
def test_no_worker_is_left_and_a_persistent_loader_works_afterwards(quick, left):
    loader = DataLoader(Dicts(400), 4, num_workers=2, persistent_workers=True)
    diagnosis.diagnose(loader, lambda batch: None, steps=3)
    assert left() == set()
    assert len(list(loader)) == 100
    loader._iterator._shutdown_workers()


@pytest.mark.parametrize(
    ("loader", "message"),
    [([], "yields no batch"), (iter([(torch.zeros(1),)] * 5), "yielded 5 batches, and none when")],
    ids=["empty", "used up"],
)
def test_loaders_without_enough_batches_are_refused(quick, loader, message):
    with pytest.raises(watching.TooFewBatches, match=message):
        diagnosis.diagnose(loader, lambda batch: None)


def test_a_profiler_that_runs_already_is_named(quick):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        with pytest.raises(watching.ProfilerRunning, match="Leave its `with` block"):
            diagnosis.diagnose([(torch.zeros(1),)], lambda batch: None)


# ---------------------------------------------------------------- where the profile goes


def profile_of(found):
    return Path(dict(found.evidence)["profile"])


def test_the_profile_is_kept_below_the_runs(quick):
    found = diagnosis.diagnose([torch.zeros(1)], lambda batch: None, steps=3)
    assert profile_of(found) == quick / "runs" / "diagnosis"
    assert traces.load(profile_of(found)).spans


def test_where_the_runs_cannot_be_written_the_profile_goes_to_a_temporary_folder(quick, monkeypatch, capsys):
    (quick / "file").write_text("no folder")
    monkeypatch.setenv("COURSE_RUNS", str(quick / "file" / "runs"))
    monkeypatch.setattr(tempfile, "tempdir", str(quick / "temporary"))
    (quick / "temporary").mkdir()
    found = diagnosis.diagnose([torch.zeros(1)], lambda batch: None, steps=3)
    assert profile_of(found).is_relative_to(quick / "temporary")
    assert traces.load(profile_of(found)).spans
    said = capsys.readouterr().out
    assert str(profile_of(found)) in said and str(quick / "file" / "runs") in said and "COURSE_RUNS" in said


def test_where_another_users_profile_cannot_be_replaced_ones_own_goes_to_a_temporary_folder(quick, monkeypatch, capsys):
    (quick / "runs" / "diagnosis").mkdir(parents=True)
    monkeypatch.setattr(watching.os, "access", lambda path, mode: path != quick / "runs" / "diagnosis")
    assert not watching._folder().is_relative_to(quick / "runs")
    assert "COURSE_RUNS" in capsys.readouterr().out


# ---------------------------------------------------------------- how it shows


def a_diagnosis():
    findings = [
        result.Finding("too <few> workers", "loading", 0.5, "word " * 40, "DataLoader(…)", "more workers"),
        result.Finding("another", "copies", 0.2, "1.2 ms", "x.to(…)", "pinned <memory>"),
    ]
    return result.conclude(40.0, [("steps", "8"), ("a long name", "x " * 80)], findings, ["why <it> is so"])


LINKS = {"more workers": "there/03&more.html", "another topic": "nowhere"}


def test_the_text_fits_a_terminal_and_is_aligned():
    lines = str(a_diagnosis()).splitlines()
    assert max(map(len, lines)) <= 98
    assert lines[0].startswith("Verdict: loading. ")
    assert lines[2].index("8") == lines[3].index("x")
    assert any("at most 2.0× (or −20 ms of a step of 40 ms)" in line for line in lines)
    assert any(line.strip() == "→ more workers" for line in lines)


def test_the_text_has_links_where_it_is_given_some():
    lines = [line.strip() for line in str(a_diagnosis().linked(LINKS)).splitlines()]
    assert "→ more workers: there/03&more.html" in lines
    assert "→ pinned <memory>" in lines
    assert not any("nowhere" in line for line in lines)


def test_the_page_has_links_where_it_is_given_some():
    page = a_diagnosis().linked(LINKS)._repr_html_()
    assert re.findall("<a .*?</a>", page) == ['<a href="there/03&amp;more.html">more workers</a>']


def test_the_page_shows_text_as_text():
    page = a_diagnosis()._repr_html_()
    assert "href" not in page
    assert "→ more workers" in page and html.escape("→ pinned <memory>") in page
    assert html.escape("too <few> workers") in page and html.escape("why <it> is so") in page
    assert "color" not in page  # so that it can be read on light and on dark


def test_names_in_a_trace_cannot_command_the_terminal(file):
    loop = cuda_trace.Loop(device=cuda_trace.DEVICE | {"name": "GPU\x1b[2J"})
    assert "\x1b" not in str(diagnosis.of_trace(loop.write(file)))
    assert "\x1b" not in str(dataclasses.replace(a_diagnosis(), reason="\x1b[2J"))


# ---------------------------------------------------------------- topics, and the notebooks that explain them


def test_each_topic_of_a_finding_has_a_notebook_and_no_other():
    """Topics are the sixth argument of each `Finding(…)` in the source, or stand in a table."""
    used = {topic for _, _, topic in loading._PARTS.values()}
    for path in Path(diagnosis.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "Finding":
                topic = node.args[5]
                assert isinstance(topic, ast.Constant) or topic.id == "topic", f"{path.name}:{node.lineno}"
                used.add(getattr(topic, "value", None))
    assert used - {None} == set(topics.NOTEBOOKS)


def test_each_topics_notebook_is_there():
    there = {path.stem for path in (config.PROJECT / "notebooks").glob("*.ipynb")}
    assert set(topics.NOTEBOOKS.values()) <= there


def test_only_notebooks_that_are_there_are_linked():
    links = topics.links("notebooks/")
    assert links["more workers"] == "notebooks/03-more-workers.ipynb"
    assert all((config.PROJECT / path).is_file() for path in links.values())
    assert topics.links()["more workers"] == "03-more-workers.ipynb"


def test_the_shell_adds_the_courses_notebooks(file, capsys):
    cuda_trace.Loop(blocking=True).write(file)
    assert main(["diagnose", str(file)]) == 0
    assert "→ asynchronous copies: notebooks/03-more-workers.ipynb" in capsys.readouterr().out
