"""Answers predictions, and checks the answers to questions of the notebooks for a number or a name.

Code that the reader writes is checked by `helpers.lessons.checks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from helpers.simulate import SlowStorage
from helpers.training.precision import FLOAT16
from stepscope.base.wording import digits


@dataclass(frozen=True)
class Question:
    """A question for a number: what it should be, from what was measured, and a hint for who is further off.

    `tolerance` is the largest deviation that counts as right, as a share of what is expected.
    """

    expected: Callable[..., float]
    hint: str
    tolerance: float = 0.05


def _from_a_server(time_here: float, bytes_each: float, storage: SlowStorage) -> float:
    return 1 / (time_here + storage.seconds_per_open + bytes_each / storage.bytes_per_second)


def _between_stalls(waits_ms: Sequence[float]) -> float:
    return float(np.diff(np.flatnonzero(np.array(waits_ms) > max(waits_ms) / 2)).mean())


QUESTIONS = {
    "images from a server": Question(
        _from_a_server, "Add three times in seconds (1 / whole is the first of them); the rate is 1 over their sum."
    ),
    "faster at most": Question(
        lambda waiting: 1 / (1 - waiting),
        "If a share s goes away, 1 - s is left. How many times does that fit into the whole?",
    ),
    "workers from stalls": Question(_between_stalls, "Count the steps from one long wait to the next."),
    "bytes for floats": Question(
        lambda: 256 * 3 * 224 * 224 * (4 - 1) / 1e6,
        "Count the numbers in a batch. Each needs 4 bytes as a float, 1 as a byte.",
    ),
    "paid for itself": Question(
        lambda once, before, after: once / (before - after),
        "What does one epoch save? How often does that fit into the time it took once?",
    ),
    "PNG from storage": Question(
        lambda: (150e3 / 200e6) / (60e3 / 200e6 + 1.2e-3),
        "How long does a photo take in each case? Both times are sums of reading and decoding.",
    ),
    "ReLU at most": Question(
        lambda gb_per_second: gb_per_second / 8 / 1e3,
        "Bytes per second, divided by the bytes for each operation; then GB to TFLOP: 1 TFLOP = 1000 GFLOP.",
    ),
    "the next row": Question(
        lambda: 56 * 64, "Between the two lie all columns of one row, each with all its channels.", tolerance=0
    ),
    "largest factor": Question(
        lambda largest: 2.0 ** math.floor(math.log2(FLOAT16.largest / largest)),
        "Largest number / largest gradient, then down to a power of two: 2 ** floor(log2(…)).",
    ),
    "graph at most": Question(
        lambda: max(1_200 * 6e-3, 4.0) / 4.0,
        "The longer of launching and running decides. With a graph launching costs next to nothing.",
    ),
}


def prediction(mine: float | None, measured: float | None, unit: str = "×") -> None:
    """Print what was predicted (``...`` or None: nothing) beside what was measured (None: here it could not be)."""
    found = "here it could not be measured" if measured is None else f"it is {_shown(measured)}{unit}"
    if _missing(mine):
        print(f"You made no prediction, and {found}. To guess first makes it stay in mind: try it next time.")
    elif not isinstance(mine, (int, float)):
        print(f"Your prediction, {mine!r}, is no number; {found}.")
    else:
        comparable = measured is not None and min(mine, measured) > 0
        apart = max(mine, measured) / min(mine, measured) if comparable else 1
        print(f"You predicted {_shown(mine)}{unit}; {found}{f': {digits(apart)}× apart' if apart >= 1.005 else ''}.")


def _missing(answer: object) -> bool:
    return answer is None or answer is ...


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else digits(value)


def check(question: str, answer: float | None, **measured: object) -> bool:
    """Say whether `answer` to one of `QUESTIONS` is right, and return that.

    `measured` is what the question's `expected` computes the answer from.
    """
    asked = QUESTIONS[question]
    if _missing(answer):
        print("Nothing to check yet: fill in the cell above, run it, then run this cell again.")
        return False
    if not isinstance(answer, (int, float)):
        print(f"Expected a number, found {answer!r}.")
        return False
    expected = asked.expected(**measured)
    right = abs(answer - expected) <= asked.tolerance * abs(expected)
    print(f"Right: {answer:.4g}." if right else f"Not yet: {answer:.4g}. {asked.hint}")
    return right


def check_names(
    answers: Mapping[str, str | None], expected: Mapping[str, str], *, names: Collection[str], hint: str
) -> bool:
    """Say of each question whether the name in `answers` is the expected one; return whether all are.

    A name has to be one of `names`. The `hint` is printed with a wrong answer.
    """
    for question, name in expected.items():
        answer = answers.get(question)
        if _missing(answer):
            print(f"{question}: nothing to check yet.")
        elif answer not in names:
            print(f"{question}: expected one of {', '.join(map(repr, names))}, found {answer!r}.")
        else:
            print(f"{question}: right: {answer}." if answer == name else f"{question}: not yet: {answer}. {hint}")
    return all(answers.get(question) == name for question, name in expected.items())
