"""Settings of PyTorch that may slow a step, and a step compared with changed settings in interleaved runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Modes:
    """How PyTorch was set while the loop ran."""

    threads: int = 0  # number of threads; 0 if unknown, or if several ranks share the cores
    physical_cores: int = 0  # of the machine: PyTorch uses one thread for each by default; 0 if unknown
    anomaly: bool = False  # whether autograd checks each operator for NaN
    deterministic: bool = False  # whether only deterministic algorithms are allowed


@dataclass(frozen=True)
class Trial:
    """A step without and with a change: its time in the fastest round, which other processes disturbed least."""

    before_ms: float = 0.0
    after_ms: float = 0.0
    sure: bool = False  # whether the changed step was faster in all rounds, except one at most

    @property
    def gain(self) -> float:
        """The share of the step that the change saves; 0 if the gain is not sure."""
        return max(0.0, 1 - self.after_ms / self.before_ms) if self.sure and self.before_ms else 0.0


@dataclass(frozen=True)
class Trials:
    """The settings that were tried with a step; a `Trial` without times was not run."""

    threads: int = 0  # PyTorch's number of threads
    other_threads: int = 0  # number of threads to try: the cores that no worker keeps busy
    batch: int = 0  # items in a batch
    other: Trial = Trial()  # with `threads`, and with `other_threads`
    anomaly: Trial = Trial()  # with anomaly detection, and without
    deterministic: Trial = Trial()  # with deterministic algorithms, and with the default algorithms
    single: Trial = Trial()  # a forward and a backward pass with float64, and with float32
    larger: Trial = Trial()  # a batch, and the same number of items in a larger batch
