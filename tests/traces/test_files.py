"""Tests of finding the runs below a folder."""

import pytest
from support.written import two_steps, write

from helpers import staging, traces


def run(folder):
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "host_1.10.pt.trace.json", two_steps())
    return folder


def test_runs_are_the_folders_with_traces_at_and_below_a_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "a.pt.trace.json").mkdir(parents=True)  # a folder named like a trace
    found = [run(folder) for folder in (tmp_path, tmp_path / "a", tmp_path / "b" / "c")]
    assert traces.runs(tmp_path) == found


def test_what_a_killed_recording_has_left_is_no_run(tmp_path):
    run(tmp_path / "finished")
    with staging.scratch(tmp_path / "recorded") as folder:
        run(folder)
        run(folder / "below")
        assert traces.runs(tmp_path) == [tmp_path / "finished"]
        assert traces.runs(folder) == [folder, folder / "below"]  # named itself


def test_without_runs_the_folder_is_named(tmp_path):
    with pytest.raises(traces.NoTraces, match=f"{tmp_path} holds no .*Record a profile first"):
        traces.runs(tmp_path)
    with pytest.raises(traces.NoTraces, match="nowhere does not exist"):
        traces.runs(tmp_path / "nowhere")
