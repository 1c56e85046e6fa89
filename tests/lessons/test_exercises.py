"""Answers to predictions and questions, and what notebooks show: sources, the checklist as a page."""

import re

import pytest

from helpers import config, simulate
from helpers.course import source_of
from helpers.lessons import exercises, topics
from helpers.simulate import slow_storage
from stepscope.diagnosis import device, job, loading, step


@pytest.mark.parametrize(("answer", "right", "said"), [
    (2.05, True, "Right"),
    (2.2, False, "Not yet: 2.2. If a share"),
    (..., False, "Nothing to check"),
    ("two", False, "Expected a number"),
])  # fmt: skip
def test_a_number_is_right_within_its_tolerance(answer, right, said, capsys):
    assert exercises.check("faster at most", answer, waiting=0.5) is right
    assert said in capsys.readouterr().out


def test_what_is_expected_is_computed_from_what_was_measured():
    waits = [0.2, 81.0, 0.1, 0.2, 79.5, 0.1, 0.2, 80.3]
    assert exercises.check("workers from stalls", 3, waits_ms=waits)
    server = simulate.SlowStorage(seconds_per_open=0.002, bytes_per_second=1e6)
    assert exercises.check("images from a server", 1 / 0.005, time_here=0.001, bytes_each=2000, storage=server)


@pytest.mark.parametrize(("answers", "right", "said"), [
    ({"A": "latency", "B": "processor"}, True, ["A: right: latency.", "B: right: processor."]),
    ({"A": ..., "B": "latency"}, False, ["A: nothing to check yet.", "B: not yet: latency. Look again."]),
    ({"A": "disk"}, False, ["A: expected one of 'latency', 'processor', found 'disk'.", "B: nothing to check yet."]),
])  # fmt: skip
def test_each_name_is_checked(answers, right, said, capsys):
    expected = {"A": "latency", "B": "processor"}
    assert exercises.check_names(answers, expected, names=list(expected.values()), hint="Look again.") is right
    assert capsys.readouterr().out.splitlines() == said


@pytest.mark.parametrize(("mine", "measured", "numbers"), [
    (2, 3.0, ["2", "3.00", "1.50"]), (3, 3.0, ["3", "3.00"]), (4, 0, ["4", "0"]), (..., 3.0, ["3.00"]),
    (None, None, []), (2, None, ["2"]), ("two", 3.0, ["3.00"]),
])  # fmt: skip
def test_a_prediction_is_answered_with_the_numbers(mine, measured, numbers, capsys):
    exercises.prediction(mine, measured)
    assert re.findall(r"[\d.]*\d", capsys.readouterr().out) == numbers


def test_the_source_of_several_objects_comes_below_each_other():
    shown = source_of(slow_storage.SlowStorage.seconds, test_each_name_is_checked)
    assert shown.language == "python"
    assert shown.data.index("def seconds(self") < shown.data.index("def test_each_name_is_checked")


def test_the_checklist_is_a_page_whose_links_lead_to_the_notebooks(tmp_path):
    page = tmp_path / "new" / "checklist.html"
    topics.write_checklist(page)
    html = page.read_text(encoding="utf-8")
    assert html.count("<tr>") == topics.checklist().count("\n|") - 1  # the line below the heads is no row
    for link in set(re.findall(r'href="([^"#:]+)"', html)):
        assert (config.PROJECT / "notebooks" / link).exists(), link


def test_every_topic_of_a_finding_leads_to_a_notebook():
    rooms = (loading, device, step, job)
    tables = [table for room in rooms for name, table in vars(room).items() if name.startswith("RULES")]
    assert {rule.topic for table in tables for rule in table} == set(topics.NOTEBOOKS) == set(topics.links())
