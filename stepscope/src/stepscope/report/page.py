"""Results as a self-contained page of HTML: without a server, scripts or internet."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stepscope.base.wording import milliseconds
from stepscope.report.documents import WANTED, ResultError

WIDTH, HEIGHT = 900, 160  # of a chart, in pixels
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
:root { color-scheme: light dark; --wait: #b3261e; --rest: #9aa7b8; }
h2 { margin-top: 2.5rem; } td { padding: .3rem 1rem .3rem 0; } code { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; font-size: 13px; } text { fill: currentColor; }
.wait { fill: var(--wait); } .rest { fill: var(--rest); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
"""
KEY = (
    '<p><span class="key" style="background: var(--wait)"></span>waits for its batch'
    '<span class="key" style="background: var(--rest)"></span>the rest of the step</p>'
)


def page(results: Sequence[dict[str, Any]], title: str) -> str:
    """Return results as a page: verdict, a bar for each step, and findings of each result; mean steps of all ranks.

    `results` come from `stepscope.report.read`. Raises ResultError if there are none.
    """
    if not results:
        raise ResultError(f"Expected a result for the page {title!r}, found none. {WANTED}")
    parts = [f"<h1>{html.escape(title)}</h1>", _ranks(results)]
    for result in results:
        if len(results) > 1:
            parts.append(f"<h2>{html.escape(_name(result))}</h2>")
        if "diagnosis" not in result:
            parts.append(f"<p>{html.escape(result['problem'])}</p>")
            continue
        diagnosis = result["diagnosis"]
        if diagnosis.steps:
            bars = {f"step {count}": times for count, times in enumerate(diagnosis.steps, 1)}
            parts.append(_chart(bars, "Each step"))
        parts.append(diagnosis._repr_html_())
    head = f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    body = "\n".join(filter(None, parts))
    return f'<!DOCTYPE html>\n<html lang="en"><head>{meta}{head}</head>\n<body>\n{body}\n</body></html>\n'


def _name(result: dict[str, Any]) -> str:
    if "trace" in result:
        return str(result["trace"])
    return f"Rank {result['rank']}" if "rank" in result else "All ranks together"


def _ranks(results: Iterable[dict[str, Any]]) -> str:
    """Return a chart with the mean step of each rank; "" for one process."""
    means = {}
    for result in results:
        if "rank" in result and "diagnosis" in result and (steps := result["diagnosis"].steps):
            means[f"rank {result['rank']}"] = tuple(sum(times) / len(steps) for times in zip(*steps, strict=True))
    return _chart(means, "Mean step") if len(means) > 1 else ""


def _chart(bars: Mapping[str, tuple[float, float]], title: str) -> str:
    """Return a chart with a named bar for each wait and duration in ms; the wait is below the rest of the step."""
    longest = max(step for _, step in bars.values()) or 1.0
    scale, bottom, wide = (HEIGHT - 40) / longest, HEIGHT - 20, WIDTH / len(bars)
    parts = []
    for number, (name, (wait, step)) in enumerate(bars.items()):
        said = f"<title>{name}: {milliseconds(step)}, {milliseconds(wait)} of it waiting</title>"
        for kind, start, height in (("wait", 0, wait), ("rest", wait, step - wait)):
            y = bottom - (start + height) * scale
            place = (
                f'x="{(number + 0.05) * wide:.1f}" y="{y:.1f}" width="{0.9 * wide:.1f}" height="{height * scale:.1f}"'
            )
            parts.append(f'<rect class="{kind}" {place}>{said}</rect>')
    first, *_, last = bars if len(bars) > 1 else [*bars, ""]
    texts = (
        f'<text x="0" y="14">{title}, the longest {milliseconds(longest)}</text>'
        f'<text x="0" y="{HEIGHT - 4}">{first}</text>'
        f'<text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor="end">{last}</text>'
    )
    share = sum(wait for wait, _ in bars.values()) / (sum(step for _, step in bars.values()) or 1.0)
    label = f"{title}, {first} to {last}: the longest {milliseconds(longest)}, {share:.0%} of the time waiting"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}{texts}</svg>{KEY}'
