"""Checks the answers to the exercises, and answers at once."""

from __future__ import annotations


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
