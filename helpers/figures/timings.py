"""Figures of what the stopwatch measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from helpers import simulate, timing
from helpers.figures.drawing import (
    BLACK,
    BLUE,
    COLOURS,
    GREEN,
    NEUTRAL,
    ORANGE,
    PALE,
    PURPLE,
    Picture,
    tidy,
    write_source,
)
from helpers.wording import counted, signed_percent


def comparison(result: timing.Comparison, source: str) -> Picture:
    """Draw the throughput of variants timed interleaved: a bar for the mean, a dot for every round."""
    figure = Figure(figsize=(7, 0.55 * len(result.names) + 1.3), layout="constrained")
    axes = figure.subplots()
    means = [result.throughput(name) for name in result.names]
    axes.barh(result.names, [each.mean for each in means], color=NEUTRAL, height=0.6)
    for row, name in enumerate(result.names):
        axes.plot(result.throughputs(name), [row] * len(result.throughputs(name)), "o", color=BLACK, markersize=4)
    axes.set(xlabel="throughput in images per second (bar: mean, dots: rounds)")
    axes.set_yticks(range(len(result.names)), [textwrap.fill(name, 28) for name in result.names])
    axes.xaxis.set_major_locator(MaxNLocator(6))  # more labels of millions would overlap
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.invert_yaxis()
    tidy(axes, "x")
    write_source(figure, source)
    words = ", ".join(f"{name} {each.mean:,.0f}" for name, each in zip(result.names, means, strict=True))
    return Picture(figure, f"Bars of images per second: {words}. {source}.")


def two_clocks(results: Mapping[str, timing.TwoClocks], source: str) -> Picture:
    """Draw, for each loader, the two clocks as they were expected to run, and below them the loop as it was measured.

    Parameters
    ----------
    results : mapping of str to TwoClocks
        One a loader, by its name.
    source : str
    """
    figure = Figure(figsize=(8, 0.85 * len(results) + 1.5), layout="constrained")
    axes = figure.subplots()
    for place, clocks in enumerate(results.values()):
        start = 0 if clocks.workers else clocks.predicted_ms - clocks.compute_ms
        rounds = [run.step_ms for run in clocks.loop]
        bars = {
            "loading alone": (place - 0.27, clocks.loading_ms, 0, COLOURS["loading"]),
            "compute alone": (place, clocks.compute_ms, start, COLOURS["compute"]),
            "the loop, measured": (place + 0.27, clocks.loop_ms, 0, NEUTRAL),
        }
        for name, (y, width, left, colour) in bars.items():
            axes.barh(y, width, left=left, height=0.24, color=colour, label=name if place == 0 else None)
        axes.plot(rounds, [place + 0.27] * len(rounds), "o", color=BLACK, markersize=3)
        axes.plot([clocks.predicted_ms] * 2, [place - 0.4, place + 0.42], color=BLACK, linestyle="--", linewidth=1.2)
        end = max(clocks.predicted_ms, *rounds)
        axes.text(end, place + 0.27, f"  {signed_percent(clocks.error)}", va="center", fontsize=9)
    axes.plot([], [], color=BLACK, linestyle="--", linewidth=1.2, label="predicted")
    axes.set(xlabel="time per batch in ms (dots: rounds; on the right: how far off the prediction is)")
    axes.set_yticks(range(len(results)), list(results))
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    tidy(axes, "x")
    write_source(figure, source)
    words = "; ".join(
        f"{name}: loading {clocks.loading_ms:.1f} ms, compute {clocks.compute_ms:.1f} ms, predicted "
        f"{clocks.predicted_ms:.1f} ms, measured {clocks.loop_ms:.1f} ms ({signed_percent(clocks.error)})"
        for name, clocks in results.items()
    )
    return Picture(figure, f"For each loader bars of the two clocks and of the loop. {words}. {source}.")


def phases(table: pd.DataFrame, source: str) -> Picture:
    """Draw the phases of a step, for one image of its batch, or of loading: a stacked horizontal bar a row.

    Parameters
    ----------
    table : DataFrame
        A row a setting, named by the index; a column a phase, in µs per image.
    source : str
    """
    figure = Figure(figsize=(8, 0.32 * len(table) + 1.4), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(table))
    for name in table.columns:
        axes.barh(table.index, table[name], left=left, color=COLOURS[name], label=name)
        left += table[name].to_numpy()
    axes.set(xlabel="time per image in µs")
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    tidy(axes, "x")
    write_source(figure, source)
    words = "; ".join(
        f"{row}: " + ", ".join(f"{name} {value:.0f}" for name, value in values.items())
        for row, values in table.iterrows()
    )
    return Picture(figure, f"Stacked bars of microseconds per image. {words}. {source}.")


def seconds(table: pd.DataFrame, source: str) -> Picture:
    """Draw how many seconds a training takes: a horizontal bar a setting, waiting and step stacked, the sum beside it.

    Parameters
    ----------
    table : DataFrame
        A row a setting, named by the index; in seconds, ``waiting`` for batches and the rest of the ``step``.
    source : str
    """
    figure = Figure(figsize=(8, 0.45 * len(table) + 1.3), layout="constrained")
    axes = figure.subplots()
    for name, left, colour in (("step", 0, COLOURS["CPU Exec"]), ("waiting", table["step"], COLOURS["DataLoader"])):
        axes.barh(table.index, table[name], left=left, color=colour, label=name, height=0.6)
    sums = table.sum(axis=1)
    for row, total in enumerate(sums):
        axes.annotate(f"{total:,.3g} s", (total, row), (4, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set(xlabel="seconds", xlim=(0, 1.12 * sums.max()))
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False)
    tidy(axes, "x")
    write_source(figure, source)
    words = ", ".join(f"{name} {total:,.3g}" for name, total in sums.items())
    return Picture(figure, f"Stacked bars of seconds, of the step and of waiting for data; in all: {words}. {source}.")


def run_ahead(tables: Mapping[str, pd.DataFrame], source: str) -> Picture:
    """Draw how far the host runs ahead: after each step, the time until the device has done that step, too.

    Parameters
    ----------
    tables : mapping of str to DataFrame
        As `timing.run_ahead` gives them, or the ``ends`` of a `simulate.SimulatedRun`.
    source : str
    """
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    words = []
    for (name, table), colour, mark in zip(tables.items(), (BLUE, ORANGE, GREEN, PURPLE), "os^v", strict=False):
        ahead = (table["device"] - table["host"]).to_numpy()
        axes.plot(range(1, len(ahead) + 1), ahead, color=colour, marker=mark, label=name)
        words.append(f"{name} {ahead[0]:.1f} ms after the first step, {ahead[-1]:.1f} ms after step {len(ahead)}")
    axes.set(xlabel="step", ylabel="host ahead by ms")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    tidy(axes)
    write_source(figure, source)
    return Picture(figure, f"Lines of how far the host is ahead of the device. {'; '.join(words)}. {source}.")


OF_STEPS = (BLUE, ORANGE, GREEN)  # one after the other, so that a step can be followed from the host to the device
OF_KINDS = {"copy": COLOURS["copy"], "loading": COLOURS["loading"], "wait": PALE}
NAMES = {"copy": "copy of a batch", "loading": "loading", "wait": "the host waits"}


def time_lines(runs: Mapping[str, simulate.SimulatedRun], steps: int = 4) -> Picture:
    """Draw the time lines of simulated hosts and devices above each other, on one time axis.

    The launches and kernels of a step have one colour, and a line goes from each launch to what it launched.

    Parameters
    ----------
    runs : mapping of str to SimulatedRun
        By their titles.
    steps : int
        How many to draw, from the first one on; the figures beside the titles are of the whole run.
    """
    lanes = [_lanes(run) for run in runs.values()]
    figure = Figure(figsize=(8, 0.42 * sum(map(len, lanes)) + 0.5 * len(runs) + 1.1), layout="constrained")
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False, height_ratios=list(map(len, lanes)))[:, 0]
    words = []
    for axes, (title, run) in zip(panels, runs.items(), strict=True):
        _draw_lines(axes, run, steps)
        words.append(f"{title}: {run.step_us:,.0f} µs a step, kernels run for {run.utilization:.0%} of the time")
        axes.set_title(words[-1], loc="left", fontsize=10)
    axes.set(xlabel=f"simulated time in µs, the first {counted(steps, 'step')}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(left=0)
    kinds = {
        kind: colour for kind, colour in OF_KINDS.items() if any(kind in set(r.spans["kind"]) for r in runs.values())
    }
    patches = [(OF_STEPS[0], "launches and kernels, a colour a step"), *((kinds[kind], NAMES[kind]) for kind in kinds)]
    figure.legend(
        handles=[Patch(facecolor=colour, edgecolor=BLACK, linewidth=0.4, label=name) for colour, name in patches],
        loc="outside upper center", ncols=len(patches), frameon=False, fontsize=9,
    )  # fmt: skip
    source = "calculated, nothing ran: " + "; ".join(dict.fromkeys(str(run.device) for run in runs.values()))
    write_source(figure, source)
    return Picture(figure, f"Simulated time lines of host and device. {'; '.join(words)}. {source}.")


def _lanes(run: simulate.SimulatedRun) -> list[str]:
    """Return the time lines of a run from above: the host, then the streams."""
    return sorted(set(run.spans["lane"]), key=lambda lane: (lane != "host", len(lane), lane))


def _draw_lines(axes: Axes, run: simulate.SimulatedRun, steps: int) -> None:
    lanes, spans = _lanes(run), run.spans[run.spans["step"] < steps]
    launched = dict(zip(spans["launch"], spans["kind"], strict=True))  # the last of a number is on the device
    ready = dict(zip(spans["launch"][::-1], spans["end"][::-1], strict=True))  # and the first one on the host
    links = []
    for span in spans.itertuples():
        kind = launched[span.launch] if span.launch > 0 else span.kind
        colour = OF_KINDS.get(kind, OF_STEPS[span.step % len(OF_STEPS)])
        place, length, hatch = lanes.index(span.lane), span.end - span.start, "///" if kind == "wait" else None
        axes.barh(place, length, 0.56, span.start, color=colour, edgecolor=BLACK, linewidth=0.4, hatch=hatch)
        if span.lane != "host":
            links.append([(ready[span.launch], 0.28), (span.start, place - 0.28)])
    axes.add_collection(LineCollection(links, colors="0.35", linewidths=0.6, zorder=0.9))  # behind the bars
    axes.set_yticks(range(len(lanes)), [lane if lane == "host" else f"device: {lane}" for lane in lanes])
    axes.set_ylim(len(lanes) - 0.6, -0.4)
    tidy(axes, "x")
