"""What all figures have in common: a picture with its alternative text, panels, lines, the source below."""

import base64
import html
import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from helpers.figures import palette
from stepscope.base import staging


@dataclass(frozen=True)
class Picture:
    """A figure, and its content in words."""

    figure: Figure
    alt: str

    def png(self, dpi: float = 150) -> bytes:
        """Return the figure as a PNG file of `dpi` pixels per inch."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, dpi=dpi)
        return buffer.getvalue()

    def save(self, path: str | Path) -> None:
        """Write the figure as a PNG file."""
        staging.write(path, self.png())

    def _repr_html_(self) -> str:
        data = base64.b64encode(self.png()).decode()
        width = int(self.figure.get_figwidth() * 96)
        alt = html.escape(self.alt, quote=True)
        return f'<img alt="{alt}" style="width: {width}px; max-width: 100%" src="data:image/png;base64,{data}">'


def panel(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of so many inches with one panel."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def panels(width: float, height: float, heights: Sequence[float], **sharing: Any) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure of so many inches with panels below each other, of these relative heights."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights, **sharing)[:, 0])


def legend(figure: Figure, where: str = "upper center", columns: int = 1, handles: Sequence | None = None) -> None:
    """Put one legend outside all panels: of these handles, or of everything with a label."""
    loc: Any = f"outside {where}"
    figure.legend(loc=loc, handles=handles or None, ncols=columns, frameon=False, fontsize=9)


def finish(figure: Figure, words: str, source: str = "", grid: Literal["x", "y", "both"] = "y") -> Picture:
    """Tidy all panels, write the source below, and return the picture; its words end with the source.

    A pale grid is drawn along ``"x"``, ``"y"`` or ``"both"``.
    """
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis=grid, color="0.85", linewidth=0.8)
        axes.set_axisbelow(True)
    if source:
        width = int(figure.get_figwidth() * 14)  # characters of this size that fit in a line
        lines = [line for part in source.splitlines() for line in textwrap.wrap(part, width)]
        figure.supxlabel("\n".join(lines), fontsize=8, color="0.35")
    parts = (words, "; ".join(source.splitlines()))
    return Picture(figure, " ".join(f"{part}." for part in parts if part))


def listed(rows: Mapping[str, Any], style: str = "{}") -> str:
    """Return the values of each row, a mapping or series, for the words of a picture: "one: a 5, b 7; two: a 3"."""
    parts = {name: (f"{key} {style.format(value)}" for key, value in row.items()) for name, row in rows.items()}
    return "; ".join(f"{name}: {', '.join(row)}" for name, row in parts.items())


def patches(colours: Mapping[str, str], **style: Any) -> list[Patch]:
    """Return a legend's patches for names and their colours."""
    return [Patch(**{"facecolor": colour, "label": name} | style) for name, colour in colours.items()]


def lines(series: Mapping[str, tuple[Sequence, Sequence]], **style: Any) -> tuple[Figure, Axes]:
    """Draw a line for each (x, y), by its name; `style` is for `Axes.plot`, but ``marker=True`` gives each its own."""
    figure, axes = panel(7, 3.2)
    marked = style.pop("marker", False)
    for (name, (x, y)), (colour, dashes, marker) in zip(series.items(), palette.LOOKS, strict=False):
        own: dict[str, Any] = {"color": colour, "linestyle": dashes, "marker": marker if marked else None}
        axes.plot(x, y, label=name, **own | style)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(figure, columns=2)
    return figure, axes
