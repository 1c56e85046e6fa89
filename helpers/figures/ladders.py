"""Figures of the ladder."""

from __future__ import annotations

from dataclasses import asdict, fields

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers.figures.drawing import BLACK, COLOURS, NEUTRAL, Picture, tidy, write_source
from helpers.results import scoreboard


def ladder(table: pd.DataFrame | None = None) -> Picture:
    """Draw the ladder so far: a bar a rung, with the share of its time spent waiting, and the ratio to its baseline.

    A rung without a ratio is the first of what cannot be compared with those above it, such as another network. It
    begins a panel of its own, with its own scale.

    Parameters
    ----------
    table : DataFrame, optional
        As `scoreboard.ladder` returns it, which is also the default.
    """
    table = scoreboard.ladder() if table is None else table
    parts = [part for _, part in table.groupby(table.ratio.isna().cumsum())] or [table]
    figure = Figure(figsize=(8, 0.5 * len(table) + 0.6 * len(parts) + 0.9), layout="constrained")
    panels = figure.subplots(len(parts), 1, height_ratios=[len(part) + 0.3 for part in parts], squeeze=False)[:, 0]
    for axes, part in zip(panels, parts, strict=True):
        _rungs(axes, part)
        if len(parts) > 1:
            axes.set_title(f"a step: {part.step.iat[0]}", fontsize=10, loc="left")
    scales = "; each panel has its own scale" if len(parts) > 1 else ""
    panels[-1].set_xlabel(f"throughput in images per second{scales}")
    write_source(figure, "\n".join(scoreboard.provenance(table)))
    _make_room(figure)
    words = (
        f"{row.rung}: {row.images_per_second:,.0f} {scoreboard.ratio_text(row)}".strip() for row in table.itertuples()
    )
    return Picture(figure, f"Bars of images per second, one a rung. {'; '.join(words)}.")


def waiting(table: pd.DataFrame | None = None) -> Picture:
    """Draw where the time of a training step goes in the ladder's first panel: waiting for the batch, and the rest.

    Parameters
    ----------
    table : DataFrame, optional
        As `scoreboard.ladder` returns it, which is also the default.

    Raises
    ------
    ValueError
        If the table has no rung.
    """
    table = scoreboard.ladder() if table is None else table
    if table.empty:
        raise ValueError("Expected a ladder with a rung at least, and found none. Run notebook 01 first.")
    rungs = table[table.ratio.isna().cumsum() == table.ratio.isna().cumsum().iat[0]]
    waits = rungs.step_ms * rungs.loading_share
    figure = Figure(figsize=(8, 0.45 * len(rungs) + 1.5), layout="constrained")
    axes = figure.subplots()
    axes.barh(rungs.rung, waits, color=COLOURS["DataLoader"], height=0.6, label="the host waits for data")
    computing = rungs.step_ms - waits
    axes.barh(rungs.rung, computing, left=waits, color=COLOURS["compute"], height=0.6, label="the step itself")
    for row, (length, wait) in enumerate(zip(rungs.step_ms, waits, strict=True)):
        text = f" {length:.1f} ms, {wait:.1f} of them waiting"
        axes.text(length, row, text, va="center", fontsize=9, in_layout=False)
    axes.set(xlabel="milliseconds of one training step")
    axes.invert_yaxis()
    tidy(axes, "x")
    figure.legend(loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    source = "\n".join(scoreboard.provenance(rungs))
    write_source(figure, source)
    _make_room(figure)
    words = "; ".join(
        f"{row.rung}: {row.step_ms:.1f} ms, of them {row.step_ms * row.loading_share:.1f} waiting"
        for row in rungs.itertuples()
    )
    return Picture(
        figure, f"Bars of the time of one training step: waiting for data, and the step itself. {words}. {source}."
    )


def reference(rung: str) -> Picture:
    """Draw a rung on this machine beside the recorded ones: a bar a machine.

    Parameters
    ----------
    rung : str
        How its name begins, such as ``"08"``.
    """
    found = scoreboard.references(rung)
    columns = [field.name for field in fields(scoreboard.Result)]
    table = pd.DataFrame(map(asdict, found.values()), columns=columns).assign(rung=list(found))
    figure = Figure(figsize=(8, 0.5 * len(table) + 1.3), layout="constrained")
    axes = figure.subplots()
    _rungs(axes, table)
    axes.set(xlabel="throughput in images per second", title=f"rung {rung}")
    lines = [
        f"{name}: {result.device}, {result.step}, {result.images_a_step:,} images a step, {result.data}"
        for name, result in found.items()
    ]
    write_source(figure, "\n".join(lines))
    _make_room(figure)
    words = "; ".join(f"{row.rung}: {row.images_per_second:,.0f}" for row in table.itertuples())
    return Picture(figure, f"Bars of images per second, one a machine. {words}. {'; '.join(lines)}.")


_LONGEST_INTERVAL = 1.3  # times the longest bar: of two rounds an interval may be a hundred times as long
_WIDEST_WORDS = 0.8  # of a panel: beside longer ones no bar could be seen


def _rungs(axes: Axes, table: pd.DataFrame) -> None:
    axes.barh(table.rung, table.images_per_second, color=NEUTRAL, height=0.6)
    end = _LONGEST_INTERVAL * table.images_per_second.max()
    highest = table.highest.clip(upper=end)
    for row, result in enumerate(table.itertuples()):
        text = f" {result.images_per_second:,.0f}/s, host waits {result.loading_share:.0%}"
        if not pd.isna(result.device_idle):
            text += f", device idle {result.device_idle:.0%}"
        if not pd.isna(result.ratio):
            text += f"\n {scoreboard.ratio_text(result, short=True)}"
        beside = max(highest.iat[row], result.images_per_second)
        axes.text(beside, row, text, va="center", fontsize=9, parse_math=False, in_layout=False)
    errors = [table.images_per_second - table.lowest, highest - table.images_per_second]
    axes.errorbar(table.images_per_second, table.rung, xerr=errors, fmt="none", ecolor=BLACK, capsize=3)
    cut = table.highest > end
    axes.plot(highest[cut], table.rung[cut], ">", color=BLACK, markersize=6)  # it goes on
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlim=(0, highest.max() if len(table) else 1))
    axes.invert_yaxis()
    tidy(axes, "x")


def _make_room(figure: Figure) -> None:
    """Let the scale of each panel go on as far as the words beside its bars do."""
    figure.draw_without_rendering()  # the layout decides how wide the panels are
    for axes in figure.axes:
        width = axes.get_window_extent().width
        shares = [min(text.get_window_extent().width / width, _WIDEST_WORDS) for text in axes.texts]
        ends = [text.get_position()[0] / (1 - share) for text, share in zip(axes.texts, shares, strict=True)]
        axes.set_xlim(0, max(ends, default=1))
