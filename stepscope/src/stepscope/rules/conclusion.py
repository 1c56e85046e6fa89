"""From findings to a verdict."""

from __future__ import annotations

from collections.abc import Iterable

from stepscope import thresholds
from stepscope.report.findings import NOTHING, UNKNOWN, VERDICTS, Diagnosis, Finding


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


def _ranked(findings: list[Finding]) -> list[Finding]:
    """Return findings, the largest gain first; findings with a line precede findings that gain about as much."""
    most = max((finding.gain for finding in findings), default=0.0)
    return sorted(
        findings,
        key=lambda finding: (-bool(finding.line and finding.gain >= thresholds.ABOUT_EQUAL * most), -finding.gain),
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
