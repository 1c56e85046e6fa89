"""Finds the bottleneck of a PyTorch training loop: times it, reads its profiler traces, and says what to change."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

Batch = TypeVar("Batch")


def watch(loader: Iterable[Batch], *, steps: int = 20, folder: str | Path = "diagnosis") -> Iterator[Batch]:
    """Yield the batches of a loader, and meanwhile diagnose the loop that takes them.

    After about sixty steps the diagnosis is printed to stderr, by each rank its own; the loop goes on. Called in each
    epoch, `watch` goes on where it was. A step is defined as in ``stepscope run``.

    Parameters
    ----------
    loader : iterable
        A DataLoader; or any other iterable, but then it is unknown how it makes its batches.
    steps : int
        Steps to time; 1 or more.
    folder : str or Path
        Where the profile and the facts go: by default ``diagnosis`` in the current folder.

    It raises ValueError if there is no step to time.

    Examples
    --------
    >>> for images, labels in stepscope.watch(loader):  # doctest: +SKIP
    ...     train(images, labels)
    """
    from stepscope import run  # here, so that importing stepscope takes no time

    run.begin(steps, folder)
    for batch in loader:  # noqa: UP028, yield from would end a generator that the caller goes on with
        yield batch
