"""A step compared with its alternatives in interleaved runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """A step as it is, and changed: ms in the fastest round, in which other processes had the cores least."""

    before_ms: float = 0.0
    after_ms: float = 0.0
    sure: bool = False  # whether it was faster in all rounds but one at most

    @property
    def gain(self) -> float:
        """The share of the step that the change saves."""
        return max(0.0, 1 - self.after_ms / self.before_ms) if self.sure and self.before_ms else 0.0


@dataclass(frozen=True)
class Trials:
    """The settings that were tried with a step; a `Trial` without times was not tried."""

    threads: int = 0
    other_threads: int = 0  # the number of cores that no worker keeps busy
    batch: int = 0  # items
    other: Trial = Trial()  # with `other_threads`
    anomaly: Trial = Trial()
    deterministic: Trial = Trial()
    single: Trial = Trial()  # a forward and a backward pass with float64, and with float32
    larger: Trial = Trial()  # a batch, and an equal part of a larger one
