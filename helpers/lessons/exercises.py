"""Responds to predictions, and checks answers to the notebooks' questions that ask for a number or a name.

`helpers.lessons.checks` checks code.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from helpers.lessons.checks.answering import Wrong, answered, expect, slip
from helpers.simulate import SlowStorage
from helpers.training.precision import FLOAT16
from stepscope.base.confidence import Interval
from stepscope.base.wording import digits
from stepscope.timing.comparison import limits

NEAR = 0.15  # of a measurement: a prediction so near is good enough to decide by
TOLERANCE = 5e-3  # a share: as much as an answer of three digits is off, less than any term of a formula contributes


def _from_a_server(time_here: float, bytes_each: float, storage: SlowStorage) -> list[float]:
    opening, reading = storage.seconds_per_open, bytes_each / storage.bytes_per_second
    return [1 / (time_here + opening + reading), 1 / (time_here + opening), 1 / (time_here + reading)]


def _between_stalls(waits_ms: Sequence[float]) -> list[float]:
    stalls = np.flatnonzero(np.array(waits_ms) > max(waits_ms) / 2)
    workers = float(np.diff(stalls).mean())
    return [workers, workers - 1, len(stalls)]


def _largest_factor(largest: float) -> list[float]:
    factor = FLOAT16.largest / largest
    return [2.0 ** math.floor(math.log2(factor)), factor, 2.0 ** math.ceil(math.log2(factor))]


# For each question: the right answer and those of two mistakes, from what was measured; the unit; a hint; two replies
QUESTIONS: dict[str, tuple[Callable[..., list[float]], str, str, str, str]] = {
    "images from a server": (
        _from_a_server, " images/s", "Add three times in seconds (first: 1 / whole); the rate is 1 over their sum.",
        "The bytes of the file take time, too.", "Opening the file takes time, too.",
    ),
    "faster at most": (
        lambda waiting: [1 / (1 - waiting), 1 / waiting, 1 - waiting], " times",
        "If a share s goes away, 1 - s is left. How many times does that fit into the whole?",
        "That divides by what goes away; divide by what is left.", "That is what is left of the time, as a share.",
    ),
    "workers from stalls": (
        _between_stalls, " workers", "Count the steps from one long wait to the next.",
        "Those are the short waits between two long ones; a long one is a worker's turn, too.",
        "That is how many long waits there are.",
    ),
    "bytes for floats": (
        lambda: [256 * 3 * 224 * 224 * each for each in (3 / 1e6, 4 / 1e6, 3 / 2**20)], " MB",
        "Count the numbers in a batch. Each needs 4 bytes as a float, 1 as a byte.",
        "That is the batch in floats; its bytes are still sent.", "A megabyte has 10⁶ bytes here, not 2²⁰.",
    ),
    "paid for itself": (
        lambda once, before, after: [once / (before - after), once / before, once / after], " epochs",
        "What does one epoch save? How often does that fit into the time spent once?",
        "An epoch does not save all its earlier time: it still takes some.",
        "That divides by what an epoch still takes, not by what it saves.",
    ),
    "the next row": (
        lambda: [56 * 64, 56, 64], " elements", "Between the two lie all columns of one row, with all their channels.",
        "That is the distance to a contiguous tensor's next row.", "That is the distance to the next column.",
    ),
    "largest factor": (
        _largest_factor, "", "Largest number / largest gradient, then down to a power of two: 2 ** floor(log2(…)).",
        "That is no power of two.", "With that factor the gradient is infinite: round down, not up.",
    ),
    "graph at most": (
        lambda: [1_200 * 6e-3 / 4.0, (1_200 * 6e-3 + 4.0) / 4.0, 1_200 * 6e-3], " times",
        "The longer of launching and running decides. With a graph launching costs next to nothing.",
        "Launching and running overlap: the longer one is the step, not their sum.",
        "That is the step in ms, the first answer.",
    ),
}  # fmt: skip


def prediction(mine: float | None, measured: float | Interval | None, unit: str = "×") -> None:
    """Print a prediction (``...`` or None: there is none) beside the measurement (None: not possible here).

    Of a measurement with a confidence interval, the interval is printed, too. The prediction is near if it is within
    `NEAR` of the measurement: a share of it, or for percentages 15 percentage points.
    """
    ends = ""
    if isinstance(measured, Interval):
        ends, measured = f" (interval: {limits(measured)})", measured.mean
    found = "here it could not be measured" if measured is None else f"it is {_shown(measured)}{unit}{ends}"
    if mine is None or mine is ...:
        print(f"You made no prediction, and {found}. A guess first helps you to remember: try it next time.")
    elif not isinstance(mine, (int, float)):
        print(f"Your prediction, {mine!r}, is no number; {found}.")
    else:
        judged = ""
        if measured is not None and unit.startswith("%"):
            apart = abs(mine - measured)
            off = f"you were off by {digits(apart)}"
            judged = f" Within {100 * NEAR:.0f} percentage points: {'yes' if apart <= 100 * NEAR else 'no'}, {off}."
        elif measured is not None and min(mine, measured) > 0:
            near = abs(mine - measured) <= NEAR * measured
            off = f"you were off by a factor of {digits(max(mine, measured) / min(mine, measured))}"
            judged = f" Within {NEAR:.0%}: {'yes' if near else 'no'}, {off}."
        print(f"You predicted {_shown(mine)}{unit}; {found}.{judged}")


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else digits(value)


def check(question: str, answer: float | None, **measured: object) -> bool:
    """Print whether `answer` to one of `QUESTIONS` is right, and return that.

    `measured` are the arguments of the question's function.
    """
    compute, unit, hint, *said = QUESTIONS[question]
    expected, *slips = compute(**measured)

    def number(found: Any) -> str:
        found = found.item() if getattr(found, "ndim", None) == 0 else found  # of a tensor
        expect(isinstance(found, (int, float)), "a number", repr(found))
        whole = question == "paid for itself" and found == math.ceil(expected)  # epochs
        if not whole and abs(found - expected) > TOLERANCE * abs(expected):
            rounded = abs(found - expected) < abs(expected) / 20
            otherwise = "That is near: leave the formula, and round nothing in it." if rounded else hint
            raise Wrong(f"{found:.4g}. {slip(found, dict(zip(said, slips, strict=True)), otherwise)}")
        return f"{found:.4g}{unit}."

    return answered(number)(answer)


def check_names(
    answers: Mapping[str, str | None], expected: Mapping[str, str], *, names: Collection[str], hint: str
) -> bool:
    """Print for each question whether the name in `answers` is the expected one; return whether all are.

    A name must be one of `names`. The `hint` is printed with a wrong answer.
    """
    for question, name in expected.items():
        answer = answers.get(question)
        if answer is None or answer is ...:
            print(f"{question}: nothing to check yet.")
        elif answer not in names:
            print(f"{question}: expected one of {', '.join(map(repr, names))}, found {answer!r}.")
        else:
            print(f"{question}: right: {answer}." if answer == name else f"{question}: not yet: {answer}. {hint}")
    return all(answers.get(question) == name for question, name in expected.items())
