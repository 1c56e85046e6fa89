"""From findings to a verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from stepscope import thresholds
from stepscope.report.findings import NOTHING, UNKNOWN, VERDICTS, Diagnosis, Finding
from stepscope.rules.rule import Gain


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
    """Return the diagnosis that follows from findings in any order.

    `steps` and `apart_ms` are attributes of `Diagnosis`. `doubt` is a reason to give no verdict; `otherwise` is a
    reason to give no verdict if nothing was found.
    """
    ranked = _ranked([*findings])
    worth = [finding for finding in ranked if finding.gain >= thresholds.WORTH]
    if doubt or (otherwise and not worth):
        verdict, reason = UNKNOWN, doubt or otherwise or ""
    elif not worth:
        verdict, reason = NOTHING, _sentence(VERDICTS[NOTHING])
    else:
        verdict, reason = worth[0].verdict, _sentence(VERDICTS[worth[0].verdict])
        if verdict == UNKNOWN:
            reason = f"{_sentence(worth[0].name)} Fix this problem first, and diagnose again."
    return Diagnosis(
        verdict, reason, step_ms, tuple(evidence), tuple(ranked), tuple(unknown), steps=tuple(steps), apart_ms=apart_ms
    )


def together(findings: Iterable[Finding], wait: float) -> list[Finding]:
    """Return findings so that each line has one: the finding with the largest gain, with the sum of the line's gains.

    Of one line, each kind of work is in one finding. The sum is at most the share of the `wait` for batches, or of the
    rest of the step.
    """
    kept = dict[str, Finding]()
    for number, finding in enumerate(sorted(findings, key=lambda each: -each.gain)):
        place = finding.line.partition(": ")[0] or str(number)
        first = kept.get(place)
        if first is None:
            kept[place] = finding
            continue
        limit = wait if first.verdict == "loading" else 1 - wait
        gain = max(first.gain, min(limit, first.gain + finding.gain))
        ends = first.range
        if ends is not None and finding.range is not None:
            ends = min(gain, ends[0] + finding.range[0]), max(ends[1], Gain(gain, gain, gain).range[1])
        kept[place] = replace(first, gain=gain, range=ends, evidence=f"{first.evidence} {finding.evidence}")
    return list(kept.values())


def _ranked(findings: list[Finding]) -> list[Finding]:
    """Return findings, the largest gain first; findings with a line precede findings that gain about as much."""
    most = max((finding.gain for finding in findings), default=0.0)
    return sorted(
        findings,
        key=lambda finding: (-bool(finding.line and finding.gain >= thresholds.ABOUT_EQUAL * most), -finding.gain),
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
