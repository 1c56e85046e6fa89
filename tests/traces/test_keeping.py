"""Tests that a trace is parsed once, however many tables are made of it, and again if it was recorded anew."""

import copy
import os
import pickle

import pandas as pd
import pytest
from support import cuda_trace
from support.written import loading, step, two_steps, write

from helpers import traces
from helpers.traces import files, keeping

TABLES = [
    traces.accelerators,
    traces.breakdown,
    traces.exposed_copies,
    traces.gaps,
    traces.idle,
    traces.kernels,
    traces.memory_curve,
    traces.steps,
    traces.top_operators,
    traces.waits,
]


@pytest.fixture
def parsed(monkeypatch):
    """The files that are parsed, in their order."""
    names, read = [], files.read

    def noting(path, build):
        names.append(path.name)
        return read(path, build)

    monkeypatch.setattr(files, "read", noting)
    keeping.clear()
    yield names
    keeping.clear()


def test_a_trace_is_parsed_once_however_many_tables_are_made_of_it(tmp_path, monkeypatch, parsed):
    path = cuda_trace.write(tmp_path / "host_1.10.pt.trace.json")
    for table in TABLES:
        table(path)
        table(tmp_path)  # the folder of the run
    monkeypatch.chdir(tmp_path)
    traces.load(path.name)
    assert parsed == [path.name]


def test_a_trace_that_is_recorded_anew_in_place_is_read_anew(tmp_path, parsed):
    path = write(tmp_path / "trace.json", [step(1, 0, 100), loading(0, 30)])
    size = path.stat().st_size
    assert traces.breakdown(path)["DataLoader"].to_list() == [30]
    write(path, [step(1, 0, 100), loading(0, 50)])
    assert path.stat().st_size == size
    assert traces.breakdown(path)["DataLoader"].to_list() == [50]


def test_a_file_of_the_same_size_and_time_that_takes_the_place_of_another_is_read(tmp_path, parsed):
    path = write(tmp_path / "trace.json", [step(1, 0, 100), loading(0, 30)])
    other = write(tmp_path / "other.json", [step(1, 0, 100), loading(0, 50)])
    time = path.stat().st_mtime_ns
    os.utime(other, ns=(time, time))
    assert traces.breakdown(path)["DataLoader"].to_list() == [30]
    other.replace(path)
    assert traces.breakdown(path)["DataLoader"].to_list() == [50]


def test_a_trace_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch, parsed):
    path = write(tmp_path / "trace.json", two_steps())
    read = files.read

    def changing(path, build):
        found = read(path, build)
        path.write_bytes(path.read_bytes() + b" ")
        return found

    with monkeypatch.context() as patch:
        patch.setattr(files, "read", changing)
        traces.load(path)
    traces.load(path)
    assert len(parsed) == 2


def test_a_trace_that_goes_while_it_is_read_is_returned(tmp_path, monkeypatch, parsed):
    path = write(tmp_path / "trace.json", two_steps())
    read = files.read

    def removing(path, build):
        found = read(path, build)
        path.unlink()
        return found

    monkeypatch.setattr(files, "read", removing)
    assert len(traces.load(path).spans[0].events)


def test_a_span_that_joins_a_run_is_read_too(tmp_path):
    write(tmp_path / "host_1.10.pt.trace.json", [step(2, 1000, 1300)])
    assert list(traces.steps(tmp_path).index) == [2]
    write(tmp_path / "host_1.20.pt.trace.json", [step(8, 5000, 5100)])
    assert list(traces.steps(tmp_path).index) == [2, 8]


@pytest.mark.parametrize("make", TABLES, ids=lambda each: each.__name__)
def test_whatever_is_done_with_a_table_the_trace_stays_as_it_was(tmp_path, make):
    trace = traces.load(cuda_trace.write(tmp_path / "trace.json"))
    table = make(trace)
    before = table.copy(deep=True)
    table.loc[:, table.select_dtypes("number").columns] = -1
    table["more"] = 1
    del table[table.columns[0]]
    pd.testing.assert_frame_equal(make(trace), before)
    pd.testing.assert_frame_equal(make(trace.path), before)


@pytest.mark.parametrize("name", ["events", "kernels", "memory"])
def test_whatever_is_done_with_the_tables_of_a_span_the_span_stays_as_it_was(tmp_path, name):
    path = cuda_trace.write(tmp_path / "trace.json")
    span = traces.load(path).spans[0]
    table = getattr(span, name)
    before = table.copy(deep=True)
    table.loc[:, "start"] = -1.0
    del table[table.columns[1]]
    pd.testing.assert_frame_equal(getattr(span, name), before)
    pd.testing.assert_frame_equal(getattr(traces.load(path).spans[0], name), before)
    with pytest.raises(TypeError):
        span.devices[0]["name"] = "another"


def test_only_the_last_few_traces_are_kept(tmp_path, parsed):
    paths = [write(tmp_path / f"{number}.json", two_steps()) for number in range(keeping.TRACES + 1)]
    for path in paths[:-1]:
        traces.load(path)
    traces.load(paths[0])  # so the second is the one that was used least recently
    traces.load(paths[-1])
    del parsed[:]
    for path in (paths[0], paths[-1], paths[1]):
        traces.load(path)
    assert parsed == ["1.json"]


def test_traces_with_many_events_are_kept_in_smaller_number(tmp_path, monkeypatch, parsed):
    monkeypatch.setattr(keeping, "EVENTS", 2 * len(two_steps()))
    paths = [write(tmp_path / f"{number}.json", two_steps()) for number in range(3)]
    for path in [*paths, *reversed(paths)]:
        traces.load(path)
    assert parsed == ["0.json", "1.json", "2.json", "0.json"]


def test_a_trace_can_be_sent_to_another_process(tmp_path):
    trace = traces.load(cuda_trace.write(tmp_path / "trace.json"))
    for again in (pickle.loads(pickle.dumps(trace)), copy.deepcopy(trace)):
        pd.testing.assert_frame_equal(traces.kernels(again), traces.kernels(trace))
        assert again.spans[0].devices == trace.spans[0].devices
