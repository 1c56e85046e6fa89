"""Tests that a trace is parsed once, however many tables are made of it, and again if it was recorded anew."""

import os

import pandas as pd
import pytest
from support import cuda_trace
from support.written import loading, step, write

from stepscope import traces
from stepscope.traces import events, files

NAMES = "accelerators breakdown exposed_copies gaps idle kernels memory_curve steps top_operators waits"
TABLES = [getattr(traces, name) for name in NAMES.split()]


@pytest.fixture
def parsed(monkeypatch):
    """The files that are parsed, in their order."""
    names, read = [], files.read

    def noting(path, build):
        names.append(path.name)
        return read(path, build)

    monkeypatch.setattr(files, "read", noting)
    events.recorded.cache_clear()
    yield names
    events.recorded.cache_clear()


def test_a_trace_is_parsed_once_for_all_tables(tmp_path, parsed):
    path = cuda_trace.write(tmp_path / "host_1.10.pt.trace.json")
    for table in TABLES:
        table(path)
        table(tmp_path)  # the folder of the run
    assert parsed == [path.name]


def test_a_trace_that_is_recorded_again_in_place_is_read_again(tmp_path, parsed):
    path = write(tmp_path / "trace.json", [step(1, 0, 100), loading(0, 30)])
    size = path.stat().st_size
    assert traces.breakdown(path)["DataLoader"].to_list() == [30]
    write(path, [step(1, 0, 100), loading(0, 50)])
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 20_000_000))  # a file system may note times in steps of 16 ms
    assert path.stat().st_size == size
    assert traces.breakdown(path)["DataLoader"].to_list() == [50]


@pytest.mark.parametrize("make", TABLES)
def test_changing_a_table_does_not_change_the_trace(tmp_path, make):
    trace = traces.load(cuda_trace.write(tmp_path / "trace.json"))
    table = make(trace)
    before = table.copy(deep=True)
    table.loc[:, table.select_dtypes("number").columns] = -1
    pd.testing.assert_frame_equal(make(trace), before)
