"""Figures of stopwatch measurements."""

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from helpers import simulate
from helpers.figures.drawing import Picture, finish, legend, lines, listed, panel, panels, patches
from helpers.figures.palette import BLUE, COLOURS, GREEN, NEUTRAL, ORANGE, PALE
from stepscope import timing
from stepscope.base.wording import counted, rounded, signed_percent, three_digits

_OF_STEPS = BLUE, ORANGE, GREEN  # in turn, so that a step can be followed from the host to the device
_OF_KINDS = {"copy": COLOURS["copy"], "loading": COLOURS["loading"], "wait": PALE}
_PREDICTED: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1.2}
_NAMES = {"copy": "copy of a batch", "loading": "loading", "wait": "the host waits"}


def comparison(result: timing.Comparison, source: str) -> Picture:
    """Draw the throughput of interleaved variants: a bar for the mean, a dot for every round."""
    figure, axes = panel(7, 0.55 * len(result.names) + 1.3)
    means = {name: result.throughput(name).mean for name in result.names}
    axes.barh(list(means), list(means.values()), color=NEUTRAL, height=0.6)
    for row, name in enumerate(result.names):
        rounds = result.throughputs(name)
        axes.plot(rounds, [row] * len(rounds), "o", color="black", markersize=4)
        number = rounded(means[name], 3)  # some bars are too short to be seen
        axes.annotate(number, (max(rounds), row), xytext=(8, 0), textcoords="offset points", va="center")
    most = max(max(result.throughputs(name)) for name in result.names)
    axes.set(xlabel="images per second (bar and number: mean, dots: rounds)", xlim=(0, 1.18 * most))
    axes.set_yticks(range(len(result.names)), [textwrap.fill(name, 28) for name in result.names])
    axes.xaxis.set_major_locator(MaxNLocator(6))  # more labels of millions would overlap
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()
    words = listed({"Bars of images per second": {name: three_digits(mean) for name, mean in means.items()}})
    return finish(figure, words, source, "x")


def two_clocks(results: Mapping[str, timing.TwoClocks], source: str) -> Picture:
    """Draw, for each loader by its name, the two clocks as the prediction combines them, and the measured loop."""
    figure, axes = panel(8, 0.85 * len(results) + 1.5)
    words = []
    for place, (name, clocks) in enumerate(results.items()):
        begin, rounds = clocks.predicted_ms - clocks.compute_ms, [run.step_ms for run in clocks.loop]
        left = 0 if clocks.workers else begin
        axes.barh(place - 0.27, clocks.loading_ms, 0.24, color=COLOURS["loading"], label=name)
        axes.barh(place, clocks.compute_ms, 0.24, left, color=COLOURS["compute"], label=name)
        axes.barh(place + 0.27, clocks.loop_ms, 0.24, color=NEUTRAL, label=name)
        axes.plot(rounds, [place + 0.27] * len(rounds), "o", color="black", markersize=3)
        axes.plot([clocks.predicted_ms] * 2, [place - 0.4, place + 0.42], **_PREDICTED)
        error = signed_percent(clocks.error)
        axes.text(max(clocks.predicted_ms, *rounds), place + 0.27, f"  {error}", va="center", fontsize=9)
        times = {"loading": clocks.loading_ms, "compute": clocks.compute_ms, "predicted": clocks.predicted_ms}
        words.append(f"{listed({name: times}, '{:.1f} ms')}, measured {clocks.loop_ms:.1f} ms ({error})")
    axes.set(xlabel="time per batch in ms (dots: rounds; on the right: the prediction's error)")
    axes.set_yticks(range(len(results)), list(results))
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    colours = {"loading alone": COLOURS["loading"], "compute alone": COLOURS["compute"], "the loop, measured": NEUTRAL}
    legend(figure, columns=4, handles=[*patches(colours), Line2D([], [], label="predicted", **_PREDICTED)])
    return finish(figure, f"For each loader bars of the two clocks and of the loop. {'; '.join(words)}", source, "x")


def phases(table: pd.DataFrame, source: str) -> Picture:
    """Draw the phases of a step, for one image of its batch, or of loading: a stacked horizontal bar per row.

    `table` has a row per setting, named by the index, and a column per phase, in µs per image.
    """
    figure, axes = panel(8, 0.38 * len(table) + 1.4)
    left = np.zeros(len(table))
    for name in table:
        axes.barh(table.index, table[name], 0.7, left, color=COLOURS[name], label=name)
        left += table[name].to_numpy()
    axes.set(xlabel="time per image in µs")
    axes.invert_yaxis()
    legend(figure, "right center")
    words = listed(dict(table.iterrows()), "{:.0f}")
    return finish(figure, f"Stacked bars of microseconds per image. {words}", source, "x")


def run_ahead(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw how far the host runs ahead: after each step, the time until the device has done that step, too.

    `tables`, by their names, are as `timing.run_ahead` gives them, or the ``ends`` of a `simulate.SimulatedRun`.
    """
    ahead = {name: (table["device"] - table["host"]).to_numpy() for name, table in tables.items()}
    series = {name: (range(1, len(values) + 1), values) for name, values in ahead.items()}
    figure, axes = lines(series, marker=True, linestyle="-")
    axes.set(xlabel="step", ylabel="host ahead, in ms")
    axes.set_ylim(bottom=0)
    ends = {name: {f"after step {n}": values[n - 1] for n in (1, len(values))} for name, values in ahead.items()}
    return finish(figure, f"Lines of how far the host is ahead of the GPU. {listed(ends, '{:.1f} ms')}", source)


def time_lines(runs: Mapping[str, simulate.SimulatedRun], steps: int = 4) -> Picture:
    """Draw the first steps of simulated hosts and devices, by their titles, above each other on one time axis.

    The launches and kernels of a step have one colour, and a line goes from each launch to the launched work. The
    figures beside the titles are for the whole run.
    """
    lanes = [sorted(set(run.spans["lane"]), key=len) for run in runs.values()]  # the host, streams 7 and 20
    heights = list(map(len, lanes))
    figure, rows = panels(8, 0.42 * sum(heights) + 0.5 * len(runs) + 1.1, heights, sharex=True)
    words = []
    for axes, places, (title, run) in zip(rows, lanes, runs.items(), strict=True):
        spans = run.spans[run.spans["step"] < steps]
        launched = dict(zip(spans["launch"], spans["kind"], strict=True))  # the last of each number is on the device
        ready = dict(zip(spans["launch"][::-1], spans["end"][::-1], strict=True))  # and the first one on the host
        links = []
        for span in spans.itertuples():
            kind = launched[span.launch] if span.launch > 0 else span.kind
            colour = _OF_KINDS.get(kind, _OF_STEPS[span.step % len(_OF_STEPS)])
            place, length, hatch = places.index(span.lane), span.end - span.start, "///" if kind == "wait" else None
            axes.barh(place, length, 0.56, span.start, color=colour, edgecolor="black", linewidth=0.4, hatch=hatch)
            if span.lane != "host":
                links.append([(ready[span.launch], 0.28), (span.start, place - 0.28)])
        axes.add_collection(LineCollection(links, colors="0.35", linewidths=0.6, zorder=0.9))  # behind the bars
        axes.set_yticks(range(len(places)), [lane if lane == "host" else f"GPU: {lane}" for lane in places])
        axes.set_ylim(len(places) - 0.6, -0.4)
        words.append(f"{title}: {run.step_us:,.0f} µs a step, kernels run for {run.utilization:.0%} of the time")
        axes.set_title(words[-1], loc="left", fontsize=10)
    rows[-1].set(xlabel=f"simulated time in µs, the first {counted(steps, 'step')}")
    rows[-1].xaxis.set_major_formatter("{x:,.0f}")
    rows[-1].set_xlim(left=0)
    kinds = set().union(*(run.spans["kind"] for run in runs.values()))
    names = {"launches and kernels, a colour per step": _OF_STEPS[0]}
    names |= {_NAMES[kind]: colour for kind, colour in _OF_KINDS.items() if kind in kinds}
    legend(figure, columns=len(names), handles=patches(names, edgecolor="black", linewidth=0.4))
    source = "calculated, nothing ran: " + "; ".join(dict.fromkeys(str(run.device) for run in runs.values()))
    return finish(figure, f"Simulated time lines of host and GPU. {'; '.join(words)}", source, "x")
