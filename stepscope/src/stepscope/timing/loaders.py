"""Batches from any loader, for ever, with its workers ended for certain; how a step is called with one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import connection

import torch
from torch.utils._pytree import tree_iter

Step = Callable[..., object]
"""Trains on one batch. It is called as `call` does, and what it returns is not looked at."""


class WorkerDied(RuntimeError):
    """A worker process of a loader was ended from outside, or ended itself: its dataset did not raise."""

    def __init__(self, worker: str):
        super().__init__(
            f"Expected a batch, but a worker of the loader died: {worker}\n"
            "It did not end by an exception, so it left no traceback. SIGKILL (Killed) mostly means that memory ran "
            "out: take fewer workers, a smaller prefetch_factor, or arrays instead of lists. SIGSEGV and SIGBUS "
            "come from compiled code, or from a full /dev/shm. To see where it happens, load with num_workers=0."
        )


def call(step: Step, batch: object) -> object:
    """Give a batch to a step: a tuple or list as ``step(*batch)``, all else, such as a dict, as ``step(batch)``."""
    return step(*batch) if isinstance(batch, (tuple, list)) else step(batch)


def batch_size(batch: object) -> int:
    """Items in a batch, however it is nested: the length of the first tensor in it; 1 without a tensor."""
    return next((len(leaf) for leaf in tree_iter(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)


@contextmanager
def batches(loader: Iterable) -> Iterator[Iterator]:
    """Give batches for ever, as `endless` does, and end the workers with the block, also when it raises.

    Raises
    ------
    WorkerDied
        If a worker is killed or exits.
    ValueError
        If the loader yields no batch at all.
    """
    try:
        with closing(endless(loader)) as endlessly:
            yield endlessly
    except RuntimeError as error:
        # PyTorch has no type for it, and raises it wherever this process is: in a step, or while the workers are ended
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise WorkerDied(str(error)) from error


def endless(loader: Iterable) -> Iterator:
    """Yield batches for ever, epoch after epoch. When it is closed or raises, no worker of the loader is left.

    Raises
    ------
    WorkerDied, ValueError
        As `batches`.
    """
    epoch = None
    try:
        while True:
            epoch = iter(loader)
            try:
                yield next(epoch)  # without a name, which would keep it from being freed by who has it
            except StopIteration:
                raise ValueError(
                    "The loader yields no batch: is the dataset smaller than one batch (drop_last)? Or is it a "
                    "generator, which can be gone through only once? Then give the DataLoader itself."
                ) from None
            yield from epoch
    except Exception as error:
        if dead := _dead_workers(epoch):  # PyTorch's error may then be any: what a dead worker offered is not there
            raise WorkerDied(dead) from error
        raise
    finally:
        # Not left to the garbage collector: a notebook keeps its last error, which keeps the iterator and so the
        # workers; and persistent ones, which the loader keeps, would load on while the next clock runs.
        getattr(epoch, "_shutdown_workers", lambda: None)()
        for worker in getattr(epoch, "_workers", []):
            worker.join(1)  # one that was terminated, since it did not end by itself, is there for a moment more
        if isinstance(loader, torch.utils.data.DataLoader):
            loader._iterator = None


def _dead_workers(epoch: object) -> str:
    """Say which workers of a DataLoader's iterator ended otherwise than they should, and how."""
    workers = getattr(epoch, "_workers", [])
    ending = connection.wait([worker.sentinel for worker in workers], timeout=0.2 if workers else 0)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join(1)  # its files are closed a moment before it has an exit code
    ended = {worker.pid: worker.exitcode for worker in workers if worker.exitcode}
    how = {pid: signal.Signals(-code).name if code < 0 else f"exit code {code}" for pid, code in ended.items()}
    return ", ".join(f"process {pid} by {way}" for pid, way in how.items())
