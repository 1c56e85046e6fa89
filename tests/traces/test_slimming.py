"""Tests of `traces.slim`, on recorded traces and on traces written by hand."""

import gzip
import json
import subprocess
import sys

import pytest
from support import recordings

from helpers import traces

PLUGIN = """
import json, logging, sys, tempfile
logging.disable(logging.ERROR)
from helpers.tensorboard import corrections
corrections.apply()
from torch_tb_profiler.profiler.data import RunProfileData
from torch_tb_profiler.profiler.run_generator import RunGenerator
shown = []
for file in sys.argv[1:]:
    data = RunProfileData.parse("worker", None, file, tempfile.gettempdir())
    profile = RunGenerator("worker", None, data).generate_run_profile()
    shown.append([profile.overview, profile.module_stats])
print(json.dumps(shown, default=repr))
"""

RECORDED = [(0, "activities"), (0, "memory"), (0, "everything"), (2, "shapes"), (2, "stacks")]


@pytest.fixture(scope="module", params=RECORDED, ids=lambda each: f"{each[1]}-{each[0]}")
def trace(request, tmp_path_factory):
    workers, options = request.param
    folder = tmp_path_factory.mktemp("recorded")
    recordings.record(folder, workers, **recordings.OPTIONS[options])
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def slimmed(trace, tmp_path_factory):
    return traces.slim(trace, tmp_path_factory.mktemp("slim") / "slim.pt.trace.json.gz")


def event(name, start, end, category="cpu_op", *, thread=1, **arguments):
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start, "dur": end - start,
        "args": arguments,
    }  # fmt: skip


def frame(name, start, end, number, parent):
    return event(name, start, end, "python_function", **{"Python id": number, "Python parent id": parent})


def memory(time, address, size):
    arguments = {"Device Type": 0, "Device Id": -1, "Addr": address, "Bytes": size}
    return {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": time, "args": arguments}


def loading(start, end):
    return event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start, end, "user_annotation")


def step(start, end):
    return event("ProfilerStep#1", start, end, "user_annotation")


def write(path, events):
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def kept(tmp_path, events):
    """Slim a trace of `events`, and return which of them are left."""
    file = traces.slim(write(tmp_path / "trace.json", events), tmp_path / "slim.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_slim_trace_has_the_same_breakdown(trace, slimmed):
    assert traces.breakdown(slimmed).equals(traces.breakdown(trace))


def test_a_slim_trace_has_the_same_metadata(trace, slimmed):
    before, after = (json.loads(recordings.read(file)) for file in (trace, slimmed))
    private = {before.pop(name) for name in ("host_name", "traceName") if name in before}  # PyTorch 2.11 has no host
    assert after | {"traceEvents": []} == before | {"traceEvents": []}
    assert private and all(private) and not private & set(map(str, after.values()))
    assert len(after["traceEvents"]) < len(before["traceEvents"])


def test_a_slim_trace_has_the_same_operators_outside_of_loading(trace, slimmed):
    outside = ["aten::conv2d", "aten::addmm", "aten::convolution_backward"]
    before, after = (traces.top_operators(file, 1000).loc[outside] for file in (trace, slimmed))
    assert after.equals(before)


@pytest.mark.processes
def test_a_slim_trace_has_the_same_overview_and_modules_in_tensorboard(trace, slimmed):
    command = [sys.executable, "-c", PLUGIN, str(trace), str(slimmed)]
    before, after = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert len(before[0]["steps"]["rows"]) == 4
    assert after == before


def test_what_ran_inside_loading_is_dropped_in_its_thread_only(tmp_path):
    others = [step(0, 100), loading(0, 50), event("aten::mm", 10, 20, thread=2), event("aten::mm", 60, 70)]
    inside = [event("aten::mul", 10, 20), event("mine", 30, 40, "user_annotation"), frame("f", 1, 49, 2, 1)]
    assert kept(tmp_path, [*others, *inside]) == others


def test_accelerator_calls_inside_loading_stay_with_the_operators_that_made_them(tmp_path):
    events = [
        step(0, 100),
        loading(0, 50),
        event("aten::copy_", 10, 30, **{"External id": 7}),
        event("cudaMemcpyAsync", 15, 20, "cuda_runtime", correlation=3, **{"External id": 7}),
        event("Memcpy HtoD", 60, 90, "gpu_memcpy", thread="stream 7", correlation=3, **{"External id": 7}),
        event("cudaFree", 31, 32, "cuda_runtime", correlation=4),
    ]
    assert kept(tmp_path, [*events, event("aten::mul", 40, 45)]) == events


def test_short_frames_are_dropped_save_those_of_modules(tmp_path):
    outer, short = frame("outer", 0, 90, 1, None), frame("short", 10, 14, 2, 1)
    module, inside = frame("nn.Module: A", 11, 13, 3, 2), frame("shorter", 12, 13, 4, 3)
    assert kept(tmp_path, [step(0, 100), outer, short, module, inside]) == [
        step(0, 100),
        outer,
        frame("nn.Module: A", 11, 13, 3, 1),  # called, as far as can be seen, by the frame around the short one
    ]


def test_the_file_of_a_compiled_kernel_is_not_named(tmp_path):
    kernel = event("triton_poi_fused_0", 60, 70, grid=[1, 1, 1])
    named = event("triton_poi_fused_0", 60, 70, grid=[1, 1, 1], kernel_file="/home/ada/cache/kernel.py")
    assert kept(tmp_path, [step(0, 100), named]) == [step(0, 100), kernel]


def test_memory_that_outlives_loading_stays(tmp_path):
    others = [step(0, 100), loading(0, 50), memory(20, 2, 64), memory(70, 2, -64)]
    assert kept(tmp_path, [*others, memory(10, 1, 32), memory(11, 1, -32)]) == others


def test_a_trace_may_be_replaced_by_its_slim_copy(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps([step(0, 100), loading(0, 50), event("aten::mul", 10, 20)]).encode()))
    before = traces.breakdown(path)
    assert traces.slim(path, path) == path
    assert traces.breakdown(path).equals(before)
    assert "aten::mul" not in recordings.read(path).decode()


def test_a_damaged_trace_leaves_nothing_behind(tmp_path):
    path = write(tmp_path / "trace.json", [step(0, 100)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(traces.TruncatedTrace, match=r"trace\.json"):
        traces.slim(path, tmp_path / "slim.json.gz")
    assert list(tmp_path.iterdir()) == [path]


def test_a_copy_must_be_named_as_the_gzip_file_it_is(tmp_path):
    path = write(tmp_path / "trace.json", [step(0, 100)])
    with pytest.raises(ValueError, match=r"end with \.json\.gz"):
        traces.slim(path, path)
