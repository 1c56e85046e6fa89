"""Where the course explains what the diagnosis advises: the notebook for each of its topics, and all on one page."""

from __future__ import annotations

from pathlib import Path

from helpers import config
from stepscope.base import staging

# By the topics of `diagnosis.Finding`
NOTEBOOKS = {
    "profiler overhead": "01-first-profile",
    "larger batches": "02-two-clocks",
    "more workers": "03-more-workers",
    "number of workers": "03-more-workers",
    "number of threads": "03-more-workers",
    "persistent workers": "03-more-workers",
    "prefetching": "03-more-workers",
    "pinned memory": "03-more-workers",
    "asynchronous copies": "03-more-workers",
    "normalization on the device": "04-normalize-on-device",
    "preprocessing ahead of time": "05-preprocess-ahead",
    "packed formats": "06-packed-formats",
    "loading whole batches": "06-packed-formats",
    "loading without workers": "06-packed-formats",
    "channels-last memory format": "09-channels-last",
    "mixed precision": "10-mixed-precision",
    "fewer synchronizations": "08-resnet50-baseline",
    "fewer launches": "11-fewer-launches",
    "fewer copies": "11-fewer-launches",
    "less work between launches": "11-fewer-launches",
    "work between the operators": "14-your-own-code",
    "debugging settings": "14-your-own-code",
    "overlapping communication with computation": "13-scale-out",
    "less communication": "13-scale-out",
    "gradient buckets": "13-scale-out",
    "stragglers": "13-scale-out",
    "buffers of a distributed model": "13-scale-out",
    "uneven inputs": "13-scale-out",
}


def links() -> dict[str, str]:
    """Return the notebook for each topic, as `diagnosis.Diagnosis.linked` takes them."""
    return {topic: f"{notebook}.ipynb" for topic, notebook in NOTEBOOKS.items()}


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<base href="{base}/">
<title>Where is the bottleneck?</title>
<style>
@page {{size: A4; margin: 1cm}}
body {{font: 13px sans-serif}}
.anchor-link {{display: none}}
td, th {{border: 1px solid; text-align: left}}
</style>
{body}
</html>
"""


def checklist() -> str:
    """Return the course's checklist, in Markdown: what is seen, what to look at, what to do, and the notebook."""
    return (config.PROJECT / "notebooks" / "checklist.md").read_text(encoding="utf-8")


def write_checklist(path: Path) -> None:
    """Write the checklist as an HTML page of one sheet; its links lead to the notebooks of this clone."""
    from nbconvert.filters import markdown2html  # takes a second, which the import of a notebook need not wait

    base = (config.PROJECT / "notebooks").as_uri()
    staging.write(path, _PAGE.format(base=base, body=markdown2html(checklist())))
