"""TensorBoard's profiler tab is right: every fault that `corrections` and `data` name, in the stock plugin and in ours.

Two TensorBoards run over the same traces, recorded here with every option and without and with workers, and written
by hand for a GPU: one as it is installed, one of ours. Both are asked over HTTP, as their page does.
"""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
from support import cuda_trace, recordings
from support.asking import ask, overview
from support.stock import stock_tensorboard
from torch_tb_profiler.plugin import TorchProfilerPlugin

from helpers import tensorboard, traces
from helpers.tensorboard import corrections, data, fix

pytestmark = pytest.mark.processes

RECORDED = [f"{option}-{workers}" for workers in (0, 2) for option in recordings.OPTIONS]
RUNS = sorted([*RECORDED, "chance", "gpu", "gpu-runtime", "no-steps", "odd-step", "two-spans"])
CLOCKS = 1e-4  # s by which the profiler's clock and that of Python may differ in a step


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of the traces, and what a stopwatch saw of each recorded run."""
    root = tmp_path_factory.mktemp("runs")
    clocks = {}
    for run in RECORDED:
        option, workers = run.split("-")
        clocks[run] = recordings.record(root / run, int(workers), **recordings.OPTIONS[option])
    recordings.record(root / "two-spans", 0, spans=2)
    write(root / "gpu", cuda_trace.trace())
    # With runtime calls in the category that the stock plugin knows, to see what it does with them; and with more
    # memory in use on the CPU than the GPU has.
    known = cuda_trace.trace()
    for correction in (data.ignore_annotations_on_the_gpu, data.know_runtime_calls):
        known["traceEvents"] = list(correction(known))
    memory = {
        "Bytes": 64,
        "Addr": 1,
        "Total Allocated": 64 << 30,
        "Total Reserved": 0,
        "Device Id": -1,
        "Device Type": 0,
    }
    known["traceEvents"].append(
        {"ph": "i", "name": "[memory]", "pid": 100, "tid": 100, "ts": 1_000_300, "args": memory}
    )
    write(root / "gpu-runtime", known)
    operators = [event for event in cuda_trace.events() if event.get("cat") == "cpu_op"]
    write(root / "no-steps", {"traceEvents": operators})
    chance = {"args": {"External id": 7}, "pid": 1, "tid": 1}
    first = {"ph": "X", "cat": "cpu_op", "name": "aten::first", "ts": 0, "dur": 10} | chance
    call = {"ph": "X", "cat": "runtime", "name": "cudaDeviceSynchronize", "ts": 100, "dur": 50} | chance
    write(root / "chance", {"traceEvents": [first, call]})
    write(root / ".run.staging-0123abcd", {"traceEvents": [first, call]})  # as while it is recorded
    like_a_step = operators[0] | {"name": "ProfilerStep#last"}
    write(root / "odd-step", cuda_trace.trace() | {"traceEvents": [*cuda_trace.events(), like_a_step]})
    return root, clocks


def write(folder, trace):
    folder.mkdir()
    (folder / "host_1.10.pt.trace.json").write_text(json.dumps(trace))


@pytest.fixture(scope="module")
def logdir(recorded):
    return recorded[0]


@pytest.fixture(scope="module")
def ours(logdir):
    server = tensorboard.start(logdir)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def stock(logdir, tmp_path_factory):
    """The ordinary TensorBoard with the plugin as it is installed."""
    with stock_tensorboard(logdir, RUNS, tmp_path_factory.mktemp("stock")) as server:
        yield server


@pytest.fixture(scope="module")
def fixed(logdir, tmp_path_factory):
    """The ordinary TensorBoard over copies of the traces corrected as data."""
    copies = tmp_path_factory.mktemp("copies")
    fix.fix(logdir, copies)
    with stock_tensorboard(copies, RUNS, tmp_path_factory.mktemp("fixed")) as server:
        yield server


def operators(server, run, group_by="Operation"):
    return {row["name"]: row for row in ask(server, "operation/table", run, "Operator", group_by=group_by)["data"]}


def kernels(server, group_by="KernelNameAndOpName"):
    table = ask(server, "kernel/table", "gpu", "Kernel", group_by=group_by)["data"]
    names = [column["name"] for column in table["columns"]]
    return [dict(zip(names, row, strict=True)) for row in table["rows"]]


def gpu_summary(server):
    return {row["title"]: row["value"] for row in ask(server, "overview", "gpu")["gpu_metrics"]["data"]}


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


# ----------------------------------------------------------------------------------------------- all of the page's data


def test_the_runs_and_their_views_are_those_written(ours):
    assert ours.get("runs") == {"runs": RUNS, "loading": False}
    common = ["Overview", "Operator", "Trace"]
    more = {"memory": ["Memory"], "stacks": ["Module"], "everything": ["Memory", "Module"]}
    for run in RECORDED:
        assert ours.get("views", run=run) == common + more.get(run.split("-")[0], []), run
    assert ours.get("views", run="gpu") == [
        "Overview",
        "Operator",
        "Kernel",
        "Trace",
        "Distributed",
        "Memory",
        "Module",
    ]


@pytest.mark.parametrize(
    ("run", "spans"), [*((run, ["1"]) for run in RECORDED), ("gpu", ["1"]), ("two-spans", ["1", "2"])]
)
def test_the_workers_and_spans_are_those_written(ours, logdir, run, spans):
    written = {file.name.split(".")[0] for file in (logdir / run).iterdir()}
    for view in ours.get("views", run=run):
        assert ours.get("workers", run=run, view=view) == (["All"] if view == "Distributed" else sorted(written))
    (worker,) = written
    assert ours.get("spans", run=run, worker=worker) == spans


@pytest.mark.parametrize("run", RECORDED)
def test_the_steps_are_those_recorded_and_their_categories_sum_to_them(ours, recorded, run):
    clock = recorded[1][run]
    steps = overview(ours, run)
    lengths = traces.steps(recorded[0] / run)
    assert [name for name, _ in steps] == list(clock)
    for name, categories in steps:
        step = lengths.loc[name]
        assert sum(categories.values()) == pytest.approx(step["end"] - step["start"], abs=1)
        assert categories["DataLoader"] > 0


@pytest.mark.parametrize("run", RECORDED)
def test_the_overview_agrees_with_the_stopwatch(ours, recorded, run):
    """Around a call of the loader the stopwatch runs a little longer, and within a step a little shorter.

    On a busy machine it may be much, but not in each step.
    """
    clock, steps = recorded[1][run], overview(ours, run)
    waits = [clock[step]["wait"] - µs["DataLoader"] / 1e6 for step, µs in steps]
    others = [sum(µs.values()) / 1e6 - clock[step]["step"] for step, µs in steps]
    for differences in (waits, others):
        assert -CLOCKS < min(differences) < 2e-3


@pytest.mark.parametrize("run", [*RECORDED, "gpu"])
def test_the_average_is_the_mean_of_the_steps(ours, run):
    steps = overview(ours, run)
    (average,) = ask(ours, "overview", run)["performance"]
    assert average["value"] == pytest.approx(sum(sum(µs.values()) for _, µs in steps) / len(steps), abs=1)
    for part in average["children"]:
        assert part["value"] == pytest.approx(sum(µs[part["name"]] for _, µs in steps) / len(steps), abs=1)


@pytest.mark.parametrize("run", [*RECORDED, "gpu"])
def test_the_overview_equals_traces(ours, logdir, run):
    table = traces.breakdown(logdir / run)
    steps = overview(ours, run)
    assert [step for step, _ in steps] == table.index.to_list()
    for step, categories in steps:
        assert categories == pytest.approx(table.loc[step, list(categories)].to_dict(), abs=1)


@pytest.mark.parametrize("option", recordings.OPTIONS)
def test_loading_in_the_training_process_takes_as_long_as_its_images_at_least(ours, option):
    for _, µs in overview(ours, f"{option}-0"):
        assert µs["DataLoader"] / 1e6 > 8 * 0.002 - CLOCKS  # eight images, each of which takes 2 ms to read


@pytest.mark.parametrize("run", RECORDED)
def test_a_share_of_loading_above_5_percent_is_recommended_against(ours, logdir, run):
    advised = "time cost on input data loading" in ask(ours, "overview", run)["recommendations"]
    assert advised == (traces.loading_share(logdir / run) > 0.05)


@pytest.mark.parametrize("run", [*RECORDED, "gpu"])
def test_the_operator_view_equals_top_operators(ours, logdir, run):
    table, shown = traces.top_operators(logdir / run, 1000), operators(ours, run)
    assert {name: row["calls"] for name, row in shown.items()} == table["Calls"].to_dict()
    for column, key in (
        ("Host Self Duration (us)", "host_self_duration"),
        ("Host Total Duration (us)", "host_total_duration"),
    ):
        assert {name: row[key] for name, row in shown.items()} == pytest.approx(table[column].to_dict(), abs=1)
    assert not [name for name in shown if name.startswith(("enumerate", "Optimizer", "ProfilerStep"))]


@pytest.mark.parametrize("run", [*RECORDED, "gpu"])
def test_the_trace_is_served_as_json_with_the_events_of_the_file(ours, logdir, run):
    (file,) = (logdir / run).iterdir()

    def slices(trace):
        return Counter(
            (event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"] if event["ph"] == "X"
        )

    assert slices(ask(ours, "trace", run, "Trace")) == slices(json.loads(recordings.read(file)))


# ------------------------------------------------------------------------- each fault: in the stock plugin, and in ours


@pytest.mark.parametrize("run", RECORDED)
def test_loading_is_0_in_stock_and_not_in_ours(stock, ours, run):
    assert {µs["DataLoader"] for _, µs in overview(stock, run)} == {0}
    assert all(µs["DataLoader"] > 0 for _, µs in overview(ours, run))


def test_steps_on_a_gpu_are_doubled_in_stock_and_single_in_ours(stock, ours):
    assert sorted(step for step, _ in overview(stock, "gpu")) == sorted(2 * cuda_trace.NUMBERS)
    assert [step for step, _ in overview(ours, "gpu")] == list(cuda_trace.NUMBERS)


def test_runtime_calls_and_communication_are_missing_in_stock_and_counted_in_ours(stock, ours):
    assert {µs["Runtime"] for _, µs in overview(stock, "gpu")} == {0}
    assert {µs["Communication"] for _, µs in overview(stock, "gpu")} != {cuda_trace.BREAKDOWN["Communication"]}
    assert [µs for _, µs in overview(ours, "gpu")] == [cuda_trace.BREAKDOWN] * 3


def test_kernels_have_lost_their_operators_in_stock_and_have_them_in_ours(stock, ours):
    assert {kernel["Operator"] for kernel in kernels(stock)} == {"CallTreeRoot"}
    assert {(kernel["Name"], kernel["Operator"], kernel["Total Duration (us)"]) for kernel in kernels(ours)} == {
        (kernel, operator or "N/A", time) for kernel, (operator, time) in cuda_trace.KERNELS.items()
    }


def test_time_on_the_device_is_0_in_stock_and_charged_to_operators_in_ours(stock, ours):
    assert {row["device_total_duration"] for row in operators(stock, "gpu").values()} == {0}
    shown = operators(ours, "gpu")
    assert {
        name: (shown[name]["device_self_duration"], shown[name]["device_total_duration"])
        for name in cuda_trace.OPERATORS
    } == cuda_trace.OPERATORS


def test_occupancy_of_kernels_with_much_shared_memory_is_0_in_stock_and_estimated_in_ours(stock, ours):
    def shown(server):
        table = {kernel["Name"]: kernel["Mean Est. Achieved Occupancy (%)"] for kernel in kernels(server, "Kernel")}
        return table[cuda_trace.CONVOLUTION]

    assert shown(stock) == 0
    assert shown(ours) == 100 * cuda_trace.CONVOLUTION_OCCUPANCY


def test_tensor_core_kernels_are_missed_in_stock_and_found_in_ours(stock, ours):
    def found(server):
        return {kernel["Name"] for kernel in kernels(server, "Kernel") if kernel["Tensor Cores Used"] == "Yes"}

    assert found(stock) == set()
    assert found(ours) == {cuda_trace.CONVOLUTION}


def test_the_gpu_summary_lacks_tensor_cores_in_stock_and_equals_the_truth_in_ours(stock, ours):
    assert "Kernel Time using Tensor Cores" not in gpu_summary(stock)
    summary = gpu_summary(ours)
    expected = {
        "GPU Utilization": cuda_trace.UTILIZATION,
        "Est. SM Efficiency": cuda_trace.SM_EFFICIENCY,
        "Est. Achieved Occupancy": cuda_trace.OCCUPANCY,
        "Kernel Time using Tensor Cores": cuda_trace.TENSOR_CORE_SHARE,
    }
    for title, share in expected.items():
        assert float(summary[title].removesuffix(" %")) == pytest.approx(100 * share, abs=0.01), title


def test_unlinked_calls_are_charged_to_the_first_module_in_stock_and_to_none_in_ours(stock, ours):
    def own_time(server):
        (network,) = ask(server, "module", "gpu-runtime", "Module")["data"]
        return network["self_host_duration"]

    truth = 3 * (190 - 105 - 50 - 20)  # Net's own in each step: without Conv2d, ReLU and the Triton kernel's launch
    assert own_time(stock) == truth - 3 * 10  # cudaEventQuery, in another thread
    assert own_time(ours) == truth


@pytest.mark.parametrize("run", ["memory-2", "everything-2"])
def test_with_workers_the_memory_curve_drops_to_0_in_stock_and_not_in_ours(stock, ours, run):
    def drops(server):
        curve = ask(server, "memory_curve", run, "Memory", memory_metric="B")["rows"]["CPU"]
        assert len(curve) > 100
        return [after for before, after in pairwise(curve) if before[1] > 0 == after[1]]

    assert len(drops(stock)) >= 3
    assert drops(ours) == []


def test_the_memory_of_a_run_without_workers_is_the_same_in_both(stock, ours):
    curves = [ask(server, "memory_curve", "memory-0", "Memory")["rows"] for server in (stock, ours)]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("run", ["stacks-0", "stacks-2", "everything-0", "everything-2"])
def test_call_stacks_are_missing_in_stock_and_shown_in_ours(stock, ours, run):
    assert not any(row["has_call_stack"] for row in operators(stock, run).values())
    assert operators(ours, run)["aten::conv2d"]["has_call_stack"]
    stacks = ask(ours, "operation/stack", run, "Operator", op_name="aten::conv2d", group_by="Operation")["data"]
    callers = {"nn.Module: Conv2d_0", "nn.Module: Conv2d_1"}
    assert {frame for stack in stacks for frame in stack["call_stack"].split(";") if "Conv2d" in frame} == callers


@pytest.mark.parametrize("run", ["stacks-0", "stacks-2", "everything-0", "everything-2"])
def test_the_module_view_has_the_tree_of_the_model(ours, run):
    tree = module_tree(ask(ours, "module", run, "Module")["data"])
    assert tree == named(recordings.Network(), Counter())


def test_going_back_through_a_convolution_is_not_for_tensor_cores_in_stock_and_is_in_ours(stock, ours):
    assert operators(stock, "activities-0")["aten::convolution_backward"]["tc_eligible"] == "No"
    assert operators(ours, "activities-0")["aten::convolution_backward"]["tc_eligible"] == "Yes"


def test_the_memory_of_the_cpu_is_compared_with_the_gpus_in_stock_and_not_in_ours(stock, ours):
    advice = "Device memory usage is at the limit"
    assert advice in ask(stock, "overview", "gpu-runtime")["recommendations"]
    assert advice not in ask(ours, "overview", "gpu-runtime")["recommendations"]


def test_an_annotation_named_like_a_step_hides_the_run_in_stock_and_not_in_ours(stock, ours):
    assert stock.get("views", run="odd-step") == []
    assert [step for step, _ in overview(ours, "odd-step")] == list(cuda_trace.NUMBERS)


def test_a_recording_without_steps_passes_for_one_step_in_stock_and_is_named_in_ours(stock, ours):
    assert [step for step, _ in overview(stock, "no-steps")] == [0]
    assert "no training steps" not in ask(stock, "overview", "no-steps")["recommendations"]
    assert "This trace marks no training steps." in ask(ours, "overview", "no-steps")["recommendations"]


def test_a_run_that_is_being_recorded_appears_in_stock_and_not_in_ours(stock, ours):
    assert ".run.staging-0123abcd" in stock.get("runs")["runs"]
    assert ".run.staging-0123abcd" not in ours.get("runs")["runs"]


def test_a_thread_that_loads_a_run_is_not_done_before_it_is_listed(monkeypatch):
    listed = []
    load_run = lambda self, run: listed.append(threading.current_thread() in self._load_threads)  # noqa: E731
    monkeypatch.setattr(TorchProfilerPlugin, "_load_run", load_run)
    corrections.end_loading_for_certain()
    plugin = SimpleNamespace(_load_threads=[])
    thread = threading.Thread(target=TorchProfilerPlugin._load_run, args=(plugin, "run"))
    thread.start()
    time.sleep(0.05)
    plugin._load_threads.append(thread)
    thread.join(60)
    assert listed == [True]


def test_a_call_whose_operator_is_not_in_the_trace_keeps_its_number():
    call = {"ph": "X", "cat": "runtime", "name": "cudaLaunchKernel", "ts": 5, "dur": 1, "args": {"External id": 99}}
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::a", "ts": 0, "dur": 10, "args": {"External id": 7}}
    trace = {"traceEvents": [operator, call]}
    assert list(data.link_no_call_by_chance(trace)) == [operator, call]


def test_calls_linked_by_chance_cost_other_operators_time_in_stock_and_not_in_ours(stock, ours):
    assert operators(stock, "chance")["aten::first"]["host_self_duration"] == 10 - 50
    assert operators(ours, "chance")["aten::first"]["host_self_duration"] == 10


def test_operators_grouped_by_shape_have_shapes_where_they_were_recorded(ours):
    rows = ask(ours, "operation/table", "shapes-0", "Operator", group_by="OperationAndInputShape")["data"]
    shapes = {row["input_shape"] for row in rows if row["name"] == "aten::conv2d"}
    assert len(shapes) == 2
    assert all("[8, 3, 3, 3]" in shape or "[8, 8, 3, 3]" in shape for shape in shapes)


# ----------------------------------------------------------------------------------------------------- corrected copies


@pytest.mark.parametrize("run", RECORDED)
def test_the_plain_tensorboard_shows_the_right_overview_of_corrected_copies(fixed, ours, run):
    assert overview(fixed, run) == overview(ours, run)


@pytest.mark.parametrize("run", ["memory-2", "everything-2"])
def test_the_plain_tensorboard_shows_the_right_memory_of_corrected_copies(fixed, ours, run):
    assert ask(fixed, "memory_curve", run, "Memory") == ask(ours, "memory_curve", run, "Memory")


def test_the_plain_tensorboard_shows_the_right_modules_of_corrected_copies(fixed):
    (network,) = ask(fixed, "module", "gpu", "Module")["data"]
    times = {
        module["name"]: (module["self_host_duration"], module["device_duration"]) for module in network["children"]
    }
    assert times == {"Conv2d_0": (15, 600), "ReLU_0": (30, 60)}


def test_the_plain_tensorboard_shows_the_operators_of_kernels_of_corrected_copies(fixed):
    launched_by = {kernel["Name"]: kernel["Operator"] for kernel in kernels(fixed)}
    assert {name: launched_by[name] for name, (operator, _) in cuda_trace.KERNELS.items() if operator} == {
        name: operator for name, (operator, _) in cuda_trace.KERNELS.items() if operator
    }


def test_the_traces_stay_as_they_are_when_copies_are_made(logdir, tmp_path):
    before = {file: file.read_bytes() for file in logdir.rglob("*.json*")}
    fix.fix(logdir, tmp_path / "copies")
    assert {file: file.read_bytes() for file in logdir.rglob("*.json*")} == before


def test_copies_lie_neither_among_the_traces_nor_on_other_files(logdir, tmp_path):
    with pytest.raises(fix.InTheWay, match="among the traces"):
        fix.fix(logdir, logdir / "copies")
    fix.fix(logdir / "gpu", tmp_path)
    with pytest.raises(fix.InTheWay, match="Name another folder"):
        fix.fix(logdir / "gpu", tmp_path)


def test_a_damaged_trace_is_named_and_the_others_are_copied(tmp_path):
    for run in ("good", "bad"):
        (tmp_path / run).mkdir()
        cuda_trace.write(tmp_path / run / "host_1.10.pt.trace.json")
    bad = tmp_path / "bad" / "host_1.10.pt.trace.json"
    bad.write_bytes(bad.read_bytes()[:-100])
    command = [sys.executable, "-m", "helpers", "tensorboard", "--fix", tmp_path, tmp_path.with_name("copies")]
    shell = subprocess.run(command, capture_output=True, text=True)
    assert shell.returncode == 1
    assert f"Not copied: {bad}" in shell.stderr
    assert shell.stdout.startswith("1 corrected traces")
