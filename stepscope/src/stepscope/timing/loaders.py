"""Gives endless batches from any loader, counts them in whole periods, ends its workers, calls a step with a batch."""

import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch
from torch.utils._pytree import tree_iter

Batch = TypeVar("Batch")
Step = Callable[..., object]
"""Trains on one batch. It is called as `call` does, and its return value is ignored."""


class WorkerDied(RuntimeError):
    """A worker process of a loader was killed, or exited by itself: its dataset did not raise."""

    def __init__(self, worker: str) -> None:
        super().__init__(
            f"Expected a batch, but a worker of the loader died: {worker}\n"
            "It raised no exception, so there is no traceback. SIGKILL (Killed) mostly means that memory ran out: use "
            "fewer workers, a smaller prefetch_factor, or arrays instead of lists. SIGSEGV and SIGBUS come from "
            "compiled code, or from a full /dev/shm. To see where it happens, load with num_workers=0."
        )


def call(step: Step, batch: object) -> object:
    """Call a step with a batch: ``step(*batch)`` for a tuple or list, ``step(batch)`` otherwise, as for a dict."""
    return step(*batch) if isinstance(batch, (tuple, list)) else step(batch)


def batch_size(batch: object) -> int:
    """Items in a batch, which may be nested: the length of the first tensor in it; 1 without a tensor."""
    return next((leaf.size(0) for leaf in tree_iter(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim), 1)


def period(loader: object) -> int:
    """Number of steps after which the waits for batches repeat: the loader's ``num_workers``, at least 1.

    Workers deliver in turn. If they work at the same rate, one step in each period waits for a batch, and the next
    batches are ready: a mean over a part of a period depends on where the part begins. With ``in_order=False`` batches
    come in groups of the same size. An epoch with fewer batches than workers is a shorter period, which this function
    does not see; then time whole epochs.
    """
    return max(1, getattr(loader, "num_workers", 0) or 0)


def whole_periods(loader: object, steps: int) -> int:
    """Return `steps`, rounded up to a multiple of the loader's `period`."""
    return -(-steps // period(loader)) * period(loader)


@contextmanager
def batches(loader: Iterable[Batch]) -> Iterator[Iterator[Batch]]:
    """Give endless batches, as `endless` does, and end the workers with the block, also if the block raises.

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
        # PyTorch has no type for this error, and raises it anywhere: in a step, or while the workers end
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise WorkerDied(str(error)) from error


def endless(loader: Iterable[Batch]) -> Generator[Batch]:
    """Yield batches endlessly, epoch after epoch. When the generator is closed or raises, the loader's workers end.

    Raises the errors of `batches`.
    """
    epoch = None
    try:
        while True:
            epoch = iter(loader)
            try:
                yield next(epoch)  # without a name, so that the caller can free the batch
            except StopIteration:
                raise ValueError(
                    "The loader yields no batch: is the dataset smaller than one batch (drop_last)? Or is it a "
                    "generator, which can be iterated over only once? Then give the DataLoader itself."
                ) from None
            yield from epoch
    except Exception as error:
        if dead := _dead_workers(epoch):  # then PyTorch may raise any error: the dead worker's data is missing
            raise WorkerDied(dead) from error
        raise
    finally:
        # Not left to the garbage collector: a notebook keeps its last error, and so the iterator and its workers; and
        # the loader keeps persistent workers, which would go on loading during the next measurement.
        getattr(epoch, "_shutdown_workers", lambda: None)()
        for worker in processes(epoch):
            worker.join(1)  # a terminated worker exists for a moment more
        if isinstance(loader, torch.utils.data.DataLoader):
            loader._iterator = None


def processes(epoch: object) -> list[BaseProcess]:
    """Return the worker processes of a loader's iterator; workers that are threads are left out."""
    return [worker for worker in getattr(epoch, "_workers", []) if hasattr(worker, "sentinel")]


def _dead_workers(epoch: object) -> str:
    """Return as text which workers of a DataLoader's iterator ended abnormally, and how."""
    workers = processes(epoch)
    ending = connection.wait([worker.sentinel for worker in workers], timeout=0.2 if workers else 0)
    for worker in workers:
        if worker.sentinel in ending:
            worker.join(1)  # its files are closed a moment before it has an exit code
    ended = {worker.pid: worker.exitcode for worker in workers if worker.exitcode}
    how = {pid: signal.Signals(-code).name if code < 0 else f"exit code {code}" for pid, code in ended.items()}
    return ", ".join(f"process {pid} by {way}" for pid, way in how.items())
