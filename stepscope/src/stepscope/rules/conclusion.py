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
    elif worth and not sure(worth[0]):
        unsure = f"The first change, for {worth[0].name}, may gain much or next to nothing: see its range."
        verdict, reason = UNKNOWN, otherwise or unsure
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

    Calls of two methods of a package at one line stay apart, because their changes differ. The sum is at most the share
    of the `wait` for batches, or of the rest of the step. Gains between host and GPU are of the same time as other
    gains of the line, and do not add up. A wait for the GPU that is about as long as the line's work on the host comes
    first: the work contains it.
    """
    kept = dict[str, Finding]()

    def weight(finding: Finding) -> float:
        return finding.gain / (thresholds.ABOUT_EQUAL if finding.verdict == "synchronization" else 1.0)

    for number, finding in enumerate(sorted(findings, key=weight, reverse=True)):
        own, _, called = finding.line.partition(", called at ")[0].partition(", in ")
        place = f"{own.partition(': ')[0]} {called}".strip() or str(number)
        first = kept.get(place)
        if first is None:
            kept[place] = finding
            continue
        limit = wait if first.verdict == "loading" else 1 - wait
        of_gpu = any(each.key.startswith(("device.", "copies.")) for each in (first, finding))
        gain = max(first.gain, min(limit, finding.gain if of_gpu else first.gain + finding.gain))
        ends = first.range
        if ends is not None and finding.range is not None:
            ends = min(gain, ends[0] + finding.range[0]), max(ends[1], Gain(gain, gain, gain).range[1])
        kept[place] = replace(first, gain=gain, range=ends, evidence=f"{first.evidence} {finding.evidence}")
    return list(kept.values())


def sure(finding: Finding) -> bool:
    """Return whether a finding is worth a change for sure: an estimate's range may begin below that."""
    return finding.range is None or finding.range[0] >= thresholds.WORTH


def _ranked(findings: list[Finding]) -> list[Finding]:
    """Return findings, the largest gain first; findings with a line precede findings that gain about as much.

    Findings that are worth a change and gain something for sure precede all others.
    """
    most = max((finding.gain for finding in findings), default=0.0)

    def rank(finding: Finding) -> tuple[bool, bool, float]:
        certain = sure(finding) and finding.gain >= thresholds.WORTH
        return not certain, not (finding.line and finding.gain >= thresholds.ABOUT_EQUAL * most), -finding.gain

    return sorted(findings, key=rank)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
