"""A progress bar where tqdm is installed, and none otherwise."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager


class NoBar:
    """Stands in for a bar of tqdm where that is not installed."""

    def __enter__(self) -> NoBar:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def update(self) -> None:
        """One more is done."""

    def set_postfix_str(self, text: str) -> None:
        """Say what is being done."""


def progress(total: int, what: str, unit: str, delay: float = 0) -> AbstractContextManager:
    """Return a progress bar for a ``with`` block; its method ``update()`` moves it on, in less than 1 µs on average.

    Parameters
    ----------
    total : int
        How many there are to do.
    what, unit : str
        What is done, and what is counted.
    delay : float
        Seconds after which the bar appears.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return NoBar()
    return tqdm(total=total, desc=what, unit=unit, file=sys.stdout, delay=delay, mininterval=0.5)
