"""Answers to predictions and questions, and what notebooks show: sources, the checklist as a page."""

import re

import pytest
import torch

from helpers import config, simulate
from helpers.course import show_lines, source_of
from helpers.lessons import exercises, topics
from helpers.simulate import slow_storage
from stepscope import rules
from stepscope.base.confidence import Interval

# Of each question what was measured, the answer, and plausible wrong ones
NUMBERS = {
    "images from a server": (
        {"time_here": 3e-4, "bytes_each": 2_300, "storage": simulate.SHARED_FILE_SYSTEM},
        1 / (3e-4 + 2e-3 + 2_300 / 50e6),
        [1 / (3e-4 + 2e-3), 1 / (3e-4 + 2_300 / 50e6), 3e-4 + 2e-3 + 2_300 / 50e6],
    ),
    "faster at most": ({"waiting": 0.8}, 5.0, [1 / 0.8, 1 - 0.8, 80]),
    "workers from stalls": ({"waits_ms": [0.2, 0.1, 81.0, *[0.1, 0.2, 0.1, 0.2, 79.5] * 2]}, 5, [4, 3, 79.5]),
    "bytes for floats": ({}, 115.6, [154.1, 110.25, 462_422_016]),
    "paid for itself": ({"once": 12.0, "before": 4.0, "after": 1.0}, 4, [3, 12, 0.25]),
    "the next row": ({}, 3_584, [56, 64, 56 * 56]),
    "largest factor": ({"largest": 60.0}, 1_024, [65_504 / 60, 2_048, 10]),
    "graph at most": ({}, 1.8, [(7.2 + 4) / 4, 7.2, 4 / 7.2]),
}  # fmt: skip


@pytest.mark.parametrize("question", exercises.QUESTIONS)
def test_a_wrong_number_is_refused_and_told_its_own_fault(question, capsys):
    measured, right, wrong = NUMBERS[question]
    assert exercises.check(question, torch.tensor(right, dtype=torch.float64), **measured) is True
    assert [exercises.check(question, answer, **measured) for answer in wrong] == [False] * len(wrong)
    assert len({line.split(". ", 1)[1] for line in capsys.readouterr().out.splitlines()[1:]}) == len(wrong)


def test_what_is_no_number_is_refused(capsys):
    assert [exercises.check("faster at most", answer, waiting=0.5) for answer in (..., "two")] == [False, False]
    assert re.findall("Nothing to check|'two'", capsys.readouterr().out) == ["Nothing to check", "'two'"]


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
    (2, 3.0, ["2", "3.00", "15", "1.50"]), (3, 3.0, ["3", "3.00", "15", "1.00"]), (4, 0, ["4", "0"]),
    (..., 3.0, ["3.00"]),
    (None, None, []), (2, None, ["2"]), ("two", 3.0, ["3.00"]),
    (2, Interval(3.0, 2.5, 3.6, 5), ["2", "3.00", "2.50", "3.60", "15", "1.50"]),
    (2, Interval(3.0, 0, 9, 1), ["2", "3.00", "15", "1.50"]),
])  # fmt: skip
def test_a_prediction_is_answered_with_the_numbers(mine, measured, numbers, capsys):
    exercises.prediction(mine, measured)
    assert re.findall(r"[\d.]*\d", capsys.readouterr().out) == numbers


@pytest.mark.parametrize(("mine", "measured", "unit", "near"), [
    (2.6, 3.0, "×", "yes"), (2.5, 3.0, "×", "no"), (3.4, 3.0, "×", "yes"), (3.5, 3.0, "×", "no"),
    (80, 66.0, "% of waiting", "yes"), (80, 64.0, "% of waiting", "no"), (0, 3.0, "% of waiting", "yes"),
])  # fmt: skip
def test_a_prediction_is_judged_by_fifteen_percent(mine, measured, unit, near, capsys):
    exercises.prediction(mine, measured, unit)
    assert re.search(r"Within 15.*: (yes|no), you were off by", capsys.readouterr().out)[1] == near


def test_parts_of_a_file_are_shown_from_line_to_line(tmp_path):
    (tmp_path / "loop.py").write_text("a = 1\nif a:\n    b = 2\n    c = 3\nd = 4\n")
    shown = show_lines(tmp_path / "loop.py", ("if a", "b ="), ("d", "d"))
    assert shown.data == "if a:\n    b = 2\n…\nd = 4"
    with pytest.raises(ValueError, match="begins with 'a', found none"):
        show_lines(tmp_path / "loop.py", ("c", "a"))


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
    assert {rule.topic for rule in rules.ALL} == set(topics.links())
