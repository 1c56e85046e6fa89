"""Corrections of the profiler tab's pages, so that they draw without internet.

Each correction is a function of a few lines, with the fault it fixes in its docstring, as in `corrections`, which
applies them.
"""

from __future__ import annotations

import functools
import html
import importlib.util
from collections.abc import Callable
from pathlib import Path

from helpers.tensorboard import answers


def draw_without_internet() -> None:
    """All views: without internet nothing is drawn, for the page waits for Google's chart loader; ours stands in."""
    from torch_tb_profiler.plugin import TorchProfilerPlugin

    stock = TorchProfilerPlugin.get_plugin_apps

    def get_plugin_apps(self) -> dict[str, Callable]:
        return stock(self) | {"/index.html": lambda environ, start: answers.page(start, views_page())}

    TorchProfilerPlugin.get_plugin_apps = get_plugin_apps


@functools.cache
def views_page() -> bytes:
    """Return the page of all views: the plugin's, with our charts in the place of Google's, and a dark look."""
    page = (Path(importlib.util.find_spec("torch_tb_profiler").origin).parent / "static" / "index.html").read_bytes()
    look = answers.script("look.js") + b"<style>" + answers.read("look.css") + b"</style>"
    loader = b'<script src="https://www.gstatic.com/charts/loader.js"></script>'
    page = answers.replace(page, loader, look + answers.script("charts.js"))
    # A share of 0 is infinite: no number to show.
    page = answers.replace(page, b'isNaN(n)?"N/A":n.toFixed(2)+"%"', b'isFinite(n)?n.toFixed(2)+"%":"N/A"')
    # What the ranks' traces do not show is said at the head of the view.
    heading = b'n.createElement(X,{title:"Distributed View"'
    page = answers.replace(page, heading, heading + b",subheader:s&&s.metadata.note")
    # The view gets the trace's address: parsed and written anew a trace would take long, and NaN be refused.
    return answers.replace(
        page,
        b"s(Ir.traceGet(t,r,o).then((function(n){return JSON.stringify(n)})))",
        b's(Promise.resolve("trace?"+new URLSearchParams({run:t,worker:r,span:o})))',
    )


def compare_operators_by_name() -> None:
    """Diff: operators are compared with others, or the page fails ("reading 'calls'").

    The page takes the n-th operator of one run for the n-th of the other, and fails where the other run has fewer.
    Both runs now list the operators of both, in one order; one that a run has not called has 0 calls there. Times are
    given to a quarter of a µs, for the page shows them, and their differences, with all digits that they have.
    """
    from torch_tb_profiler.profiler.diffrun.contract import DiffStats, OpAgg

    stock = DiffStats.__init__

    def __init__(self, left, right) -> None:
        stock(self, left, right)
        sides = [{agg.name: agg for agg in stats.op_aggs} for stats in (left, right)]
        for stats, aggs in zip((left, right), sides, strict=True):
            aligned = [aggs.get(name) or OpAgg(name, 0, 0, 0, 0, 0) for name in sides[0] | sides[1]]
            stats.op_aggs = [OpAgg(agg.name, agg.calls, *(round(time * 4) / 4 for time in agg[2:])) for agg in aligned]

    DiffStats.__init__ = __init__


def show_names_of_gpus_as_text() -> None:
    """Overview, CUDA: what a trace says of its GPUs is put into the page as HTML."""
    from torch_tb_profiler.profiler.gpu_metrics_parser import GPUMetricsParser

    stock = GPUMetricsParser.get_gpu_metrics_data_tooltip

    def get_gpu_metrics_data_tooltip(self, gpu_infos: dict, tc_ratio: list) -> tuple:
        escaped = {gpu: {key: html.escape(str(text)) for key, text in info.items()} for gpu, info in gpu_infos.items()}
        return stock(self, escaped, tc_ratio)

    GPUMetricsParser.get_gpu_metrics_data_tooltip = get_gpu_metrics_data_tooltip


def round_times_of_modules() -> None:
    """Module: times have 13 digits and no unit."""
    from torch_tb_profiler.run import RunProfile

    stock = RunProfile.get_module_view

    def get_module_view(self) -> dict | None:
        view = stock(self)
        if view is not None:
            for column in view["columns"]:
                if column["name"].endswith("Time"):
                    column["name"] += " (us)"
            _round(view["data"])
        return view

    RunProfile.get_module_view = get_module_view


def _round(modules: list[dict]) -> None:
    for module in modules:
        module |= {key: round(amount, 1) for key, amount in module.items() if isinstance(amount, float)}
        _round(module["children"])
