"""Figures of processes that train together: what each rank does in a step, and what more ranks gain."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from helpers.figures.drawing import Picture, finish, legend, listed, panel, panels
from helpers.figures.palette import COLOURS, LOOKS, PALE
from helpers.figures.profiles import draw_lane
from stepscope import traces
from stepscope.base.wording import counted, three_digits
from stepscope.traces.exposed_communication import NO_COMPUTATION

_WAITING = {"facecolor": PALE, "hatch": "////", "edgecolor": "black"}
_TRANSFER = {"facecolor": COLOURS["Communication"]}
# Parts that add up to a step: columns of `traces.communication`, from the left, with their labels and looks.
_OVERLAPPED = {"facecolor": COLOURS["compute"], "hatch": "xxxx", "edgecolor": "white"}
_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "compute": ("computing, loading, other", {"facecolor": COLOURS["compute"]}),
    "overlapped": ("computing, overlapped with communication", _OVERLAPPED),
    "transfer": ("exposed communication: transfer", _TRANSFER),
    "waiting": ("exposed communication: waiting for the last rank", _WAITING),
}
_TALLEST = 11  # inches of a figure, for any number of ranks


def communication(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw what each rank does in a step: stacked bars of computing, overlapped and exposed communication.

    `tables`, by the titles of their panels, are as `traces.communication` returns them, in ms a step.
    """
    heights = [len(table) + 0.6 for table in tables.values()]
    figure, rows = panels(8, min(0.42 * sum(heights) + 1.6, _TALLEST), heights, sharex=True)
    words: dict[str, Mapping[str, str]] = {}
    for axes, (title, table) in zip(rows, tables.items(), strict=True):
        left = np.zeros(len(table))
        for name, (_, looks) in _PARTS.items():
            bars = axes.barh(table.index, table[name], 0.64, left, linewidth=0, **looks)
            left += table[name].to_numpy()
        texts = table[["step", "overlapped", "transfer", "waiting"]].map("{:.0f} ms".format)
        texts["efficiency"] = table["efficiency"].map("{:.0%}".format)
        axes.bar_label(bars, " " + texts["efficiency"], fontsize=9)
        words |= {f"{title} {rank}": row for rank, row in texts.iterrows()}
        axes.set_title(title, loc="left", fontsize=10)
        axes.invert_yaxis()
    rows[-1].set(xlabel="time of a step in ms; at the end of each bar the share without exposed communication")
    rows[-1].set_xlim(0, 1.1 * max(table["step"].max() for table in tables.values()))
    legend(figure, columns=2, handles=[Patch(label=label, linewidth=0, **looks) for label, looks in _PARTS.values()])
    return finish(figure, f"Stacked bars of the time of a step, one per rank. {listed(words)}", source, "x")


def rank_timeline(path: str | Path | traces.Ranks, source: str = "") -> Picture:
    """Draw the time lines of all ranks on one clock in the last step that all of them have recorded.

    Each rank has a line for its work, and right below it one for communication. `path` is the folder with the traces of
    all ranks, or the result of `traces.ranks`. Raises `traces.NoSteps` if a rank marks no steps.
    """
    ranks = path if isinstance(path, Mapping) else traces.ranks(path)
    operations = traces.collectives(ranks)
    last = operations.groupby("number")["start"].transform("max")  # the start on the rank that comes last
    operations["until"] = np.minimum(last, operations["end"])
    marks = {rank: traces.steps(trace) + ranks.clock[rank] for rank, trace in ranks.items()}
    step = max(set.intersection(*(set(table.index) for table in marks.values())))
    bounds = pd.DataFrame([table.loc[step] for table in marks.values()])
    window = bounds["start"].min(), bounds["end"].max()
    figure, axes = panel(8, min(0.72 * len(ranks) + 1.6, _TALLEST))
    handles: dict[str, Patch] = {}
    words: dict[str, dict[str, str]] = {}
    for place, (rank, trace) in enumerate(ranks.items()):
        words[rank] = {}
        events, own = pd.concat([span.events.table() for span in trace.spans]), operations[operations["rank"] == rank]
        work, kind, computing = "kernels", "Kernel", events["kind"] == "Kernel"
        if not computing.any():
            work, kind = "operators", "CPU Exec"
            computing = events["operator"] & (events["kind"] == kind) & ~events["name"].str.match(NO_COMPUTATION)
        spans = events[["start", "end"]] + ranks.clock[rank]
        # Place and looks of each activity, with starts and ends in µs on the common clock
        lanes: dict[str, tuple[float, dict[str, Any], pd.DataFrame]] = {
            "loading": (-0.36, {"facecolor": COLOURS["loading"]}, spans[events["kind"] == "DataLoader"]),
            f"computing: {work}": (-0.36, {"facecolor": COLOURS[kind]}, spans[computing]),
            "communication: waiting for the last rank": (0.02, _WAITING, own[["start", "until"]]),
            "communication: transfer": (0.02, _TRANSFER, own[["until", "end"]]),
        }
        for name, (offset, looks, times) in lanes.items():
            share = draw_lane(axes, (place + offset, 0.34), times, window, **looks)
            if share:
                words[rank][name] = f"{share:.0%}"
                handles[name] = Patch(label=name, linewidth=0, **looks)
        start = (marks[rank].loc[step, "start"] - window[0]) / 1e3
        begin = axes.vlines(start, place - 0.46, place + 0.46, color="0.5", linestyle=":", label="start of the step")
    length = (window[1] - window[0]) / 1e3
    axes.set(xlabel="time in ms, on one clock for all ranks", xlim=(-0.01 * length, length))
    axes.set_yticks(range(len(ranks)), list(ranks))
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    legend(figure, columns=2, handles=[*handles.values(), begin])
    text = f"in step {step}, {length:.0f} ms; shares of that time. {listed(words)}"
    return finish(figure, f"Time lines of the ranks, each above its communication, {text}", source, "x")


def scaling(table: pd.DataFrame, source: str) -> Picture:
    """Draw throughput by the number of ranks, and the ideal, in which each rank brings as much as the first.

    `table` has a row per measurement: `kind`, such as "weak" or "strong", `ranks`, `images/s` of all ranks together,
    and a prediction in `predicted`. NaN where nothing was measured, or predicted.
    """
    figure, axes = panel(7, 3.8)
    words = {}
    ideals: dict[int, float] = {}
    for (kind, rows), (colour, _, marker) in zip(table.groupby("kind", sort=False), LOOKS, strict=False):
        rows = rows.set_index("ranks").sort_index().rename(columns={"images/s": "measured"})
        rates = rows["measured"].fillna(rows["predicted"])
        ideals |= {ranks: rates.iloc[0] / rates.index[0] * ranks for ranks in rates.index}
        shares = rates / rates.iloc[0] * rates.index[0] / rates.index
        for name, style in (("predicted", "--"), ("measured", "-")):
            column = rows[name].dropna()
            if len(column):
                mark: dict[str, Any] = {"markersize": 5, "markerfacecolor": colour if name == "measured" else "white"}
                axes.plot(column.index, column, style, color=colour, marker=marker, label=f"{kind}, {name}", **mark)
        for ranks, share in shares.iloc[1:].items():
            text, place = f"{share:.0%}", (ranks, rates[ranks])
            axes.annotate(text, place, (5, -13), textcoords="offset points", color=colour, fontsize=9)
        words[kind] = {counted(n, "rank"): f"{three_digits(rates[n])} ({shares[n]:.0%})" for n in rates.index}
    ideal = pd.Series(ideals).sort_index()
    axes.plot(ideal.index, ideal, color="0.5", linestyle=":", label="ideal", zorder=1.5)
    axes.set(xscale="log", yscale="log", xlabel="number of ranks (%: efficiency)", ylabel="images per second")
    axes.set_xticks(ideal.index, [f"{ranks:,}" for ranks in ideal.index])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.12g}")
    axes.margins(x=0.1, y=0.1)
    axes.legend(frameon=False)
    text = f"at each mark the efficiency: its share of the ideal. {listed(words)}"
    return finish(figure, f"Lines of images per second by the number of ranks, {text}", source, "both")
