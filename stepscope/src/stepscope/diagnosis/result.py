"""The result of a diagnosis: verdict, evidence, and what to change, as text and as HTML."""

import dataclasses
import html
import math
import string
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from stepscope.base.wording import counted, digits, milliseconds, percent, printable

WIDTH = 98  # characters in a line: two more may stand before it, and a terminal has 100
# Share of a step. TensorBoard's profiler tab uses the same threshold; two traces of one loop differ by 2%.
WORTH = 0.05
ABOUT = 0.75  # a gain of at least this part of the largest counts as equal: then findings with a line come first

NOTHING, UNKNOWN = "nothing wrong", "unknown"
VERDICTS = {
    "loading": "the loop waits for batches, or for the cores that make them",
    "copies": "copies between host and GPU hold the step up",
    "launches": "the GPU waits until the host launches its next kernel",
    "compute": "the operators, on a GPU its kernels, take the time, and could take less",
    "synchronization": "the host waits for the GPU in every step, and then the GPU for the host",
    "communication": "the step waits for the other processes",
    "host": "the host does other work than training, in or between the steps, or calls very many small operators",
    "settings": "the step is slower than it would be with another setting, or with a larger batch",
    NOTHING: "no change that is known here would gain 5% of a step",
    UNKNOWN: "the evidence does not suffice",
}


@dataclass(frozen=True)
class Finding:
    """Something that costs time, and what to do about it."""

    name: str  #: What it is, in a few words
    verdict: str  #: The verdict if this finding has the largest gain; one of `VERDICTS`
    #: The most that fixing it can gain, as a share of the step (Amdahl: at most the time that it takes); infinite if
    #: the job hangs.
    gain: float
    evidence: str  #: What was measured, in sentences
    change: str  #: The line of code to change, in its new form
    topic: str  #: What to read about, in the words of the field, such as ``"mixed precision"``
    line: str = ""  #: The line of the user's code that causes it, also part of the evidence; "" if none is known

    def bound(self, step_ms: float) -> str:
        """Return as text how much of a step of `step_ms` milliseconds can be saved."""
        if self.gain < WORTH:
            return f"less than {percent(WORTH)} of a step"
        if math.isinf(self.gain):
            return "fix it, or the job hangs"
        saved = f"−{milliseconds(self.gain * step_ms)} of a step of {milliseconds(step_ms)}"
        factor = 1 / max(1 - self.gain, 0.01)  # Amdahl
        return f"at most {digits(factor)}× (or {saved})"


@dataclass(frozen=True)
class Rule:
    """A row of a table of findings: the attributes of a `Finding`, computed from facts.

    A text names attributes of the facts, with their units: ``"{wait:ms}"``, ``"{share:%}"``, and ``"{cores:core}"`` for
    a number of cores. A text may also be a function of the facts.
    """

    name: str
    verdict: str
    topic: str
    gain: Callable[[Any], float | None]  # None if the rule does not apply
    evidence: str | Callable[[Any], str]
    change: str | Callable[[Any], str]
    least: float = WORTH  # smallest gain that makes a finding
    line: Callable[[Any], str] = lambda facts: ""


class _Text(string.Formatter):
    """Fills a text with attributes of an object."""

    def get_value(self, name: int | str, arguments: Sequence[object], more: Mapping[str, object]) -> object:
        return getattr(arguments[0], str(name))

    def format_field(self, value: Any, unit: str) -> str:
        known = {"ms": milliseconds, "%": percent}
        if unit in known:
            return known[unit](value)
        return counted(value, unit) if unit.replace(" ", "").isalpha() else format(value, unit)


def findings(rules: Iterable[Rule], facts: object) -> Iterator[Finding]:
    """Yield the findings of the rules that apply to these facts."""

    def filled(text: str | Callable[[Any], str]) -> str:
        return _Text().format(text, facts) if isinstance(text, str) else text(facts)

    for rule in rules:
        gain = rule.gain(facts)
        if gain is not None and gain >= rule.least:
            texts = filled(rule.evidence), filled(rule.change)
            yield Finding(rule.name, rule.verdict, gain, *texts, rule.topic, rule.line(facts))


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found: printed, text for a terminal; in a notebook, a table."""

    verdict: str  #: One of `VERDICTS`
    reason: str  #: Why, in a sentence
    step_ms: float  #: Mean duration of a step in milliseconds; NaN if it is unknown
    evidence: tuple[tuple[str, str], ...]  #: What was measured: name and value
    #: What to change, the largest possible gain first, except that findings with a line precede it if they gain about
    #: as much. Several gains do not add up.
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...] = ()  #: What could not be examined, and how to examine it
    #: For topics of the findings, the address or the path of a page; see `linked`.
    links: Mapping[str, str] = field(default_factory=dict)
    #: For each timed or recorded step, how long it waited for its batch, and how long it took including that wait;
    #: wall-clock time in ms.
    steps: tuple[tuple[float, float], ...] = ()
    #: Work between two epochs, such as evaluation, divided by the steps of an epoch: part of `step_ms`, but not of
    #: `steps`.
    apart_ms: float = 0.0

    def as_json(self) -> dict:
        """Return the diagnosis in types of JSON, without links: unknown or infinite numbers are None."""

        def number(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "step_ms": number(self.step_ms),
            "evidence": dict(self.evidence),
            "findings": [dataclasses.asdict(each) | {"gain": number(each.gain)} for each in self.findings],
            "unknown": list(self.unknown),
            "waits_ms": [round(wait, 4) for wait, _ in self.steps],
            "steps_ms": [round(step, 4) for _, step in self.steps],
            "apart_ms": self.apart_ms,
        }

    @classmethod
    def of_json(cls, content: dict) -> Self:
        """Return the diagnosis that `as_json` turned into this; raises ValueError, TypeError or LookupError."""
        if content["verdict"] not in VERDICTS:
            raise ValueError(f"the verdict {content['verdict']!r}")
        gains = [math.inf if each["gain"] is None else float(each["gain"]) for each in content["findings"]]
        names = [field.name for field in dataclasses.fields(Finding) if field.name != "gain"]
        texts = [{name: str(each[name]) for name in names} for each in content["findings"]]
        steps = [*zip(map(float, content["waits_ms"]), map(float, content["steps_ms"]), strict=True)]
        if not all(0 <= wait <= step < math.inf for wait, step in steps):
            raise ValueError("a step that waits longer than it takes")
        apart = float(content.get("apart_ms", 0.0))
        if not 0 <= apart < math.inf:
            raise ValueError(f"{apart} ms between epochs")
        return cls(
            content["verdict"],
            str(content["reason"]),
            math.nan if content["step_ms"] is None else float(content["step_ms"]),
            tuple((str(name), str(value)) for name, value in content["evidence"].items()),
            tuple(Finding(gain=gain, **text) for gain, text in zip(gains, texts, strict=True)),
            tuple(map(str, content["unknown"])),
            steps=tuple(steps),
            apart_ms=apart,
        )

    def linked(self, links: Mapping[str, str]) -> Self:
        """Return the same diagnosis with links: for a topic, the address or the path of a page."""
        return dataclasses.replace(self, links=links)

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.evidence), default=0) + 2
        lines = [*_wrapped(f"Verdict: {self.verdict}. {self.reason}"), ""]
        for name, value in self.evidence:
            lines += _wrapped(value, f"  {name:{width}}")
        if self.findings:
            lines += ["", "What to change, in this order:"]
        for number, finding in enumerate(self.findings, 1):
            lines += ["", *_wrapped(f"{finding.name}: {finding.bound(self.step_ms)}", f"{number:3}  ")]
            page = self.links.get(finding.topic)
            topic = f"{finding.topic}: {page}" if page else finding.topic
            for text in (finding.evidence, finding.change, f"→ {topic}"):
                lines += _wrapped(text, "     ")
        if len(self.findings) > 1:
            lines += ["", *_wrapped(ONE_AT_A_TIME)]
        for text in self.unknown:
            lines += ["", *_wrapped(f"Unknown: {text}")]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        parts = [f"<p><b>Verdict: {self.verdict}.</b> {_words(self.reason)}</p>"]
        parts.append(_table((_words(name), _words(value)) for name, value in self.evidence))
        if self.findings:
            parts.append(_table([("<b>what</b>", "<b>gains</b>", "<b>change</b>"), *map(self._row, self.findings)]))
        if len(self.findings) > 1:
            parts.append(f"<p>{ONE_AT_A_TIME}</p>")
        parts += [f"<p>Unknown: {_words(text)}</p>" for text in self.unknown]
        return "".join(parts)

    def _row(self, finding: Finding) -> tuple[str, ...]:
        topic, page = _words(finding.topic), self.links.get(finding.topic)
        return (
            f"<b>{_words(finding.name)}</b><br>{_words(finding.evidence)}",
            _words(finding.bound(self.step_ms)),
            f"<code>{_words(finding.change)}</code><br>→ "
            + (f'<a href="{html.escape(page)}">{topic}</a>' if page else topic),
        )


ONE_AT_A_TIME = "These gains do not add up. Fix the first, measure, and diagnose again."


def conclude(
    step_ms: float,
    evidence: Iterable[tuple[str, str]],
    findings: Iterable[Finding],
    unknown: Iterable[str] = (),
    doubt: str | None = None,
    otherwise: str | None = None,
    steps: Iterable[tuple[float, float]] = (),
    apart_ms: float = 0.0,
) -> Diagnosis:
    """Return the diagnosis that follows from the findings, given in any order.

    `steps` and `apart_ms` are those of the `Diagnosis`. `doubt` is a reason to give no verdict at all; `otherwise` is a
    reason to give none if nothing was found.
    """
    ranked = _ranked([*findings])
    worth = [finding for finding in ranked if finding.gain >= WORTH]
    if doubt or (otherwise and not worth):
        verdict, reason = UNKNOWN, doubt or otherwise
    elif not worth:
        verdict, reason = NOTHING, _sentence(VERDICTS[NOTHING])
    else:
        verdict, reason = worth[0].verdict, _sentence(VERDICTS[worth[0].verdict])
        if verdict == UNKNOWN:
            reason = f"{_sentence(worth[0].name)} Fix that first, and diagnose again."
    known = {"steps": tuple(steps), "apart_ms": apart_ms}
    return Diagnosis(verdict, reason, step_ms, tuple(evidence), tuple(ranked), tuple(unknown), **known)


def _ranked(findings: list[Finding]) -> list[Finding]:
    """Return findings, the largest gain first; among those that gain about as much, those with a line come first."""
    most = max((finding.gain for finding in findings), default=0.0)
    return sorted(findings, key=lambda finding: (-bool(finding.line and finding.gain >= ABOUT * most), -finding.gain))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _words(text: str) -> str:
    """Escape a text for HTML."""
    return html.escape(text).replace("\n", "<br>")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    style = 'style="text-align: left; vertical-align: top"'
    lines = (f"<tr>{''.join(f'<td {style}>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table style="margin-left: 0">{"".join(lines)}</table>'


def _wrapped(text: str, head: str = "") -> list[str]:
    """Return the printable lines of a text, the first one after `head`, the others indented to match."""
    lines, indent = [], " " * len(head)
    for paragraph in text.split("\n"):
        lines += textwrap.wrap(
            printable(paragraph), WIDTH, initial_indent=indent if lines else head, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines
