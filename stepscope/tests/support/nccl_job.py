"""Traces of ranks that train together on made-up GPUs, simulated: the specification of `diagnosis.of_ranks`.

The form is that of NCCL: an operation is issued on the host, in ``c10d::…``, ``record_param_comms`` and ``nccl:…``,
and is a kernel on a stream of its own, which ends on all ranks at once: its time after the last one has begun it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support.cuda_trace import DEVICE, LOADING, TENSOR_CORE_PRODUCT

KERNELS = {
    "all_reduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "all_gather": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "broadcast": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}


@dataclass
class Job:
    """Ranks that train by DistributedDataParallel. As it stands nothing is wrong with it. Times are in ms."""

    ranks: int = 2
    steps: int = 4
    layers: int = 10  # each takes 5 ms forward and 10 ms backward
    megabytes: float = 100  # of all gradients
    buckets: int = 10  # in which they travel, each as soon as the gradients of the last layer in it are there
    milliseconds: float = 6  # that each bucket travels
    by_hand: bool = False  # whether all travel when backward has ended
    operation: str = "all_reduce"  # by which they travel, one of `KERNELS`
    broadcast: float = 0  # time of a broadcast before each forward; there is none if it is 0
    # Of some ranks: what they wait for their batches, what their host does between loading and forward, and by which
    # factor their kernels take longer
    loading: dict[int, float] = field(default_factory=dict)
    python: dict[int, float] = field(default_factory=dict)
    slower: dict[int, float] = field(default_factory=dict)
    late: Callable[[int, int], float] = lambda step, rank: 0  # further ms that the host takes there
    extra: dict[int, int] = field(default_factory=dict)  # operations in the last step that only these ranks have
    sizes: bool = True  # whether the traces say how large the operations are

    def write(self, folder: Path) -> Path:
        """Write the trace of each rank into a folder, each by a clock of its own, and return the folder."""
        folder.mkdir(exist_ok=True)
        for rank, events in enumerate(self._events()):
            content = {
                "schemaVersion": 1,
                "deviceProperties": [DEVICE],
                "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": self.ranks},
                "traceEvents": events,
            }
            (folder / f"rank_{rank}.1.pt.trace.json").write_text(json.dumps(content))
        return folder

    def _events(self) -> list[list[dict]]:
        self.events, self.numbers = [[] for _ in range(self.ranks)], itertools.count(1)
        self.now, self.free = [0.0] * self.ranks, [0.0] * self.ranks  # when kernels, and NCCL's, have ended
        for rank in range(self.ranks):  # so that the times of each count from another moment
            self._add(rank, "cpu_op", "aten::ones", -7 * rank - 1, -7 * rank)
        for step in range(self.steps):
            self._step(step)
        return self.events

    def _step(self, step: int) -> None:
        begins = list(self.now)
        for rank in range(self.ranks):
            loaded = begins[rank] + 0.2 + self.loading.get(rank, 0)
            self._add(rank, "user_annotation", LOADING, begins[rank], loaded)
            self.now[rank] = loaded + 0.5 + self.python.get(rank, 0) + self.late(step, rank)
        self.host = [now - 0.4 for now in self.now]  # it launches all that follows as fast as it can
        if self.broadcast:
            self._exchange("broadcast", list(self.now), self.broadcast, 24)
            self.now = list(self.free)
        ready = [self._compute(rank) for rank in range(self.ranks)]
        for bucket in range(self.buckets):
            last = max((bucket + 1) * self.layers // self.buckets - 1, 0)
            moments = [each[-1 if self.by_hand else last] for each in ready]
            self._exchange(self.operation, moments, self.milliseconds, self.megabytes / self.buckets * 1e6)
        for rank, number in self.extra.items():
            for _ in range(number * (step == self.steps - 1)):
                self._kernel(rank, self.operation, self.free[rank], self.free[rank] + 0.1, 400)
        for rank in range(self.ranks):
            end = max(self.now[rank], self.free[rank]) + 1
            self._launch(rank, "update", end - 1, end)
            self._add(rank, "user_annotation", f"ProfilerStep#{step}", begins[rank], end)
            self.now[rank] = self.free[rank] = end

    def _compute(self, rank: int) -> list[float]:
        """Run forward and backward; return when the gradients of each layer are there, those of the last one first."""
        ends = []
        for duration in [5.0] * self.layers + [10.0] * self.layers:
            start = self.now[rank]
            self.now[rank] += duration * self.slower.get(rank, 1)
            self._launch(rank, TENSOR_CORE_PRODUCT, start + 0.002, self.now[rank])
            ends.append(self.now[rank])
        return ends[self.layers :]

    def _exchange(self, operation: str, ready: list[float], duration: float, nbytes: float) -> None:
        starts = [max(moment, free) + 0.002 for moment, free in zip(ready, self.free, strict=True)]
        for rank, start in enumerate(starts):
            self._kernel(rank, operation, start, max(starts) + duration, nbytes)

    def _kernel(self, rank: int, operation: str, start: float, end: float, nbytes: float) -> None:
        sizes = {"In msg nelems": int(nbytes / 4), "dtype": "Float"} if self.sizes else {}
        noted = {"Collective name": operation.replace("_", ""), "Process Group Name": "0", **sizes}
        self.free[rank] = end
        self._launch(rank, KERNELS[operation], start, end, 20, operation, noted)

    def _launch(
        self,
        rank: int,
        name: str,
        start: float,
        end: float,
        stream: int = 7,
        operation: str = "",
        noted: dict | None = None,
    ) -> None:
        noted, number, begin = noted or {}, next(self.numbers), self.host[rank]
        self.host[rank] = done = begin + 0.01
        links = {"External id": number, "correlation": number}
        if operation:
            self._add(rank, "cpu_op", f"c10d::{operation.replace('_', '')}_", begin, done, **{"External id": number})
            self._add(rank, "cpu_op", "record_param_comms", begin + 0.001, done - 0.001, **noted)
            self._add(rank, "user_annotation", f"nccl:{operation}", begin + 0.002, done - 0.002)
        else:
            self._add(rank, "cpu_op", "aten::mm", begin, done, **{"External id": number})
        self._add(rank, "cuda_runtime", "cudaLaunchKernelExC", begin + 0.003, done - 0.003, **links)
        launch = {"grid": [400, 1, 1], "block": [256, 1, 1], "blocks per SM": 4, "device": rank, "stream": stream}
        self._add(rank, "kernel", name, start, end, tid=stream, **links, **launch, **noted)

    def _add(
        self, rank: int, category: str, name: str, start: float, end: float, *, tid: int = 100, **arguments: object
    ) -> None:
        clock = 1e6 + rank * 123_456
        self.events[rank].append({
            "ph": "X", "cat": category, "name": name, "pid": rank, "tid": tid, "ts": clock + start * 1e3,
            "dur": (end - start) * 1e3, "args": arguments,
        })  # fmt: skip
