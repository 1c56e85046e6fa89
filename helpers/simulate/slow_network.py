"""A simulated network between the ranks of a job on one machine."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from helpers.simulate.sleeping import wait_until

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.futures import Future

_SLOTS = 4096  # transfers whose begin the ranks know; no rank is that far ahead of another


@dataclass(frozen=True)
class SlowNetwork:
    """A network as slow as you choose, between the ranks of a job on this machine.

    Gloo sums the tensors over the loopback; then each rank waits until the slow network would have done so, too. A
    transfer begins when the last rank has asked for it and the transfer before has ended: transfers queue on one link.
    It ends on all ranks at the same moment. The loopback's time is part of that time, not added.
    The wait is part of the all-reduce in a trace, too, and takes no CPU time.

    Parameters
    ----------
    mb_per_s : float
        Bandwidth of each rank's connection, in each direction: 125 for 1 Gbit/s.
    latency_ms : float
        From one rank to the next, for each of the messages of an all-reduce.

    Examples
    --------
    >>> network = SlowNetwork(mb_per_s=125)
    >>> model.register_comm_hook(None, network.hook)  # of a DistributedDataParallel
    """

    mb_per_s: float
    latency_ms: float = 0.1

    def __str__(self) -> str:
        return f"simulated network ({self.mb_per_s:g} MB/s, {self.latency_ms:g} ms latency)"

    def seconds(self, nbytes: float, world: int) -> float:
        """Return how long an all-reduce of a tensor of `nbytes` takes between `world` ranks, in seconds.

        By the ring all-reduce: each of n ranks sends 2 (n − 1) messages of 1/n of the bytes to the next one (Patarasuk
        and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009).
        """
        messages = 2 * (world - 1)
        return messages * (nbytes / world / (self.mb_per_s * 1e6) + self.latency_ms / 1e3)

    def hook(self, group: ProcessGroup | None, bucket):  # no annotation: the model refuses one that is text
        """Average a bucket of gradients, as `DistributedDataParallel` does without a hook, but over this network.

        For ``model.register_comm_hook(None, network.hook)``, also inside of PyTorch's ``bf16_compress_wrapper``. If
        the model has its own process group, pass that instead of None. Returns and raises as `all_reduce` does.
        """
        group = _group(group)
        return self.all_reduce(bucket.buffer().div_(group.size()), group)  # divided first: 16 bits overflow later

    def all_reduce(self, tensor: torch.Tensor, group: ProcessGroup | None = None) -> Future[torch.Tensor]:
        """Begin to sum a tensor over all ranks in place; they must ask for the same tensors in the same order.

        The tensor may have any shape and type. By default all ranks take part; each `group` has its own link. The
        future has the tensor when this network would have transferred it, or the all-reduce's error at once. Raises
        `ValueError` if the tensor is not on the CPU; `RuntimeError` if there is no process group.
        """
        if tensor.device.type != "cpu":
            raise ValueError(
                f"Expected a tensor on the CPU, found one on {tensor.device}: a {self} does not model a device that "
                "computes while it communicates. Train on the CPU with gloo, or leave the simulated network out."
            )
        group = _group(group)
        if group not in _links:
            _links[group] = _Link(group)
        link = _links[group]
        number = link.begin(self.seconds(tensor.nbytes, group.size()))

        def arrive(summed: Future) -> torch.Tensor:
            (tensor,) = summed.value()  # raises if it has failed
            wait_until(link.end(number))
            return tensor

        return dist.all_reduce(tensor, group=group, async_op=True).get_future().then(arrive)


def _group(group: ProcessGroup | None) -> ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError(
            "Expected a process group, found none: call torch.distributed.init_process_group first, in each rank."
        )
    return group or world


class _Link:
    """When a process group's transfers end. All ranks calculate the same, from the times at which each rank asked.

    The ranks write these times into shared memory; they share one clock. When the loopback has done a transfer, all
    ranks have asked for it, and for all before it.
    """

    def __init__(self, group: ProcessGroup):
        self.rank, self.asked = group.rank(), _shared_memory(group)
        self.lock = threading.Lock()  # gloo's threads end two transfers at a time
        self.seconds: list[float] = []
        self.ends: list[float] = []

    def begin(self, seconds: float) -> int:
        """Queue a transfer that takes so long; return its number."""
        with self.lock:
            number = len(self.seconds)
            self.seconds.append(seconds)
            self.asked[number % _SLOTS, self.rank] = time.perf_counter()
            return number

    def end(self, number: int) -> float:
        """Return when a transfer ends, in seconds of ``time.perf_counter()``, once the loopback has done it."""
        with self.lock:
            for following in range(len(self.ends), number + 1):
                free = self.ends[-1] if self.ends else 0.0
                begin = max(float(self.asked[following % _SLOTS].max()), free)
                self.ends.append(begin + self.seconds[following])
            return self.ends[number]


_links: weakref.WeakKeyDictionary[ProcessGroup, _Link] = weakref.WeakKeyDictionary()


def _shared_memory(group: ProcessGroup) -> np.ndarray:
    """Return an array that a group's ranks, on one machine, share: float64 [_SLOTS, ranks]; all must call this."""
    shape = _SLOTS, group.size()
    path = [""]
    if group.rank() == 0:
        file, path[0] = tempfile.mkstemp(prefix="simulated-network-")
        os.truncate(file, int(np.prod(shape)) * 8)
        os.close(file)
    dist.broadcast_object_list(path, group=group, group_src=0)
    asked = np.memmap(path[0], np.float64, "r+", shape=shape)
    dist.barrier(group)  # all have it open
    if group.rank() == 0:
        with suppress(PermissionError):  # Windows cannot delete an open file
            Path(path[0]).unlink()
    return asked
