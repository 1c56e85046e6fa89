"""Figures of object stores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from helpers.figures.drawing import BLACK, BLUE, GREEN, PURPLE, VERMILION, Picture, three_digits, tidy, write_source


def throughput(
    table: pd.DataFrame, seconds: Callable[[int, float, int], float], epochs: pd.DataFrame, core: float, source: str
) -> Picture:
    """Draw how much arrives per second, by the size of a request: predicted as lines, measured as marks.

    Parameters
    ----------
    table : DataFrame
        A row a measurement: "MB" of a request, "connections", and the "seconds" until each connection has had one.
        Of measurements that were repeated, the mark is the median, and a bar goes from the lowest to the highest.
    seconds : callable
        ``seconds(requests, size, connections)`` predicts, for `size` bytes in all, as that of `simulate.Link` does.
    epochs : DataFrame
        A row for an epoch of shards, of which each is a request: "MB" of a shard, "connections", and "MB/s". Its
        connections are some of `table`.
    core : float
        MB/s of shards that one core unpacks and decodes.
    source : str
    """
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    sizes = np.geomspace(table["MB"].min(), table["MB"].max(), 60)
    words, legend = [], []
    looks = zip(table.groupby("connections"), (BLUE, VERMILION, GREEN, PURPLE), "osD^", strict=False)
    for (connections, own), colour, marker in looks:
        name = f"{connections} connection{'s' * (connections != 1)}"
        predicted = [size * connections / seconds(connections, size * connections * 1e6, connections) for size in sizes]
        axes.plot(sizes, predicted, color=colour, linewidth=1.2)
        rates = (own["MB"] * connections / own["seconds"]).groupby(own["MB"]).agg(["median", "min", "max"])
        reach = np.abs(rates[["min", "max"]].to_numpy() - rates[["median"]].to_numpy()).T
        axes.errorbar(rates.index, rates["median"], reach, fmt=marker, color=colour, markersize=6)
        read = epochs[epochs["connections"] == connections]
        axes.plot(read["MB"], read["MB/s"], marker, color=colour, fillstyle="none", markersize=9, markeredgewidth=1.6)
        legend.append(Line2D([], [], color=colour, marker=marker, label=name))
        measured = {"requests": rates["median"], "epochs": read.set_index("MB")["MB/s"]}
        words += [
            f"{name}, {what}: " + ", ".join(f"{round(mb, 2):g} MB {three_digits(rate)}" for mb, rate in of.items())
            for what, of in measured.items()
            if len(of)
        ]
    axes.axhline(core, color=BLACK, linestyle="--", linewidth=1.2)
    axes.set(xscale="log", yscale="log", xlabel="size of a request in MB", ylabel="throughput in MB/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.4g}")
    black = {"color": BLACK, "markersize": 7}
    legend += [
        Line2D([], [], **black, label="predicted, link"),
        Line2D([], [], **black, linestyle="--", label="predicted, one core"),
        Line2D([], [], **black, marker="o", linestyle="", label="measured, one request each"),
        Line2D([], [], **black, marker="o", linestyle="", fillstyle="none", label="measured, epoch of shards"),
    ]
    figure.legend(handles=legend, frameon=False, loc="outside upper center", ncols=3)
    tidy(axes, "both")
    write_source(figure, source)
    return Picture(
        figure, f"Marks of throughput in MB/s by the size of a request, lines of what was predicted, and a line at "
        f"{three_digits(core)}, what one core unpacks and decodes. {'; '.join(words)}. {source}."
    )  # fmt: skip
