"""Time lost between the host and the accelerator, and on the accelerator, read from a trace."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Accelerator:
    """Use of one accelerator. Shares are shares of the steps' time, None if the trace does not record them."""

    number: int  # of the device, as in the trace
    name: str | None
    utilization: float | None  # share in which a kernel runs
    sm_efficiency: float | None  # mean share of the multiprocessors that have work
    tensor_cores: float | None  # share of all kernels' durations in kernels that use Tensor Cores


@dataclass(frozen=True)
class Device:
    """All accelerators together. Shares are shares of the steps' time."""

    accelerators: tuple[Accelerator, ...]
    # Waits of the host for the GPU, in calls that every step makes
    waiting: float  # share in which the host waits for the GPU
    blocked: float  # share in which the host waits in copies to the GPU, at most the avoidable idle time of the GPU
    synchronizing: float  # share in which the host waits for the GPU, except in copies to the GPU
    synchronized: int  # number of steps in which the host waits for the GPU, except in copies to the GPU
    operator: str  # operator in which the host waits longest; "" for a call outside of operators
    # Copies while no kernel runs
    copying: float  # share of copies to the GPU while no kernel runs
    pageable: float  # share of copies to the GPU from memory that is not pinned, while no kernel runs
    within: float  # share of copies within the GPU while no kernel runs
    # Gaps between kernels in which the GPU waits for the host to launch the next kernel
    gaps: float  # number of short gaps in a step
    gap_us: float | None  # median length of a short gap; None without short gaps
    short_us: float  # total time of the short gaps, without loading and copies
    long_us: float  # total time of the long gaps, without loading and copies
    all_us: float  # total time of all gaps, without loading and copies
    doing: str  # the host's main activity in the long gaps; "" without long gaps
    # Kernels
    kernels: float  # share in which kernels run
    launches: float  # number of kernels in a step
    kernel_us: float  # mean duration of a kernel
    fill: float | None  # mean share of the multiprocessors that have work while kernels run
    float32: float  # share of matrix products and convolutions in float32
    layouts: float  # share of kernels that convert the memory format
    capability: tuple[int, int] | None  # compute capability; None without Tensor Cores, or if unknown
    classes: dict[str, float] = field(default_factory=dict)  # share of the kernels of each class, such as "elementwise"
    volumes: bool = False  # whether kernels convert the memory format of volumes, of five dimensions
    native_bfloat16: float = 0.0  # share of batch normalization in PyTorch's own kernels, in bfloat16
