"""Finds the bottleneck of a PyTorch training loop: times the loop, reads its profiler traces, and suggests changes."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from stepscope.trying import tries as tries

Batch = TypeVar("Batch")


def watch(loader: Iterable[Batch], *, steps: int = 20, folder: str | Path = "diagnosis") -> Iterator[Batch]:
    """Yield the batches of a loader, and diagnose the loop that uses them.

    After about sixty steps each rank prints its diagnosis to stderr, and the loop continues. If `watch` is called in
    each epoch, a diagnosis may span several epochs. A step is defined as in ``stepscope run``.

    Parameters
    ----------
    loader : iterable
        A DataLoader. With another iterable, the diagnosis cannot examine how batches are made.
    steps : int
        Number of steps to time; 1 or more.
    folder : str or Path
        Folder for the profile and the facts: by default ``diagnosis`` in the current folder.

    Raises ValueError if there is no step to time.

    Examples
    --------
    >>> for images, labels in stepscope.watch(loader):  # doctest: +SKIP
    ...     train(images, labels)
    """
    from stepscope import run  # here, so that importing stepscope takes no time

    run.begin(steps, folder)
    for batch in loader:  # noqa: UP028, yield from would close a generator that the caller may still use
        yield batch


def __getattr__(name: str) -> Any:
    if name != "tries":  # so that importing stepscope takes no time
        raise AttributeError(f"module 'stepscope' has no attribute {name!r}")
    from stepscope.trying import tries

    return tries


def load_ipython_extension(shell: object) -> None:
    """Register the cell magic ``%%stepscope``: see `stepscope.magic`."""
    from stepscope import magic

    magic.register(shell)
