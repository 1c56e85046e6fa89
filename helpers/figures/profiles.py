"""Figures of traces."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.figures.drawing import Picture, finish, legend, lines, listed, panel, patches
from helpers.figures.palette import BLUE, COLOURS, NEUTRAL
from stepscope import traces
from stepscope.base import wording
from stepscope.traces import report
from stepscope.traces.columns import union

# Classes of kernels that are drawn: products first, which compute; all others move bytes
_CLASSES = ("products and convolutions", "attention", "normalization", "elementwise", "compiled", "pooling")


def breakdown(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw the step breakdown of one or several traces side by side: a stacked bar per step, a gap between two spans.

    `tables`, by the titles of their panels, are as `traces.breakdown` gives them, in µs.
    """
    used = [name for name in COLOURS if any(name in table and table[name].sum() > 0 for table in tables.values())]
    figure = Figure(figsize=(min(4.2 * len(tables) + 1.6, 11), 3.6), layout="constrained")
    columns = figure.subplots(1, len(tables), sharey=True, squeeze=False)[0]
    for axes, (title, table) in zip(columns, tables.items(), strict=True):
        bottom = np.zeros(len(table))
        jumps = np.diff(table.index) > 1
        places = np.arange(len(table)) + np.r_[0, np.cumsum(jumps)]
        for name in used:
            milliseconds = table[name].to_numpy() / 1e3
            axes.bar(places, milliseconds, bottom=bottom, color=COLOURS[name], label=name)
            bottom += milliseconds
        axes.set_xticks(places, [str(step) for step in table.index])
        axes.set(xlabel="step (between two spans: a gap)" if jumps.any() else "step", title=title)
    columns[0].set_ylabel("time in ms")
    legend(figure, "right center", handles=columns[0].get_legend_handles_labels()[0][::-1])
    means = {title: table[used].mean() / 1e3 for title, table in tables.items()}
    return finish(figure, f"Stacked bars, one per step; mean milliseconds. {listed(means, '{:.1f}')}", source)


def utilization_and_efficiency(kernels: Sequence[tuple[float, float, float]], source: str = "") -> Picture:
    """Draw a GPU's kernels over time, each as high as the share of multiprocessors that it fills.

    Each kernel has a start and an end in ms, and that share, 0 to 1.
    """
    figure, axes = panel(7, 2.6)
    for start, end, share in kernels:
        axes.bar(start, share * 100, width=end - start, align="edge", color=COLOURS["Kernel"], edgecolor="black")
    axes.set(xlabel="time in ms", ylabel="SMs with a block in %", ylim=(0, 105))
    words = ", ".join(f"{start:g} to {end:g} ms at {share:.0%}" for start, end, share in kernels)
    return finish(figure, f"Blocks, one per kernel, over time; multiprocessors with a block: {words}", source)


def gpu(path: str | Path | traces.Trace, source: str) -> Picture:
    """Draw what host and GPUs did over the first three steps of a trace: a lane each, with its busy share.

    Only the first span is drawn. Raises `traces.NoAccelerator` if the trace has no kernels, `traces.NoSteps` if
    it marks no steps.
    """
    trace = traces.load(path)
    traces.accelerators(trace)  # raises NoAccelerator
    steps = traces.steps(traces.Trace(trace.path, trace.spans[:1])).iloc[:3]
    begin, end = steps["start"].iloc[0], steps["end"].iloc[-1]
    events = trace.spans[0].events.table()
    kinds = events["kind"]
    lanes = {
        "loading": ("DataLoader", events[kinds == "DataLoader"]),
        "operators": ("CPU Exec", events[events["host"] & (kinds == "CPU Exec")]),
        "runtime calls": ("Runtime", events[kinds == "Runtime"]),
        "copies": ("Memcpy", events[kinds == "Memcpy"]),
    }
    for (device, stream), own in trace.spans[0].kernels.table().groupby(["device", "stream"]):
        for kind, word in (("Kernel", "kernels"), ("Communication", "communication")):
            lanes[f"GPU {device:g}, stream {stream:g}: {word}"] = (kind, own[own["kind"] == kind])
    lanes = {lane: (kind, rows[["start", "end"]]) for lane, (kind, rows) in lanes.items() if len(rows)}
    figure, axes = panel(8, 0.36 * len(lanes) + 1.4)
    shares = {}
    for place, (lane, (kind, events)) in enumerate(lanes.items()):
        shares[lane] = f"{draw_lane(axes, (place - 0.4, 0.8), events, (begin, end), color=COLOURS[kind]):.0%}"
        axes.text(1.01, place, shares[lane], transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    for number, start in steps["start"].items():
        axes.axvline((start - begin) / 1e3, color="black", linewidth=0.8, linestyle=":")
        axes.text((start - begin) / 1e3, -0.6, f" step {number}", fontsize=8, color="0.35")
    axes.set(xlabel="time in ms; on the right, the share of it in which a lane is busy", xlim=(0, (end - begin) / 1e3))
    axes.set(yticks=range(len(lanes)), yticklabels=list(lanes), ylim=(len(lanes) - 0.5, -1))
    words = listed({f"in {len(steps)} steps, together {(end - begin) / 1e3:.1f} ms": shares})
    return finish(figure, f"Lanes over time, and the share of it in which each is busy, {words}", source, "x")


def draw_lane(
    axes: Axes, place: tuple[float, float], events: pd.DataFrame, window: tuple[float, float], **looks: Any
) -> float:
    """Draw bars where at least one event runs, in ms since `window` began, and return their share of the window.

    `place` is the lower end and the height of the bars; starts and ends, the two columns of `events`, are in µs.
    """
    begin, end = window
    starts, ends = union(*events.clip(begin, end).to_numpy(float).T)
    bars = np.c_[starts - begin, ends - starts][ends > starts]
    if len(bars):
        axes.broken_barh(bars / 1e3, place, linewidth=0, **looks)
    return bars[:, 1].sum() / (end - begin)


def kernels(table: pd.DataFrame, source: str) -> Picture:
    """Draw `traces.kernels`: a bar for the time of each, coloured by whether it uses Tensor Cores."""
    figure, axes = panel(8, 0.42 * len(table) + 1.6)
    total, used = table["Total Duration (us)"].to_numpy() / 1e3, table["Tensor Cores Used"].to_numpy(bool)
    bars = axes.barh(range(len(table)), total, 0.7, color=np.where(used, BLUE, NEUTRAL))
    axes.bar_label(bars, table["Share"].map(" {:.0%}".format), fontsize=9)
    names = [report.short(name, 46) for name in table.index]
    launched = ["" if pd.isna(name) else f"\nby {wording.printable(name)[:46]}" for name in table["Operator"]]
    labels = [name + by for name, by in zip(names, launched, strict=True)]
    axes.set_yticks(range(len(table)), labels, fontsize=8, parse_math=False)  # a $ in a name is no formula
    axes.set(xlabel="time in ms, and share of all kernels' time", xlim=(0, total.max(initial=0.1) * 1.1))
    axes.invert_yaxis()
    axes.legend(handles=patches({"on Tensor Cores": BLUE, "others": NEUTRAL}), frameon=False, loc="lower right")
    rows = zip(names, total, used, strict=True)
    words = ", ".join(f"{name} {value:.2f} ms{' on Tensor Cores' if core else ''}" for name, value, core in rows)
    return finish(figure, f"Bars of the time of the kernels that took most: {words}", source, "x")


def kernel_classes(steps: Mapping[str, pd.Series], source: str) -> Picture:
    """Draw what a GPU's kernels do in a step: a bar per step, with the ms of each class of kernel.

    `steps` are by what the bars are called; the index of each has names of `traces.kernel_class`.
    """
    table = pd.DataFrame(steps).fillna(0.0)
    table = table.groupby(lambda name: name if name in _CLASSES else "the rest").sum().T
    table = table[[name for name in (*_CLASSES, "the rest") if name in table]]
    figure, axes = panel(8, 0.55 * len(table) + 1.4)
    begins = np.zeros(len(table))
    readable = 0.05 * table.sum(axis="columns").max()
    for name, milliseconds in table.items():
        bars = axes.barh(table.index, milliseconds, left=begins, height=0.6, color=COLOURS[name], label=name)
        axes.bar_label(bars, [f"{ms:.1f}" if ms > readable else "" for ms in milliseconds], label_type="center")
        begins += milliseconds.to_numpy()
    axes.set(xlabel="kernels' time in a step, in ms", xlim=(0, 1.05 * begins.max()))
    axes.invert_yaxis()
    legend(figure, columns=4)
    words = listed(dict(table.iterrows()), "{:.1f}")
    return finish(figure, f"Bars of the milliseconds of a step's kernels, by class. {words}", source, "x")


def memory_curves(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw the memory of tensors over time: for each recording, by its name, `traces.memory_curve` of one device."""
    series = {name: (table["time"], table["allocated"]) for name, table in tables.items()}
    figure, axes = lines(series, drawstyle="steps-post")
    axes.set(xlabel="time since the start of the first recorded step in ms", ylabel="memory of tensors in MB")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    ends = {name: table["allocated"].agg(["min", "max"]) for name, table in tables.items()}
    return finish(figure, f"Lines of the memory of tensors over time. {listed(ends, '{:,.0f} MB')}", source)
