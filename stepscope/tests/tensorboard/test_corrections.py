"""TensorBoard's profiler tab is right: every fault that `corrections` names, in the stock plugin and in ours.

TensorBoards run over the same traces, recorded here without and with workers, and written by hand for a GPU: one as it
is installed, one of ours, one as installed over corrected copies. They are asked over HTTP, as their page does.
"""

import json
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise

import pytest
from support import cuda_trace, recordings
from support.asking import ask, overview, stock_tensorboard
from support.written import event

from stepscope import tensorboard, traces
from stepscope.__main__ import main
from stepscope.base.staging import TargetExists
from stepscope.tensorboard import corrections

pytestmark = pytest.mark.processes

RECORDED = ["activities-0", "activities-2", "everything-0", "everything-2"]
RUNS = sorted([*RECORDED, "chance", "gpu", "gpu-runtime", "no-steps", "odd-step", "two-spans"])


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    """The folder of the traces."""
    root = tmp_path_factory.mktemp("runs")
    for run in RECORDED:
        options = recordings.EVERYTHING if run.startswith("everything") else {}
        recordings.record(root / run, int(run[-1]), **options)
    recordings.record(root / "two-spans", 0, spans=2)
    write(root / "gpu", cuda_trace.trace())
    # With runtime calls in the category that the stock plugin knows, to see what it does with them; and with more
    # memory in use on the CPU than the GPU has.
    known = cuda_trace.trace()
    known["traceEvents"] = list(corrections.rename_categories(known))
    memory = {"Bytes": 64, "Addr": 1, "Total Allocated": 64 << 30, "Total Reserved": 0, "Device Id": -1}
    memory |= {"Device Type": 0}
    known["traceEvents"].append(
        {"ph": "i", "name": "[memory]", "pid": 100, "tid": 100, "ts": 1_000_300, "args": memory}
    )
    write(root / "gpu-runtime", known)
    operators = [each for each in cuda_trace.events() if each.get("cat") == "cpu_op"]
    write(root / "no-steps", {"traceEvents": operators})
    first = event("cpu_op", "aten::first", 0, 10, **{"External id": 7})
    call = event("runtime", "cudaDeviceSynchronize", 100, 150, **{"External id": 7})
    write(root / "chance", {"traceEvents": [first, call]})
    write(root / ".run.staging-0123abcd", {"traceEvents": [first, call]})  # as while it is recorded
    like_a_step = operators[0] | {"name": "ProfilerStep#last"}
    write(root / "odd-step", cuda_trace.trace() | {"traceEvents": [*cuda_trace.events(), like_a_step]})
    return root


def write(folder, trace):
    folder.mkdir()
    (folder / "host_1.10.pt.trace.json").write_text(json.dumps(trace))


@pytest.fixture(scope="module")
def ours(logdir):
    server = tensorboard.start(logdir)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stock(logdir):
    with stock_tensorboard(logdir, RUNS) as server:
        yield server


def operators(server, run, column=None, group_by="Operation"):
    rows = ask(server, "operation/table", run, "Operator", group_by=group_by)["data"]
    return {row["name"]: row[column] if column else row for row in rows}


def kernels(server, column, group_by="Kernel"):
    table = ask(server, "kernel/table", "gpu", "Kernel", group_by=group_by)["data"]
    place = [each["name"] for each in table["columns"]].index(column)
    return {row[0]: row[place] for row in table["rows"]}


def parts(server, run="gpu"):
    return [µs for _, µs in overview(server, run)]


def advice(server, run):
    return ask(server, "overview", run)["recommendations"]


def drops(server, run):
    """Return how often the CPU's memory curve falls to 0."""
    curve = ask(server, "memory_curve", run, "Memory", memory_metric="B")["rows"]["CPU"]
    return sum(before[1] > 0 == after[1] for before, after in pairwise(curve))


def module_time(server, run="gpu-runtime"):
    (network,) = ask(server, "module", run, "Module")["data"]
    return network["self_host_duration"]


def module_tree(modules):
    """The Module view's rows, as {name: the same of its children}."""
    return {module["name"]: module_tree(module["children"]) for module in modules}


def named(module, numbers):
    """A model as the profiler names its modules: the class, and how many of it came before."""
    name = type(module).__name__
    numbers[name] += 1
    number = numbers[name] - 1
    children = [named(child, numbers) for child in module.children()]
    return {f"{name}_{number}": {name: inside for child in children for name, inside in child.items()}}


def test_runs_views_workers_and_spans_match_the_written_traces(ours):
    assert ours.get("runs") == {"runs": RUNS, "loading": False}
    common = ["Overview", "Operator", "Trace"]
    for run in RECORDED:
        assert ours.get("views", run=run) == common + ["Memory", "Module"] * run.startswith("everything"), run
    views = ["Overview", "Operator", "Kernel", "Trace", "Distributed", "Memory", "Module"]
    assert ours.get("views", run="gpu") == views
    for run, spans in (("gpu", ["1"]), ("two-spans", ["1", "2"])):
        (worker,) = ours.get("workers", run=run, view="Overview")
        assert ours.get("spans", run=run, worker=worker) == spans


@pytest.mark.parametrize("run", [*RECORDED, "gpu"])
def test_the_overview_equals_traces_and_its_average_is_the_mean_of_the_steps(ours, logdir, run):
    table, steps, lengths = traces.breakdown(logdir / run), overview(ours, run), traces.steps(logdir / run)
    assert [step for step, _ in steps] == table.index.to_list()
    for step, categories in steps:
        assert categories == pytest.approx(table.loc[step, list(categories)].to_dict(), abs=1)
        assert sum(categories.values()) == pytest.approx(lengths["end"][step] - lengths["start"][step], abs=1)
    (average,) = ask(ours, "overview", run)["performance"]
    assert average["value"] == pytest.approx(table.sum(axis=1).mean(), abs=1)
    for part in average["children"]:
        assert part["value"] == pytest.approx(table[part["name"]].mean(), abs=1)
    share = table["DataLoader"].sum() / table.attrs["total"]
    assert ("time cost on input data loading" in advice(ours, run)) == (share > 0.05)


@pytest.mark.parametrize("run", ["activities-0", "everything-2", "gpu"])
def test_the_operator_view_equals_top_operators(ours, logdir, run):
    table = traces.top_operators(logdir / run, 1000)
    assert operators(ours, run, "calls") == table["Calls"].to_dict()
    for title in table.columns[1:]:  # Host Self Duration (us), …
        shown = operators(ours, run, title.removesuffix(" (us)").lower().replace(" ", "_"))
        assert shown == pytest.approx(table[title].to_dict(), abs=1)
    assert not [name for name in shown if name.startswith(("enumerate", "Optimizer", "ProfilerStep"))]


def test_modules_call_stacks_and_shapes_match_the_model(stock, ours):
    run = "everything-2"
    assert module_tree(ask(ours, "module", run, "Module")["data"]) == named(recordings.Network(), Counter())
    assert not any(operators(stock, run, "has_call_stack").values())
    assert operators(ours, run, "has_call_stack")["aten::conv2d"]
    stacks = ask(ours, "operation/stack", run, "Operator", op_name="aten::conv2d", group_by="Operation")["data"]
    callers = {"nn.Module: Conv2d_0", "nn.Module: Conv2d_1"}
    assert {frame for stack in stacks for frame in stack["call_stack"].split(";") if "Conv2d" in frame} == callers
    rows = ask(ours, "operation/table", run, "Operator", group_by="OperationAndInputShape")["data"]
    assert len({row["input_shape"] for row in rows if row["name"] == "aten::conv2d"}) == 2


KERNEL_OPERATORS = {kernel: operator or "N/A" for kernel, (operator, _) in cuda_trace.KERNELS.items()}
# Net's own time in each step: without Conv2d, ReLU and the launch of the Triton kernel
NETWORKS_OWN = 3 * (190 - 105 - 50 - 20)
FAULTS = {  # what is asked, and what the stock plugin and ours answer
    "steps doubled": (
        lambda server: sorted(step for step, _ in overview(server, "gpu")),
        [4, 4, 5, 5, 6, 6],
        [4, 5, 6],
    ),
    "no loading": (lambda server: parts(server, "activities-2")[0]["DataLoader"] > 0, False, True),
    "no runtime": (lambda server: {µs["Runtime"] for µs in parts(server)}, {0}, {cuda_trace.BREAKDOWN["Runtime"]}),
    "kernels without operators": (
        lambda server: kernels(server, "Operator", "KernelNameAndOpName"),
        dict.fromkeys(KERNEL_OPERATORS, "CallTreeRoot"),
        KERNEL_OPERATORS,
    ),
    "no time on the device": (
        lambda server: operators(server, "gpu", "device_total_duration").get("aten::mm"),
        0,
        cuda_trace.OPERATORS["aten::mm"][1],
    ),
    "occupancy 0": (
        lambda server: kernels(server, "Mean Est. Achieved Occupancy (%)")[cuda_trace.CONVOLUTION],
        0,
        100 * cuda_trace.CONVOLUTION_OCCUPANCY,
    ),
    "Tensor-Core kernels missed": (
        lambda server: {name for name, used in kernels(server, "Tensor Cores Used").items() if used == "Yes"},
        set(),
        {cuda_trace.CONVOLUTION},
    ),
    "unlinked calls charged to a module": (module_time, NETWORKS_OWN - 3 * 10, NETWORKS_OWN),
    "memory drops, with workers": (lambda server: drops(server, "everything-2") > 2, True, False),
    "convolution's backward": (
        lambda server: operators(server, "activities-0", "tc_eligible")["aten::convolution_backward"],
        "No",
        "Yes",
    ),
    "CPU's memory compared with a GPU's": (
        lambda server: "Device memory usage is at the limit" in advice(server, "gpu-runtime"),
        True,
        False,
    ),
    "annotation like a step": (lambda server: "Overview" in server.get("views", run="odd-step"), False, True),
    "no steps marked": (lambda server: "marks no training steps" in advice(server, "no-steps"), False, True),
    "run being recorded": (lambda server: ".run.staging-0123abcd" in server.get("runs")["runs"], True, False),
    "linked by chance": (lambda server: operators(server, "chance", "host_self_duration")["aten::first"], -40, 10),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_in_the_plugin_but_not_in_the_corrected_plugin(stock, ours, fault):
    asked, faulty, right = FAULTS[fault]
    assert asked(stock) == faulty
    assert asked(ours) == right


def test_the_kernels_and_the_summary_of_a_gpu_are_correct(ours):
    times = kernels(ours, "Total Duration (us)", "KernelNameAndOpName")
    assert times == {kernel: time for kernel, (_, time) in cuda_trace.KERNELS.items()}
    summary = {row["title"]: row["value"] for row in ask(ours, "overview", "gpu")["gpu_metrics"]["data"]}
    expected = {
        "GPU Utilization": cuda_trace.UTILIZATION,
        "Est. SM Efficiency": cuda_trace.SM_EFFICIENCY,
        "Est. Achieved Occupancy": cuda_trace.OCCUPANCY,
        "Kernel Time using Tensor Cores": cuda_trace.TENSOR_CORE_SHARE,
    }
    for title, share in expected.items():
        assert float(summary[title].removesuffix(" %")) == pytest.approx(100 * share, abs=0.01), title


def test_a_call_whose_operator_is_not_in_the_trace_keeps_its_number():
    call = event("runtime", "cudaLaunchKernel", 5, 6, **{"External id": 99})
    operator = event("cpu_op", "aten::a", 0, 10, **{"External id": 7})
    assert list(corrections.link_calls_to_their_operators({"traceEvents": [operator, call]})) == [operator, call]


def test_a_plain_tensorboard_shows_corrected_copies_correctly_and_the_traces_stay(ours, logdir, tmp_path):
    before = {file: file.read_bytes() for file in logdir.rglob("*.json*")}
    written, refused = corrections.write_copies(logdir, tmp_path / "copies")
    assert (len(written), refused) == (len(RUNS) + 1, [])
    assert {file: file.read_bytes() for file in logdir.rglob("*.json*")} == before
    with stock_tensorboard(tmp_path / "copies", RUNS) as fixed:
        for run in RECORDED:
            assert overview(fixed, run) == overview(ours, run)
        one, other = (ask(server, "memory_curve", "everything-2", "Memory") for server in (fixed, ours))
        assert one == other
        (network,) = ask(fixed, "module", "gpu", "Module")["data"]
        times = [(each["name"], each["self_host_duration"], each["device_duration"]) for each in network["children"]]
        assert times == [("Conv2d_0", 15, 600), ("ReLU_0", 30, 60)]


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a disk that is always full")
def test_a_full_disk_is_reported_in_one_line(tmp_path):
    write(tmp_path / "run", cuda_trace.trace())
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "stepscope", "traces", str(tmp_path)]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr.count("\n"), "No space left" in ended.stderr) == (1, 1, True), ended.stderr


def test_copies_among_traces_or_over_files_are_refused_and_a_damaged_trace_is_named(tmp_path, capsys):
    write(tmp_path / "good", cuda_trace.trace())
    for name, text in (("cut", '{"traceEvents": ['), ("odd", '{"traceEvents": [3]}')):
        (tmp_path / f"{name}.pt.trace.json").write_text(text)
    with pytest.raises(TargetExists, match=str(tmp_path)):
        corrections.write_copies(tmp_path, tmp_path / "copies")
    out = tmp_path.with_name("copies")
    assert main(["tensorboard", "--fix", str(tmp_path), str(out)]) == 1
    assert re.search(r"(?s)cut\.pt.*odd\.pt", capsys.readouterr().err)
    assert len(list(out.rglob("*.json.gz"))) == 1
    with pytest.raises(TargetExists, match=str(out)):
        corrections.write_copies(tmp_path, out)
