"""The trace of the guided tour: the one that ships, and that anybody can record it again."""

import gzip
import json
import platform
import re
import statistics
from pathlib import Path

import pytest

from helpers import traces
from helpers.results import scoreboard, tour

PARTS = {
    "training": {"Optimizer.zero_grad", "forward", "backward", "Optimizer.step", "metric"},
    "evaluation": {"forward", "metric"},
}


def read(folder):
    return json.loads(gzip.decompress((folder / tour.TRACE).read_bytes()))


def bars(trace):
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def annotated(trace, name):
    """The bars of a name on the host; with a GPU there are more of it there."""
    return [event for event in bars(trace) if event["cat"] == "user_annotation" and event["name"] == name]


def inside(outer, events):
    end = outer["ts"] + outer["dur"]
    return [each for each in events if outer["ts"] <= each["ts"] and each["ts"] + each["dur"] <= end]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return tour.record(tmp_path_factory.mktemp("recorded") / "tour")


@pytest.fixture(params=["ships", pytest.param("recorded", marks=pytest.mark.processes)])
def folder(request):
    return tour.FOLDER if request.param == "ships" else request.getfixturevalue("recorded")


def test_the_trace_has_its_steps(folder):
    assert len(traces.breakdown(folder)) == tour.TRAINING + tour.EVALUATION


def test_the_trace_that_ships_is_small_and_waits_for_each_batch():
    assert (tour.FOLDER / tour.TRACE).stat().st_size < 300e3
    assert (traces.breakdown(tour.FOLDER)["DataLoader"] > 0).all()


def test_in_the_trace_that_ships_evaluation_is_shorter_and_the_metric_a_larger_share_of_it():
    trace = read(tour.FOLDER)
    training, evaluation, metric = (
        statistics.mean(event["dur"] for event in annotated(trace, name))
        for name in ("training", "evaluation", "metric")
    )
    assert metric < evaluation < training


@pytest.mark.parametrize(("kind", "count"), [("training", tour.TRAINING), ("evaluation", tour.EVALUATION)])
def test_each_step_has_the_parts_that_the_tour_goes_through(folder, kind, count):
    trace = read(folder)
    steps = annotated(trace, kind)
    assert len(steps) == count
    named = [event for event in bars(trace) if event["cat"] == "user_annotation"]
    for step in steps:
        assert {each["name"].partition("#")[0] for each in inside(step, named)} - {kind} == PARTS[kind]


def test_a_metric_asks_for_each_of_its_numbers(folder):
    trace = read(folder)
    for metric in annotated(trace, "metric"):
        assert sum(each["name"] == "aten::item" for each in inside(metric, bars(trace))) == tour.CLASSES**2


def test_arrows_lead_from_forward_to_backward_in_training_alone(folder):
    trace = read(folder)
    starts = [event for event in trace["traceEvents"] if event.get("cat") == "fwdbwd" and event["ph"] == "s"]
    for kind, expected in (("training", True), ("evaluation", False)):
        for step in annotated(trace, kind):
            assert any(step["ts"] <= each["ts"] <= step["ts"] + step["dur"] for each in starts) == expected


def test_it_names_neither_the_machine_nor_its_folders(folder):
    text = gzip.decompress((folder / tour.TRACE).read_bytes()).decode() + (folder / tour.PAGE).read_text("utf-8")
    assert sorted(path.name for path in folder.iterdir()) == [tour.PAGE, tour.TRACE]
    assert platform.node() not in re.findall(r"[\w.-]+", text)
    assert str(Path.home()) + "/" not in text
    assert re.findall(r'(?:"|\s)(?:/\w|[A-Z]:\\)[^"\s]*', text) == []


def test_its_page_names_what_it_was_recorded_on(folder):
    page = (folder / tour.PAGE).read_text(encoding="utf-8")
    for key in ("device", "processor", "cores", "torch", "date", "threads of PyTorch"):
        assert re.search(rf"^\| {key} \| .+ \|$", page, re.MULTILINE), key


def test_it_is_no_reference_of_a_rung():
    assert tour.FOLDER.parent == scoreboard.REFERENCE
    assert not list(tour.FOLDER.rglob("*.jsonl"))


@pytest.mark.processes
def test_an_earlier_tour_is_replaced_and_nothing_else(recorded, tmp_path):
    own = tmp_path / "own"
    own.mkdir()
    (own / tour.PAGE).write_text("an earlier tour")
    (own / "thesis.txt").write_text("mine")
    with pytest.raises(tour.OtherFolder, match=r"thesis\.txt"):
        tour.record(own)
    assert (own / "thesis.txt").read_text() == "mine"
    before = (recorded / tour.TRACE).read_bytes()
    tour.record(recorded)
    assert (recorded / tour.TRACE).read_bytes() != before
