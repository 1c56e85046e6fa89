"""Each rung as the pair that was compared: images per second before and after a change, here or on a GPU elsewhere."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from helpers.results import scoreboard
from helpers.results.scoreboard import Result
from helpers.training import calculated
from stepscope.base.confidence import Interval
from stepscope.base.wording import digits, rounded
from stepscope.timing.comparison import NOISY, SAME, outcome, with_limits

GPU = "A100"
"""The GPU for which rungs without a recording are calculated."""

# Rungs that can be calculated: how many of the first `calculated.changes` of its notebook a rung contains
_CALCULATED = {"10 channels_last": 1, "11 mixed precision": 2, "12 fused optimizer": 1, "12 fewer launches": 2}


@dataclass(frozen=True)
class Pair:
    """A change, and what it was compared with; a rung without a ratio has nothing before it."""

    rung: str
    baseline: str | None  #: in words
    before: float | None  #: images per second
    after: float  #: images per second
    gain: str  #: the ratio in words; empty without a baseline
    source: str  #: device, step and data
    waiting: tuple[float | None, float | None] = None, None  #: share of the time before and after, 0 to 1
    origin: str = ""  #: where it was recorded, or that it is calculated; empty if it is from the same machine
    hatched: bool = False  #: whether the change is made for another device

    @property
    def rates(self) -> str:
        """The images per second in words: "7,290 → 12,100 images/s"."""
        return f"{' → '.join(rounded(rate) for rate in (self.before, self.after) if rate)} images/s"


def measured(result: Result, origin: str = "") -> Pair:
    """Return a result as a pair."""
    rate, ratio = result.rate.mean, result.ratio
    return Pair(
        rung=result.rung,
        baseline=scoreboard.against(result) if ratio else None,
        before=rate / ratio.mean if ratio else None,
        after=rate,
        gain=_gain(ratio) if ratio else "",
        source=scoreboard.provenance([result])[0],
        waiting=(result.baseline_loading_share, result.loading_share),
        origin=origin,
        hatched=result.for_another_device,
    )


def _gain(ratio: Interval) -> str:
    found = outcome(ratio)
    return NOISY if found == NOISY else f"{with_limits(ratio)}{', equal' if found == SAME else ''}"


def on_a_gpu(rung: str) -> Pair | None:
    """Return a rung as a GPU of ``data/reference`` recorded it, else as it is calculated, which takes some seconds.

    None if it is neither recorded nor calculated.
    """
    for machine, result in scoreboard.references(rung):
        if machine != scoreboard.HERE and result.device != "CPU" and result.ratio:
            return measured(result, f"recorded on {result.device}")
    if rung not in _CALCULATED:
        return None
    changes = list(islice(calculated.changes(rung[:2], [GPU]), _CALCULATED[rung]))  # the next one would take seconds
    (_, first, _, images), (_, _, last, _) = changes[0], changes[-1]
    before, after = (images / step.steady_ms * 1e3 for step in (first, last))
    gain, source = f"{digits(after / before)}×", f"{GPU}, ResNet-50 at 224 × 224, calculated from {last.gpu.source}"
    return Pair(rung, "the step without it", before, after, gain, source, origin=f"calculated for {GPU}")


def ladder(results: Iterable[Result]) -> list[Pair]:
    """Return results as pairs; a change that is made for a GPU, measured on a CPU, is replaced as by `on_a_gpu`."""
    return [(result.for_another_device and on_a_gpu(result.rung)) or measured(result) for result in results]
