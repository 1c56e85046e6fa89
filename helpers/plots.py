"""Every figure of the course.

Each function returns a `Picture`: shown in a notebook it is an image with an alternative text for those who cannot
see it. Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart; a category
has the same colour in every figure.
"""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from helpers import hardware, measure, precision, scoreboard, traces
from helpers.traces import report
from helpers.traces.intervals import union

if TYPE_CHECKING:
    import torch

# Okabe and Ito, Color Universal Design, 2008: https://jfly.uni-koeln.de/color/
BLACK, ORANGE, SKY, GREEN, YELLOW = "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#BBBBBB"
NEUTRAL, PALE = "#8C9BA5", "#DCE3E8"  # for what belongs to no category
COLOURS = {
    "Kernel": GREEN,
    "Memcpy": YELLOW,
    "Memset": PURPLE,
    "Communication": BLACK,
    "Runtime": SKY,
    "DataLoader": VERMILION,
    "CPU Exec": BLUE,
    "Other": GREY,
    "loading": VERMILION,
    "copy": YELLOW,
    "forward": BLUE,
    "backward": SKY,
    "optimizer": PURPLE,
    "open and read": PURPLE,
    "header": YELLOW,
    "decode": VERMILION,
    "resize": ORANGE,
    "crop and flip": GREEN,
    "to tensor": SKY,
    "normalize": GREEN,
    "collate": BLUE,
    "hand over": BLACK,
    "the rest": GREY,
    "compute": BLUE,
}


@dataclass(frozen=True)
class Picture:
    """A figure, and in words what it shows."""

    figure: Figure
    alt: str

    def png(self) -> bytes:
        """Return the figure as a PNG file."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, dpi=150)
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the figure as a PNG file."""
        Path(path).write_bytes(self.png())

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.png()).decode()
        width = int(self.figure.get_figwidth() * 96)
        alt = html.escape(self.alt, quote=True)
        return f'<img alt="{alt}" style="width: {width}px; max-width: 100%" src="data:image/png;base64,{data}">'


def image_grid(images: Sequence, labels: Sequence[int], classes: Sequence[str], source: str) -> Picture:
    """Draw some images with the names of their classes.

    Parameters
    ----------
    images : sequence of PIL images or uint8 arrays (H, W, 3)
    labels : sequence of int
    classes : sequence of str
    source : str
        Where the images come from.
    """
    columns = min(len(images), 8)
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(8, 1.25 * rows + 0.5), layout="constrained")
    for axes, image, label in zip(figure.subplots(rows, columns).flat, images, labels, strict=False):
        axes.imshow(np.asarray(image))
        axes.set_title(classes[label].removeprefix("drawn: "), fontsize=9)  # the source says that they are drawn
    for axes in figure.axes:
        axes.axis("off")
    figure.suptitle(source, fontsize=10)
    shown = ", ".join(classes[label] for label in labels)
    return Picture(figure, f"{len(images)} images from {source}, of the classes {shown}.")


def breakdown(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw the step breakdown of one or several traces side by side: a stacked bar a step.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        Title of each panel, and its steps as `traces.breakdown` gives them, in µs.
    source : str
        Source of the images, and what a step is.
    """
    used = [name for name in COLOURS if any(name in table and table[name].sum() > 0 for table in tables.values())]
    figure = Figure(figsize=(min(4.2 * len(tables) + 1.6, 11), 3.6), layout="constrained")
    for axes, (title, table) in zip(_row(figure, len(tables)), tables.items(), strict=True):
        bottom = np.zeros(len(table))
        for name in used:
            milliseconds = table[name].to_numpy() / 1e3
            axes.bar([str(step) for step in table.index], milliseconds, bottom=bottom, color=COLOURS[name], label=name)
            bottom += milliseconds
        axes.set(xlabel="step", title=title)
        _quiet(axes)
    figure.axes[0].set_ylabel("time in ms")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, reverse=True)
    _foot(figure, source)
    means = (
        f"{title}: " + ", ".join(f"{name} {table[name].mean() / 1e3:.1f}" for name in used)
        for title, table in tables.items()
    )
    return Picture(figure, f"Stacked bars, one a step; mean milliseconds. {'; '.join(means)}. {source}.")


def comparison(result: measure.Comparison, source: str) -> Picture:
    """Draw the throughput of variants timed in turn: a bar for the median, a dot for every round."""
    figure = Figure(figsize=(7, 0.55 * len(result.names) + 1.3), layout="constrained")
    axes = figure.subplots()
    medians = [statistics.median(result.throughputs(name)) for name in result.names]
    axes.barh(result.names, medians, color=NEUTRAL, height=0.6)
    for row, name in enumerate(result.names):
        axes.plot(result.throughputs(name), [row] * len(result.throughputs(name)), "o", color=BLACK, markersize=4)
    axes.set(xlabel="throughput in images per second (bar: median, dots: rounds)")
    axes.set_yticks(range(len(result.names)), [textwrap.fill(name, 28) for name in result.names])
    axes.xaxis.set_major_locator(MaxNLocator(6))  # more labels of millions would overlap
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()
    _quiet(axes, "x")
    _foot(figure, source)
    words = ", ".join(f"{name} {median:,.0f}" for name, median in zip(result.names, medians, strict=True))
    return Picture(figure, f"Bars of median images per second: {words}. {source}.")


def two_clocks(results: Mapping[str, measure.TwoClocks], source: str) -> Picture:
    """Draw, for each loader, the two clocks as they were expected to run, and below them the loop as it was measured.

    Parameters
    ----------
    results : mapping of str to TwoClocks
        One a loader, by its name.
    source : str
    """
    figure = Figure(figsize=(8, 0.85 * len(results) + 1.5), layout="constrained")
    axes = figure.subplots()
    for place, clocks in enumerate(results.values()):
        start = 0 if clocks.workers else clocks.predicted_ms - clocks.compute_ms
        rounds = [timing.step_ms for timing in clocks.loop]
        bars = {
            "loading alone": (place - 0.27, clocks.loading_ms, 0, COLOURS["loading"]),
            "compute alone": (place, clocks.compute_ms, start, COLOURS["compute"]),
            "the loop, measured": (place + 0.27, clocks.loop_ms, 0, NEUTRAL),
        }
        for name, (y, width, left, colour) in bars.items():
            axes.barh(y, width, left=left, height=0.24, color=colour, label=name if place == 0 else None)
        axes.plot(rounds, [place + 0.27] * len(rounds), "o", color=BLACK, markersize=3)
        axes.plot([clocks.predicted_ms] * 2, [place - 0.4, place + 0.42], color=BLACK, linestyle="--", linewidth=1.2)
        end = max(clocks.predicted_ms, *rounds)
        axes.text(end, place + 0.27, f"  {clocks.error:+.0%}", va="center", fontsize=9)
    axes.plot([], [], color=BLACK, linestyle="--", linewidth=1.2, label="predicted")
    axes.set(xlabel="time per mini-batch in ms (dots: rounds; on the right: how far off the prediction is)")
    axes.set_yticks(range(len(results)), list(results))
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    _quiet(axes, "x")
    _foot(figure, source)
    words = "; ".join(
        f"{name}: loading {clocks.loading_ms:.1f} ms, compute {clocks.compute_ms:.1f} ms, predicted "
        f"{clocks.predicted_ms:.1f} ms, measured {clocks.loop_ms:.1f} ms ({clocks.error:+.0%})"
        for name, clocks in results.items()
    )
    return Picture(figure, f"For each loader bars of the two clocks and of the loop. {words}. {source}.")


def monitored(table: pd.DataFrame, timing: measure.Timing, source: str) -> Picture:
    """Draw what a monitor saw while a loop ran, under the steps of the loop.

    Parameters
    ----------
    table : DataFrame
        As `monitor.Monitor.table` returns it.
    timing : Timing
        The loop; time 0 is when its first step began.
    source : str
    """
    table = table.loc[timing.begin : timing.begin + timing.seconds]
    panels = {
        "CPU in %": {name.removesuffix(" in %").removesuffix(", CPU"): name for name in table if "core" in name or "CPU" in name},
        "GPU in %": {name.removesuffix(" in %"): name for name in table if name.startswith("GPU") and name.endswith("%")},
        "MB/s": {name.removesuffix(" in MB/s"): name for name in table if name.endswith("MB/s")},
        "memory in MB": {name.removesuffix(" in MB"): name for name in table if name.endswith(" in MB")},
    }
    panels = {unit: lines for unit, lines in panels.items() if lines}
    figure = Figure(figsize=(8, 1.4 * len(panels) + 1.6), layout="constrained")
    steps, *others = figure.subplots(1 + len(panels), 1, sharex=True, height_ratios=[0.5, *[1.4] * len(panels)])
    starts = np.cumsum([0, *timing.durations[:-1]])
    waits, durations = np.array(timing.waits), np.array(timing.durations)
    steps.broken_barh(np.c_[starts, waits], (0, 1), color=COLOURS["loading"], label="waiting for data")
    steps.broken_barh(np.c_[starts + waits, durations - waits], (0, 1), color=COLOURS["compute"], label="the step itself")
    steps.set(yticks=[], ylabel="steps", ylim=(0, 1))
    _quiet(steps)
    steps.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8, borderaxespad=0)
    for axes, (unit, lines) in zip(others, panels.items(), strict=True):
        colours = iter((VERMILION, BLUE, GREEN, PURPLE))
        for label, name in lines.items():
            values = table[name].dropna()
            pale = name.startswith("core")
            style = {"color": GREY, "linewidth": 1} if pale else {"color": next(colours), "marker": "o", "markersize": 3}
            axes.plot(values.index - timing.begin, values, label=None if pale else label, **style)
        if unit == "CPU in %":
            axes.plot([], [], color=GREY, label="each core")
        axes.set(ylabel=unit, ylim=(0, None))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
        _quiet(axes)
    others[-1].set_xlabel("time in s")
    _foot(figure, source)
    words = ", ".join(f"{name} {table[name].mean():.0f}" for lines in panels.values() for name in lines.values())
    return Picture(
        figure,
        f"Lines over {timing.seconds:.1f} s of a loop of {len(durations)} steps, which waits {timing.loading_share:.0%} of it; "
        f"their means: {words}. {source}.",
    )


def access(table: pd.DataFrame, limits: Mapping[str, float], source: str) -> Picture:
    """Draw how fast packed formats are read, in several ways: a row a format, a mark a way.

    Parameters
    ----------
    table : DataFrame
        A row a format, a column a way to read; images per second, NaN where it was not measured.
    limits : mapping of str to float
        Other throughputs to compare with, drawn as lines across all rows.
    source : str
    """
    figure = Figure(figsize=(8, 0.38 * len(table) + 2.2), layout="constrained")
    axes = figure.subplots()
    for way, colour, marker in zip(table, (VERMILION, BLUE, GREEN, PURPLE), "osD^", strict=False):
        axes.plot(table[way], table.index, marker, color=colour, label=way, markersize=7, alpha=0.85)
    for (name, value), style in zip(limits.items(), ("--", ":"), strict=False):
        axes.axvline(value, color=BLACK, linestyle=style, linewidth=1.2, label=name)
    axes.set(xscale="log", xlabel="throughput in images per second, each line ten times the last")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()
    axes.grid(axis="y", color=PALE)
    _quiet(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    _foot(figure, source)
    words = "; ".join(
        f"{kind}: " + ", ".join(f"{way} {value:,.0f}" for way, value in row.dropna().items()) for kind, row in table.iterrows()
    )
    others = ", ".join(f"{name} {value:,.0f}" for name, value in limits.items())
    return Picture(figure, f"Marks of images per second, a row a format. {words}. For comparison: {others}. {source}.")


def curves(losses: Mapping[str, Sequence[float]], source: str) -> Picture:
    """Draw the training loss of one or several runs over their steps."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    colours = (BLUE, ORANGE, GREEN, PURPLE, BLACK, VERMILION)
    styles = zip(colours, ("-", "--", ":", "-.", (0, (8, 3)), (0, (4, 1, 1, 1, 1, 1))), strict=True)
    for (name, values), (colour, style) in zip(losses.items(), styles, strict=False):
        axes.plot(values, color=colour, linestyle=style, label=name)
    axes.set(xlabel="step", ylabel="cross-entropy in nats")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    _quiet(axes)
    _foot(figure, source)
    ends = ", ".join(f"{name} from {values[0]:.2f} to {values[-1]:.2f}" for name, values in losses.items())
    return Picture(figure, f"Lines of the training loss: {ends}, over {max(map(len, losses.values()))} steps. {source}.")


def item_timeline(items: Mapping[str, np.ndarray]) -> Picture:
    """Draw when each item of a `datasets.SleepDataset` was made, by which worker: one panel a loader.

    Parameters
    ----------
    items : mapping of str to ndarray
        Title of each panel, and its items, shape (count, 3): worker, start and end in seconds.
    """
    figure = Figure(figsize=(8, 1 + sum(0.6 + 0.3 * len(set(made[:, 0])) for made in items.values())), layout="constrained")
    lanes = [len(set(made[:, 0])) for made in items.values()]
    panels = figure.subplots(len(items), 1, sharex=True, height_ratios=lanes, squeeze=False)[:, 0]
    for axes, (title, made) in zip(panels, items.items(), strict=True):
        begin = made[:, 1].min()
        for number, (worker, start, end) in enumerate(made):
            axes.barh(worker, end - start, left=start - begin, color=PALE, edgecolor=BLACK, height=0.7)
            axes.text((start + end) / 2 - begin, worker, str(number), ha="center", va="center", fontsize=8)
        workers = sorted(set(made[:, 0]))
        axes.set(title=title, yticks=workers, yticklabels=[f"worker {worker:.0f}" for worker in workers])
        axes.invert_yaxis()
        _quiet(axes, "x")
    panels[-1].set_xlabel("time in s")
    words = ", ".join(f"{title}: {np.ptp(made[:, 1:]):.2f} s" for title, made in items.items())
    return Picture(figure, f"Timeline of items by worker; from the first item's start to the last one's end, {words}.")


def phases(table: pd.DataFrame, source: str) -> Picture:
    """Draw the phases of a step, for one image of its mini-batch, or of loading: a stacked horizontal bar a row.

    Parameters
    ----------
    table : DataFrame
        A row a setting, named by the index; a column a phase, in µs per image.
    source : str
    """
    figure = Figure(figsize=(8, 0.32 * len(table) + 1.4), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(table))
    for name in table.columns:
        axes.barh(table.index, table[name], left=left, color=COLOURS[name], label=name)
        left += table[name].to_numpy()
    axes.set(xlabel="time per image in µs")
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    _quiet(axes, "x")
    _foot(figure, source)
    words = "; ".join(
        f"{row}: " + ", ".join(f"{name} {value:.0f}" for name, value in values.items()) for row, values in table.iterrows()
    )
    return Picture(figure, f"Stacked bars of microseconds per image. {words}. {source}.")


def memory(growth: Mapping[str, Mapping[int, float]]) -> Picture:
    """Draw how much memory a worker gains in one pass over file names, by how many there are and how they are kept.

    Parameters
    ----------
    growth : mapping of str to mapping of int to float
        For each kind of container, the worker's growth in MB by number of names.
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for (kind, points), colour, marker in zip(growth.items(), (VERMILION, BLUE), "os", strict=False):
        axes.plot(list(points), list(points.values()), f"{marker}-", color=colour, label=kind)
    axes.set(xlabel="number of file names", ylabel="growth of a worker in MB")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)
    _quiet(axes)
    words = "; ".join(
        f"{kind}: " + ", ".join(f"{value:.0f} MB at {count:,}" for count, value in points.items())
        for kind, points in growth.items()
    )
    return Picture(figure, f"Lines of a worker's growth in memory over the number of file names. {words}.")


def utilization_and_efficiency(kernels: Sequence[tuple[float, float, float]]) -> Picture:
    """Draw an accelerator's kernels over time, as high as the share of its multiprocessors that each one fills.

    Parameters
    ----------
    kernels : sequence of (start, end, share)
        Times in ms; share of the multiprocessors, 0 to 1.
    """
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    for start, end, share in kernels:
        axes.bar(start, share * 100, width=end - start, align="edge", color=COLOURS["Kernel"], edgecolor=BLACK)
    axes.set(xlabel="time in ms", ylabel="busy multiprocessors in %", ylim=(0, 105))
    _quiet(axes)
    words = ", ".join(f"{start:g} to {end:g} ms at {share:.0%}" for start, end, share in kernels)
    return Picture(figure, f"Blocks, one a kernel, over time; busy multiprocessors: {words}.")


def roofline(steps: Mapping[str, hardware.Placed], source: str) -> Picture:
    """Draw training steps below the two limits of their device: memory, which rises with the intensity, and computing.

    Parameters
    ----------
    steps : mapping of str to hardware.Placed
        Name of each step, and where it stands. Each has the limits that it was measured with.
    source : str
        What was measured, and on which machine.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    least = min(step.limits.ridge / 30 for step in steps.values())
    most = max(max(step.limits.ridge, step.work.intensity) * 30 for step in steps.values())
    for (name, step), colour, marker in zip(steps.items(), (BLUE, ORANGE, GREEN, PURPLE), "osD^", strict=False):
        limits, intensity = step.limits, step.work.intensity
        corners = [least, limits.ridge, most]
        axes.plot(corners, [min(x / limits.ridge, 1) * limits.tflops for x in corners], color=colour, linewidth=1.5)
        axes.text(
            most / 1.1, limits.tflops * 1.06, f"computing, {name}: {_three(limits.tflops)} TFLOP/s",
            ha="right", va="bottom", fontsize=9,
        )  # fmt: skip
        label = f"{name}: {_three(step.tflops)} TFLOP/s, {step.share_of_peak:.0%} of its peak"
        axes.plot(intensity, step.tflops, marker, color=colour, markersize=9, linestyle="", label=label)
    axes.set(xscale="log", yscale="log", xlabel="floating-point operations per byte", ylabel="TFLOP/s", xlim=(least, most))
    lowest = min(min(step.tflops, step.limits.tflops / 30) for step in steps.values())
    axes.set_ylim(lowest / 3, max(step.limits.tflops for step in steps.values()) * 2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)  # inside, its marks look like steps
    bandwidth = next(iter(steps.values())).limits.gb_per_second
    axes.text(
        least * 1.5, bandwidth * least * 1.5e-3 * 1.3, f"memory: {_three(bandwidth)} GB/s",
        rotation=_slope(figure, axes), rotation_mode="anchor", fontsize=9,
    )  # fmt: skip
    _quiet(axes, "both")
    _foot(figure, source)
    words = "; ".join(
        f"{name}: {_three(step.tflops)} of {_three(step.limits.tflops)} TFLOP/s at {_three(step.work.intensity)} "
        f"operations per byte, memory {_three(step.limits.gb_per_second)} GB/s"
        for name, step in steps.items()
    )
    return Picture(figure, f"Roofline with a point a step. {words}. {source}.")


def memory_formats(tensors: Mapping[str, torch.Tensor]) -> Picture:
    """Draw where the elements of small images lie in memory: a box an element, coloured by its channel.

    The boxes of the first pixel have a thick edge.

    Parameters
    ----------
    tensors : mapping of str to Tensor, shape (1, 3, H, W)
        Title of each row, and the tensor, whose shape and strides are drawn.
    """
    figure = Figure(figsize=(8, 1.25 * len(tensors) + 0.8), layout="constrained")
    for axes, (title, tensor) in zip(figure.subplots(len(tensors), 1, sharex=True), tensors.items(), strict=True):
        for index in np.ndindex(*tensor.shape):
            place = int(np.dot(index, tensor.stride()))
            _, channel, row, column = index
            first = (row, column) == (0, 0)
            colour, edge = (VERMILION, GREEN, SKY)[channel], 2.5 if first else 0.6
            axes.bar(place, 1, 0.86, color=colour, edgecolor=BLACK, linewidth=edge, zorder=2 + first)
            axes.text(place, 0.5, f"{'RGB'[channel]}\n{row},{column}", ha="center", va="center", fontsize=8, zorder=4)
        axes.set_title(f"{title}: shape {tuple(tensor.shape)}, strides {tensor.stride()}", fontsize=10)
        axes.set(yticks=[], ylim=(-0.05, 1.05), xticks=range(0, tensor.numel(), 4))
        axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("place in memory, in elements; each box: channel, and row,column of its pixel")
    words = "; ".join(
        f"{title}, strides {tensor.stride()}: a pixel's channels are {tensor.stride(1)} elements apart"
        for title, tensor in tensors.items()
    )
    return Picture(figure, f"Rows of boxes, one an element, in the order of memory. {words}.")


def ladder(table: pd.DataFrame | None = None) -> Picture:
    """Draw the ladder so far: a bar a rung, with the share of its time spent waiting, and the ratio to the rung before.

    A rung without a ratio is the first of what cannot be compared with the rungs before, such as another network. It
    begins a panel of its own, with its own scale.

    Parameters
    ----------
    table : DataFrame, optional
        As `scoreboard.ladder` returns it, which is also the default.
    """
    table = scoreboard.ladder() if table is None else table
    parts = [part for _, part in table.groupby(table.ratio.isna().cumsum())] or [table]
    figure = Figure(figsize=(8, 0.5 * len(table) + 0.6 * len(parts) + 0.9), layout="constrained")
    panels = figure.subplots(len(parts), 1, height_ratios=[len(part) + 0.3 for part in parts], squeeze=False)[:, 0]
    for axes, part in zip(panels, parts, strict=True):
        _rungs(axes, part)
        if len(parts) > 1:
            axes.set_title(f"a step: {part.step.iat[0]}", fontsize=10, loc="left")
    panels[-1].set_xlabel("throughput in images per second" + "; each panel has its own scale" * (len(parts) > 1))
    _foot(figure, "\n".join(scoreboard.provenance(table)))
    words = "; ".join(f"{row.rung}: {row.images_per_second:,.0f} {scoreboard.ratio_text(row)}".strip() for row in table.itertuples())
    return Picture(figure, f"Bars of images per second, one a rung. {words}.")


def reference(rung: str) -> Picture:
    """Draw a rung on this machine beside the recorded ones: a bar a machine.

    Parameters
    ----------
    rung : str
        How its name begins, such as ``"08"``.
    """
    found = scoreboard.references(rung)
    fields = [field.name for field in dataclasses.fields(scoreboard.Result)]
    table = pd.DataFrame(map(asdict, found.values()), columns=fields).assign(rung=list(found))
    figure = Figure(figsize=(8, 0.5 * len(table) + 1.3), layout="constrained")
    axes = figure.subplots()
    _rungs(axes, table)
    axes.set(xlabel="throughput in images per second", title=f"rung {rung}")
    lines = [f"{name}: {result.device}, {result.step}, {result.data}" for name, result in found.items()]
    _foot(figure, "\n".join(lines))
    words = "; ".join(f"{row.rung}: {row.images_per_second:,.0f}" for row in table.itertuples())
    return Picture(figure, f"Bars of images per second, one a machine. {words}. {'; '.join(lines)}.")


def _rungs(axes: Axes, table: pd.DataFrame) -> None:
    axes.barh(table.rung, table.images_per_second, color=NEUTRAL, height=0.6)
    for row, result in enumerate(table.itertuples()):
        ratio = scoreboard.ratio_text(result).split(" ")[0]
        text = f" {result.images_per_second:,.0f}/s, {result.loading_share:.0%} waiting{', ' * bool(ratio)}{ratio}"
        axes.text(result.highest, row, text, va="center", fontsize=9)
    errors = [table.images_per_second - table.lowest, table.highest - table.images_per_second]
    axes.errorbar(table.images_per_second, table.rung, xerr=errors, fmt="none", ecolor=BLACK, capsize=3)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlim=(0, table.highest.max() * 1.5 if len(table) else 1))
    axes.invert_yaxis()
    _quiet(axes, "x")


def accelerator(path: str | Path | traces.Trace, source: str) -> Picture:
    """Draw what host and accelerators did over the first three steps of a trace: a lane each, with its busy share.

    Parameters
    ----------
    path : str, Path or Trace
        Of a trace with kernels and steps. Of several spans the first is drawn.
    source : str
        What was recorded, and on which machine.

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
    figure = Figure(figsize=(8, 0.36 * len(lanes) + 1.4), layout="constrained")
    axes = figure.subplots()
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
    _quiet(axes, "x")
    _foot(figure, source)
    words = ", ".join(f"{lane} {share:.0%}" for lane, share in shares.items())
    length = f"{len(steps)} steps, together {(end - begin) / 1e3:.1f} ms"
    return Picture(figure, f"Lanes over time, and the share of it in which each is busy, in {length}: {words}. {source}.")


def _lanes(span: traces.Span) -> dict[str, tuple[str, np.ndarray, np.ndarray]]:
    """Return colour, starts and ends of each lane, in the order of the starts."""
    events = {
        "loading": ("DataLoader", span.events["kind"] == "DataLoader"),
        "operators": ("CPU Exec", span.events["host"] & (span.events["kind"] == "CPU Exec")),
        "runtime calls": ("Runtime", span.events["kind"] == "Runtime"),
        "copies": ("Memcpy", span.events["kind"] == "Memcpy"),
    }
    rows = {name: (COLOURS[kind], span.events[chosen]) for name, (kind, chosen) in events.items()}
    for (device, stream), kernels in span.kernels.groupby(["device", "stream"]):
        for kind, word in (("Kernel", "kernels"), ("Communication", "communication")):
            rows[f"GPU {device:g}, stream {stream:g}: {word}"] = (COLOURS[kind], kernels[kernels["kind"] == kind])
    return {name: (colour, *row[["start", "end"]].to_numpy().T) for name, (colour, row) in rows.items() if len(row)}


def kernels(table: pd.DataFrame, source: str) -> Picture:
    """Draw the kernels that took most time: a horizontal bar each, coloured by whether it uses Tensor Cores.

    Parameters
    ----------
    table : DataFrame
        As `traces.kernels` returns it.
    source : str
        What was recorded, and on which machine.
    """
    figure = Figure(figsize=(8, 0.42 * len(table) + 1.6), layout="constrained")
    axes = figure.subplots()
    total, used = table["Total Duration (us)"].to_numpy() / 1e3, table["Tensor Cores Used"].to_numpy(bool)
    for chosen, colour, label in ((used, BLUE, "on Tensor Cores"), (~used, NEUTRAL, "others")):
        axes.barh(np.flatnonzero(chosen), total[chosen], color=colour, height=0.7, label=label)
    names = [report.short(name, 46) for name in table.index]
    launched = ["" if pd.isna(name) else f"\nby {report.printable(name)[:46]}" for name in table["Operator"]]
    for place, share in enumerate(table["Share"]):
        axes.text(total[place], place, f" {share:.0%}", va="center", fontsize=9)
    axes.set(xlabel="time in ms, and share of all kernels' time", xlim=(0, total.max() * 1.1 if len(table) else 1))
    labels = [name + by for name, by in zip(names, launched, strict=True)]
    axes.set_yticks(range(len(table)), labels, fontsize=8, parse_math=False)  # a $ in a name is no formula
    axes.invert_yaxis()
    axes.legend(frameon=False, loc="lower right")
    _quiet(axes, "x")
    _foot(figure, source)
    rows = zip(names, total, used, strict=True)
    words = ", ".join(f"{name} {value:.2f} ms{' on Tensor Cores' * bool(core)}" for name, value, core in rows)
    return Picture(figure, f"Bars of the time of the kernels that took most: {words}. {source}.")


def number_formats() -> Picture:
    """Draw the bits of `precision.FORMATS`, and from where to where their numbers go."""
    formats = precision.FORMATS
    figure = Figure(figsize=(8, 0.8 * len(formats) + 1.6), layout="constrained")
    bits, reach = figure.subplots(2, 1)
    parts = {"sign": GREY, "exponent: the range": ORANGE, "mantissa: the precision": SKY}
    for row, each in enumerate(formats):
        start = 0
        for (label, colour), count in zip(parts.items(), (1, each.exponent, each.mantissa), strict=True):
            boxes = [(start + bit, 1) for bit in range(count)]
            bits.broken_barh(boxes, (row - 0.35, 0.7), facecolor=colour, edgecolor="white", label=label if row == 0 else None)
            bits.text(start + count / 2, row, str(count), ha="center", va="center", fontsize=9)
            start += count
        low, normal, high = np.log2(each.range)
        reach.barh(row, high - normal, left=normal, color=ORANGE, height=0.5)
        reach.barh(row, normal - low, left=low, color=PALE, edgecolor=ORANGE, hatch="///", height=0.5)
        reach.text(high, row, f"  after 1 comes 1 + 2$^{{-{each.mantissa}}}$", va="center", fontsize=9)
    bits.set(xlabel="bits", xlim=(0, 33))
    bits.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.97), fontsize=9)
    reach.set(xlabel="numbers above 0, as powers of 2 (hatched: with fewer bits of precision)", xlim=(-155, 215))
    reach.set_xticks(range(-150, 151, 50))
    for axes in (bits, reach):
        axes.set_yticks(range(len(formats)), [each.name for each in formats])
        axes.invert_yaxis()
        _quiet(axes, "x")
    words = "; ".join(
        f"{each.name}: sign 1, exponent {each.exponent}, mantissa {each.mantissa} bits, "
        f"from {each.smallest_normal:.1e} to {each.largest:.1e}"
        for each in formats
    )
    return Picture(figure, f"Boxes for the bits of number formats, and bars from the smallest to the largest number. {words}.")


def gradients(samples: Mapping[str, Mapping[str, torch.Tensor]], scale: float, source: str) -> Picture:
    """Draw how large gradients are, above the range of float16 without and with a loss scale.

    Parameters
    ----------
    samples : mapping of str to mapping of str to Tensor
        Title of each panel, and its gradients by kind, as `precision.gradients` returns them.
    scale : float
        Factor of the loss.
    source : str
        Of which network and images.
    """
    figure = Figure(figsize=(8, 2.1 * len(samples) + 0.8), layout="constrained")
    panels = figure.subplots(len(samples), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    bins, top, words = np.arange(-60, 21), 0.0, []
    for axes, (title, kinds) in zip(panels, samples.items(), strict=True):
        for (kind, values), (colour, style) in zip(kinds.items(), ((BLUE, "-"), (VERMILION, "--")), strict=False):
            sizes = np.log2(np.abs(values[values != 0].numpy().astype(float)))
            counts, _ = np.histogram(sizes.clip(bins[0], bins[-1]), bins)
            shares = counts / counts.sum() * 100
            axes.stairs(shares, bins, color=colour, linestyle=style, label=kind)
            top = max(top, shares.max())
            words.append(f"{title}, {kind}: half of them below 2^{np.median(sizes):.0f}")
        axes.set(title=title, ylabel="share in %")
        _quiet(axes)
    for axes in panels:
        for place, (factor, label) in enumerate(((1, "float16"), (scale, f"float16, loss × {scale:,.0f}"))):
            low, normal, high = np.log2([each / factor for each in precision.FLOAT16.range])
            height, y = top * 0.16, top * (1.15 + 0.22 * place)
            axes.barh(y, high - normal, left=normal, height=height, color=GREEN)
            axes.barh(y, normal - low, left=low, height=height, color=PALE, edgecolor=GREEN, hatch="///")
            axes.text(low - 0.5, y, label, ha="right", va="center", fontsize=8)
        axes.set_ylim(0, top * 1.5)
    panels[0].legend(frameon=False, fontsize=9, loc="center right")
    panels[-1].set_xlabel("size of a gradient's element, as a power of 2 (bars: what float16 can hold)")
    _foot(figure, source)
    return Picture(figure, f"Histograms of the size of gradients, below the range of float16. {'; '.join(words)}. {source}.")


def memory_curves(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw the memory of tensors over time, as traces tell it.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        For each recording its rows of one device, as `traces.memory_curve` returns them.
    source : str
        What was recorded, and on which machine.
    """
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    for (name, table), (colour, style) in zip(tables.items(), ((BLUE, "-"), (ORANGE, "--"), (GREEN, ":")), strict=False):
        axes.step(table["time"], table["allocated"], where="post", color=colour, linestyle=style, label=name)
    axes.set(xlabel="time since the start of the first recorded step in ms", ylabel="memory of tensors in MB")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False)
    _quiet(axes)
    _foot(figure, source)
    words = (
        f"{name}: between {table['allocated'].min():,.0f} and {table['allocated'].max():,.0f} MB"
        for name, table in tables.items()
    )
    return Picture(figure, f"Lines of the memory of tensors over time. {'; '.join(words)}. {source}.")


def _three(value: float) -> str:
    """Return a number with three digits, or all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _slope(figure: Figure, axes: Axes) -> float:
    """Return the angle in degrees at which y = x rises, where both axes are logarithmic."""
    figure.draw_without_rendering()  # the layout decides how large the axes are
    box, (left, right), (low, high) = axes.get_window_extent(), axes.get_xlim(), axes.get_ylim()
    return float(np.degrees(np.arctan2(box.height / np.log(high / low), box.width / np.log(right / left))))


def _row(figure: Figure, count: int) -> Sequence[Axes]:
    return figure.subplots(1, count, sharey=True, squeeze=False)[0]


def _quiet(axes: Axes, grid: str = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.85", linewidth=0.8)
    axes.set_axisbelow(True)


def _foot(figure: Figure, source: str) -> None:
    width = int(figure.get_figwidth() * 14)  # characters of this size that fit in a line
    lines = [line for part in source.splitlines() for line in textwrap.wrap(part, width)]
    figure.supxlabel("\n".join(lines), fontsize=8, color="0.35")
