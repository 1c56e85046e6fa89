"""Rules as rows of a table: a rule reads facts, and gives a finding or none."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stepscope.base.wording import counted, milliseconds, percent
from stepscope.report.findings import Finding
from stepscope.thresholds import WORTH

View = TypeVar("View")  # numbers computed from facts, for the rules of a table


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
    gain: Callable[[View], float | None]  # None if the rule does not apply
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


def findings(rules: Iterable[Rule[View]], view: View) -> Iterator[Finding]:
    """Yield the findings of the rules that apply."""

    def filled(text: str | Callable[[View], str]) -> str:
        return _Text().format(text, view) if isinstance(text, str) else text(view)

    for rule in rules:
        gain = rule.gain(view)
        if gain is not None and gain >= rule.least:
            texts = filled(rule.evidence), filled(rule.change)
            yield Finding(rule.key, rule.name, rule.verdict, gain, *texts, rule.topic, rule.line(view))


def mostly(line: str) -> str:
    """Return a sentence with the user's line; "" if the line is unknown."""
    return f" Mostly at {line}" if line else ""
