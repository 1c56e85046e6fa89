"""Figures of results: the ladder, a rung on several machines, the gains of a whole class."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import LogLocator

from helpers.figures.drawing import Picture, finish, legend, listed, make_room, panel, panels
from helpers.figures.palette import BLUE, GREEN, GREY, NEUTRAL, ORANGE, PALE, SKY, VERMILION
from helpers.figures.timings import stacked_bars
from helpers.results import elsewhere, scoreboard
from helpers.training.calculated import changes
from stepscope.base.wording import counted, digits
from stepscope.timing.comparison import FASTER, NOISY, SAME, SLOWER

_LONGEST_INTERVAL = 1.3  # times the longest bar: with two rounds an interval may be a hundred times as long
_OUTCOMES = {FASTER: (GREEN, "^"), SLOWER: (VERMILION, "v"), SAME: (BLUE, "s"), NOISY: (GREY, "o")}
_BEYOND = 1.6  # times the outermost mark: intervals end there


def ladder(results: Sequence[scoreboard.Result] | None = None) -> Picture:
    """Draw the ladder so far: a bar per rung, with the share of its time spent waiting, and the ratio to its baseline.

    A rung without a ratio, or with another network, cannot be compared with those above it. It begins a new panel, with
    its own scale. `results` are by default those of this reader's `scoreboard.ladder`.
    """
    results = scoreboard.ladder() if results is None else results
    if not results:  # axes without a bar would say nothing
        figure, axes = panel(8, 0.5)
        axes.set_axis_off()
        axes.text(0, 0.5, words := "No result yet: run a notebook that measures, such as 01.", va="center")
        return Picture(figure, words)
    parts = scoreboard.panels(results)
    height = 0.5 * len(results) + 0.6 * len(parts) + 0.9
    figure, rows = panels(8, height, [len(part) + 0.3 for part in parts])
    for axes, part in zip(rows, parts, strict=True):
        means = [result.rate.mean for result in part]
        end = _LONGEST_INTERVAL * max(means)
        hatches = ["///" if result.for_another_device else None for result in part]
        names = [result.rung for result in part]
        axes.barh(names, means, 0.6, color=NEUTRAL, edgecolor="white", hatch=hatches)
        for row, result in enumerate(part):
            rate, highest = result.rate, min(result.rate.highest, end)
            gap = "   " if rate.highest > end else " "  # beside the arrow
            text = f"{gap}{rate.mean:,.0f}/s, host waits {result.loading_share:.0%}"
            if result.device_idle is not None:
                text += f", device idle {result.device_idle:.0%}"
            if result.ratio:
                text += f"\n{gap}{scoreboard.ratio_text(result, short=True)}"
            axes.text(highest, row, text, va="center", fontsize=9, parse_math=False, in_layout=False)
            errors = [[rate.mean - rate.lowest], [highest - rate.mean]]
            axes.errorbar(rate.mean, row, xerr=errors, fmt="none", ecolor="black", capsize=3)
            if rate.highest > end:
                axes.plot(end, row, ">", color="black", markersize=6)  # it goes on
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.invert_yaxis()
        if len(parts) > 1:
            axes.set_title(f"a step: {part[0].step}", fontsize=10, loc="left")
    scales = "; each panel has its own scale" if len(parts) > 1 else ""
    rows[-1].set_xlabel(f"throughput in images per second{scales}")
    make_room(figure)
    rungs = (f"{result.rung}: {result.rate.mean:,.0f} {scoreboard.ratio_text(result)}".strip() for result in results)
    source = ["line: 95% interval; ▶: it goes on", *scoreboard.provenance(results)]
    if any(result.for_another_device for result in results):
        source.append("hatched: a change made for a GPU, measured on a CPU; its notebook calculates it for a GPU")
    return finish(figure, f"Bars of images per second, one per rung. {'; '.join(rungs)}", "\n".join(source), "x")


def waiting(results: Sequence[scoreboard.Result]) -> Picture:
    """Draw where the time of a training step goes in the first panel of a ladder: waiting for the batch, and the rest.

    `results`, one or more, are as `scoreboard.ladder` returns them.
    """
    results = scoreboard.panels(results)[0]
    table = pd.DataFrame(index=[result.rung for result in results])
    table["waiting"] = [result.step_ms * result.loading_share for result in results]
    table["step"] = [result.step_ms * (1 - result.loading_share) for result in results]
    texts = {rung: f"{row.sum():.1f} ms, {row['waiting']:.1f} of them waiting" for rung, row in table.iterrows()}
    words = listed({"Bars of the time of one training step": texts})
    source = "\n".join(scoreboard.provenance(results))
    return stacked_bars(table, "milliseconds of one training step", words, source, list(texts.values()))


def on_a_gpu() -> Picture:
    """Draw what the rungs from 09 on do to ResNet-50 on an A100: calculated as bars, published as points.

    The calculation takes about 15 s.
    """
    rates: dict[str, float] = {}
    for number in ("09", "10", "11", "12"):
        for change, before, after, images in changes(number, ["A100"]):
            if images == 256:  # of photos
                rates = rates or {"09 float32": images / before.step_ms * 1e3}
                rates[f"{number} {change}"] = images / after.step_ms * 1e3
    measured = elsewhere.published().loc["F12 A100"]
    places = {measured.before: 1, measured.after: list(rates).index("11 TF32 to bfloat16")}
    figure, axes = panel(8, 0.45 * len(rates) + 1.4)
    bars = axes.barh(list(rates), list(rates.values()), color=PALE, edgecolor=BLUE, height=0.6, label="calculated")
    axes.bar_label(bars, [f" {rate:,.0f}" for rate in rates.values()], fontsize=9)
    axes.plot(list(places), list(places.values()), "D", color=VERMILION, label="published by NVIDIA")
    axes.set(xlabel="ResNet-50 on an A100: training images of 224 × 224 per second")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()
    legend(figure, columns=2)
    words = listed({"Bars of images per second, calculated": rates}, "{:,.0f}")
    words += f"; points, published: TF32 {measured.before:,.0f}, AMP with channels_last {measured.after:,.0f}"
    return finish(figure, words, f"calculated from the data sheet; {measured.source}, {measured.versions}", "x")


def calculated(table: pd.DataFrame) -> Picture:
    """Draw calculated over measured figures: a row per change, with a mark for each speed and for the gain.

    `table` is that of `elsewhere.calculated_and_measured`.
    """
    figure, axes = panel(8, 0.45 * len(table) + 1.6)
    marks = {
        "images/s before the change": ("before", "s", SKY),
        "images/s after it": ("after", "o", BLUE),
        "the gain, after over before": ("gain", "D", ORANGE),
    }
    for place, (label, (column, marker, colour)) in enumerate(marks.items()):
        rows = np.arange(len(table)) + (place - 1) * 0.22
        axes.plot(table[column], rows, marker, color=colour, label=label, markersize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="calculated over published or recorded", xlim=(0.6, 1 / 0.6))
    axes.set_xticks([0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5])
    axes.xaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.set_yticks(range(len(table)), table["change"])
    axes.invert_yaxis()
    legend(figure, columns=len(marks))
    words = listed(dict(table.set_index("change")[["before", "after", "gain"]].iterrows()), "{:.2f}")
    return finish(figure, f"Marks of calculated over measured figures. {words}", "", "x")


def ratios(table: pd.DataFrame) -> Picture:
    """Draw what each rung gained for each reader of a class: a mark with its interval per reader, in a band per rung.

    `table` has a row per result: "rung" with the ratio's baseline, "ratio", "lowest", "highest", and the "outcome", as
    `timing.comparison.outcome` names it. Rungs are drawn in the order in which they appear.
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
            looks: dict[str, Any] = {"fmt": marker, "color": colour, "markersize": 5, "elinewidth": 1}
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
    text = f"Marks of the ratio to the baseline, one per reader, in a band per rung. {listed(words)}"
    return finish(figure, text, grid="x")
