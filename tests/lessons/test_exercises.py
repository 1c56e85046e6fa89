import pytest

from helpers import simulate
from helpers.lessons import exercises

RIGHT = {"A": "latency", "B": "processor"}


@pytest.mark.parametrize(("answer", "right", "said"), [
    (2.0, True, "Right: 2"),
    (2.05, True, "Right"),
    (2.2, False, "Not yet: 2.2. If a share"),
    (..., False, "Nothing to check"),
    ("two", False, "Expected a number"),
])  # fmt: skip
def test_a_number_is_right_within_its_tolerance(answer, right, said, capsys):
    assert exercises.check("faster at most", answer, waiting=0.5) is right
    assert said in capsys.readouterr().out


def test_stalls_are_counted_from_one_long_wait_to_the_next(capsys):
    waits = [0.2, 81.0, 0.1, 0.2, 79.5, 0.1, 0.2, 80.3]
    assert exercises.check("workers from stalls", 3, waits_ms=waits)
    assert not exercises.check("workers from stalls", 4, waits_ms=waits)


def test_a_server_adds_its_waits_to_the_time_of_an_image():
    storage = simulate.SlowStorage(seconds_per_open=0.002, bytes_per_second=1e6)
    assert exercises.check("images from a server", 1 / 0.005, time_here=0.001, bytes_each=2000, storage=storage)


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


@pytest.mark.parametrize(("mine", "measured", "said"), [
    (2, 3.0, "You predicted 2×; it is 3.00×: 1.50× apart."),
    (3, 3.0, "You predicted 3×; it is 3.00×."),
    (4, 0, "You predicted 4×; it is 0×."),
    (..., 3.0, "You made no prediction, and it is 3.00×. To guess first"),
    (None, None, "You made no prediction, and here it could not be measured."),
    (2, None, "You predicted 2×; here it could not be measured."),
    ("two", 3.0, "Your prediction, 'two', is no number; it is 3.00×."),
])  # fmt: skip
def test_a_prediction_is_answered_and_none_is_said_kindly(mine, measured, said, capsys):
    exercises.prediction(mine, measured)
    assert said in capsys.readouterr().out
