"""What a diagnosis says: verdict, evidence, and what to change, as text and as HTML."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass

from helpers import config
from helpers.traces.report import printable

WIDTH = 98  # of a line, in characters: two more may stand before it, and a terminal has 100
# Share of a step. TensorBoard's profiler tab advises from the same share on; two traces of one loop differ by 2 %.
WORTH = 0.05

NOTHING, UNKNOWN = "nothing wrong", "cannot tell"
VERDICTS = {
    "loading": "the loop waits for mini-batches",
    "copies": "copies between host and GPU hold the step up",
    "launches": "the GPU waits until the host launches its next kernel",
    "compute": "the kernels take the time, and could take less",
    "synchronization": "the host waits for the GPU in every step, and then the GPU for the host",
    "communication": "the GPU waits for the other processes",
    NOTHING: "no change that this course knows would gain 5 % of a step",
    UNKNOWN: "the evidence does not suffice",
}


@dataclass(frozen=True)
class Finding:
    """Something that costs time, and what to do about it.

    Attributes
    ----------
    name : str
        What it is, in a few words.
    verdict : str
        The verdict if this is what can gain most, one of `VERDICTS`.
    gain : float
        The most that mending it can gain: a share of the step, 0 to 1 (Amdahl: no more than all of the time it takes).
    evidence : str
        What was measured.
    change : str
        The line of code to change, as it should be.
    notebook : str or None
        The notebook that explains it, without ``.ipynb``; shown as soon as there is one.
    """

    name: str
    verdict: str
    gain: float
    evidence: str
    change: str
    notebook: str | None = None

    @property
    def factor(self) -> float:
        """The most that mending it can make the loop faster: 1 / (1 − gain)."""
        return 1 / (1 - self.gain) if self.gain < 1 else math.inf

    def bound(self, step_ms: float) -> str:
        """Say how much can be gained of a step of `step_ms` milliseconds."""
        if self.gain < WORTH:
            return f"less than {percent(WORTH)} of a step"
        factor = f"{self.factor:.{2 if self.factor < 1.95 else 1}f}×" if self.factor < 100 else "100× and more"
        return f"at most {factor} (or −{milliseconds(self.gain * step_ms)} of a step of {milliseconds(step_ms)})"


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found. Printed, it is text for a terminal; in a notebook it shows as a table.

    Attributes
    ----------
    verdict : str
        One of `VERDICTS`.
    reason : str
        Why, in a sentence.
    step_ms : float
        Mean duration of a step in milliseconds; NaN if it is not told.
    evidence : tuple of (str, str)
        What was measured: name and value.
    findings : tuple of Finding
        What to change, the largest possible gain first. Several gains do not add up.
    cannot_tell : tuple of str
        What could not be looked at, and how to get it.
    """

    verdict: str
    reason: str
    step_ms: float
    evidence: tuple[tuple[str, str], ...]
    findings: tuple[Finding, ...]
    cannot_tell: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = max((len(name) for name, _ in self.evidence), default=0) + 2
        lines = [*_wrapped(f"Verdict: {self.verdict}. {self.reason}"), ""]
        for name, value in self.evidence:
            lines += _wrapped(value, f"  {name:{width}}")
        if self.findings:
            lines += ["", "What to change, the largest possible gain first:"]
        for number, finding in enumerate(self.findings, 1):
            lines += ["", *_wrapped(f"{finding.name}: {finding.bound(self.step_ms)}", f"{number:3}  ")]
            for text in (finding.evidence, finding.change, _explained(finding.notebook)):
                lines += _wrapped(text, "     ") if text else []
        if len(self.findings) > 1:
            lines += ["", *_wrapped(ONE_AT_A_TIME)]
        for text in self.cannot_tell:
            lines += ["", *_wrapped(f"Cannot tell: {text}")]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        rows = [f"<tr>{_cell(_words(name), 'nowrap')}{_cell(_words(value))}</tr>" for name, value in self.evidence]
        parts = [f"<p><b>Verdict: {self.verdict}.</b> {_words(self.reason)}</p>", _table(rows)]
        if self.findings:
            head = "".join(f'<th style="text-align: left">{name}</th>' for name in ("what", "gains", "change"))
            rows = [f"<tr>{''.join(self._cells(finding))}</tr>" for finding in self.findings]
            parts.append(_table([f"<tr>{head}</tr>", *rows]))
        if len(self.findings) > 1:
            parts.append(f"<p>{ONE_AT_A_TIME}</p>")
        parts += [f"<p>Cannot tell: {_words(text)}</p>" for text in self.cannot_tell]
        return "".join(parts)

    def _cells(self, finding: Finding) -> Iterable[str]:
        yield _cell(f"<b>{_words(finding.name)}</b><br>{_words(finding.evidence)}")
        yield _cell(_words(finding.bound(self.step_ms)))
        yield _cell(f"<code>{_words(finding.change)}</code>{_link(finding.notebook)}")


ONE_AT_A_TIME = "These gains do not add up. Mend the first, measure, and diagnose again."


def conclude(
    step_ms: float,
    evidence: Iterable[tuple[str, str]],
    findings: Iterable[Finding],
    cannot_tell: Iterable[str] = (),
    unknown: str | None = None,
    otherwise: str | None = None,
) -> Diagnosis:
    """Return the diagnosis that the findings amount to.

    Parameters
    ----------
    step_ms, evidence, findings, cannot_tell
        As those of `Diagnosis`; the findings in any order.
    unknown : str, optional
        Why there can be no verdict, whatever else.
    otherwise : str, optional
        Why there can be no verdict if nothing was found.
    """
    ranked = sorted(findings, key=lambda finding: -finding.gain)
    worth = [finding for finding in ranked if finding.gain >= WORTH]
    if unknown or (otherwise and not worth):
        verdict, reason = UNKNOWN, unknown or otherwise
    elif not worth:
        verdict, reason = NOTHING, _sentence(VERDICTS[NOTHING])
    else:
        verdict, reason = worth[0].verdict, _sentence(VERDICTS[worth[0].verdict])
        if verdict == UNKNOWN:
            reason = f"{_sentence(worth[0].name)} Mend that first, and diagnose again."
    return Diagnosis(verdict, reason, step_ms, tuple(evidence), tuple(ranked), tuple(cannot_tell))


def milliseconds(value: float) -> str:
    """Return a duration in ms with two digits that tell: "0.85 ms", "8.5 ms", "85 ms"."""
    return f"{value:,.{0 if value >= 9.95 else 1 if value >= 0.995 else 2}f} ms"


def percent(share: float) -> str:
    """Return a share from 0 to 1 in percent."""
    return f"{share * 100:.{0 if share >= 0.0995 or share < 0.0005 else 1}f} %"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _exists(notebook: str | None) -> bool:
    return notebook is not None and (config.PROJECT / "notebooks" / f"{notebook}.ipynb").exists()


def _title(notebook: str) -> str:
    number, name = notebook.split("-", 1)
    return f"{number} {name[0].upper()}{name[1:].replace('-', ' ')}"


def _explained(notebook: str | None) -> str:
    return f"→ notebooks/{notebook}.ipynb" if _exists(notebook) else ""


def _link(notebook: str | None) -> str:
    return f'<br><a href="{notebook}.ipynb">{_title(notebook)}</a>' if _exists(notebook) else ""


def _words(text: str) -> str:
    """Return a text as HTML that is shown as it is."""
    return html.escape(_unbroken(text)).replace("\n", "<br>")


def _unbroken(text: str) -> str:
    """Let no line end between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(%|ms|µs|kB)(?!\w))", "\u00a0", text)


def _cell(content: str, space: str = "normal") -> str:
    return f'<td style="text-align: left; vertical-align: top; white-space: {space}">{content}</td>'


def _table(rows: Iterable[str]) -> str:
    return f'<table style="margin-left: 0">{"".join(rows)}</table>'


def _wrapped(text: str, head: str = "") -> list[str]:
    """Return printable lines of a text that begin below each other, the first one after `head`."""
    lines = []
    for paragraph in text.split("\n"):
        text = _unbroken(printable(paragraph))
        lines += textwrap.wrap(text, WIDTH - len(head), break_long_words=False, break_on_hyphens=False)
    return [(" " * len(head) if number else head) + line.replace("\u00a0", " ") for number, line in enumerate(lines)]
