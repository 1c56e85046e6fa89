"""The trace of the guided tour: the one that ships, and that anybody can record it again."""

import gzip
import json
import platform
import re
from pathlib import Path

import pytest

from helpers import config
from helpers.results import tour
from stepscope import traces

PARTS = {
    "training": {"Optimizer.zero_grad", "forward", "backward", "Optimizer.step", "metric"},
    "evaluation": {"forward", "metric"},
}


def read(folder):
    return json.loads(gzip.decompress((folder / tour.TRACE).read_bytes()))


def bars(trace):
    return [event for event in trace["traceEvents"] if event.get("ph") == "X"]


def inside(outer, events):
    end = outer["ts"] + outer["dur"]
    return [each for each in events if outer["ts"] <= each["ts"] and each["ts"] + each["dur"] <= end]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return tour.record(tmp_path_factory.mktemp("recorded") / "tour")


@pytest.fixture(params=["ships", pytest.param("recorded", marks=pytest.mark.processes)])
def folder(request):
    return tour.FOLDER if request.param == "ships" else request.getfixturevalue("recorded")


def test_the_trace_that_ships_is_small_and_waits_for_each_batch():
    assert (tour.FOLDER / tour.TRACE).stat().st_size < 300e3
    assert (traces.breakdown(tour.FOLDER)["DataLoader"] > 0).all()


def test_each_step_has_the_parts_that_the_tour_goes_through_and_a_metric_asks_for_each_of_its_numbers(folder):
    assert len(traces.breakdown(folder)) == tour.TRAINING + tour.EVALUATION
    events = bars(read(folder))
    named = [event for event in events if event["cat"] == "user_annotation"]
    steps = [event for event in named if event["name"] in PARTS]
    assert [step["name"] for step in steps] == ["training"] * tour.TRAINING + ["evaluation"] * tour.EVALUATION
    for step in steps:
        assert {each["name"].partition("#")[0] for each in inside(step, named)} - {step["name"]} == PARTS[step["name"]]
        (metric,) = (each for each in inside(step, named) if each["name"] == "metric")
        assert sum(each["name"] == "aten::item" for each in inside(metric, events)) == tour.CLASSES**2


def test_it_names_neither_the_machine_nor_its_folders(folder):
    text = gzip.decompress((folder / tour.TRACE).read_bytes()).decode() + (folder / tour.PAGE).read_text("utf-8")
    assert sorted(path.name for path in folder.iterdir()) == [tour.PAGE, tour.TRACE]
    assert platform.node() not in re.findall(r"[\w.-]+", text)
    assert str(Path.home()) + "/" not in text
    assert re.findall(r'(?:"|\s)(?:/\w|[A-Z]:\\)[^"\s]*', text) == []


def test_notebook_01_searches_for_what_is_in_the_trace_that_ships():
    text = (config.PROJECT / "notebooks" / "01-first-profile.ipynb").read_text(encoding="utf-8")
    words = re.findall(r"(?:Search for|Type) `([^`]+)`", text)
    names = {event["name"] for event in bars(read(tour.FOLDER))}
    assert len(words) == 7
    assert [word for word in words if not any(word in name for name in names)] == []
