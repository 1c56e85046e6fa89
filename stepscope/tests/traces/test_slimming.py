"""Tests of `traces.slim`, on recorded traces and on traces written by hand."""

import gzip
import json

import pytest
from support import recordings
from support.asking import parsed_by_the_plugin
from support.written import event, loading, step, write

from stepscope import traces


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    recordings.record(folder, 0, **recordings.EVERYTHING)
    (file,) = folder.iterdir()
    return file


@pytest.fixture(scope="module")
def slimmed(trace, tmp_path_factory):
    return traces.slim(trace, tmp_path_factory.mktemp("slim") / "slim.pt.trace.json.gz")


def frame(name, start, end):
    return event("python_function", name, start, end, **{"Python id": 2, "Python parent id": 1})


def kept(tmp_path, events):
    """Slim a trace of `events`, and return which of them are left."""
    file = traces.slim(write(tmp_path / "trace.json", events), tmp_path / "slim.json.gz")
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_slim_trace_has_the_same_tables_and_metadata(trace, slimmed):
    assert traces.breakdown(slimmed).equals(traces.breakdown(trace))
    outside = ["aten::conv2d", "aten::addmm", "aten::convolution_backward"]
    tables = [traces.top_operators(file, 1000).loc[outside] for file in (trace, slimmed)]
    assert tables[1].equals(tables[0])
    before, after = (json.loads(recordings.read(file)) for file in (trace, slimmed))
    private = {before.pop(name) for name in ("host_name", "traceName") if name in before}  # PyTorch 2.11 has no host
    assert after | {"traceEvents": []} == before | {"traceEvents": []}
    assert private and all(private) and not private & set(map(str, after.values()))
    assert len(after["traceEvents"]) < len(before["traceEvents"])


@pytest.mark.processes
def test_a_slim_trace_has_the_same_overview_and_modules_in_tensorboard(trace, slimmed):
    before, after = parsed_by_the_plugin([trace, slimmed], "(page.overview, repr(page.module_stats))")
    assert len(before[0]["steps"]["rows"]) == 4
    assert after == before


def test_events_inside_loading_are_dropped_only_in_their_thread(tmp_path):
    others = [
        step(1, 0, 100),
        loading(0, 50),
        event("cpu_op", "aten::mm", 10, 20, thread=2),
        event("cpu_op", "mm", 60, 70),
    ]
    inside = [event("cpu_op", "aten::mul", 10, 20), event("user_annotation", "mine", 30, 40), frame("f", 1, 49)]
    assert kept(tmp_path, [*others, *inside, frame("outside", 60, 61)]) == [*others, frame("outside", 60, 61)]


def test_accelerator_calls_inside_loading_stay_with_the_operators_that_made_them(tmp_path):
    events = [
        step(1, 0, 100),
        loading(0, 50),
        event("cpu_op", "aten::copy_", 10, 30, **{"External id": 7}),
        event("cuda_runtime", "cudaMemcpyAsync", 15, 20, correlation=3, **{"External id": 7}),
        event("gpu_memcpy", "Memcpy HtoD", 60, 90, correlation=3, **{"External id": 7}),
        event("cuda_runtime", "cudaFree", 31, 32, correlation=4),
    ]
    assert kept(tmp_path, [*events, event("cpu_op", "aten::mul", 40, 45)]) == events


def test_the_file_of_a_compiled_kernel_is_not_named(tmp_path):
    kernel = event("kernel", "triton_poi_fused_0", 60, 70, grid=[1, 1, 1])
    named = event("kernel", "triton_poi_fused_0", 60, 70, grid=[1, 1, 1], kernel_file="/home/ada/cache/kernel.py")
    assert kept(tmp_path, [step(1, 0, 100), named]) == [step(1, 0, 100), kernel]


def test_a_trace_may_be_replaced_by_its_slim_copy(tmp_path):
    path = write(tmp_path / "trace.json.gz", [step(1, 0, 100), loading(0, 50), event("cpu_op", "aten::mul", 10, 20)])
    before = traces.breakdown(path)
    assert traces.slim(path, path) == path
    assert traces.breakdown(path).equals(before)
    assert "aten::mul" not in recordings.read(path).decode()
