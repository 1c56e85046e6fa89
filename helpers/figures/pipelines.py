"""Figures of loaders, of what they load, and from where."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from helpers.figures.drawing import Picture, finish, legend, lines, listed, panel, panels
from helpers.figures.palette import LOOKS, PALE
from stepscope.base.wording import counted, three_digits


def image_grid(images: Sequence, labels: Sequence[int], classes: Sequence[str], source: str) -> Picture:
    """Draw some images, of PIL or uint8 arrays of shape (H, W, 3), with the names of their classes."""
    columns = min(len(images), 8)
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(8, 1.25 * rows + 0.5), layout="constrained")
    for axes, image, label in zip(figure.subplots(rows, columns).flat, images, labels, strict=False):
        axes.imshow(np.asarray(image))
        axes.set_title(classes[label].removeprefix("drawn: "), fontsize=9)  # the source says that they are drawn
    for axes in figure.axes:
        axes.axis("off")
    figure.suptitle(source, fontsize=10)
    words = listed({f"{len(images)} images from {source}": Counter(classes[label] for label in labels)})
    return Picture(figure, f"{words}.")


def access(table: pd.DataFrame, limits: Mapping[str, float], source: str) -> Picture:
    """Draw how fast packed formats are read, in several ways: a row per format, a mark per way.

    `table` has a row per format and a column per way, in images per second, NaN where it was not measured; `limits` are
    other throughputs to compare with, drawn as lines across all rows.
    """
    figure, axes = panel(8, 0.38 * len(table) + 2.2)
    for way, (colour, _, marker) in zip(table, LOOKS, strict=False):
        axes.plot(table[way], table.index, marker, color=colour, label=way, markersize=7, alpha=0.85)
    for (name, value), style in zip(limits.items(), ("--", ":"), strict=False):
        axes.axvline(value, color="black", linestyle=style, linewidth=1.2, label=name)
    axes.set(xscale="log", xlabel="throughput in images per second, each line ten times the last")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()
    legend(figure, columns=3)
    rates = {kind: row.dropna() for kind, row in table.iterrows()} | {"for comparison": limits}
    words = f"Marks of images per second, a row per format. {listed(rates, '{:,.0f}')}"
    return finish(figure, words, source, "both")


def item_timeline(items: Mapping[str, np.ndarray]) -> Picture:
    """Draw when each item of a `datasets.SleepDataset` was made, by which worker: one panel per loader.

    `items` has an array of shape (count, 3) for each panel, by title: worker, start and end in seconds.
    """
    lanes = [len(set(made[:, 0])) for made in items.values()]
    figure, rows = panels(8, 1 + 0.6 * len(lanes) + 0.3 * sum(lanes), lanes, sharex=True)
    for axes, (title, made) in zip(rows, items.items(), strict=True):
        begin = made[:, 1].min()
        for number, (worker, start, end) in enumerate(made):
            axes.barh(worker, end - start, left=start - begin, color=PALE, edgecolor="black", height=0.7)
            axes.text((start + end) / 2 - begin, worker, str(number), ha="center", va="center", fontsize=8)
        workers = sorted(set(made[:, 0]))
        axes.set(title=title, yticks=workers, yticklabels=[f"worker {worker:.0f}" for worker in workers])
        axes.invert_yaxis()
    rows[-1].set_xlabel("time in s")
    seconds = {title: np.ptp(made[:, 1:]) for title, made in items.items()}
    words = listed({"from the first item's start to the last one's end": seconds}, "{:.2f} s")
    return finish(figure, f"Timeline of items by worker; {words}", grid="x")


def memory(growth: Mapping[str, Mapping[int, float]]) -> Picture:
    """Draw how much memory a worker gains in one pass over file names, by how many there are and how they are kept.

    `growth` has for each kind of container the worker's growth in MB by the number of names.
    """
    figure, axes = lines({kind: (list(points), list(points.values())) for kind, points in growth.items()}, marker=True)
    axes.set(xlabel="number of file names", ylabel="growth of a worker in MB")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    words = listed({kind: {f"{n:,} names": mb for n, mb in own.items()} for kind, own in growth.items()}, "{:.1f} MB")
    return finish(figure, f"Lines of a worker's growth in memory over the number of file names. {words}")


def throughput(
    table: pd.DataFrame, seconds: Callable[[int, float, int], float], epochs: pd.DataFrame, core: float, source: str
) -> Picture:
    """Draw throughput by the size of a request: predicted as lines, measured as marks.

    `table` has a row per measurement: "MB" of a request, "connections", and the "seconds" until each connection has
    done one. For repeated measurements, the mark is the median, and a bar goes from the lowest to the highest.
    ``seconds(requests, size, connections)`` predicts, for `size` bytes in all, as that of `simulate.SlowStore` does.
    `epochs` has a row per epoch of shards, with one request for each shard: "MB" of a shard, "connections", some of
    those in `table`, and "MB/s". `core` are the MB/s of shards that one core unpacks and decodes.
    """
    figure, axes = panel(8, 4.6)
    sizes = np.geomspace(table["MB"].min(), table["MB"].max(), 60)
    words, handles = {}, []
    for (connections, own), (colour, _, marker) in zip(table.groupby("connections"), LOOKS, strict=False):
        name = counted(connections, "connection")
        predicted = [size * connections / seconds(connections, size * connections * 1e6, connections) for size in sizes]
        axes.plot(sizes, predicted, color=colour, linewidth=1.2)
        rates = (own["MB"] * connections / own["seconds"]).groupby(own["MB"]).agg(["median", "min", "max"])
        reach = np.abs(rates[["min", "max"]].to_numpy() - rates[["median"]].to_numpy()).T
        axes.errorbar(rates.index, rates["median"], reach, fmt=marker, color=colour, markersize=6)
        read = epochs[epochs["connections"] == connections]
        axes.plot(read["MB"], read["MB/s"], marker, color=colour, fillstyle="none", markersize=9, markeredgewidth=1.6)
        handles.append(Line2D([], [], color=colour, marker=marker, label=name))
        for what, measured in (("requests", rates["median"]), ("epochs", read.set_index("MB")["MB/s"])):
            if len(measured):
                words[f"{name}, {what}"] = {f"{round(mb, 2):g} MB": three_digits(rate) for mb, rate in measured.items()}
    axes.axhline(core, color="black", linestyle="--", linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlabel="size of a request in MB", ylabel="throughput in MB/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.4g}")
    black: dict[str, Any] = {"color": "black", "markersize": 7}
    handles += [
        Line2D([], [], **black, label="predicted, link"),
        Line2D([], [], **black, linestyle="--", label="predicted, one core"),
        Line2D([], [], **black, marker="o", linestyle="", label="measured, one request each"),
        Line2D([], [], **black, marker="o", linestyle="", fillstyle="none", label="measured, epoch of shards"),
    ]
    legend(figure, columns=3, handles=handles)
    words["predicted, one core unpacks and decodes"] = {"any size": three_digits(core)}
    what = "Marks of throughput in MB/s by the size of a request, and lines of what was predicted"
    return finish(figure, f"{what}. {listed(words)}", source, "both")
