"""Rounds of a loop at throughputs that are given, in place of measured ones."""

from stepscope import timing


def rounds(*rates: float) -> tuple[timing.Timing, ...]:
    """A round of one step with 100 images at each of these images/s; a quarter of it is waiting."""
    return tuple(timing.Timing(100, 100 / rate, (25 / rate,), (100 / rate,)) for rate in rates)


def compared(*rates: float, before: list[float] | None = None) -> timing.Comparison:
    """Rounds ``"now"``, and as many ``"before"``, by default at the same throughputs."""
    return timing.Comparison({"before": rounds(*(before or rates)), "now": rounds(*rates)})
