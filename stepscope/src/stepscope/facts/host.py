"""The host's part of a step: short operators that are called very often, and work outside of operators."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operator:
    """Calls of one operator in a step."""

    name: str
    calls: float


@dataclass(frozen=True)
class Calls:
    """Short operators that a step calls very often; by default none."""

    share: float = 0.0  # of the recorded steps: the calls with the code between them, without unusually long calls
    operators: tuple[Operator, ...] = ()  # the most expensive first
    median_us: float = 0.0  # of a call
    line: str = ""  # the user's line that calls most of them; "" if unknown, as everywhere here
    sampled_share: float = 0.0  # of the sampled steps, in samples with such a call


@dataclass(frozen=True)
class Work:
    """Work of the user's lines that is not training."""

    share: float = 0.0  # of the sampled time
    ms: float = 0.0  # in a step
    waited: float = 0.0  # the part of `share` spent waiting
    line: str = ""  # that takes most of it


@dataclass(frozen=True)
class Host:
    """The host's time in a step beside the work of its operators. Without sampled steps, no line is known."""

    optimizer: Calls = Calls()  # those that an optimizer calls which has a faster way
    calls: Calls = Calls()  # all other calls
    elementwise: float = 0.0  # share of large elementwise operators, with their backward pass
    elementwise_line: str = ""
    updates: float = 0.0  # share of the optimizer, without short calls
    updates_line: str = ""
    outside: Work = Work()  # in steps
    around: Work = Work()  # between steps, without loading
    sampled_ms: float | None = None  # a sampled step without its batch; None if no step was sampled
