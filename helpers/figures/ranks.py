"""Figures of processes that train together: what each rank does in a step, and what more of them gain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator

from helpers import traces
from helpers.figures.drawing import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    ORANGE,
    PALE,
    PURPLE,
    Picture,
    three_digits,
    tidy,
    write_source,
)
from helpers.traces.exposure import NO_COMPUTATION
from helpers.traces.intervals import union
from helpers.wording import counted

WAITING = {"facecolor": PALE, "hatch": "////", "edgecolor": BLACK}
TRANSFER = {"facecolor": COLOURS["Communication"]}
# Parts that add up to a step: columns of `traces.communication`, from the left, what they are called and how they look.
PARTS = {
    "compute": ("computing", {"facecolor": COLOURS["compute"]}),
    "overlapped": (
        "computing, with communication behind it",
        {"facecolor": COLOURS["compute"], "hatch": "xxxx", "edgecolor": "white"},
    ),
    "transfer": ("exposed communication: transfer", TRANSFER),
    "waiting": ("exposed communication: waiting for the last rank", WAITING),
}
TALLEST = 11  # inches of a figure, of however many ranks


def communication(tables: pd.DataFrame | Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw what each rank does in a step: stacked bars of computing, overlapped and exposed communication.

    Parameters
    ----------
    tables : DataFrame or mapping of str to DataFrame
        As `traces.communication` returns it, in ms a step; several by the titles of their panels.
    source : str
        What was recorded, on which machine, and what of it is simulated.
    """
    tables = {"": tables} if isinstance(tables, pd.DataFrame) else tables
    heights = [len(table) + 0.6 for table in tables.values()]
    figure = Figure(figsize=(8, min(0.42 * sum(heights) + 1.6, TALLEST)), layout="constrained")
    panels = figure.subplots(len(tables), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    used = {}
    for axes, (title, table) in zip(panels, tables.items(), strict=True):
        left = np.zeros(len(table))
        for name, (label, looks) in PARTS.items():
            if (table[name] > 0.005 * table["step"]).any():
                axes.barh(table.index, table[name], 0.64, left, linewidth=0, **looks)
                used[name] = Patch(label=label, linewidth=0, **looks)
            left += table[name].to_numpy()
        for place, efficiency in enumerate(table["efficiency"]):
            axes.text(left[place], place, f" {efficiency:.0%}", va="center", fontsize=9)
        axes.set_title(title, loc="left", fontsize=10)
        axes.invert_yaxis()
        tidy(axes, "x")
    panels[-1].set(xlabel="time of a step in ms; at the end of each bar the share without exposed communication")
    panels[-1].set_xlim(0, 1.1 * max(table["step"].max() for table in tables.values()))
    figure.legend(
        handles=[used[name] for name in PARTS if name in used], loc="outside upper center", ncols=2, frameon=False,
        fontsize=9,
    )  # fmt: skip
    write_source(figure, source)
    words = "; ".join(f"{title}: {_words(table)}" if title else _words(table) for title, table in tables.items())
    return Picture(figure, f"Stacked bars of milliseconds of a step, one a rank. {words}. {source}.")


def _words(table: pd.DataFrame) -> str:
    return ", ".join(
        f"{rank} {row['step']:.0f}, with {row['overlapped']:.0f} overlapped, {row['transfer']:.0f} of exposed transfer "
        f"and {row['waiting']:.0f} of waiting, efficiency {row['efficiency']:.0%}"
        for rank, row in table.iterrows()
    )


def rank_timeline(path: str | Path | Mapping[str, traces.Trace], steps: int = 1, source: str = "") -> Picture:
    """Draw the time lines of all ranks on one clock: what each does, and right below it its communication.

    Parameters
    ----------
    path : str, Path or Ranks
        The folder with the traces of all ranks, or what `traces.ranks` returns.
    steps : int
        How many to draw: the last ones that all ranks have recorded.
    source : str
        What was recorded, on which machine, and what of it is simulated.

    Raises
    ------
    NoSteps
        If a rank marks no steps, or no step is recorded by all ranks.
    """
    ranks = path if isinstance(path, Mapping) else traces.ranks(path)
    operations = traces.collectives(ranks)
    last = operations.groupby("number")["start"].transform("max")
    marks = {rank: traces.steps(trace) + ranks.clock[rank] for rank, trace in ranks.items()}
    chosen = _chosen(ranks, marks, steps)
    begin = min(table.loc[chosen[0], "start"] for table in marks.values())
    end = max(table.loc[chosen[-1], "end"] for table in marks.values())
    figure = Figure(figsize=(8, min(0.72 * len(ranks) + 1.6, TALLEST)), layout="constrained")
    axes = figure.subplots()
    used, words = {}, []
    for place, (rank, trace) in enumerate(ranks.items()):
        own = operations["rank"] == rank
        lanes = _lanes(trace, ranks.clock[rank], operations[own], last[own])
        shares = {}
        for name, (offset, looks, starts, ends) in lanes.items():
            starts, ends = union(*(np.clip(times, begin, end) for times in (starts, ends)))
            bars = np.c_[starts - begin, ends - starts][ends > starts] / 1e3
            if len(bars):
                axes.broken_barh(bars, (place + offset, 0.34), linewidth=0, **looks)
                used[name] = Patch(label=name, linewidth=0, **looks)
                shares[name] = bars[:, 1].sum() * 1e3 / (end - begin)
        words.append(f"{rank}: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
        for start in marks[rank].loc[chosen, "start"]:
            axes.plot([(start - begin) / 1e3] * 2, [place - 0.42, place + 0.42], color=BLACK, linewidth=0.8)
    axes.set(xlabel="time in ms, on one clock for all ranks", xlim=(-0.01 * (end - begin) / 1e3, (end - begin) / 1e3))
    axes.set_yticks(range(len(ranks)), list(ranks))
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    figure.legend(handles=list(used.values()), loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    tidy(axes, "x")
    write_source(figure, source)
    numbers = f"step {chosen[0]}" if len(chosen) == 1 else f"steps {chosen[0]} to {chosen[-1]}"
    return Picture(
        figure, f"Time lines of the ranks, each above its communication, in {numbers}, {(end - begin) / 1e3:.0f} ms; "
        f"shares of that time. {'; '.join(words)}.{f' {source}.' if source else ''}"
    )  # fmt: skip


def _chosen(ranks: Mapping[str, traces.Trace], marks: Mapping[str, pd.DataFrame], steps: int) -> list[int]:
    """Return the numbers of the last steps that all ranks have recorded."""
    common = sorted(set.intersection(*(set(table.index) for table in marks.values())))
    if not common:
        recorded = ", ".join(f"{rank} {table.index[0]} to {table.index[-1]}" for rank, table in marks.items())
        raise traces.NoSteps(
            f"Expected a step that all of {', '.join(ranks)} have recorded, found none: {recorded}. Give all ranks the "
            "same schedule(…), and record again."
        )
    return common[-steps:]


def _lanes(trace: traces.Trace, clock: float, operations: pd.DataFrame, last: pd.Series) -> dict[str, tuple]:
    """Return of all that a rank does its place, its looks, and the starts and ends in µs on the common clock."""
    events = pd.concat([span.events for span in trace.spans])
    kernels, loading = events["kind"] == "Kernel", events["kind"] == "DataLoader"
    waits = events["name"].str.match(NO_COMPUTATION)
    operators = events["operator"] & (events["kind"] == "CPU Exec") & ~waits
    name, kind, chosen = ("kernels", "Kernel", kernels) if kernels.any() else ("operators", "CPU Exec", operators)
    above = {"loading": ("DataLoader", events[loading]), f"computing: {name}": (kind, events[chosen])}
    found = {
        name: (-0.36, {"facecolor": COLOURS[kind]}, *(rows[["start", "end"]].to_numpy().T + clock))
        for name, (kind, rows) in above.items()
    }
    operations = operations.assign(until=np.minimum(last, operations["end"])).sort_values("start")
    starts, until, ends = operations[["start", "until", "end"]].to_numpy(float).T
    begun = np.argsort(np.maximum(starts, until), kind="stable")
    transfer = np.maximum(starts, until)[begun], ends[begun]
    return found | {
        "communication: waiting for the last rank": (0.02, WAITING, starts, until),
        "communication: transfer": (0.02, TRANSFER, *transfer),
    }


def scaling(table: pd.DataFrame, source: str) -> Picture:
    """Draw throughput by the number of ranks, and as it would be if each rank brought as much as the first.

    Parameters
    ----------
    table : DataFrame
        A row a measurement: `kind`, such as "weak" or "strong", `ranks`, and `images/s`, all ranks together; if there
        is a prediction, that in `predicted`. NaN where nothing was measured, or predicted.
    source : str
        What was measured, on which machine, what of it is simulated, and by what it was predicted.
    """
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    words, ideals = [], {}
    looks = zip(table.groupby("kind", sort=False), (BLUE, ORANGE, GREEN, PURPLE), "os^D", strict=False)
    for (kind, rows), colour, marker in looks:
        rows = rows.set_index("ranks").sort_index().rename(columns={"images/s": "measured"})
        rows = rows.reindex(columns=["measured", "predicted"])
        rates = rows["measured"].fillna(rows["predicted"])
        ideals |= {ranks: rates.iloc[0] / rates.index[0] * ranks for ranks in rates.index}
        shares = rates / rates.iloc[0] * rates.index[0] / rates.index
        for name, style in (("predicted", "--"), ("measured", "-")):
            column = rows[name].dropna()
            if len(column):
                mark = {"markersize": 5, "markerfacecolor": colour if name == "measured" else "white"}
                axes.plot(column.index, column, style, color=colour, marker=marker, label=f"{kind}, {name}", **mark)
        for ranks, share in shares.iloc[1:].items():
            place = {"xytext": (5, -13), "textcoords": "offset points", "color": colour, "fontsize": 9}
            axes.annotate(f"{share:.0%}", (ranks, rates[ranks]), **place)
        words.append(f"{kind}: " + ", ".join(
            f"{counted(ranks, 'rank')} {three_digits(rate)} ({shares[ranks]:.0%})" for ranks, rate in rates.items()
        ))  # fmt: skip
    ideal = pd.Series(ideals).sort_index()
    axes.plot(ideal.index, ideal, color="0.5", linestyle=":", label="ideal", zorder=1.5)
    axes.set(xscale="log", yscale="log", xlabel="number of ranks", ylabel="images per second")
    axes.set_xticks(ideal.index, [f"{ranks:,}" for ranks in ideal.index])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.12g}")
    axes.margins(x=0.1, y=0.1)
    axes.legend(frameon=False)
    tidy(axes, "both")
    write_source(figure, source)
    return Picture(
        figure, "Lines of images per second by the number of ranks, at each mark the efficiency: its share of the "
        f"ideal. {'; '.join(words)}. {source}."
    )  # fmt: skip
