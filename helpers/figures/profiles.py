"""Figures of what traces show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from helpers.figures.drawing import BLACK, BLUE, COLOURS, NEUTRAL, Picture, finish, legend, lines, listed, panel
from stepscope import traces
from stepscope.base import wording
from stepscope.traces import report
from stepscope.traces.columns import union


def breakdown(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw the step breakdown of one or several traces side by side: a stacked bar a step, a gap between two spans.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        Title of each panel, and its steps as `traces.breakdown` gives them, in µs.
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
    means = {title: (table[used].mean() / 1e3).map("{:.1f}".format) for title, table in tables.items()}
    return finish(figure, f"Stacked bars, one a step; mean milliseconds. {listed(means)}", source)


def utilization_and_efficiency(kernels: Sequence[tuple[float, float, float]], source: str = "") -> Picture:
    """Draw an accelerator's kernels over time, as high as the share of its multiprocessors that each one fills.

    Parameters
    ----------
    kernels : sequence of (start, end, share)
        Times in ms; share of the multiprocessors, 0 to 1.
    """
    figure, axes = panel(7, 2.6)
    for start, end, share in kernels:
        axes.bar(start, share * 100, width=end - start, align="edge", color=COLOURS["Kernel"], edgecolor=BLACK)
    axes.set(xlabel="time in ms", ylabel="busy multiprocessors in %", ylim=(0, 105))
    words = ", ".join(f"{start:g} to {end:g} ms at {share:.0%}" for start, end, share in kernels)
    return finish(figure, f"Blocks, one a kernel, over time; busy multiprocessors: {words}", source)


def accelerator(path: str | Path | traces.Trace, source: str) -> Picture:
    """Draw what host and accelerators did over the first three steps of a trace: a lane each, with its busy share.

    Parameters
    ----------
    path : str, Path or Trace
        Of a trace with kernels and steps. Of several spans the first is drawn.

    Raises
    ------
    NoAccelerator, NoSteps
        If the trace has no kernels, or marks no steps.
    """
    trace = traces.load(path)
    traces.accelerators(trace)  # raises NoAccelerator
    steps = traces.steps(traces.Trace(trace.path, trace.spans[:1])).iloc[:3]
    begin, end = steps["start"].iloc[0], steps["end"].iloc[-1]
    lanes = _lanes(trace.spans[0])
    figure, axes = panel(8, 0.36 * len(lanes) + 1.4)
    shares = {}
    for place, (lane, (colour, starts, ends)) in enumerate(lanes.items()):
        starts, ends = union(np.clip(starts, begin, end), np.clip(ends, begin, end))
        bars = np.c_[starts - begin, ends - starts] / 1e3
        axes.broken_barh(bars, (place - 0.4, 0.8), color=colour, linewidth=0, label=lane)
        shares[lane] = (ends - starts).sum() / (end - begin)
        axes.text(1.01, place, f"{shares[lane]:.0%}", transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    for number, start in steps["start"].items():
        axes.axvline((start - begin) / 1e3, color=BLACK, linewidth=0.8, linestyle=":")
        axes.text((start - begin) / 1e3, -0.6, f" step {number}", fontsize=8, color="0.35")
    axes.set(xlabel="time in ms; on the right, the share of it in which a lane is busy", xlim=(0, (end - begin) / 1e3))
    axes.set(yticks=range(len(lanes)), yticklabels=list(lanes), ylim=(len(lanes) - 0.5, -1))
    words = ", ".join(f"{lane} {share:.0%}" for lane, share in shares.items())
    words = f"in {len(steps)} steps, together {(end - begin) / 1e3:.1f} ms: {words}"
    return finish(figure, f"Lanes over time, and the share of it in which each is busy, {words}", source, "x")


def _lanes(span: traces.Span) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
    """Return colour, starts and ends of each lane, in the order of the starts."""
    table = span.events.table()
    events = {
        "loading": ("DataLoader", table["kind"] == "DataLoader"),
        "operators": ("CPU Exec", table["host"] & (table["kind"] == "CPU Exec")),
        "runtime calls": ("Runtime", table["kind"] == "Runtime"),
        "copies": ("Memcpy", table["kind"] == "Memcpy"),
    }
    rows = {name: (COLOURS[kind], table[chosen]) for name, (kind, chosen) in events.items()}
    for (device, stream), kernels in span.kernels.table().groupby(["device", "stream"]):
        for kind, word in (("Kernel", "kernels"), ("Communication", "communication")):
            rows[f"GPU {device:g}, stream {stream:g}: {word}"] = (COLOURS[kind], kernels[kernels["kind"] == kind])
    return {name: (colour, *row[["start", "end"]].to_numpy().T) for name, (colour, row) in rows.items() if len(row)}


def kernels(table: pd.DataFrame, source: str) -> Picture:
    """Draw the kernels that took most time: a horizontal bar each, coloured by whether it uses Tensor Cores.

    Parameters
    ----------
    table : DataFrame
        As `traces.kernels` returns it.
    """
    figure, axes = panel(8, 0.42 * len(table) + 1.6)
    total, used = table["Total Duration (us)"].to_numpy() / 1e3, table["Tensor Cores Used"].to_numpy(bool)
    for chosen, colour, label in ((used, BLUE, "on Tensor Cores"), (~used, NEUTRAL, "others")):
        axes.barh(np.flatnonzero(chosen), total[chosen], color=colour, height=0.7, label=label)
    names = [report.short(name, 46) for name in table.index]
    launched = ["" if pd.isna(name) else f"\nby {wording.printable(name)[:46]}" for name in table["Operator"]]
    for place, share in enumerate(table["Share"]):
        axes.text(total[place], place, f" {share:.0%}", va="center", fontsize=9)
    axes.set(xlabel="time in ms, and share of all kernels' time", xlim=(0, total.max() * 1.1 if len(table) else 1))
    labels = [name + by for name, by in zip(names, launched, strict=True)]
    axes.set_yticks(range(len(table)), labels, fontsize=8, parse_math=False)  # a $ in a name is no formula
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right")
    rows = zip(names, total, used, strict=True)
    words = ", ".join(f"{name} {value:.2f} ms{' on Tensor Cores' if core else ''}" for name, value, core in rows)
    return finish(figure, f"Bars of the time of the kernels that took most: {words}", source, "x")


def memory_curves(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw the memory of tensors over time, as traces have it.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        For each recording its rows of one device, as `traces.memory_curve` returns them.
    """
    series = {name: (table["time"], table["allocated"]) for name, table in tables.items()}
    figure, axes = lines(series, drawstyle="steps-post")
    axes.set(xlabel="time since the start of the first recorded step in ms", ylabel="memory of tensors in MB")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    words = "; ".join(
        f"{name}: between {table['allocated'].min():,.0f} and {table['allocated'].max():,.0f} MB"
        for name, table in tables.items()
    )
    return finish(figure, f"Lines of the memory of tensors over time. {words}", source)
