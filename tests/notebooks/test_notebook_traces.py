"""What an executed notebook leaves behind: each trace is right, here, in TensorBoard and by the stopwatch."""

import ast
import json
from dataclasses import replace

import nbformat
import pandas as pd
import pytest
import torch
from support.asking import overview
from support.notebooks import NOTEBOOKS

from helpers import tensorboard, traces, training
from helpers.data import cifar10, photos, stores
from helpers.diagnosis import watching
from helpers.results import rungs, scoreboard
from helpers.results.describing import describe
from helpers.timing import profiling

FIRST = {
    "01 naive PNG files",
    "07 augmented image by image",
    "08 ResNet-50",
    "12 an object an image",
    "13 exchange after backward",
}  # of their kind: there is nothing to compare them with
BORROWED = {path.name for path in scoreboard.REFERENCE.iterdir()}


@pytest.fixture
def written(executed):
    """Folders of the traces that this notebook wrote, without those that it found or borrowed."""
    number = executed.notebook.stem[:2]
    return {
        file.parent
        for file in executed.runs.rglob("*.pt.trace.json.gz")
        if file.relative_to(executed.runs).parts[0][:2] in (number, watching.RUN[:2])
        and file.parent.name not in BORROWED
    }


def test_traces_are_left_by_the_notebooks_that_record_some(executed, written):
    recorded = {folder for folder in written if folder.name != watching.RUN}
    assert bool(recorded) == (executed.calls("profiling.record") or executed.calls("launching.torchrun"))
    assert (len(recorded) < len(written)) == executed.calls("diagnosis.diagnose")


def test_the_profiler_tab_shows_the_same_breakdown_of_every_trace(executed, written):
    if not written:
        pytest.skip("this notebook records no trace")
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
    clocks = {folder for folder in written if (folder / profiling.STOPWATCH).exists()}
    without = {folder for folder in written - clocks if not list(folder.glob("rank_*"))}  # ranks run no stopwatch
    assert {folder.name for folder in without} <= {"plain-profiler"}
    for folder in clocks:
        clock, ours = profiling.stopwatch(folder), traces.breakdown(folder)
        assert ours.index.tolist() == clock.index.tolist()
        for theirs, mine in ((clock["wait"], ours["DataLoader"]), (clock["step"], ours[traces.CATEGORIES].sum(axis=1))):
            assert abs(theirs - mine).min() < 1000, folder  # µs


def rungs_of(executed):
    """Return the results that this notebook has added to its scoreboard."""
    results = [json.loads(line) for line in (executed.runs / "scoreboard.jsonl").read_text().splitlines()]
    return [result for result in results if result["rung"][:2] == executed.notebook.stem[:2]]


def as_recorded(result, data, tmp_path):
    """Return a rung as `record` times it, with what the notebook found best: its workers, and whether in bfloat16."""
    if result["rung"] in rungs.RESNET:
        definition = rungs.RESNET[result["rung"]]
        if result["rung"][:2] == "11" and "bfloat16" not in result["step"]:
            definition = replace(definition, autocast=None)
        return rungs.resnet_rung(result["rung"], data, definition)
    if result["rung"][:2] == "12":
        place = stores.Folder(tmp_path)
        return next(rung for rung in rungs.streaming_rungs(data, place, place) if rung.name == result["rung"])
    group = rungs.augmenting_rungs if result["rung"][:2] == "07" else rungs.loading_rungs
    (rung,) = (rung for rung in group(data, result["workers"]) if rung.name == result["rung"])
    return rung


def test_the_notebook_times_its_rungs_with_the_loader_and_the_step_that_are_recorded(
    executed, any_images, tmp_path, monkeypatch
):
    results = rungs_of(executed)
    if not results:
        pytest.skip("this notebook adds no rung")
    if {result["rung"] for result in results} <= set(rungs.OF_RANKS):
        pytest.skip("its rungs are timed by the ranks of a job, and `record` starts none")
    for name in ("COURSE_DATA", "COURSE_PRESET"):
        monkeypatch.setenv(name, any_images[name])
    data = cifar10.prepare()
    for result in results:
        rung = as_recorded(result, data, tmp_path)
        assert result["setting"] == describe(rung.loader, rung.step)


def test_the_notebook_on_photos_defines_the_loaders_and_the_step_that_are_recorded(any_images, monkeypatch):
    """It adds no rung to the scoreboard, so what it defines is compared, without what it measures."""
    for name in ("COURSE_DATA", "COURSE_RUNS", "COURSE_PRESET"):
        monkeypatch.setenv(name, any_images[name])
    (notebook,) = (path for path in NOTEBOOKS if path.stem.startswith("05"))
    names = {"preset", "device", "data", "SIZE", "CROP", "resize", "crop_and_flip", "to_tensor", "naive", "crop_only"}
    defined = definitions(notebook, names | {"copies", "variants", "loader_of", "step"})
    recorded = rungs.photo_rungs(photos.prepare(), defined["copies"].folder)
    for rung, variant in zip(recorded, ("naive", "resized ahead"), strict=True):
        assert describe(defined["loader_of"](variant, workers=1), defined["step"]) == describe(rung.loader, rung.step)


def test_the_notebook_on_mixed_precision_defines_the_step_that_is_recorded(any_images, monkeypatch):
    """Where bfloat16 is too slow to train in, it adds no rung, so what it defines is compared here, too."""
    for name in ("COURSE_DATA", "COURSE_PRESET"):
        monkeypatch.setenv(name, any_images[name])
    (notebook,) = (path for path in NOTEBOOKS if path.stem.startswith("10"))
    defined = definitions(notebook, {"device", "data", "images", "workload", "new_model", "new_step", "loader"})
    rung = rungs.resnet_rung("10 mixed precision", defined["data"], rungs.RESNET["10 mixed precision"])
    step = training.WithTF32(defined["new_step"](torch.bfloat16), False)
    assert describe(defined["loader"], step) == describe(rung.loader, rung.step)


def definitions(notebook, names):
    """Execute the imports of a notebook, and of its other statements those that define one of `names`."""
    source = "\n".join(cell.source for cell in nbformat.read(notebook, 4).cells if cell.cell_type == "code")
    kept = []
    for statement in ast.parse(source).body:
        nodes = list(ast.walk(statement)) if isinstance(statement, ast.Assign | ast.If) else []
        bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        if isinstance(statement, ast.Import | ast.ImportFrom) or (bound | {getattr(statement, "name", None)}) & names:
            kept.append(statement)
    defined = {}
    exec(compile(ast.Module(kept, []), str(notebook), "exec"), defined)
    return defined


def test_the_notebook_adds_its_rungs_to_the_scoreboard_with_their_provenance(executed):
    number, own = executed.notebook.stem[:2], rungs_of(executed)
    expected = executed.calls("scoreboard.add")
    if number == "10":  # where bfloat16 is too slow to train in, there is no trace of it with all images, and no rung
        expected = (executed.runs / "10-mixed-precision" / "bfloat16").exists()
    assert bool(own) == expected
    for result in own:
        assert result["preset"] == "ci"
        assert "images" in result["data"] or "CIFAR-10" in result["data"]
        assert result["images_per_second"] > 0
        assert (result["baseline"] is None) == (result["rung"] in FIRST)
