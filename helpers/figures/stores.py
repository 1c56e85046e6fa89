"""Figures of object stores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from helpers.figures.drawing import BLUE, GREEN, PURPLE, VERMILION, Picture, three_digits, tidy, write_source


def throughput(table: pd.DataFrame, seconds: Callable[[int, float, int], float], source: str) -> Picture:
    """Draw how much arrives per second, by the size of a request: measured as marks, predicted as lines.

    Parameters
    ----------
    table : DataFrame
        A row a measurement: "MB" of a request, "connections", and the "seconds" until each connection has had one.
        Of measurements that were repeated, the mark is the median, and a bar goes from the lowest to the highest.
    seconds : callable
        ``seconds(requests, size, connections)`` predicts, for `size` bytes in all, as that of `simulate.Link` does.
    source : str
    """
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    sizes = np.geomspace(table["MB"].min(), table["MB"].max(), 60)
    words = []
    looks = zip(table.groupby("connections"), (BLUE, VERMILION, GREEN, PURPLE), "osD^", strict=False)
    for (connections, own), colour, marker in looks:
        name = f"{connections} connection{'s' * (connections != 1)}"
        predicted = [size * connections / seconds(connections, size * connections * 1e6, connections) for size in sizes]
        axes.plot(sizes, predicted, color=colour, linewidth=1.2, label=f"{name}, predicted")
        rates = (own["MB"] * connections / own["seconds"]).groupby(own["MB"]).agg(["median", "min", "max"])
        reach = np.abs(rates[["min", "max"]].to_numpy() - rates[["median"]].to_numpy()).T
        axes.errorbar(
            rates.index, rates["median"], reach, fmt=marker, color=colour, markersize=6, label=f"{name}, measured"
        )
        words.append(f"{name}: " + ", ".join(f"{mb:g} MB {three_digits(rate)}" for mb, rate in rates["median"].items()))
    axes.set(xscale="log", yscale="log", xlabel="size of a request in MB", ylabel="throughput in MB/s")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.4g}")
    axes.legend(frameon=False)
    tidy(axes, "both")
    write_source(figure, source)
    return Picture(
        figure, f"Marks of throughput in MB/s by the size of a request, near lines of what was predicted. "
        f"{'; '.join(words)}. {source}."
    )  # fmt: skip
