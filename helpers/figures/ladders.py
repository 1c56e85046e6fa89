"""Figures of results: the ladder, a rung on several machines, the gains of a whole class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from helpers.figures.drawing import Picture, finish, legend, listed, make_room, panel, panels
from helpers.figures.palette import BLUE, GREEN, GREY, NEUTRAL, VERMILION
from helpers.figures.timings import stacked_bars
from helpers.results import scoreboard
from stepscope.base.wording import counted, digits
from stepscope.timing.comparison import FASTER, NOISY, SAME, SLOWER

_LONGEST_INTERVAL = 1.3  # times the longest bar: of two rounds an interval may be a hundred times as long
_OUTCOMES = {
    FASTER: (GREEN, "^"),
    SLOWER: (VERMILION, "v"),
    SAME: (BLUE, "s"),
    NOISY: (GREY, "o"),
}
_BEYOND = 1.6  # times the outermost mark: as far as an interval is drawn


def ladder(results: Sequence[scoreboard.Result] | None = None) -> Picture:
    """Draw the ladder so far: a bar a rung, with the share of its time spent waiting, and the ratio to its baseline.

    A rung without a ratio is the first of what cannot be compared with those above it, such as another network. It
    begins a panel of its own, with its own scale. `results` are by default those of this reader's `scoreboard.ladder`.
    """
    results = scoreboard.ladder() if results is None else results
    parts = scoreboard.panels(results) or [[]]
    height = 0.5 * len(results) + 0.6 * len(parts) + 0.9
    figure, rows = panels(8, height, [len(part) + 0.3 for part in parts])
    for axes, part in zip(rows, parts, strict=True):
        _bars(axes, {result.rung: result for result in part})
        if len(parts) > 1:
            axes.set_title(f"a step: {part[0].step}", fontsize=10, loc="left")
    scales = "; each panel has its own scale" if len(parts) > 1 else ""
    rows[-1].set_xlabel(f"throughput in images per second{scales}")
    make_room(figure)
    words = (f"{result.rung}: {result.rate.mean:,.0f} {scoreboard.ratio_text(result)}".strip() for result in results)
    source = "\n".join(scoreboard.provenance(results))
    return finish(figure, f"Bars of images per second, one a rung. {'; '.join(words)}", source, "x")


def waiting(results: Sequence[scoreboard.Result]) -> Picture:
    """Draw where the time of a training step goes in the first panel of a ladder: waiting for the batch, and the rest.

    `results` are at least one, as `scoreboard.ladder` returns them.
    """
    results = scoreboard.panels(results)[0]
    table = pd.DataFrame(index=[result.rung for result in results])
    table["waiting"] = [result.step_ms * result.loading_share for result in results]
    table["step"] = [result.step_ms * (1 - result.loading_share) for result in results]
    texts = {rung: f"{row.sum():.1f} ms, {row['waiting']:.1f} of them waiting" for rung, row in table.iterrows()}
    words = listed({"Bars of the time of one training step": texts})
    source = "\n".join(scoreboard.provenance(results))
    return stacked_bars(table, "milliseconds of one training step", words, source, list(texts.values()))


def reference(rung: str) -> Picture:
    """Draw a rung, by the begin of its name such as ``"08"``, here and on the recorded machines: a bar a machine."""
    machines = scoreboard.references(rung)
    figure, axes = panel(8, 0.5 * len(machines) + 1.3)
    _bars(axes, machines)
    axes.set(xlabel="throughput in images per second", title=f"rung {rung}")
    make_room(figure)
    lines = [
        f"{name}: {result.device}, {result.step}, {result.images_a_step:,} images a step, {result.data}"
        for name, result in machines.items()
    ]
    words = listed({"Bars of images per second": {name: f"{each.rate.mean:,.0f}" for name, each in machines.items()}})
    return finish(figure, words, "\n".join(lines), "x")


def _bars(axes: Axes, results: Mapping[str, scoreboard.Result]) -> None:
    """Draw a bar for each result, under its name."""
    rates = [result.rate for result in results.values()]
    end = _LONGEST_INTERVAL * max((rate.mean for rate in rates), default=1)
    axes.barh(list(results), [rate.mean for rate in rates], color=NEUTRAL, height=0.6)
    for row, (result, rate) in enumerate(zip(results.values(), rates, strict=True)):
        text = f" {rate.mean:,.0f}/s, host waits {result.loading_share:.0%}"
        if result.device_idle is not None:
            text += f", device idle {result.device_idle:.0%}"
        if result.ratio:
            text += f"\n {scoreboard.ratio_text(result, short=True)}"
        highest = min(rate.highest, end)
        axes.text(highest, row, text, va="center", fontsize=9, parse_math=False, in_layout=False)
        errors = [[rate.mean - rate.lowest], [highest - rate.mean]]
        axes.errorbar(rate.mean, row, xerr=errors, fmt="none", ecolor="black", capsize=3)
        if rate.highest > end:
            axes.plot(end, row, ">", color="black", markersize=6)  # it goes on
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()


def ratios(table: pd.DataFrame) -> Picture:
    """Draw what each rung gained for each reader of a class: a mark a reader, with the interval, in a band a rung.

    `table` has a row a result: "rung" with what the ratio is against, "ratio", "lowest", "highest", and the "outcome",
    as `timing.comparison.outcome` names it. Rungs are drawn in the order in which they appear.
    """
    rungs = list(dict.fromkeys(table["rung"]))
    most = max(table["rung"].value_counts(), default=1)
    band = min(0.45 + 0.05 * most, 1.2)  # inches
    figure, axes = panel(8, band * len(rungs) + 1.3)
    ends = table["ratio"].min() / _BEYOND, table["ratio"].max() * _BEYOND
    places = pd.Series(0.0, table.index)
    for place, rung in enumerate(rungs):
        own = table.index[table["rung"] == rung]
        places[own] = place + np.linspace(-0.35, 0.35, len(own) + 2)[1:-1]
    for name, (colour, marker) in _OUTCOMES.items():
        rows = table[table["outcome"] == name]
        if len(rows):
            reach = rows[["lowest", "highest"]].clip(*ends).sub(rows["ratio"], axis=0).abs().to_numpy().T
            looks = {"fmt": marker, "color": colour, "markersize": 5, "elinewidth": 1}
            axes.errorbar(rows["ratio"], places[rows.index], xerr=reach, label=name, **looks)
    axes.axvline(1, color="black", linewidth=1)
    for place in range(len(rungs) - 1):
        axes.axhline(place + 0.5, color="0.85", linewidth=0.8)
    axes.set(xscale="log", xlabel="throughput over that of the baseline, and the 95% interval", xlim=ends)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if ends[1] < 20 * ends[0] else (1, 3)))
    axes.xaxis.set_major_formatter("{x:g}×")
    axes.minorticks_off()
    axes.set_yticks(range(len(rungs)), [rung.replace(" to ", "\nto ", 1) for rung in rungs], parse_math=False)
    axes.set_ylim(len(rungs) - 0.5, -0.5)
    legend(figure, columns=len(_OUTCOMES))
    words = {
        rung: {counted(len(own), "reader"): f"from {digits(own.min())}× to {digits(own.max())}×"}
        for rung, own in table.groupby("rung", sort=False)["ratio"]
    }
    words = f"Marks of the ratio to the baseline, one a reader, in a band a rung. {listed(words)}"
    return finish(figure, words, grid="x")
