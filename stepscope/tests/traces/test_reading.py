"""Tests of `stepscope.traces`: on traces written by hand, whose truth is known, and on recorded ones."""

import gzip
import json
import tracemalloc

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import cuda_trace, recordings
from support.written import event, loading, on_a_gpu, step, two_steps, write

from stepscope import traces
from stepscope.base import staging
from stepscope.traces import files, step_times
from stepscope.traces.events import parsed

ZERO = dict.fromkeys(traces.CATEGORIES, 0.0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    recordings.record(folder := tmp_path_factory.mktemp("recorded"), 2)
    return next(folder.iterdir())


def test_breakdown_charges_each_moment_to_the_first_category_that_claims_it(tmp_path):
    table = traces.breakdown(write(tmp_path / "trace.json", two_steps()))
    assert table.loc[7].to_dict() == ZERO | {"DataLoader": 300, "CPU Exec": 410, "Other": 290}
    assert table.loc[8].to_dict() == ZERO | {"CPU Exec": 100, "Other": 400}
    assert list(table.columns) == traces.CATEGORIES
    assert table.index.name == "step"
    assert table.attrs["total"] == 1500


intervals = st.lists(st.tuples(st.sampled_from(traces.CATEGORIES[:-1]), st.integers(0, 60), st.integers(0, 20)))
names = {
    "Kernel": ("kernel", "k"),
    "Memcpy": ("gpu_memcpy", "c"),
    "Memset": ("gpu_memset", "s"),
    "Communication": ("cpu_op", "nccl:all_reduce"),
    "Runtime": ("cuda_runtime", "cudaLaunchKernel"),
    "DataLoader": ("user_annotation", "enumerate(DataLoader)#x.__next__"),
    "CPU Exec": ("cpu_op", "aten::add"),
}


@pytest.mark.processes
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(intervals)
def test_breakdown_equals_painting_the_steps_microsecond_by_microsecond(intervals):
    events = [event(*names[category], start, start + length) for category, start, length in intervals]
    span = parsed([{"traceEvents": [step(0, 10, 40), step(1, 45, 70), *events]}])
    painted = np.full(100, traces.CATEGORIES.index("Other"))
    for rank, category in reversed(list(enumerate(traces.CATEGORIES[:-1]))):
        for each, start, length in intervals:
            if each == category:
                painted[start : start + length] = rank
    expected = [np.bincount(painted[start:end], minlength=8) for start, end in ((10, 40), (45, 70))]
    np.testing.assert_allclose(step_times.breakdown_of(span).table("step").to_numpy(), expected)


def test_a_step_lasts_until_its_work_on_the_gpu_has_ended(tmp_path):
    path = write(tmp_path / "trace.json", on_a_gpu())
    assert traces.steps(path).to_dict("index") == {1: {"start": 0, "end": 150}, 2: {"start": 150, "end": 220}}
    table = traces.breakdown(path)
    expected = {"Kernel": 80, "Memcpy": 10, "Runtime": 10, "CPU Exec": 15, "Other": 35}
    assert table.loc[1].to_dict() == ZERO | expected
    assert table.loc[2].to_dict() == ZERO | {"Kernel": 10, "Memset": 5, "Runtime": 5, "Other": 50}


@pytest.mark.parametrize(
    ("files_there", "error", "named"),
    [
        ([], traces.NoTraces, "run"),
        (["below/a.pt.trace.json"], traces.NoTraces, "below"),
        (["one.1.pt.trace.json", "two.1.pt.trace.json"], traces.SeveralRecordings, r"one, two\..*traces\.ranks"),
        (["one.1.pt.trace.json", "one.2.pt.trace.json"], traces.SeveralRecordings, "step 7"),
    ],
)
def test_the_error_for_a_folder_that_is_not_one_run_names_its_content(tmp_path, files_there, error, named):
    (tmp_path / "run" / "below").mkdir(parents=True)
    for file in files_there:
        write(tmp_path / "run" / file, two_steps())
    with pytest.raises(error, match=named):
        traces.breakdown(tmp_path / "run")


EVENT = b'{"traceEvents": [{"ph": "X", %s, "dur": 1, "tid": 1}]}'
NO_TIMES = (b"NaN", b"1e999", b"null", b'"soon"')


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"traceEvents": []}',
        gzip.compress(b"", mtime=0),
        b"\x89PNG\r\n",
        b"[1, 2, 3]",
        b'{"cells": []}',
        b'{"traceEvents": [1, 2]}',
        *(EVENT % b'"name": "a", "cat": "cpu_op", "ts": %s' % time for time in NO_TIMES),
        EVENT % b'"name": 5, "cat": "gpu_memcpy", "ts": 1',
    ],
)
def test_a_file_that_is_not_a_trace_is_refused_by_name(tmp_path, content):
    path = tmp_path / "odd.json"
    path.write_bytes(content)
    with pytest.raises(traces.TraceError, match=r"odd\.json"):
        traces.load(path)


def test_a_file_is_judged_by_its_bytes_and_not_by_its_name(tmp_path):
    file = cuda_trace.write(tmp_path / "a.pftrace")
    assert len(traces.steps(file)) == 3
    with pytest.raises(traces.NoTraces, match=r"a\.pftrace is JSON: name that file"):
        traces.steps(tmp_path)


@pytest.mark.parametrize("named", ["run", "run/a.pftrace"])
def test_the_error_for_perfettos_own_format_explains_how_to_record_json(tmp_path, named):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a.pftrace").write_bytes(b"\x0a\x2c\x08\x01")
    with pytest.raises(traces.TraceError, match=r"a\.pftrace .*Perfetto.*export_chrome_trace.*\.pt\.trace\.json"):
        traces.load(tmp_path / named)


def test_runs_are_the_folders_with_traces_except_leftovers_of_a_killed_recording(tmp_path):
    (tmp_path / "odd" / "a.pt.trace.json").mkdir(parents=True)  # a folder named like a trace
    folders = [tmp_path, tmp_path / "a", tmp_path / "b" / "c"]
    with staging.scratch(tmp_path / "recorded") as killed:
        for folder in [*folders, killed]:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / "host_1.10.pt.trace.json", two_steps())
        assert traces.runs(tmp_path) == folders
        assert traces.runs(killed) == [killed]  # named itself
    with pytest.raises(traces.NoTraces, match="nowhere"):
        traces.runs(tmp_path / "nowhere")
    with pytest.raises(traces.NoTraces, match="nowhere"):
        traces.load(tmp_path / "nowhere")


def test_the_error_for_a_trace_without_steps_explains_how_to_mark_them(tmp_path):
    path = write(tmp_path / "trace.json", [event("cpu_op", "aten::add", 0, 10)])
    with pytest.raises(traces.NoSteps, match=r"profiler\.step\(\)"):
        traces.breakdown(path)
    assert list(traces.top_operators(path).index) == ["aten::add"]


def test_invalid_json_by_kineto_is_read(tmp_path):
    path = write(tmp_path / "trace.json", [step(1, 0, 10), event("cpu_op", "a\tb?😀", 0, 4, size="N/A")])
    path.write_bytes(path.read_bytes().replace(b"\\t", b"\t").replace(b'"N/A"', b"N/A").replace(b"?", b"\xe9"))
    assert traces.breakdown(path).loc[1, "CPU Exec"] == 4
    assert list(traces.top_operators(path).index) == ["a\tb\ufffd😀"]


def test_top_operators_separates_self_time_from_the_time_of_inner_operators(tmp_path):
    events = [
        *two_steps(),
        event("cpu_op", "aten::to", 2200, 2300),  # calls itself: one call
        event("cpu_op", "aten::to", 2210, 2290),
        event("cpu_op", "aten::copy_", 2220, 2250),
        event("cpu_op", "aten::pad", 2300, 2400),  # calls itself and another: two calls
        event("cpu_op", "aten::pad", 2310, 2340),
        event("cpu_op", "aten::fill_", 2350, 2360),
    ]
    table = traces.top_operators(write(tmp_path / "trace.json", events))
    assert table.loc["aten::conv2d"].to_list() == [1, 100, 200]
    assert table.loc["aten::to"].to_list() == [1, 70, 100]
    assert table.loc["aten::pad"].to_list() == [2, 90, 130]
    assert not table.index.str.match("enumerate|Optimizer|ProfilerStep").any()
    assert table["Host Self Duration (us)"].is_monotonic_decreasing


def test_difference_compares_the_mean_steps(tmp_path):
    for name, waited in (("before", (62_000, 62_000)), ("after", (1000, 3000))):
        steps = [(number, number * 100_000) for number in range(2)]
        events = [step(number, begin, begin + 100_000) for number, begin in steps]
        events += [loading(begin, begin + each) for (_, begin), each in zip(steps, waited, strict=True)]
        write(tmp_path / name, events)
    table = traces.difference(tmp_path / "before", tmp_path / "after")
    assert table.loc["DataLoader"].to_dict() == pytest.approx({"before": 62, "after": 2, "change": -60})
    assert table["change"].sum() == pytest.approx(0)


@pytest.mark.parametrize(
    ("means", "said"),
    [
        ({"DataLoader": (71.6, 0.52), "Other": (10, 12)}, "loading 71.6 → 0.5 ms a step, other 10.0 → 12.0 ms a step"),
        (
            {"Memcpy": (0.1, 0.02), "DataLoader": (0.5, 0.9)},
            "loading 0.500 → 0.900 ms a step, copies 0.100 → 0.020 ms a step",
        ),
        ({"DataLoader": (1000, 1019)}, "no change of 20 ms a step or more"),
        ({"DataLoader": (1000, 1021)}, "loading 1000 → 1021 ms a step"),
    ],
)
def test_a_difference_in_words_is_sorted_by_size_and_leaves_out_small_changes(means, said):
    table = pd.DataFrame.from_dict(means, orient="index", columns=["before", "after"])
    assert traces.sentence(table.assign(change=table["after"] - table["before"])) == said


def changed(change):
    """Return a rewriting of a trace that replaces each of its finished events by what `change` makes of it."""
    return lambda trace: json.dumps(
        trace | {"traceEvents": [change(each) if each["ph"] == "X" else each for each in trace["traceEvents"]]}
    )


def with_one_more(event):
    return lambda trace: json.dumps(trace | {"traceEvents": [*trace["traceEvents"], event, {"ph": "M", "ts": 1}]})


def with_argument(text):
    """Return a rewriting of a trace that puts `text`, as it is, into one of its events."""
    odd = '{"ph": "X", "cat": "other", "name": "a", "ts": 1, "dur": 1, "tid": 1, "args": {"odd": %s}}, '
    return lambda trace: json.dumps(trace).replace('{"ph": "X"', odd % text + '{"ph": "X"', 1)


DEVICES = {"deviceProperties": [{"id": number, "name": "GPU"} for number in range(500)]}
LAYOUTS = {
    "keys in another order": lambda trace: json.dumps(trace, sort_keys=True),
    "metadata after the events": lambda trace: json.dumps({"traceEvents": trace["traceEvents"]} | trace | DEVICES),
    "metadata before the events": lambda trace: json.dumps(DEVICES | trace | DEVICES),
    "another list before the events": lambda trace: json.dumps({"others": trace["traceEvents"]} | trace),
    "another list after the events": lambda trace: json.dumps(trace | {"others": trace["traceEvents"]}),
    "empty arguments": changed(lambda each: each | {"args": None}),
    "numbers as text": changed(lambda each: each | {"ts": str(each["ts"]), "dur": str(each["dur"])}),
    "an event still open": with_one_more({"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "tid": 1}),
    "a mark far in the future": with_one_more({"ph": "i", "s": "g", "name": "Record Window End", "ts": 1e18}),
    "a bare N/A": with_argument("N/A"),
    "text that looks like the next event": with_argument(json.dumps('}, {"ph": "X", ' * 2000)),
    "a list that looks like events": with_argument(json.dumps([{"name": "a"}] * 2000)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_of_a_recorded_trace_give_the_same_breakdown(recorded, tmp_path, monkeypatch, layout):
    monkeypatch.setattr(files, "PIECE", 20_000)
    file, content = recorded, LAYOUTS[layout](json.loads(recordings.read(recorded))).encode()
    path = tmp_path / "other.json"
    path.write_bytes(content)
    assert len(list(files.parts(file, files.PIECE))) > 5
    assert traces.breakdown(path).equals(traces.breakdown(file))
    if layout.startswith("metadata"):
        assert traces.load(path).spans[0].devices == tuple(DEVICES["deviceProperties"])


def test_an_event_that_ends_before_it_starts_does_not_count(tmp_path):
    events = [step(1, 0, 10), event("cpu_op", "a", 2, 4), event("cpu_op", "b", 8, 6), event("kernel", "k", 8, 6)]
    path = write(tmp_path / "trace.json", events)
    assert traces.breakdown(path).loc[1, "CPU Exec"] == 2
    assert traces.load(path).spans[0].kernels.height == 0


@pytest.mark.processes
def test_a_packed_trace_that_is_cut_off_is_refused_by_name(recorded, tmp_path):
    content, path = recorded.read_bytes(), tmp_path / "damaged.json"
    for end in np.random.default_rng(0).integers(len(content), size=40):
        path.write_bytes(content[:end])
        with pytest.raises(traces.TraceError, match=r"damaged\.json"):
            traces.breakdown(path)


@pytest.mark.parametrize("events", [[step(1, 0, 10), step(1, 20, 30)], [step(1, 0, 10), step(2, 5, 15)]])
def test_steps_that_repeat_or_overlap_in_one_file_are_refused(tmp_path, events):
    path = write(tmp_path / "trace.json", events)
    with pytest.raises(traces.SeveralRecordings, match=r"trace\.json.*ProfilerStep#[12]"):
        traces.breakdown(path)


def test_steps_in_whole_microseconds_may_overlap_by_one(tmp_path):
    assert len(traces.breakdown(write(tmp_path / "trace.json", [step(1, 0, 11), step(2, 10, 20)]))) == 2


def test_memory_for_reading_is_a_fraction_of_the_file(recorded, tmp_path):
    trace = json.loads(recordings.read(recorded))
    for each in trace["traceEvents"]:
        each |= {"args": each.get("args", {}) | {"long": "x" * 5000}}
    path = tmp_path / "large.json"
    path.write_text(json.dumps(trace))
    tracemalloc.start()
    traces.load(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 10 * files.PIECE
    assert peak < path.stat().st_size


def ranked(path, rank):
    write(path, [step(rank + 1, 0, 10)], distributedInfo={"rank": rank})


def test_ranks_are_read_from_the_traces_and_sorted_by_number(tmp_path):
    ranked(tmp_path / "a.1.pt.trace.json", 10)
    ranked(tmp_path / "b.1.pt.trace.json", 2)
    write(tmp_path / "c.9.pt.trace.json", [step(5, 0, 10)])
    write(tmp_path / "c.10.pt.trace.json", [step(6, 20, 30)])  # later, though its name comes first
    ranks = traces.ranks(tmp_path)
    assert {name: list(traces.breakdown(trace).index) for name, trace in ranks.items()} == {
        "rank 2": [3], "rank 10": [11], "c": [5, 6],
    }  # fmt: skip
    assert list(ranks) == ["rank 2", "rank 10", "c"]
    ranked(tmp_path / "old.1.pt.trace.json", 2)
    with pytest.raises(traces.SeveralRecordings, match="b and old .* rank 2"):
        traces.ranks(tmp_path)
