"""What the executed notebooks left behind: each trace is right, here, in TensorBoard and by the stopwatch."""

import json

import pandas as pd
import pytest
from asking import overview

from helpers import profiling, tensorboard, traces
from helpers.diagnosis import watching


@pytest.fixture(scope="module")
def server(executed_runs):
    server = tensorboard.start(executed_runs)
    yield server
    server.stop()


def test_the_profiler_tab_lists_all_runs_of_all_notebooks(server, executed, executed_runs):
    written = {file.parent.relative_to(executed_runs).as_posix() for file in executed_runs.rglob("*.pt.trace.json.gz")}
    assert set(server.get("runs")["runs"]) == written
    recorded = {run.split("/")[0][:2] for run in written if run != watching.RUN}
    assert recorded == those_that_call("profiling.record", executed)
    assert (watching.RUN in written) == bool(those_that_call("diagnosis.diagnose", executed))


def test_the_overview_equals_our_own_breakdown_of_every_trace(server, executed_runs):
    for run in server.runs:
        ours = traces.breakdown(executed_runs / run)
        shown = pd.DataFrame.from_dict(dict(overview(server, run)), orient="index")
        assert shown.index.tolist() == ours.index.tolist(), run
        assert (abs(ours[shown.columns] - shown) <= 1).all(axis=None), run  # µs


def test_every_trace_agrees_with_the_stopwatch_that_ran_along(executed_runs):
    checked = 0
    for clock_file in executed_runs.rglob(profiling.STOPWATCH):
        clock, ours = profiling.stopwatch(clock_file.parent), traces.breakdown(clock_file.parent)
        assert ours.index.tolist() == clock.index.tolist()
        assert abs(ours["DataLoader"] - clock["wait"]).median() < 1000, clock_file  # µs
        assert abs(ours[traces.CATEGORIES].sum(axis=1) - clock["step"]).median() < 1000, clock_file
        checked += 1
    assert checked >= 10


def test_the_first_profile_shows_that_the_loop_waits_for_data(executed_runs):
    assert (traces.breakdown(executed_runs / "01-first-profile" / "one-worker")["DataLoader"] > 0).all()


def test_the_scoreboard_has_a_line_with_its_provenance_for_every_rung(executed, executed_runs):
    results = [json.loads(line) for line in (executed_runs / "scoreboard.jsonl").read_text().splitlines()]
    assert {result["rung"][:2] for result in results} == those_that_call("scoreboard.add", executed)
    for result in results:
        assert result["preset"] == "ci"
        assert "images" in result["data"] or "CIFAR-10" in result["data"]
        assert result["images_per_second"] > 0


def those_that_call(function, executed):
    """Numbers of the executed notebooks that call a function."""
    return {path.name[:2] for path in executed.notebooks if f"{function}(" in path.read_text()}
