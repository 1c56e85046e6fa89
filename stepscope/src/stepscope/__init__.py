"""Finds the bottleneck of a PyTorch training loop: times it, reads its profiler traces, and says what to change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

Batch = TypeVar("Batch")


def watch(loader: Iterable[Batch], *, steps: int = 20, folder: str | Path = "diagnosis") -> Iterator[Batch]:
    """Yield the batches of a loader, and diagnose the loop that takes them meanwhile.

    When some sixty of its steps have been seen, the diagnosis is printed to stderr, of each rank its own; the loop goes
    on as without it. Called in each epoch, it goes on where it was. A step is what ``stepscope run`` takes for one.

    Parameters
    ----------
    loader : iterable
        A DataLoader; or any other iterable, of which it is not known how it makes its batches.
    steps : int
        Steps to time; 1 or more.
    folder : str or Path
        Where the profile goes: by default ``diagnosis`` in the current folder.

    Raises
    ------
    ValueError
        If there is no step to time.

    Examples
    --------
    >>> for images, labels in stepscope.watch(loader):  # doctest: +SKIP
    ...     train(images, labels)
    """
    from stepscope import script  # here, so that to import stepscope takes no time

    script.begin(steps, folder)
    yield from loader
