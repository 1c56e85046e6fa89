"""Tests of what `stepscope.traces` finds out about accelerators."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import cuda_trace
from support.written import event, write

from stepscope import traces
from stepscope.__main__ import main


@pytest.fixture(scope="module")
def gpu(tmp_path_factory):
    return traces.load(cuda_trace.write(tmp_path_factory.mktemp("gpu") / "host_1.1.pt.trace.json.gz"))


def written(path, events, devices=(cuda_trace.DEVICE,)):
    return write(path, events, deviceProperties=list(devices))


def kernel(start, end, *, name="k", device=0, **arguments):
    return event("kernel", name, start, end, device=device, stream=7, correlation=start, **arguments)


def test_each_moment_of_a_step_on_a_gpu_is_charged_once(gpu):
    table = traces.breakdown(gpu)
    copies = {"Memcpy HtoD (Pinned -> Device)": 100, "Memcpy DtoH (Device -> Pageable)": 5}
    assert traces.exposed_copies(gpu).mean().to_dict() == copies
    assert sum(copies.values()) == cuda_trace.BREAKDOWN["Memcpy"]
    assert list(table.index) == list(cuda_trace.NUMBERS)
    assert table.drop_duplicates().to_dict("records") == [cuda_trace.BREAKDOWN]


def test_the_use_of_a_gpu_is_computed_from_its_kernels(gpu):
    table = traces.accelerators(gpu)
    assert table.index.to_list() == [0] and table.attrs["unknown"] == []
    used = table.loc[0]
    assert used["name"] == "Made-up GPU"
    assert used["utilization"] == pytest.approx(cuda_trace.UTILIZATION)
    assert used["sm_efficiency"] == pytest.approx(cuda_trace.SM_EFFICIENCY)
    assert used["occupancy"] == pytest.approx(cuda_trace.OCCUPANCY)
    assert used["tensor_core_share"] == pytest.approx(cuda_trace.TENSOR_CORE_SHARE)
    assert (used["kernels"], used["kernel_time"]) == (21, cuda_trace.KERNEL_TIME)


def test_kernels_are_listed_with_the_operator_that_launched_each(gpu):
    table = traces.kernels(gpu)
    rows = table[["Operator", "Total Duration (us)"]].astype(object).replace(float("nan"), None)
    assert {name: tuple(row) for name, row in rows.iterrows()} == cuda_trace.KERNELS
    assert table["Total Duration (us)"].is_monotonic_decreasing
    assert (table["Calls"] == 3).all() and table["Share"].sum() == pytest.approx(1)
    assert table.index[table["Tensor Cores Used"]].to_list() == [cuda_trace.CONVOLUTION]


def test_operators_are_charged_with_the_work_that_they_launched(gpu):
    table = traces.top_operators(gpu, 100)[["Device Self Duration (us)", "Device Total Duration (us)"]]
    assert {name: tuple(table.loc[name]) for name in cuda_trace.OPERATORS} == cuda_trace.OPERATORS


def test_gaps_between_kernels_are_divided_by_the_activity_meanwhile(gpu):
    row = traces.gaps(gpu).loc[0]
    assert row[list(cuda_trace.GAPS)].to_dict() == cuda_trace.GAPS
    assert row[list(cuda_trace.IN_GAPS)].to_dict() == cuda_trace.IN_GAPS
    assert row["share"] == cuda_trace.GAPS["total"] / cuda_trace.TOTAL
    assert row["in_longest"] == cuda_trace.LOADING


def test_a_gap_in_which_the_host_waits_does_not_count_as_launching(tmp_path):
    wait = event("cuda_runtime", "cudaDeviceSynchronize", 20, 70, correlation=2)
    events = [event("cpu_op", "a", 0, 90), kernel(0, 10), wait, kernel(80, 90)]
    row = traces.gaps(written(tmp_path / "trace.json", events))
    assert row.loc[0, ["waiting", "launching", "operators"]].to_list() == [50, 0, 20]
    assert row.loc[0, "in_longest"] == "cudaDeviceSynchronize"


def test_the_innermost_event_that_fills_the_longest_gap_is_named(tmp_path):
    events = [kernel(0, 10), kernel(90, 95), event("cpu_op", "start", 0, 20)]
    events += [event("cpu_op", "around", 15, 100), event("cpu_op", "inner", 20, 90), event("cpu_op", "part", 20, 60)]
    assert traces.gaps(written(tmp_path / "trace.json", events)).loc[0, "in_longest"] == "around"
    events[3]["ts"], events[4]["ts"], events[4]["dur"] = 10, 10, 80
    assert traces.gaps(written(tmp_path / "trace.json", events)).loc[0, "in_longest"] == "inner"


blocks = st.sampled_from([0.25, 0.5, 1.0, 7.0])
launches = st.lists(st.tuples(st.integers(0, 80), st.integers(1, 15), blocks), min_size=1)


@pytest.mark.processes
@settings(max_examples=30)
@given(launches)
def test_utilization_efficiency_and_gaps_equal_painting_the_steps_microsecond_by_microsecond(launches):
    events = [event("user_annotation", "ProfilerStep#1", 10, 70)]
    events += [kernel(start, start + length, **{"blocks per SM": blocks}) for start, length, blocks in launches]
    blocks = np.zeros(100)
    for start, length, each in launches:
        blocks[start : start + length] += each
    inside = blocks[10:70]
    with tempfile.TemporaryDirectory() as folder:
        trace = traces.load(written(Path(folder) / "trace.json", events))
    used, gaps = traces.accelerators(trace).loc[0], traces.gaps(trace).loc[0]
    assert used["utilization"] == pytest.approx((inside > 0).mean())
    assert used["sm_efficiency"] == pytest.approx(np.minimum(inside, 1).mean())
    busy = np.flatnonzero(inside)
    assert gaps["total"] == ((inside == 0)[busy[0] : busy[-1]].sum() if len(busy) else 0)
    assert gaps[list(cuda_trace.IN_GAPS)].sum() == pytest.approx(gaps["total"])


def test_each_gpu_of_a_trace_has_a_row_of_its_own(tmp_path):
    kernels = [kernel(0, 50), kernel(50, 100), kernel(0, 10, device=1), kernel(90, 100, device=1)]
    events = [event("cpu_op", "a", 0, 100), *kernels]
    trace = traces.load(written(tmp_path / "trace.json", events, [cuda_trace.DEVICE, cuda_trace.DEVICE | {"id": 1}]))
    assert traces.accelerators(trace)["utilization"].to_dict() == {0: 1, 1: 0.2}
    assert traces.gaps(trace)["total"].to_dict() == {0: 0, 1: 80}


@pytest.mark.parametrize("steps", [True, False], ids=["steps in both", "no steps in the second"])
def test_several_spans_are_combined_without_the_time_between_them(tmp_path, steps):
    cuda_trace.write(tmp_path / "host_1.1.pt.trace.json")
    later = [
        each | {"ts": each["ts"] + 1e6, "name": re.sub(r"(?<=^ProfilerStep#)", "1", each["name"])}
        for each in cuda_trace.events()
        if steps or not each["name"].startswith("ProfilerStep#")
    ]
    written(tmp_path / "host_1.2.pt.trace.json", later)
    used = traces.accelerators(tmp_path).loc[0]
    assert used["utilization"] == pytest.approx(cuda_trace.UTILIZATION, rel=1e-6 if steps else 0.02)
    assert traces.kernels(tmp_path).loc[cuda_trace.PRODUCT, "Calls"] == 6
    if steps:
        assert used["sm_efficiency"] == pytest.approx(cuda_trace.SM_EFFICIENCY)
        assert traces.gaps(tmp_path).loc[0, "total"] == 2 * cuda_trace.GAPS["total"]


def test_the_error_for_a_trace_without_a_known_gpu_explains_why(tmp_path):
    path = written(tmp_path / "trace.json", [event("cpu_op", "aten::add", 0, 10)], devices=[])
    with pytest.raises(traces.NoAccelerator, match=r"ProfilerActivity\.CUDA\."):
        traces.gaps(path)
    events = [event("cpu_op", "aten::add", 0, 10), event("mtia_ccp_events", "job", 0, 10)]
    with pytest.raises(traces.NoAccelerator, match="ARTEMIS"):
        traces.kernels(written(tmp_path / "other.json", events, devices=[{"name": "ARTEMIS"}]))


def test_on_amd_known_values_are_returned(tmp_path):
    amd = {"id": 0, "name": "AMD Instinct MI250X", "warpSize": 64, "computeMajor": 9, "computeMinor": 0, "numSms": 104}
    events = cuda_trace.events()
    for each in events:
        for key in ("blocks per SM", "warps per SM", "est. achieved occupancy %", "grid", "block"):
            each["args"].pop(key, None)
    table = traces.accelerators(written(tmp_path / "trace.json", events, [amd]))
    assert table.loc[0, "utilization"] == pytest.approx(cuda_trace.UTILIZATION)
    assert table.loc[0, ["sm_efficiency", "occupancy", "tensor_core_share"]].isna().all()
    reasons = [reason.split(":")[0] for reason in table.attrs["unknown"]]
    assert reasons == ["SM efficiency", "Occupancy", "Tensor Cores"]


def test_without_device_properties_a_false_occupancy_of_0_is_left_out_and_reported(tmp_path):
    table = traces.accelerators(written(tmp_path / "trace.json", cuda_trace.events(), devices=[]))
    known = cuda_trace.OCCUPANCY * cuda_trace.KERNEL_TIME - 600 * cuda_trace.CONVOLUTION_OCCUPANCY
    assert table.loc[0, "occupancy"] == pytest.approx(known / (cuda_trace.KERNEL_TIME - 600))
    assert "Occupancy of 34% of the kernels' time" in table.attrs["unknown"][0]


def test_without_steps_shares_refer_to_the_whole_recording(tmp_path):
    table = traces.accelerators(written(tmp_path / "a.json", [event("cpu_op", "a", 0, 100), kernel(0, 50)]))
    assert table.loc[0, "utilization"] == 0.5
    table = traces.accelerators(written(tmp_path / "b.json", [kernel(0, 50), kernel(60, 70)]))
    assert table.loc[0, "utilization"] == pytest.approx(60 / 70) and table.loc[0, "kernel_time"] == 60


@pytest.mark.parametrize(
    "link",
    [{}, {"External id": 0}, {"External id": 7}, {"External id": 1}],
    ids=["no External id", "External id 0", "that of an operator long past", "that of the step"],
)
def test_a_kernel_without_a_valid_link_has_no_operator(tmp_path, link):
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100, **{"External id": 1}),
        event("cpu_op", "aten::empty", 0, 10, **{"External id": 7}),
        event("cpu_op", "recorded without a number", 30, 80, **{"External id": 0}),
        event("cuda_runtime", "cudaLaunchKernel", 40, 45, correlation=50, **link),
        kernel(50, 60, **link),
    ]
    trace = traces.load(written(tmp_path / "trace.json", events))
    assert traces.kernels(trace)["Operator"].isna().all()
    assert traces.top_operators(trace)["Device Total Duration (us)"].to_list() == [0, 0]
    assert traces.top_operators(trace)["Host Self Duration (us)"].to_list() == [50, 10]


def shown(capsys, *arguments):
    """Return the exit status of ``stepscope traces`` and its output, with single blanks."""
    status = main(["traces", *map(str, arguments)])
    return status, re.sub(" +", " ", capsys.readouterr().out)


def test_the_shell_prints_the_content_of_a_trace(gpu, capsys):
    status, output = shown(capsys, gpu.path)
    assert status == 0
    for words in [
        "host_1.1.pt.trace.json.gz, rank 0\n",
        "steps 3, on average 1.0 ms; loading took 15%",
        "0 Made-up GPU 53% 42% 25% 34% 21\n",
        "GPU 0: 11 37% 10 µs 300 µs 22% 1.4% 6.3% 27% 12% 31%",
        "ampere_sgemm_128x64_nn 300 µs 17% 3 no aten::mm\n",
        "my_extension::scale 180 µs 10% 3 no unknown\n",
    ]:
        assert words in output
    assert max(map(len, output.splitlines())) <= 120


def test_the_shell_prints_which_values_are_unknown(tmp_path, capsys):
    _, output = shown(capsys, written(tmp_path / "trace.json", [kernel(0, 50), kernel(60, 70)], devices=[]))
    assert "marks no training steps" in output
    assert "0 86% – – 0% 2\n" in output
    assert "Unknown: SM efficiency" in output


def test_a_bad_trace_is_named_and_the_other_traces_are_printed(tmp_path, capsys):
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        for rank in (0, 1):
            content = cuda_trace.trace()
            content["distributedInfo"]["rank"] = rank
            (tmp_path / run / f"host{rank}.1.pt.trace.json").write_text(json.dumps(content))
    (tmp_path / "b" / "host0.1.pt.trace.json").write_text("{")
    status, output = shown(capsys, tmp_path)
    printed = re.findall(r"^\S.*| TraceError", output, re.M)
    good = ["a, rank 0", "a, rank 1", "a, 2 ranks together"]
    assert printed == [*good, "b/host0.1.pt.trace.json", " TraceError", "b/host1.1.pt.trace.json, rank 1"]
    assert status == 1
    status, output = shown(capsys, tmp_path / "none")
    assert status == 1 and "NoTraces" in output


def test_a_job_that_was_recorded_twice_is_diagnosed_rank_by_rank_and_the_job_is_not_left_out_silently(tmp_path, capsys):
    for start in ("first", "second"):
        for rank in (0, 1):
            content = cuda_trace.trace()
            content["distributedInfo"]["rank"] = rank
            (tmp_path / f"{start}{rank}.1.pt.trace.json").write_text(json.dumps(content))
    status, output = shown(capsys, tmp_path)
    assert status == 1 and len(re.findall(r"^\S.*pt\.trace\.json, rank [01]$", output, re.M)) == 4
    assert f"{tmp_path.name}, ranks together\n" in output and "SeveralRecordings: " in output


def test_no_name_in_a_trace_can_control_the_terminal(tmp_path, capsys):
    evil = "\x1b[2J\x1b]0;title\x07\r\n\u202egemm\u2028\x9b"
    link = {"External id": 7}
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("cpu_op", evil, 0, 90, **link),
        event("cuda_runtime", evil, 5, 80, correlation=5, **link),
        kernel(5, 10, name=evil, **link),
        kernel(90, 95, name=evil),
    ]
    _, output = shown(capsys, written(tmp_path / "trace.json", events, [cuda_trace.DEVICE | {"name": evil}]))
    assert "?[2J?]0;title????gemm" in output
    assert {each for each in output if not each.isprintable()} == {"\n"}


@pytest.mark.processes
def test_the_command_ends_quietly_when_its_output_is_closed(tmp_path):
    cuda_trace.write(tmp_path / "trace.json")
    shell = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "traces", tmp_path / "trace.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    shell.stdout.close()  # as `head` does
    assert shell.stderr.read() == b""
    shell.wait()
    shell.stderr.close()


def test_kernels_of_a_cuda_graph_are_attributed_to_it_and_the_host_is_not_late_between_them(tmp_path):
    launch = event("cuda_runtime", "cudaGraphLaunch", 2, 8, correlation=2, **{"External id": 2})
    graphed = [kernel(10, 30), kernel(60, 80), kernel(90, 95)]
    for each in graphed:
        each["args"]["correlation"] = 2
    graphed[2]["args"]["name"] = "forward pass"  # by torch.cuda.graph_annotations.mark_kernels
    launches = [event("cuda_runtime", "cudaLaunchKernel", end - 5, end, correlation=end) for end in (110, 140)]
    queued, late = (kernel(start, start + 10) for start in (120, 150))
    queued["args"]["correlation"], late["args"]["correlation"] = 110, 140
    events = [event("cpu_op", "aten::add", 0, 100), launch, *graphed, *launches, queued, late, kernel(170, 180)]
    trace = traces.load(written(tmp_path / "trace.json", events))
    gaps = traces.idle(trace)[["start", "end", "late"]]
    assert gaps.to_numpy().tolist() == [[30, 60, 0], [80, 90, 0], [95, 120, 15], [130, 150, 10], [160, 170, 10]]
    launched = traces.kernels(trace).fillna({"Operator": "unknown"}).groupby("Operator")["Calls"].sum()
    assert launched.to_dict() == {"cudaGraphLaunch": 2, "forward pass": 1, "unknown": 3}


def test_kernels_without_a_launch_are_no_graph(tmp_path):
    events = [kernel(start, start + 10) for start in (0, 40, 90)]
    for each in events:
        each["args"]["correlation"] = 0
    gaps = traces.idle(written(tmp_path / "trace.json", events))
    assert gaps[["start", "end", "late"]].to_numpy().tolist() == [[10, 40, 30], [50, 90, 40]]
