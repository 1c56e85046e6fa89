"""Time lost between the host and the accelerator, and on the accelerator, as a trace shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """How much an accelerator of the trace did; shares of the steps' time, None where the trace does not say."""

    number: int
    name: str | None
    utilization: float | None
    sm_efficiency: float | None
    tensor_cores: float | None


@dataclass(frozen=True)
class Device:
    """All accelerators together; shares are shares of the steps' time."""

    accelerators: tuple[Accelerator, ...]
    # Waits of the host in every step
    waiting: float  # share, as the next three
    blocked: float  # in copies to the GPU, as far as the GPU idles
    synchronizing: float  # without copies to the GPU
    synchronized: int  # steps with such a wait
    operator: str  # in which the host waits most; "" for a call without an operator
    # Copies while no kernel runs: shares
    copying: float  # to the GPU
    pageable: float  # the part of it from memory that is not pinned
    within: float  # within the GPU
    # Gaps in which the GPU waits for the host
    gaps: float  # short ones, in a step
    gap_us: float | None  # median of the short ones
    short_us: float  # time of the short ones in which the host is busy, as the next two
    long_us: float
    all_us: float
    doing: str  # the host's activity in the long gaps; "" if there are none
    # Kernels
    kernels: float  # share in which kernels run
    launches: float  # in a step
    kernel_us: float  # mean
    fill: float | None  # share of the multiprocessors that have work while kernels run
    float32: float  # share of matrix products and convolutions in float32
    layouts: float  # share of conversions of the memory format
    capability: tuple[int, int] | None  # None without Tensor Cores, or if unknown
