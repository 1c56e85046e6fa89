"""Rules as rows of a table: a rule reads facts, and gives a finding or none."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from stepscope import thresholds
from stepscope.base.wording import counted, milliseconds, percent
from stepscope.report.findings import Finding
from stepscope.thresholds import WORTH

View = TypeVar("View")  # numbers computed from facts, for the rules of a table


class Gain(NamedTuple):
    """A gain as a share of the step, of which two measurements are known: the true gain is about between them."""

    about: float
    least: float
    most: float

    @property
    def range(self) -> tuple[float, float]:
        """The range of the true gain. A measurement is inexact, and a fault may slow the rest of the step, too."""
        least = 1 - thresholds.LONGER_REST * (1 - self.least) - thresholds.INEXACT * self.least
        most = 1 - thresholds.SHORTER_REST * (1 - self.most) + thresholds.INEXACT * self.most
        return max(0.0, least), min(1.0, most)


@dataclass(frozen=True)
class Rule(Generic[View]):
    """Computes the attributes of a `Finding` from a view of the facts.

    A text contains attributes of the view with their units: ``"{wait_ms:ms}"``, ``"{share:%}"``, and ``"{cores:core}"``
    for a number of cores. A text may also be a function of the view.
    """

    key: str  # unique, such as "loader.too-few-workers"; it stays when texts change
    name: str
    verdict: str
    topic: str
    means: str  # when the rule applies, in a sentence for the page of rules
    gain: Callable[[View], float | Gain | None]  # None if the rule does not apply
    evidence: str | Callable[[View], str]
    change: str | Callable[[View], str]
    least: float = WORTH  # smallest gain of a finding
    line: Callable[[View], str] = lambda view: ""
    example: str = ""  # the change for the page of rules, if `change` is a function

    @property
    def remedy(self) -> str:
        """The change with "…" for each number that depends on the facts."""
        return self.example or re.sub(r"\{[^}]*\}", "…", str(self.change))


class _Text(string.Formatter):
    """Replaces names in a text by attributes of an object."""

    def get_value(self, name: int | str, arguments: Sequence[Any], more: Mapping[str, Any]) -> Any:
        return getattr(arguments[0], str(name))

    def format_field(self, value: Any, unit: str) -> str:
        known = {"ms": milliseconds, "%": percent}
        if unit in known:
            return known[unit](value)
        return counted(value, unit) if unit.replace(" ", "").isalpha() else format(value, unit)


def filled(text: str, view: object) -> str:
    """Return a text of a rule with the attributes of a view."""
    return _Text().format(text, view)


def findings(rules: Iterable[Rule[View]], view: View, estimated: bool = False) -> Iterator[Finding]:
    """Yield the findings of the rules that apply; `estimated` says whether their gains are more than upper bounds."""

    def text_of(part: str | Callable[[View], str]) -> str:
        return filled(part, view) if isinstance(part, str) else part(view)

    for rule in rules:
        gain = rule.gain(view)
        if gain is None:
            continue
        gain = gain if isinstance(gain, Gain) else Gain(gain, gain, gain)
        if gain.about >= rule.least:
            texts = text_of(rule.evidence), text_of(rule.change)
            ends = gain.range if estimated else None
            yield Finding(rule.key, rule.name, rule.verdict, gain.about, *texts, rule.topic, rule.line(view), ends)


def mostly(line: str) -> str:
    """Return a sentence with the user's line; "" if the line is unknown."""
    return f" Mostly at {line}" if line else ""
