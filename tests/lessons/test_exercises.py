import pytest

from helpers.lessons import exercises

RIGHT = {"A": "latency", "B": "processor"}


@pytest.mark.parametrize(("answer", "right", "said"), [
    (2.0, True, "Right: 2"),
    (2.05, True, "Right"),
    (2.2, False, "Not yet: 2.2. Halve it."),
    (..., False, "Nothing to check"),
    ("two", False, "Expected a number"),
])  # fmt: skip
def test_a_number_is_right_within_its_tolerance(answer, right, said, capsys):
    assert exercises.check(answer, 2, hint="Halve it.") is right
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(("answers", "right", "said"), [
    (RIGHT, True, ["A: right: latency.", "B: right: processor."]),
    ({"A": "latency", "B": "latency"}, False, ["A: right", "B: not yet: latency. Look again."]),
    ({"A": ..., "B": None}, False, ["A: nothing to check yet.", "B: nothing to check yet."]),
    ({"A": "disk", "B": "processor"}, False, ["A: expected one of 'latency', 'processor', 'start', found 'disk'."]),
    ({}, False, ["A: nothing to check yet."]),
])  # fmt: skip
def test_each_name_is_checked(answers, right, said, capsys):
    names = ["latency", "processor", "start"]
    assert exercises.check_names(answers, RIGHT, names=names, hint="Look again.") is right
    out = capsys.readouterr().out
    assert all(line in out for line in said)
