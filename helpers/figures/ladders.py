"""Figures of results: the ladder, a rung on several machines, the gains of a whole class."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, PercentFormatter

from helpers.figures.drawing import Picture, finish, legend, listed, panel, patches
from helpers.figures.palette import BLUE, COLOURS, GREEN, GREY, NEUTRAL, ORANGE, PALE, SKY, VERMILION
from helpers.results import elsewhere, pairs, scoreboard
from helpers.training.calculated import changes
from stepscope.base.wording import counted, digits
from stepscope.timing.comparison import FASTER, NOISY, SAME, SLOWER

_LONGEST = 2.0  # times the bar before: longer bars are cut off
_BAR, _GAP = 0.24, 0.6  # inches: the height of a bar; and the gap between two rungs, in bars
_OUTCOMES = {FASTER: (GREEN, "^"), SLOWER: (VERMILION, "v"), SAME: (BLUE, "s"), NOISY: (GREY, "o")}
_BEYOND = 1.6  # times the outermost mark: intervals end there


def ladder(results: Sequence[scoreboard.Result] | None = None) -> Picture:
    """Draw the ladder so far: for each rung the time for an image before and after, as a share of the time before.

    Both bars are from the same interleaved rounds, and show the part that is waiting for data. A rung without a ratio
    is a single bar. `results` are by default those of this reader's `scoreboard.ladder`; among these, a change that is
    made for a GPU, measured on a CPU, is replaced by `pairs.on_a_gpu`, on a grey band.
    """
    own = results is None
    results = scoreboard.ladder() if results is None else results
    if not results:  # axes without a bar would say nothing
        figure, axes = panel(8, 0.5)
        axes.set_axis_off()
        axes.text(0, 0.5, words := "No result yet: run a notebook that measures, such as 01.", va="center")
        return Picture(figure, words)
    rungs = pairs.ladder(results) if own else [pairs.measured(result) for result in results]
    bars = sum(2 if rung.before else 1 for rung in rungs)
    figure, axes = panel(8, _BAR * (bars + _GAP * len(rungs)) + 1.3)
    ticks: dict[float, str] = {}
    top, edges = 0.0, []
    for rung in rungs:
        height = 2.0 if rung.before else 1.0
        if rung.origin:
            axes.axhspan(top - 0.15, top + height + 0.15, color="0.93", zorder=0)
        if rung.before:
            _bar(axes, top + 0.5, 1.0, rung.waiting[0], rung)
            ticks[top + 0.5] = f"before: {rung.baseline}"
        length = rung.before / rung.after if rung.before else 1.0
        _bar(axes, top + height - 0.5, length, rung.waiting[1], rung)
        ticks[top + height - 0.5] = rung.rung
        words = "\n".join(filter(None, [rung.rates, rung.gain, rung.origin]))
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.02, top + height / 2, words, fontsize=9, parse_math=False, **place)
        edges.append(length)
        top += height + _GAP
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(list(ticks), list(ticks.values()), parse_math=False)
    for label in axes.get_yticklabels():
        if label.get_text().startswith("before: "):
            label.set(fontsize=8, color="0.35")
    axes.tick_params(axis="y", length=0)
    axes.set(xlim=(0, min(max(1.02, 1.08 * max(edges)), _LONGEST)), ylim=(top - 0.4, -0.2))
    axes.set_xlabel("time for an image (before = 100%)")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    legend(figure, columns=3, handles=_handles(rungs))
    text = "; ".join(f"{rung.rung}: {', '.join(filter(None, [rung.rates, rung.gain, rung.origin]))}" for rung in rungs)
    source = list(dict.fromkeys(rung.source for rung in rungs))
    if any(rung.hatched for rung in rungs):
        source.append("hatched: a change made for a GPU, measured on a CPU")
    return finish(figure, f"Bars of the time for an image, before and after each rung. {text}", "\n".join(source), "x")


def _bar(axes: Axes, place: float, length: float, waiting: float | None, rung: pairs.Pair) -> None:
    """Draw a bar, its waiting part first, or in a neutral colour if that part is unknown."""
    looks: dict[str, Any] = {"height": 0.85, "edgecolor": "white", "hatch": "///" if rung.hatched else None}
    if waiting is None:
        axes.barh(place, length, color=NEUTRAL, **looks)
    else:
        axes.barh(place, length * waiting, color=COLOURS["waiting"], **looks)
        axes.barh(place, length * (1 - waiting), left=length * waiting, color=COLOURS["step"], **looks)
    if length > _LONGEST:
        axes.plot(0.99 * _LONGEST, place, ">", color="white", markersize=6)  # it goes on


def _handles(rungs: Sequence[pairs.Pair]) -> list[Patch]:
    colours = {"waiting for data": COLOURS["waiting"], "the rest": COLOURS["step"]}
    unknown = any(rung.waiting[1] is None or (rung.before and rung.waiting[0] is None) for rung in rungs)
    return patches(colours | ({"not divided: waiting is unknown": NEUTRAL} if unknown else {}))


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
    places = {measured.before: 1, measured.after: list(rates).index("11 TF32 to float16")}
    figure, axes = panel(8, 0.45 * len(rates) + 1.4)
    bars = axes.barh(list(rates), list(rates.values()), color=PALE, edgecolor=BLUE, height=0.6, label="calculated")
    axes.bar_label(bars, [f"{rate:,.0f}" for rate in rates.values()], label_type="center")
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
