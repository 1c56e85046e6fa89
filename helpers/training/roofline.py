"""What this device can do at most, what a training step asks of it, and which limit the step meets.

The roofline model (Williams, Waterman, Patterson, "Roofline: an insightful visual performance model for multicore
architectures", 2009): F operations on B bytes take at least the longer of F / (peak operations a second) and
B / (memory bandwidth).
"""

from dataclasses import dataclass

import torch

from helpers import config
from helpers.training import called_operators
from stepscope import timing

_FIRST_SHARE = 1 / 3  # of the step's time: a limit that accounts for less does not explain the step
_BOUND = {"compute": "compute", "memory": "memory", "loading": "input", "launches": "launch"}


@dataclass(frozen=True)
class Limits:
    """A device's measured limits."""

    tflops: float  #: 10¹² floating-point operations a second, in products of large matrices
    gb_per_second: float  #: 10⁹ bytes a second, read and written, in a large copy

    @property
    def ridge(self) -> float:
        """Operations per byte above which computing takes longer than moving bytes."""
        return self.tflops * 1e3 / self.gb_per_second


@dataclass(frozen=True)
class Work:
    """What a training step asks for."""

    #: Floating-point operations in convolutions and matrix products, forward and backward; a multiplication with an
    #: addition counts as two.
    flops: int
    bytes: int  #: read and written by all operators, if each reads its inputs from memory and writes its outputs to it

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Placed:
    """A training step and the limits of its device, all as measured."""

    work: Work
    limits: Limits
    step_ms: float
    loading_share: float  #: of the time of a step, waiting for its batch, 0 to 1; `timing.Timing` has it
    kernel_share: float | None = None  #: of the time with a kernel, 0 to 1: ``utilization`` in `traces.accelerators`

    @property
    def tflops(self) -> float:
        """What the step achieved, in 10¹² operations a second."""
        return self.work.flops / self.step_ms / 1e9

    @property
    def share_of_peak(self) -> float:
        """Achieved operations over the device's peak, 0 to 1."""
        return self.tflops / self.limits.tflops

    @property
    def shares(self) -> dict[str, float]:
        """Share of the step's time that each limit accounts for, 0 to 1.

        - ``compute``: the operations, at the peak
        - ``memory``: the bytes, at the full bandwidth
        - ``loading``: waiting for the batch
        - ``launches``: on a GPU, neither waiting for the batch nor running a kernel: its host was too slow

        They need not sum to 1. The first two are the least time that the step can take; kernels that reach neither
        limit take longer, and those that compute and move bytes at the same time count in both.
        """
        shares = {
            "compute": self.share_of_peak,
            "memory": self.work.bytes / self.limits.gb_per_second / 1e6 / self.step_ms,
            "loading": self.loading_share,
        }
        if self.kernel_share is not None:
            shares["launches"] = max(1 - self.kernel_share - self.loading_share, 0.0)
        return shares

    @property
    def bound(self) -> str | None:
        """The limit that bounds the step: ``"compute"``, ``"memory"``, ``"input"`` or ``"launch"``.

        It is the one with the largest share; None if that is below a third, which explains too little of the time.
        """
        first, share = max(self.shares.items(), key=lambda each: each[1])
        return _BOUND[first] if share >= _FIRST_SHARE else None

    def verdict(self) -> str:
        """Say in one sentence which limit bounds the step, with the figures."""
        figures = ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items())
        if self.bound is None:
            return (
                f"No limit accounts for a third of the step ({figures}): its operators reach neither the peak nor the "
                "bandwidth, or the machine was busy."
            )
        verdict = f"The step is {self.bound}-bound ({figures} of its time)."
        if self.share_of_peak > 1:
            verdict += (
                " More than all of it: the device was busy with something else when its limits were measured, or a "
                "library computes with fewer operations than were counted (Winograd's convolutions). Measure again."
            )
        return verdict


def limits() -> Limits:
    """Measure this device's limits in float32: `matmul_tflops` and `bandwidth`, the larger of two turns.

    Each turn takes the fastest of 20 calls: a limit is what the device does when nothing disturbs it.
    """
    tflops, gb_per_second = zip(*((matmul_tflops(), bandwidth()) for _ in range(2)), strict=True)
    return Limits(max(tflops), max(gb_per_second))


def matmul_tflops(dtype: torch.dtype = torch.float32) -> float:
    """Measure the product of two large square matrices, in 10¹² floating-point operations a second.

    For float32 on a GPU it matters whether `training.set_tf32` is on. A product of n × n matrices takes 2 n³
    operations: as many multiplications as additions.
    """
    device = config.device()
    n = 8192 if device.type == "cuda" else 1024  # 1.1 TFLOP or 2 GFLOP: some milliseconds
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / min(timing.each_call_ms(lambda: left @ right)) / 1e9


def bandwidth() -> float:
    """Measure the memory's bandwidth by a large copy and a large addition, in 10⁹ bytes a second, read and written.

    256 MiB are more than the caches of most CPUs and of NVIDIA's GPUs hold. Some CPUs read memory before they
    overwrite it, which is half as much traffic again; that is not counted.
    """
    source = torch.zeros(64 * 2**20, device=config.device())
    target = torch.empty_like(source)
    times_ms = timing.each_call_ms(lambda: target.copy_(source))
    times_ms += timing.each_call_ms(lambda: torch.add(source, 1, out=target))  # on some CPUs the faster of the two
    return 2 * source.nbytes / min(times_ms) / 1e6


def work_of(step: timing.Step, images: torch.Tensor, labels: torch.Tensor) -> Work:
    """Run `step` once, and count its work, with the optimizer and the copy to the device.

    Operators that `torch.compile` has fused, and CUDA graphs, cannot be counted: give the step without them. Data that
    stays in a cache is not moved after all, so the bytes are an estimate.
    """
    operators = called_operators.record(lambda: step(images, labels))
    return Work(sum(each.flops for each in operators), sum(each.bytes for each in operators))
