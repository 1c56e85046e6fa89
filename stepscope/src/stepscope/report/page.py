"""Results as a self-contained page of HTML: without a server, scripts or internet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from stepscope.base.wording import counted, milliseconds, percent
from stepscope.report import context
from stepscope.report.documents import WANTED, ResultError, ratio_text, title_of
from stepscope.report.findings import ONE_AT_A_TIME, Diagnosis, Finding, as_html

STYLE = """
:root { color-scheme: light dark; --wait: #b3261e; --rest: #9aa7b8; --good: #1a7f37; --edge: #8886; --card: #8881; }
@media (prefers-color-scheme: dark) { :root { --wait: #f2766d; --rest: #64748b; --good: #5fd07a; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 56rem; margin: 1.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
h3 { font-size: 1.05rem; margin: 0; } figure { margin: 1.5rem 0; } figcaption { margin-bottom: .4rem; }
figcaption, .small { font-size: .875rem; }
code, pre { font: .875rem/1.45 ui-monospace, monospace; } p code { overflow-wrap: anywhere; }
pre { overflow-x: auto; border: 1px solid var(--edge); border-radius: .3rem; padding: .4rem .6rem; }
pre.write { white-space: pre-wrap; overflow-wrap: anywhere; }
pre .here { font-weight: bold; background: var(--edge); }
.verdict, .card { background: var(--card); border: 1px solid var(--edge); border-radius: .5rem; padding: .8rem 1rem; }
.verdict { border-left: 6px solid var(--wait); } .verdict.fine { border-left-color: var(--good); }
.card { margin: 1rem 0; } .gain { color: var(--good); font-weight: bold; margin: .2rem 0; }
.bars { display: flex; align-items: flex-end; gap: 1px; height: 8rem; border-bottom: 1px solid var(--edge); }
.bars div { flex: 1; display: flex; flex-direction: column; justify-content: flex-end; height: 100%; }
.parts { display: flex; height: 2rem; border-radius: .3rem; overflow: hidden; }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .35em; } .keys span { margin-right: 1.1em; }
.keys span { white-space: nowrap; display: inline-block; }
.wait { background: var(--wait); } .rest { background: var(--rest); }
dl { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .3rem 1rem; }
dt { font-weight: bold; } dd { margin: 0; overflow-wrap: anywhere; }
.tried { display: grid; grid-template-columns: minmax(7rem, max-content) minmax(5rem, 1fr) max-content;
  gap: .4rem .8rem; align-items: center; }
.tried code { overflow-wrap: anywhere; } .track { position: relative; height: 1rem; }
.track * { position: absolute; top: 0; bottom: 0; } .one { border-left: 1px dashed; }
.range { top: 40% !important; bottom: 40% !important; background: var(--rest); border-radius: 2px; }
.mean { width: .5rem; margin-left: -.25rem; background: currentColor; border-radius: 50%; top: .25rem !important;
  bottom: .25rem !important; }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; } dd { margin-bottom: .5rem; }
  .tried { grid-template-columns: 1fr; } }
"""
COLOURS = ("#4c78a8", "#72b7b2", "#b279a2", "#e0a458", "#7d8aa0", "#54a24b")  # of the parts of a step but waiting


def page(content: Mapping[str, Any], title: str) -> str:
    """Return results as a page: what was run, the verdict, figures of a step, and a card for each finding.

    `content` comes from `stepscope.report.load`: results of ``run``, ``diagnose`` or ``try``. The lines of findings are
    shown in context if their files are in the current folder, or up to two levels below it. Raises ResultError if there
    are no results.
    """
    if content["command"] == "try":
        return _whole(title, _trials(content))
    results = content["results"]
    if not results:
        raise ResultError(f"Expected a result for the page {title!r}, found none. {WANTED}")
    parts = [_run(results[0]), _ranks(results)]
    for result in results:
        if len(results) > 1:
            parts.append(f"<h2>{escape(title_of(result))}</h2>")
        parts.append(_diagnosis(result["diagnosis"]) if "diagnosis" in result else _text(result["problem"]))
    return _whole(title, "\n".join(filter(None, parts)))


def _whole(title: str, body: str) -> str:
    head = f"<title>{escape(title)}</title><style>{STYLE}</style>"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    body = f"<h1>{escape(title)}</h1>\n{body}"
    return f'<!DOCTYPE html>\n<html lang="en"><head>{meta}{head}</head>\n<body>\n{body}\n</body></html>\n'


def _run(result: Mapping[str, Any]) -> str:
    """Return what was run, and on which machine, if the results contain it."""
    script = f"<code>{escape(result['script'])}</code>" if result.get("script") else ""
    known = [*filter(None, [script, escape(result.get("machine", ""))])]
    return f"<p>{', on '.join(known)}</p>" if known else ""


def _ranks(results: Iterable[Mapping[str, Any]]) -> str:
    """Return a figure of the mean step of each rank; "" for one process."""
    means = {}
    for result in results:
        if "rank" in result and "diagnosis" in result and (steps := result["diagnosis"].steps):
            means[f"rank {result['rank']}"] = tuple(sum(times) / len(steps) for times in zip(*steps, strict=True))
    return _steps(means, "Mean step") if len(means) > 1 else ""


def _diagnosis(found: Diagnosis) -> str:
    fine = " fine" if found.verdict == "nothing wrong" else ""
    parts = [f'<p class="verdict{fine}"><b>Verdict: {escape(found.verdict)}.</b> {as_html(found.reason)}</p>']
    parts.append(_shares(found.shares))
    if found.steps:
        parts.append(_steps({f"step {count}": times for count, times in enumerate(found.steps, 1)}, "Each step"))
    if found.findings:
        parts.append("<h3>What to change, in this order</h3>")
    parts += [_card(number, each, found.step_ms) for number, each in enumerate(found.findings, 1)]
    if len(found.findings) > 1:
        parts.append(_text(ONE_AT_A_TIME))
    rows = "".join(f"<dt>{as_html(name)}</dt><dd>{as_html(value)}</dd>" for name, value in found.evidence)
    parts += [f"<h3>Evidence</h3><dl>{rows}</dl>", *(_text(f"Unknown: {each}") for each in found.unknown)]
    return "\n".join(filter(None, parts))


def _card(number: int, finding: Finding, step_ms: float) -> str:
    lines = []
    for line, text in context.around(finding.line):
        kind = ' class="here"' if finding.line.split(":")[1] == str(line) else ""
        lines.append(f"<span{kind}>{line:5}  {escape(text)}</span>")
    shown = f"<pre>{chr(10).join(lines)}</pre>" if lines else ""
    return (
        f'<section class="card"><h3>{number}. {as_html(finding.name)}</h3>'
        f'<p class="gain">{as_html(finding.saving(step_ms))}</p>{_text(finding.evidence)}{shown}'
        f'<p class="small">Write:</p><pre class="write">{escape(finding.change)}</pre>'
        f'<p class="small">→ {as_html(finding.topic)}</p></section>'
    )


def _shares(shares: Mapping[str, float]) -> str:
    """Return a figure of the parts of a step, one bar; "" if they are unknown."""
    if not shares:
        return ""
    others = iter(COLOURS * len(shares))
    colours = {name: "var(--wait)" if name == "loading" else next(others) for name in shares}
    parts = "".join(
        f'<div style="width: {100 * share:.2f}%; background: {colours[name]}" title="{escape(name)} {percent(share)}">'
        "</div>"
        for name, share in shares.items()
    )
    said = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
    keys = _keys({f"{name} {percent(share)}": colours[name] for name, share in shares.items()})
    label = escape(f"The parts of a step: {said}")
    return (
        f'<figure><figcaption>Where the time of a step goes</figcaption><div class="parts" role="img" '
        f'aria-label="{label}">{parts}</div>{keys}</figure>'
    )


def _steps(bars: Mapping[str, tuple[float, float]], title: str) -> str:
    """Return a figure with a named bar for each wait and duration in ms; the wait is below the rest of the step."""
    longest = max(step for _, step in bars.values()) or 1.0
    parts = []
    for name, (wait, step) in bars.items():
        said = f"{name}: {milliseconds(step)}, {milliseconds(wait)} of it waiting"
        rest, waits = (f"height: {100 * each / longest:.2f}%" for each in (step - wait, wait))
        parts.append(
            f'<div title="{said}"><span class="rest" style="{rest}"></span>'
            f'<span class="wait" style="{waits}"></span></div>'
        )
    names = list(bars)
    share = sum(wait for wait, _ in bars.values()) / (sum(step for _, step in bars.values()) or 1.0)
    label = f"{title}, {names[0]} to {names[-1]}: the longest {milliseconds(longest)}, {share:.0%} of the time waiting"
    keys = _keys({"waits for its batch": "var(--wait)", "the rest of the step": "var(--rest)"})
    return (
        f"<figure><figcaption>{title}: {names[0]} to {names[-1]}, the longest {milliseconds(longest)}</figcaption>"
        f'<div class="bars" role="img" aria-label="{label}">{"".join(parts)}</div>{keys}</figure>'
    )


def _keys(colours: Mapping[str, str]) -> str:
    keys = (
        f'<span><span class="key" style="background: {colour}"></span>{escape(name)}</span>'
        for name, colour in colours.items()
    )
    return f'<p class="keys small">{" ".join(keys)}</p>'


def _trials(content: Mapping[str, Any]) -> str:
    """Return the results of ``try``: the lines to write, a figure of the ratios, and the refused settings."""
    lines = content["lines"]
    written = f'<b>Write:</b><pre class="write">{escape(chr(10).join(lines))}</pre>'
    best = written if lines else "No setting is surely faster."
    rounds = f"{milliseconds(content['step_ms'])} a step as it is; {counted(content['rounds'], 'round')}"
    parts = [_run(content), _text(rounds), f'<div class="verdict{" fine" * bool(lines)}">{best}</div>']
    ratios = {each["name"]: each["ratio"] for each in content["settings"] if each["ratio"] and not each["problem"]}
    if content["together"]:
        ratios["together"] = content["together"]
    if ratios:
        parts.append(_ratios(ratios))
    refused = [each for each in content["settings"] if each["problem"]]
    rows = "".join(f"<dt>{as_html(each['name'])}</dt><dd>{as_html(each['problem'])}</dd>" for each in refused)
    learnt = [each for each in content["settings"] if each["learns"] and not each["problem"]]
    learns = "".join(f"<dt>{as_html(each['name'])}</dt><dd>{as_html(each['learns'])}</dd>" for each in learnt)
    parts += [f"<h3>Not recommended</h3><dl>{rows}</dl>"] * bool(refused)
    parts += [f"<h3>The first losses, beside those of the script as it is</h3><dl>{learns}</dl>"] * bool(learnt)
    return "\n".join(parts)


def _ratios(ratios: Mapping[str, tuple[float, float, float]]) -> str:
    """Return a figure of ratios with their intervals, the largest first."""
    most = 1.05 * max(1.0, *(min(highest, 2 * mean) for mean, _, highest in ratios.values()))
    rows = []
    for name, (mean, lowest, highest) in sorted(ratios.items(), key=lambda each: -each[1][0]):
        left, right, at, one = (100 * min(each / most, 1.0) for each in (lowest, highest, mean, 1.0))
        rows.append(
            f'<code>{escape(name)}</code><div class="track"><span class="one" style="left: {one:.1f}%"></span>'
            f'<span class="range" style="left: {left:.1f}%; width: {right - left:.1f}%"></span>'
            f'<span class="mean" style="left: {at:.1f}%"></span></div>'
            f"<span>{ratio_text((mean, lowest, highest))}</span>"
        )
    title = "Throughput divided by that of the script as it is (dashed), with 95% intervals"
    return f'<figure><figcaption>{title}</figcaption><div class="tried">{"".join(rows)}</div></figure>'


def _text(text: str) -> str:
    return f"<p>{as_html(text)}</p>"
