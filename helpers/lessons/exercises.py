"""Checks the answers to the exercises, and answers at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def check(answer: float | None, expected: float, *, tolerance: float = 0.05, hint: str) -> bool:
    """Say whether `answer` is right.

    Parameters
    ----------
    answer : float or None
        None where nothing has been filled in yet.
    expected : float
    tolerance : float
        Largest deviation that counts as right, as a share of `expected`.
    hint : str
        Printed with a wrong answer.

    Returns
    -------
    bool
        Whether the answer is right.
    """
    if answer is None or answer is ...:
        print("Nothing to check yet: fill in the cell above, run it, then run this cell again.")
        return False
    if not isinstance(answer, (int, float)):
        print(f"Expected a number, found {answer!r}.")
        return False
    right = abs(answer - expected) <= tolerance * abs(expected)
    print(f"Right: {answer:.4g}." if right else f"Not yet: {answer:.4g}. {hint}")
    return right


def check_names(
    answers: Mapping[str, str | None], expected: Mapping[str, str], *, names: Collection[str], hint: str
) -> bool:
    """Say of each question whether the name in `answers` is right.

    Parameters
    ----------
    answers : mapping of str to str or None
        For each question a name; None where nothing has been filled in yet.
    expected : mapping of str to str
        The right ones.
    names : collection of str
        All names to choose from.
    hint : str
        Printed with a wrong answer.

    Returns
    -------
    bool
        Whether all answers are right.
    """
    right = []
    for question, name in expected.items():
        answer = answers.get(question)
        if answer is None or answer is ...:
            print(f"{question}: nothing to check yet.")
        elif answer not in names:
            print(f"{question}: expected one of {', '.join(map(repr, names))}, found {answer!r}.")
        elif answer != name:
            print(f"{question}: not yet: {answer}. {hint}")
        else:
            print(f"{question}: right: {answer}.")
            right.append(question)
    return len(right) == len(expected)
