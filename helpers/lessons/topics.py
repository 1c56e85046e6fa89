"""Where the course explains what the diagnosis advises: the notebook for each of its topics, and all on one page."""

from pathlib import Path

from helpers import config
from stepscope.base import staging

# The topics of `diagnosis.Finding`, by notebook
TOPICS = {
    "01-first-profile": ["profiler overhead"],
    "02-two-clocks": ["larger batches"],
    "03-more-workers": [
        "more workers", "number of workers", "persistent workers", "prefetching",
        "pinned memory", "asynchronous copies",
    ],
    "04-normalize-on-device": ["normalization on the device"],
    "05-preprocess-ahead": ["preprocessing ahead of time"],
    "06-packed-formats": ["packed formats", "loading whole batches", "loading without workers", "padding"],
    "08-host-and-device": ["fewer synchronizations"],
    "10-channels-last": ["channels-last memory format"],
    "11-mixed-precision": ["mixed precision"],
    "12-fewer-launches": ["fewer launches", "fewer copies", "less work between launches", "fused kernels"],
    "14-requests-and-shards": ["shards for each worker"],
    "16-data-parallel": ["overlapping communication with computation", "less communication", "gradient buckets"],
    "17-stragglers-and-failures": ["stragglers", "buffers of a distributed model", "uneven inputs"],
    "18-your-own-code": ["work between the operators", "number of threads", "debugging settings"],
}  # fmt: skip


def links() -> dict[str, str]:
    """Return the notebook for each topic, as `diagnosis.Diagnosis.linked` takes them."""
    return {topic: f"{notebook}.ipynb" for notebook, topics in TOPICS.items() for topic in topics}


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
    from nbconvert.filters import markdown2html  # takes a second, which notebooks should not spend on importing

    base = (config.PROJECT / "notebooks").as_uri()
    staging.write(path, _PAGE.format(base=base, body=markdown2html(checklist())))
