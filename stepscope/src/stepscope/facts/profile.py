"""A recorded profile in numbers: where the time of its steps goes, and whether it allows a verdict."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope import thresholds


@dataclass(frozen=True)
class Profile:
    """Recorded steps; shares are shares of their time. One step that took far longer counts as the others' mean."""

    steps: int
    step_ms: float  # mean
    shares: dict[str, float]  # for each category of `traces.breakdown`
    devices: int = 0  # accelerators that ran kernels
    in_process: bool = False  # whether the loop itself made the batches, without workers
    stall_ms: float = 0.0  # the step that took far longer than all other steps; 0 if there is none
    timed: tuple[tuple[float, float], ...] = ()  # for each step its loading time and its whole duration, in ms
    recorded_us: float = 0.0  # from the first event to the last
    operators: int = 0  # recorded by the profiler, like the frames of Python
    frames: int = 0
    settings: tuple[str, ...] = ()  # of the profiler, such as "with_stack"
    communication: float = 0.0  # share in which the step exchanges data with other processes, and computes nothing
    lost_kernels: str = ""  # a sentence on kernels that are not in the trace; "" if there are none
    unknown_accelerators: tuple[str, ...] = ()  # categories of events that stepscope does not know
    without_kernels: bool = False  # whether the network ran on a GPU whose kernels are not in the trace

    @property
    def on_device(self) -> bool:
        """Whether an accelerator ran kernels."""
        return self.devices > 0

    @property
    def total_us(self) -> float:
        """Time of all steps."""
        return self.steps * self.step_ms * 1e3

    @property
    def loading(self) -> float:
        """Share in which the loop waited for batches, and the accelerator had nothing to do."""
        return self.shares["DataLoader"]

    @property
    def host(self) -> float:
        """Share in which the accelerator had nothing to do and the host did other work than loading."""
        return self.shares["Runtime"] + self.shares["CPU Exec"] + self.shares["Other"]

    @property
    def avoidable_idle(self) -> float:
        """Share in which the accelerator would not idle if the host were ahead of it.

        All work of the host counts, and loading counts unless the workers limit the speed.
        """
        return self.host + (self.loading if self.in_process or self.loading < thresholds.WORTH else 0.0)

    @property
    def recording(self) -> float:
        """Share that recording took, at least; while a GPU is busy, recording costs nothing."""
        shapes = thresholds.SHAPES_COST_US * ("record_shapes" in self.settings)
        cost = self.operators * (thresholds.OPERATOR_COST_US + shapes) + self.frames * thresholds.FRAME_COST_US
        share = cost / max(self.recorded_us, 1.0)
        return min(share, self.avoidable_idle) if self.on_device else share
