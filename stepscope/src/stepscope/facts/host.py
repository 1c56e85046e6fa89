"""The host's overhead in a step: short operators that are called very often, and work outside of operators."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepscope import thresholds


@dataclass(frozen=True)
class Operator:
    """Calls of one operator."""

    name: str
    calls: float  # mean number of calls in a step


@dataclass(frozen=True)
class Calls:
    """Short operators that a step calls very often; by default none."""

    share: float = 0.0  # share of the recorded steps for these calls and the code between them, without unusual delays
    operators: tuple[Operator, ...] = ()  # the operator with the longest total time first
    median_us: float = 0.0  # median duration of a call
    line: str = ""  # the user's line that makes most of these calls; "" if unknown
    sampled_share: float = 0.0  # share of the sampled steps in samples during which such a call begins
    line_share: float = 1.0  # the part of these calls that the function with `line` makes; 1 if it is unknown


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of the training; by default unknown, as in a trace alone."""

    name: str = ""  # its type, such as "AdamW"
    groups: int = 0  # number of parameter groups
    tensors: int = 0  # number of weight tensors in all groups
    faster: tuple[str, ...] = ()  # options by which it would update all weights at once, which it does not yet
    device: str = ""  # type of the device of its first weight, such as "cuda" or "mps"; "" if unknown
    dtype: str = ""  # of its first weight, such as "float64"; "" if unknown
    largest: float = 0.0  # share of the largest weight tensor in the numbers of all weights

    @property
    def split(self) -> bool:
        """Whether the weights are in many groups, which any optimizer updates one after another."""
        return self.groups >= thresholds.MANY_WEIGHTS


@dataclass(frozen=True)
class Gradients:
    """Gradients of weight tensors in a few steps; by default unknown."""

    computed: int = 0  # number of gradients that backward passes computed or added to
    orphaned: int = 0  # of them, gradients of weights that no optimizer has
    discarded: int = 0  # of them, gradients that were freed before the weight's optimizer updated

    @property
    def unused(self) -> float:
        """Share of the gradients that no optimizer used."""
        return min(1.0, (self.orphaned + self.discarded) / self.computed) if self.computed else 0.0


@dataclass(frozen=True)
class Work:
    """Work of the user's lines other than training."""

    share: float = 0.0  # share of the sampled time
    ms: float = 0.0  # mean time in a step
    waited: float = 0.0  # the part of `share` spent waiting
    line: str = ""  # the user's line that takes most of this work; "" if unknown
    recorded: float = 0.0  # the part of `share` in operators that autograd records for a backward pass that never comes


@dataclass(frozen=True)
class Part:
    """A part of a framework that works in the steps."""

    name: str  # the function, such as "TQDMProgressBar.on_train_batch_end"
    kind: str  # "progress", "logging", "saving", "evaluation" or "callback"
    share: float  # share of the sampled time


@dataclass(frozen=True)
class Framework:
    """The installed package that runs the loop, such as Lightning; by default the user's code runs the loop."""

    name: str = ""  # of the package
    work: Work = Work()  # its own work within steps, between the operators of the training
    parts: tuple[Part, ...] = ()  # the parts of `work` that settings change, the largest first


@dataclass(frozen=True)
class GpuLines:
    """The user's lines in which most happens of the following, with a GPU; "" if unknown."""

    waiting: str = ""  # the host waits for the GPU, except in copies to the GPU
    copying: str = ""  # the host waits in copies to the GPU
    gaps: str = ""  # the GPU waits long for the host's next launch
    launching: str = ""  # the thread of the step launches kernels
    scaling: float = 0.0  # share of the host's waits, except in copies to the GPU, within torch.amp.GradScaler


@dataclass(frozen=True)
class Host:
    """The host's overhead in a step. Without sampled steps, only `optimizer` and `calls` are known, without lines."""

    optimizer: Calls = Calls()  # calls by an optimizer that has a faster version, such as fused=True
    calls: Calls = Calls()  # calls outside of optimizers; not measured with a GPU
    elementwise: float = 0.0  # share of large elementwise operators, with their backward pass
    elementwise_line: str = ""  # the user's line that takes most of `elementwise`; "" if unknown
    updates: float = 0.0  # share of the optimizer, without short operators that it calls very often
    updates_line: str = ""  # the user's line that calls the optimizer; "" if unknown
    backward_line: str = ""  # the user's line that takes most of the time in backward passes; "" if unknown
    outside: Work = Work()  # work within steps
    evaluated: Work = Work()  # networks that run without training within steps, apart from `outside`
    constant: Work = Work()  # work of trained networks that no gradient needs
    around: Work = Work()  # work between steps, without loading
    # Shares of the operators of the step's thread, with the short gaps between them: "forward", "backward", "update"
    phases: dict[str, float] = field(default_factory=dict)
    framework: Framework = Framework()
    embedding: float = 0.0  # share of the dense gradients of embeddings, on the CPU
    repeated: float = 0.0  # share of backward passes through parts of a graph that an earlier pass went through
    recomputed: float = 0.0  # share of the sampled steps in forward passes that activation checkpointing repeats
    debugging: float = 0.0  # share of the sampled steps in which anomaly detection notes operators or checks for NaN
    on_gpu: GpuLines = GpuLines()
    sampled_ms: float | None = None  # mean duration of a sampled step without its wait; None if no step was sampled
