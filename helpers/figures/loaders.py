"""Figures of loaders and of what they load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from helpers import timing
from helpers.figures.drawing import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    GREY,
    PALE,
    PURPLE,
    VERMILION,
    Picture,
    tidy,
    write_source,
)


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
    counts = Counter(classes[label] for label in labels)
    shown = ", ".join(name if count == 1 else f"{name} ({count})" for name, count in counts.items())
    return Picture(figure, f"{len(images)} images from {source}, of the classes {shown}.")


def monitored(table: pd.DataFrame, loop: timing.Timing, source: str) -> Picture:
    """Draw what a monitor saw while a loop ran, under the steps of the loop.

    Parameters
    ----------
    table : DataFrame
        As `monitor.Monitor.table` returns it.
    loop : Timing
        The loop; time 0 is when its first step began.
    source : str
    """
    table = table.loc[loop.begin : loop.begin + loop.seconds]
    if len(table):  # memory is looked at once a second, so a short loop may have none of it
        table = table.dropna(axis="columns", how="all")
    panels = {
        "CPU in %": {
            name.removesuffix(" in %").removesuffix(", CPU"): name for name in table if "core" in name or "CPU" in name
        },
        "GPU in %": {
            name.removesuffix(" in %"): name for name in table if name.startswith("GPU") and name.endswith("%")
        },
        "MB/s": {name.removesuffix(" in MB/s"): name for name in table if name.endswith("MB/s")},
        "memory in MB": {name.removesuffix(" in MB"): name for name in table if name.endswith(" in MB")},
    }
    panels = {unit: lines for unit, lines in panels.items() if lines}
    figure = Figure(figsize=(8, 1.4 * len(panels) + 1.6), layout="constrained")
    steps, *others = figure.subplots(1 + len(panels), 1, sharex=True, height_ratios=[0.5, *[1.4] * len(panels)])
    starts = np.cumsum([0, *loop.durations[:-1]])
    waits, durations = np.array(loop.waits), np.array(loop.durations)
    steps.broken_barh(np.c_[starts, waits], (0, 1), color=COLOURS["loading"], label="waiting for data")
    steps.broken_barh(
        np.c_[starts + waits, durations - waits], (0, 1), color=COLOURS["compute"], label="the step itself"
    )
    steps.set(yticks=[], ylabel="steps", ylim=(0, 1))
    tidy(steps)
    steps.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False, fontsize=8, borderaxespad=0)
    for axes, (unit, lines) in zip(others, panels.items(), strict=True):
        colours = iter((VERMILION, BLUE, GREEN, PURPLE))
        for label, name in lines.items():
            values = table[name].dropna()
            pale = name.startswith("core")
            style = (
                {"color": GREY, "linewidth": 1} if pale else {"color": next(colours), "marker": "o", "markersize": 3}
            )
            axes.plot(values.index - loop.begin, values, label=None if pale else label, **style)
        if unit == "CPU in %":
            axes.plot([], [], color=GREY, label="each core")
        axes.set(ylabel=unit, ylim=(0, None))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
        tidy(axes)
    others[-1].set_xlabel("time in s")
    write_source(figure, source)
    words = ", ".join(f"{name} {table[name].mean():.0f}" for lines in panels.values() for name in lines.values())
    return Picture(
        figure,
        f"Lines over {loop.seconds:.1f} s of a loop of {len(durations)} steps, "
        f"which waits {loop.loading_share:.0%} of it; their means: {words}. {source}.",
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
    tidy(axes, "x")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    write_source(figure, source)
    words = "; ".join(
        f"{kind}: " + ", ".join(f"{way} {value:,.0f}" for way, value in row.dropna().items())
        for kind, row in table.iterrows()
    )
    others = ", ".join(f"{name} {value:,.0f}" for name, value in limits.items())
    return Picture(figure, f"Marks of images per second, a row a format. {words}. For comparison: {others}. {source}.")


def item_timeline(items: Mapping[str, np.ndarray]) -> Picture:
    """Draw when each item of a `datasets.SleepDataset` was made, by which worker: one panel a loader.

    Parameters
    ----------
    items : mapping of str to ndarray
        Title of each panel, and its items, shape (count, 3): worker, start and end in seconds.
    """
    figure = Figure(
        figsize=(8, 1 + sum(0.6 + 0.3 * len(set(made[:, 0])) for made in items.values())), layout="constrained"
    )
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
        tidy(axes, "x")
    panels[-1].set_xlabel("time in s")
    words = ", ".join(f"{title}: {np.ptp(made[:, 1:]):.2f} s" for title, made in items.items())
    return Picture(figure, f"Timeline of items by worker; from the first item's start to the last one's end, {words}.")


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
    tidy(axes)
    words = "; ".join(
        f"{kind}: " + ", ".join(f"{value:.0f} MB at {count:,}" for count, value in points.items())
        for kind, points in growth.items()
    )
    return Picture(figure, f"Lines of a worker's growth in memory over the number of file names. {words}.")
