"""Figures of a whole class."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from helpers.figures.drawing import BLACK, BLUE, GREEN, GREY, VERMILION, Picture, tidy
from helpers.timing.comparison import FASTER, NOISY, SAME, SLOWER
from helpers.wording import counted, digits

OUTCOMES = {FASTER: (GREEN, "^"), SLOWER: (VERMILION, "v"), SAME: (BLUE, "s"), NOISY: (GREY, "o")}
BEYOND = 1.6  # times the outermost mark: of two rounds an interval may be a hundred times as long


def ratios(table: pd.DataFrame) -> Picture:
    """Draw what each rung gained for each reader of a class: a mark a reader, with the interval, in a band a rung.

    Parameters
    ----------
    table : DataFrame
        A row a result: "rung" with what the ratio is against, "ratio", "lowest", "highest", and the "outcome", as
        `timing.comparison.outcome` names it. Rungs are drawn in the order in which they appear.
    """
    rungs = list(dict.fromkeys(table["rung"]))
    most = max(table["rung"].value_counts(), default=1)
    band = min(0.45 + 0.05 * most, 1.2)  # inches
    figure = Figure(figsize=(8, band * len(rungs) + 1.3), layout="constrained")
    axes = figure.subplots()
    ends = table["ratio"].min() / BEYOND, table["ratio"].max() * BEYOND
    places = pd.Series(0.0, table.index)
    for place, rung in enumerate(rungs):
        own = table.index[table["rung"] == rung]
        places[own] = place + np.linspace(-0.35, 0.35, len(own) + 2)[1:-1]
    for name, (colour, marker) in OUTCOMES.items():
        rows = table[table["outcome"] == name]
        if len(rows):
            reach = rows[["lowest", "highest"]].clip(*ends).sub(rows["ratio"], axis=0).abs().to_numpy().T
            axes.errorbar(
                rows["ratio"], places[rows.index], xerr=reach, fmt=marker, color=colour, markersize=5, elinewidth=1,
                label=name,
            )  # fmt: skip
    axes.axvline(1, color=BLACK, linewidth=1)
    for place in range(len(rungs) - 1):
        axes.axhline(place + 0.5, color="0.85", linewidth=0.8)
    axes.set(xscale="log", xlabel="throughput over that of the baseline, and the 95% interval", xlim=ends)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if ends[1] < 20 * ends[0] else (1, 3)))
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.minorticks_off()
    axes.set_yticks(range(len(rungs)), [rung.replace(" to ", "\nto ", 1) for rung in rungs], parse_math=False)
    axes.set_ylim(len(rungs) - 0.5, -0.5)
    tidy(axes, "x")
    figure.legend(loc="outside upper center", ncols=len(OUTCOMES), frameon=False)
    words = "; ".join(
        f"{rung}: {counted(len(own), 'reader')}, from {digits(own.min())}× to {digits(own.max())}×"
        for rung, own in table.groupby("rung", sort=False)["ratio"]
    )
    return Picture(figure, f"Marks of the ratio to the baseline, one a reader, in a band a rung. {words}.")
