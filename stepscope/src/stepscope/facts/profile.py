"""A recorded profile in numbers: where the time of its steps goes, and whether the profile allows a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope import thresholds

BUSY = ("Kernel", "Memcpy", "Memset", "Communication")  # categories in which an accelerator works


@dataclass(frozen=True)
class Profile:
    """Recorded steps, without a single far longer step. Shares are of the steps' time."""

    steps: int  # number of steps
    step_ms: float  # mean duration of a step
    shares: dict[str, float]  # share of each category of `traces.breakdown`
    devices: int = 0  # number of accelerators that ran kernels
    in_process: bool = False  # whether the loop itself made the batches, without workers
    stall_ms: float = 0.0  # duration of a single step far longer than all other steps; 0 if there is none
    begins_epoch: bool = False  # whether an epoch with workers begins in that step
    queued: float = 0.0  # share in which the accelerator idles although the host has launched its next kernel
    between: float = 0.0  # share of the shortest such gaps, which an accelerator has between any two kernels
    timed: tuple[tuple[float, float], ...] = ()  # loading time and whole duration of each step, in ms
    recorded_us: float = 0.0  # time from the first event to the last
    operators: int = 0  # number of recorded operators
    frames: int = 0  # number of recorded Python frames
    settings: tuple[str, ...] = ()  # options of the profiler, such as "with_stack"
    communication: float = 0.0  # share in which the step exchanges data with other processes, and computes nothing
    lost_kernels: str = ""  # a sentence on kernels that the trace lacks; "" if it lacks none
    unknown_accelerators: tuple[str, ...] = ()  # categories of events of accelerators that stepscope does not know
    without_kernels: bool = False  # whether the network ran on a GPU whose kernels are not in the trace

    @property
    def on_device(self) -> bool:
        """Whether an accelerator ran kernels."""
        return self.devices > 0

    @property
    def total_us(self) -> float:
        """Time of all steps in µs."""
        return self.steps * self.step_ms * 1e3

    @property
    def loading(self) -> float:
        """Share in which the loop waited for batches while the accelerator was idle."""
        return self.shares["DataLoader"]

    @property
    def host(self) -> float:
        """Share in which the accelerator was idle and waited for the host, which did work other than loading."""
        idle = self.shares["Runtime"] + self.shares["CPU Exec"] + self.shares["Other"]
        return max(0.0, idle - self.queued - self.between)

    @property
    def busy(self) -> float:
        """Share in which the accelerator runs kernels, copies, or exchanges data."""
        return sum(self.shares[name] for name in BUSY)

    @property
    def avoidable_idle(self) -> float:
        """Share in which the accelerator is idle, but would not be if the host ran ahead of the accelerator.

        All work of the host counts. Loading counts unless the workers limit the speed.
        """
        return self.host + (self.loading if self.in_process or self.loading < thresholds.WORTH else 0.0)

    @property
    def recording(self) -> float:
        """Lower bound for the share that recording took; while a GPU is busy, recording costs nothing."""
        shapes = thresholds.SHAPES_COST_US * ("record_shapes" in self.settings)
        cost = self.operators * (thresholds.OPERATOR_COST_US + shapes) + self.frames * thresholds.FRAME_COST_US
        share = cost / max(self.recorded_us, 1.0)
        return min(share, self.avoidable_idle) if self.on_device else share
