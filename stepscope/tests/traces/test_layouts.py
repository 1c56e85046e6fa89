"""The layouts in which the versions of PyTorch's profiler write the same recording."""

import inspect

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from support import cuda_trace
from support.written import write
from torch.profiler import ProfilerActivity, profile, schedule

from stepscope import traces

# As kineto/libkineto/src/output_json.cpp (114171df, August 2026) writes them; the numbers are of pull requests there.


def synchronizations_on_a_row_of_their_own(events):
    """#1356; recorded with ``_ExperimentalConfig(enable_cuda_sync_events=True)``."""
    waits = [each for each in events if each["name"] == "cudaStreamSynchronize"]
    row = {"cat": "cuda_sync", "name": "Stream Sync", "pid": 0, "tid": 1_000_007}
    named = {"ph": "M", "name": "thread_name", "ts": 0, "pid": 0, "tid": 1_000_007, "args": {"name": "stream 7 (sync)"}}
    return [*events, named, *(each | row for each in waits)]


def counters_of_the_hardware(events):
    """#1530: samples without a duration, in a process whose name is text."""
    counter = {"ph": "C", "cat": "hardware_counters", "name": "sm__cycles_active.avg", "pid": "GPU 0 Counters"}
    return [counter | {"tid": 0, "ts": each["ts"], "args": {"": 17.5}} for each in events] + events


def links_only_where_there_are_some(events):
    """Calls and kernels without an operator have no id in place of 0."""
    unlinked = ("External id", 0)
    return [each | {"args": {k: v for k, v in each.get("args", {}).items() if (k, v) != unlinked}} for each in events]


def arrows_between_host_and_device(events):
    """#1467: from each call of the runtime to what it launched."""
    ends = {"cuda_runtime": {"ph": "s"}, "cuda_driver": {"ph": "s"}, "kernel": {"ph": "f", "bp": "e"}}
    arrows = [
        each | ends[each["cat"]] | {"cat": "ac2g", "name": "ac2g", "id": each["args"]["correlation"]}
        for each in events
        if each.get("cat") in ends
    ]
    return events + arrows


def names_with_escaped_quotes(events):
    """#1459: the name of a frame in code that dynamo made."""
    frame = {"ph": "X", "cat": "python_function", "name": '{"device": "cpu"}(12): run', "pid": 100, "tid": 100}
    return [*events, frame | {"ts": cuda_trace.BEGIN + 50, "dur": 10, "args": {"Python id": 1}}]


def arguments_in_another_order(events):
    """#1455: serialized from typed values."""
    return [each | {"args": dict(reversed(each.get("args", {}).items()))} for each in events]


CHANGES = (
    synchronizations_on_a_row_of_their_own, counters_of_the_hardware, links_only_where_there_are_some,
    arrows_between_host_and_device, names_with_escaped_quotes, arguments_in_another_order,
)  # fmt: skip
TABLES = (
    traces.breakdown, traces.accelerators, traces.kernels, traces.kernel_classes, traces.top_operators, traces.gaps,
    traces.waits, traces.exposed_copies, traces.memory_curve,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda each: each.__name__)
def test_a_recording_means_the_same_in_each_layout(tmp_path, change):
    content = cuda_trace.trace()
    events = content.pop("traceEvents")
    as_before = traces.load(write(tmp_path / "before.json", events, **content))
    changed = traces.load(write(tmp_path / "after.json", change(events), **content))
    for table in TABLES:
        assert_frame_equal(table(changed), table(as_before))


EXPORT = profile.export_chrome_trace


@pytest.mark.skipif("use_python_export" not in inspect.signature(EXPORT).parameters, reason="PyTorch has one exporter")
def test_both_exporters_of_pytorch_write_the_same_steps(tmp_path):
    def write_both(recorded):
        recorded.export_chrome_trace(str(tmp_path / "kineto.json"))
        recorded.export_chrome_trace(str(tmp_path / "python.json"), use_python_export=True)

    steps = schedule(wait=0, warmup=1, active=3)
    with profile(activities=[ProfilerActivity.CPU], schedule=steps, on_trace_ready=write_both) as recorded:
        for _ in range(4):
            torch.mm(torch.ones(64, 64), torch.ones(64, 64)).sum().item()
            recorded.step()
    kineto, python = (traces.load(tmp_path / f"{name}.json") for name in ("kineto", "python"))
    assert len(traces.breakdown(kineto)) == 3
    for table in (traces.breakdown, traces.top_operators):
        assert np.allclose(table(python), table(kineto), atol=0.01)  # µs
        assert table(python).index.equals(table(kineto).index)
