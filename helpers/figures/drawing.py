"""What all figures have in common: a picture with its alternative text, colours, axes, the line below.

Colours are those of Okabe and Ito, which people with any kind of colour vision can tell apart; a category has the same
colour in every figure.
"""

from __future__ import annotations

import base64
import html
import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from helpers import staging

# Okabe and Ito, Color Universal Design, 2008: https://jfly.uni-koeln.de/color/
BLACK, ORANGE, SKY, GREEN, YELLOW = "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#BBBBBB"
NEUTRAL, PALE = "#8C9BA5", "#DCE3E8"  # for what belongs to no category
COLOURS = {
    "Kernel": GREEN,
    "Memcpy": YELLOW,
    "Memset": PURPLE,
    "Communication": BLACK,
    "Runtime": SKY,
    "DataLoader": VERMILION,
    "CPU Exec": BLUE,
    "Other": GREY,
    "loading": VERMILION,
    "copy": YELLOW,
    "forward": BLUE,
    "backward": SKY,
    "optimizer": PURPLE,
    "open and read": PURPLE,
    "header": YELLOW,
    "decode": VERMILION,
    "resize": ORANGE,
    "crop and flip": GREEN,
    "to tensor": SKY,
    "normalize": GREEN,
    "collate": BLUE,
    "transfer": BLACK,
    "the rest": GREY,
    "compute": BLUE,
}


@dataclass(frozen=True)
class Picture:
    """A figure, and in words what it shows."""

    figure: Figure
    alt: str

    def png(self, dpi: float = 150) -> bytes:
        """Return the figure as a PNG file of so many pixels an inch."""
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


def three_digits(value: float) -> str:
    """Return a number with three digits, or all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def angle_of_diagonal(figure: Figure, axes: Axes) -> float:
    """Return the angle in degrees at which y = x rises, where both axes are logarithmic."""
    figure.draw_without_rendering()  # the layout decides how large the axes are
    box, (left, right), (low, high) = axes.get_window_extent(), axes.get_xlim(), axes.get_ylim()
    return float(np.degrees(np.arctan2(box.height / np.log(high / low), box.width / np.log(right / left))))


def panels_side_by_side(figure: Figure, count: int) -> Sequence[Axes]:
    """Return `count` panels in a row, with the same scale upwards."""
    return figure.subplots(1, count, sharey=True, squeeze=False)[0]


def tidy(axes: Axes, grid: str = "y") -> None:
    """Leave out the frame above and on the right, and draw a pale grid, along ``"x"``, ``"y"`` or ``"both"``."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="0.85", linewidth=0.8)
    axes.set_axisbelow(True)


def write_source(figure: Figure, source: str) -> None:
    """Write below a figure what it was measured on, in as many lines as it takes."""
    width = int(figure.get_figwidth() * 14)  # characters of this size that fit in a line
    lines = [line for part in source.splitlines() for line in textwrap.wrap(part, width)]
    figure.supxlabel("\n".join(lines), fontsize=8, color="0.35")
