"""A diagnosis: verdict, evidence and changes, as text, as HTML and as JSON."""

from __future__ import annotations

import dataclasses
import html
import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from stepscope.base import terminal
from stepscope.base.wording import digits, milliseconds, percent, printable
from stepscope.thresholds import WORTH

WIDTH = 98  # characters in a line: a terminal has 100, and a line may be indented by two
NOTHING, UNKNOWN = "nothing wrong", "unknown"
VERDICTS = {
    "loading": "the loop waits for batches, or competes with its workers for cores",
    "copies": "copies between host and GPU delay the step",
    "launches": "the GPU waits for the host to launch its next kernel",
    "compute": "the operators (on a GPU, its kernels) take the time, and could take less",
    "synchronization": "in every step the host waits for the GPU, and afterwards the GPU waits for the host",
    "communication": "the step waits for communication with other processes",
    "data": "the batches hold padding, or items that were trained on already: the step works for nothing",
    "host": "the host does work other than training, in or between the steps, or calls very many small operators",
    "settings": "the step would be faster with another setting, or with a larger batch",
    NOTHING: "no change known to stepscope would gain 5% of a step",
    UNKNOWN: "the evidence does not suffice",
}


@dataclass(frozen=True)
class Finding:
    """A fault that costs time, and the change that fixes the fault."""

    key: str  #: Key of the rule, such as ``"loader.too-few-workers"``; it stays when texts change
    name: str  #: The fault, in a few words
    verdict: str  #: The verdict if this finding has the largest gain; one of `VERDICTS`
    gain: float  #: Estimated gain, as a share of the step; infinite if the job hangs
    evidence: str  #: The measurements, in sentences
    change: str  #: The line of code to change, in its new form
    topic: str  #: A topic to read about, by a term of the field, such as ``"mixed precision"``
    line: str = ""  #: The user's line that causes the fault, also part of the evidence; "" if unknown
    #: Ends of the range of the true gain; None if there is no estimate: `gain` is then the largest possible gain
    #: (Amdahl: at most the time that the fault takes).
    range: tuple[float, float] | None = None

    def saving(self, step_ms: float) -> str:
        """Return as text how much of a step of `step_ms` milliseconds can be saved."""
        if self.gain < WORTH:
            return f"less than {percent(WORTH)} of a step"
        if math.isinf(self.gain):
            return "fix it, or the job hangs"
        saved = f"−{milliseconds(self.gain * step_ms)} of a step of {milliseconds(step_ms)}"
        if self.range is None:
            return f"at most {_times(self.gain)}× (or {saved})"
        least, most = map(_times, self.range)
        return f"about {_times(self.gain)}×, {least} to {most} (or {saved})"


@dataclass(frozen=True)
class Diagnosis:
    """The result of `diagnose`: text if it is printed, and a table in a notebook."""

    verdict: str  #: One of `VERDICTS`
    reason: str  #: The reason for the verdict, in a sentence
    step_ms: float  #: Mean duration of a step in milliseconds; NaN if unknown
    evidence: tuple[tuple[str, str], ...]  #: The measurements: name and value
    #: The largest gain first, except that findings with a line precede findings that gain about as much. Gains do not
    #: add up.
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...] = ()  #: Parts that could not be examined, and how to examine them
    #: The address or the path of a page for each topic of the findings; see `linked`.
    links: Mapping[str, str] = field(default_factory=dict)
    #: For each timed or recorded step, its wait for a batch, and its duration with this wait; wall-clock time in ms.
    steps: tuple[tuple[float, float], ...] = ()
    #: Work between two epochs, such as evaluation, divided by the steps of an epoch: part of `step_ms`, but not of
    #: `steps`.
    apart_ms: float = 0.0
    #: Where the time of a recorded step goes: names, such as ``"forward"``, and shares of the step.
    shares: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as types of JSON, without links; unknown or infinite numbers are None."""

        def number(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "step_ms": number(self.step_ms),
            "evidence": dict(self.evidence),
            "findings": [
                dataclasses.asdict(each) | {"gain": number(each.gain), "range": each.range and [*each.range]}
                for each in self.findings
            ],
            "unknown": list(self.unknown),
            "waits_ms": [round(wait, 4) for wait, _ in self.steps],
            "steps_ms": [round(step, 4) for _, step in self.steps],
            "apart_ms": self.apart_ms,
            "shares": {name: round(share, 4) for name, share in self.shares.items()},
        }

    @classmethod
    def of_json(cls, content: Mapping[str, Any]) -> Self:
        """Return the diagnosis from the result of `as_json`; raises ValueError, TypeError or LookupError."""
        if content["verdict"] not in VERDICTS:
            raise ValueError(f"the verdict {content['verdict']!r}")
        gains = [
            (math.inf if each["gain"] is None else float(each["gain"]), each["range"] and _ends(*each["range"]))
            for each in content["findings"]
        ]
        names = [field.name for field in dataclasses.fields(Finding) if field.name not in ("gain", "range")]
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
            tuple(Finding(gain=gain, range=ends, **text) for (gain, ends), text in zip(gains, texts, strict=True)),
            tuple(map(str, content["unknown"])),
            steps=tuple(steps),
            apart_ms=apart,
            shares={str(name): float(share) for name, share in content.get("shares", {}).items()},
        )

    def linked(self, links: Mapping[str, str]) -> Self:
        """Return the same diagnosis with links: the address or the path of a page for each topic."""
        return dataclasses.replace(self, links=links)

    def at(self, folder: Path) -> Self:
        """Return the same diagnosis with the folder of its profile in the evidence."""
        return dataclasses.replace(self, evidence=(*self.evidence, ("profile", str(folder))))

    def __str__(self) -> str:
        return self.text()

    def text(self, colours: bool = False) -> str:
        """Return the diagnosis as text; on a terminal with `colours` for the verdict and the gains."""
        text = self._plain()
        if not colours:
            return text
        text = re.sub(r"^Verdict: [^.]+\.", rf"{terminal.BOLD}\g<0>{terminal.PLAIN}", text)
        return _GAIN.sub(rf"{terminal.GREEN}\g<0>{terminal.PLAIN}", text)

    def _plain(self) -> str:
        width = max((len(name) for name, _ in self.evidence), default=0) + 2
        lines = [*_wrapped(f"Verdict: {self.verdict}. {self.reason}"), ""]
        for name, value in self.evidence:
            lines += _wrapped(value, f"  {name:{width}}")
        if self.findings:
            lines += ["", "What to change, in this order:"]
        for number, finding in enumerate(self.findings, 1):
            lines += ["", *_wrapped(f"{finding.name}: {finding.saving(self.step_ms)}", f"{number:3}  ")]
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
        parts = [f"<p><b>Verdict: {self.verdict}.</b> {as_html(self.reason)}</p>"]
        parts.append(_table((as_html(name), as_html(value)) for name, value in self.evidence))
        if self.findings:
            parts.append(_table([("<b>finding</b>", "<b>gain</b>", "<b>change</b>"), *map(self._row, self.findings)]))
        if len(self.findings) > 1:
            parts.append(f"<p>{ONE_AT_A_TIME}</p>")
        parts += [f"<p>Unknown: {as_html(text)}</p>" for text in self.unknown]
        return "".join(parts)

    def _row(self, finding: Finding) -> tuple[str, ...]:
        topic, page = as_html(finding.topic), self.links.get(finding.topic)
        return (
            f"<b>{as_html(finding.name)}</b><br>{as_html(finding.evidence)}",
            as_html(finding.saving(self.step_ms)),
            f"<code>{as_html(finding.change)}</code><br>→ "
            + (f'<a href="{html.escape(page)}">{topic}</a>' if page else topic),
        )


def _times(gain: float) -> str:
    """Return how many times as fast a step is without a share of its time (Amdahl), as text."""
    return digits(1 / max(1 - gain, 0.01))


def _ends(least: float, most: float) -> tuple[float, float]:
    return float(least), float(most)


# As `Finding.saving` writes it; a line may end between the words
_GAIN = re.compile(r"(?<=: )(?:at\s+most|about)\s+[\d.,]+×(?:,\s+[\d.]+\s+to\s+[\d.]+)?")
ONE_AT_A_TIME = "These gains do not add up. Fix the first fault, measure, and diagnose again."


def as_html(text: str) -> str:
    """Escape a text for HTML."""
    return html.escape(text).replace("\n", "<br>")


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    style = 'style="text-align: left; vertical-align: top"'
    lines = (f"<tr>{''.join(f'<td {style}>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<table style="margin-left: 0">{"".join(lines)}</table>'


def _wrapped(text: str, head: str = "") -> list[str]:
    """Return the printable lines of a text: the first line after `head`, all further lines indented to match."""
    lines, indent = list[str](), " " * len(head)
    for paragraph in text.split("\n"):
        lines += textwrap.wrap(
            printable(paragraph), WIDTH, initial_indent=indent if lines else head, subsequent_indent=indent,
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
    return lines
