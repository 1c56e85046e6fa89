"""Corrections of the profiler tab's pages, so that they draw without internet.

Each correction is a function of a few lines, with the fault it mends in its docstring, as in `corrections`, which
applies them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

CHARTS = Path(__file__).with_name("charts.js")


def draw_without_internet() -> None:
    """All views: without internet nothing is drawn, for the page waits for Google's chart loader; ours stands in."""
    from torch_tb_profiler.plugin import TorchProfilerPlugin

    stock = TorchProfilerPlugin.static_file_route
    loader = b'<script src="https://www.gstatic.com/charts/loader.js"></script>'

    def static_file_route(self, environ: dict, start_response: Callable) -> list[bytes]:
        if not environ["PATH_INFO"].endswith("/index.html"):
            return stock(self, environ, start_response)
        head = []
        page = b"".join(stock(self, environ, lambda *answer: head.extend(answer)))
        page = page.replace(loader, b"<script>" + CHARTS.read_bytes() + b"</script>")
        status, headers, *_ = head
        headers = [(name, value) for name, value in headers if name.lower() != "content-length"]
        start_response(status, [*headers, ("Content-Length", str(len(page)))])
        return [page]

    TorchProfilerPlugin.static_file_route = static_file_route
