"""What an executed notebook leaves behind: each trace is right, here, in TensorBoard and by the stopwatch."""

import json

import pandas as pd
import pytest
from support.asking import overview

from helpers.results import scoreboard
from stepscope import tensorboard, traces
from stepscope.timing import profiling
from stepscope.traces import files

pytestmark = pytest.mark.timeout(1200)  # with the execution of the notebook, on a busy machine
FIRST = {  # of their kind: there is nothing to compare them with
    "01 naive PNG files", "05 photos as they are", "07 augmented image by image", "09 ResNet-50",
    "14 an object an image", "16 exchange after backward",
}  # fmt: skip
IN_TENSORBOARD = {"01", "09", "14", "16", "17"}  # one of each kind of trace; each start of TensorBoard takes seconds
BORROWED = {path.name for path in scoreboard.REFERENCE.iterdir()}


@pytest.fixture
def written(executed):
    """Folders of the traces that this notebook wrote, without those that it found or borrowed."""
    number = executed.notebook.stem[:2]
    files = executed.runs.glob(f"{number}*/**/*.pt.trace.json.gz")
    return {file.parent for file in files if file.parent.name not in BORROWED}


def test_the_profiler_tab_shows_the_same_breakdown_of_every_trace(executed, written):
    if executed.notebook.stem[:2] not in IN_TENSORBOARD:
        pytest.skip("this notebook records no trace, or none of another kind")
    server = tensorboard.start(executed.runs)
    try:
        shown_runs = set(server.get("runs")["runs"])
        assert {folder.relative_to(executed.runs).as_posix() for folder in written} <= shown_runs
        for run in shown_runs:
            recorded = traces.ranks(executed.runs / run)  # one, but where several processes trained together
            for worker, trace in zip(server.get("workers", run=run, view="Overview"), recorded.values(), strict=True):
                ours = traces.breakdown(trace)
                shown = pd.DataFrame.from_dict(dict(overview(server, run, worker)), orient="index")
                assert shown.index.tolist() == ours.index.tolist(), run
                assert (abs(ours[shown.columns] - shown) <= 1).all(axis=None), run  # µs
    finally:
        server.stop()


def test_every_trace_agrees_with_the_stopwatch_that_ran_along(executed, written):
    """The stopwatch looks before and after what the trace holds; in the best step hardly anything comes between."""
    clocks = {folder for folder in written if (folder / files.STOPWATCH).exists()}
    without = {folder for folder in written - clocks if not list(folder.glob("rank_*"))}  # ranks run no stopwatch
    assert {folder.name for folder in without} <= {"plain-profiler"}
    apart = {}  # µs
    for folder in clocks:
        clock, ours = profiling.stopwatch(folder), traces.breakdown(folder)
        assert ours.index.tolist() == clock.index.tolist()
        waits, steps = clock["wait"] - ours["DataLoader"], clock["step"] - ours[traces.CATEGORIES].sum(axis=1)
        best = max(abs(waits).min(), abs(steps).min())
        key = folder if len(clock) > 1 else "single steps"  # together: a busy machine may stand still in one
        apart[key] = min(best, apart.get(key, best))
    assert all(best < 1000 for best in apart.values()), apart


def test_the_notebook_adds_its_rungs_to_the_scoreboard_with_their_provenance(executed):
    number = executed.notebook.stem[:2]
    results = [json.loads(line) for line in (executed.runs / "scoreboard.jsonl").read_text().splitlines()]
    own = [result for result in results if result["rung"][:2] == number]
    expected = "scoreboard.add(" in executed.notebook.read_text(encoding="utf-8")
    if number == "11":  # where 16 bits are too slow to train in, there is no trace of them with all images, and no rung
        folder = executed.runs / "11-mixed-precision"
        expected = (folder / "bfloat16").exists() or (folder / "float16").exists()
    assert bool(own) == expected
    for result in own:
        assert result["preset"] == "ci"
        assert any(source in result["data"] for source in ("images", "photos", "CIFAR-10"))
        assert result["rate"]["mean"] > 0
        alone = result["workers"] == 1 and number == "03"  # where one worker is the fastest, it is compared with itself
        assert (result["baseline"] is None) == (result["rung"] in FIRST or alone)
