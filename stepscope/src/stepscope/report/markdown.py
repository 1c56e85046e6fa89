"""Results as Markdown, for a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from stepscope.base.wording import counted, milliseconds, printable
from stepscope.report.documents import ratio_text, title_of
from stepscope.report.findings import ONE_AT_A_TIME, Diagnosis


def markdown(content: Mapping[str, Any], title: str) -> str:
    """Return results as Markdown; `content` comes from `stepscope.report.load`."""
    parts = [f"### {_words(title)}"]
    if content["command"] == "try":
        parts += _trials(content)
    else:
        for result in content["results"]:
            if len(content["results"]) > 1:
                parts.append(f"#### {_words(title_of(result))}")
            parts += _diagnosis(result["diagnosis"]) if "diagnosis" in result else [_words(result["problem"])]
    return "\n\n".join(parts) + "\n"


def _diagnosis(found: Diagnosis) -> Iterator[str]:
    yield f"**Verdict: {found.verdict}.** {_words(found.reason)}"
    if found.findings:
        rows = [
            (_words(each.name), _words(each.saving(found.step_ms)), _code(each.line), _code(each.change))
            for each in found.findings
        ]
        yield _table(("finding", "gain", "line", "change"), rows)
    if len(found.findings) > 1:
        yield ONE_AT_A_TIME
    yield from (f"Unknown: {_words(each)}" for each in found.unknown)
    evidence = _table(("", ""), [(_words(name), _words(value)) for name, value in found.evidence])
    yield f"<details><summary>Evidence</summary>\n\n{evidence}\n\n</details>"


def _trials(content: Mapping[str, Any]) -> Iterator[str]:
    yield f"{milliseconds(content['step_ms'])} a step as it is; {counted(content['rounds'], 'round')}."
    rows = []
    for each in content["settings"]:
        gain = "" if each["ratio"] is None else ratio_text(each["ratio"])
        rows.append((_code(each["name"]), gain, _words(each["problem"] or each["learns"])))
    if content["together"]:
        rows.append(("together", ratio_text(content["together"]), ""))
    yield _table(("setting", "throughput", ""), rows)
    fence = "```"
    yield "\n".join([fence, *content["lines"], fence]) if content["lines"] else "No setting is surely faster."


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows))


def _words(text: str) -> str:
    """Return a text that stays one cell of a table, and that Markdown takes as plain text."""
    return "<br>".join(
        re.sub(r"([\\`*_\[\]@#|])", r"\\\1", escape(printable(line), False)) for line in text.split("\n")
    )


def _code(text: str) -> str:
    return "<br>".join(f"`` {printable(each)} ``".replace("|", "\\|") for each in text.split("\n")) if text else ""
