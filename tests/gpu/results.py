"""Lines of measured figures in ``results.jsonl``, and the table that holds them against their predictions.

A line has ``run``, ``comparison``, ``variant``, ``baseline``, ``round`` (None for a trace), ``process``, ``card``,
``torch``, ``small`` and ``time``; ``figures``, with their units in their names, or else ``error``; and ``load``: the
clock of the multiprocessors and the power of the card while it was measured, None if unknown.
"""

import csv
import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Line = dict[str, Any]
NAME = "results.jsonl"


@dataclass(frozen=True)
class Prediction:
    """A figure that was stated before it was measured: a row of ``predictions.csv``."""

    run: int
    comparison: str
    variant: str
    quantity: str  #: with its unit, such as ``"step_ms"``
    to: str  #: the variant by whose figure it is divided: then a ratio is predicted; empty if none
    card: str  #: a part of the card's name; empty for all cards
    low: float  #: the predicted range; both ends are equal if one figure was predicted
    high: float
    below: float  #: the range outside of which a figure is a surprise
    above: float
    source: str

    @property
    def middle(self) -> float:
        """Geometric middle of the range; its upper end if the lower one is 0."""
        return math.sqrt(self.low * self.high) or self.high

    def __str__(self) -> str:
        predicted = number(self.low) if self.low == self.high else f"{number(self.low)} to {number(self.high)}"
        of = f"{self.quantity} ÷ that of {self.to}" if self.to else self.quantity
        return f"{self.comparison}: {self.variant}: {of}{self.card and ' on '}{self.card}: {predicted} ({self.source})"


def predictions() -> list[Prediction]:
    """Return all predictions."""
    with Path(__file__).with_name("predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    limits = ("low", "high", "below", "above")
    return [Prediction(**row | {"run": int(row["run"])} | {name: float(row[name]) for name in limits}) for row in rows]


def read(path: Path) -> list[Line]:
    """Return the lines of a file, if it exists; a last line that was cut off is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(text))
        except ValueError:
            print(f"{path}: left out a line that was cut off: {text[:40]}…")
    return lines


def append(path: Path, line: Line) -> None:
    """Add a line to a file; it is on the disk when this returns."""
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # the last line was cut off
                file.write(b"\n")
        file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def number(value: float) -> str:
    """Return a figure as text with three digits or more."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean of figures above 0, or else the arithmetic mean."""
    values = list(values)
    return statistics.geometric_mean(values) if min(values) > 0 else statistics.fmean(values)


def of(lines: Iterable[Line], **named: object) -> list[Line]:
    """Return the lines with figures that have these values, such as ``variant="eager"``."""
    return [line for line in lines if "figures" in line and named.items() <= line.items()]


def values(lines: Iterable[Line], variant: str, quantity: str, to: str = "") -> list[float]:
    """Return a quantity of a variant in each round; divided by that of the variant `to` in the same round, if named."""
    mine, others = (
        {(line["process"], line["round"]): line["figures"].get(quantity) for line in of(lines, variant=name)}
        for name in (variant, to)
    )
    if not to:
        return [value for value in mine.values() if value is not None]
    return [mine[key] / others[key] for key in mine if mine[key] is not None and others.get(key)]


def table(title: str, lines: Iterable[Line], stated: Iterable[Prediction]) -> str:
    """Return the figures of a run: a line for each variant, then each prediction with measured ÷ predicted.

    Figures of small sizes are not a card's: they are marked, and held against no prediction.
    """
    kinds: dict[tuple, list[Line]] = {}
    for line in lines:
        kinds.setdefault((line["card"], line["torch"], line["small"]), []).append(line)
    rows = [title]
    for (card, torch, small), found in kinds.items():
        rows.append(f" {card}, torch {torch}" + (": SMALL SIZES OR NO GPU, no figure is a result" if small else ""))
        comparisons = {name: of(found, comparison=name) for name in dict.fromkeys(line["comparison"] for line in found)}
        for name, inside in comparisons.items():
            rows += [f"  {name}: {_row(inside, each)}" for each in dict.fromkeys(line["variant"] for line in inside)]
        failed = {f"{line['comparison']}: {line['variant']}": line for line in found if "error" in line}
        measured = {f"{line['comparison']}: {line['variant']}" for line in of(found)}
        rows += [f"  FAILED: {name}: {line['error']}" for name, line in failed.items() if name not in measured]
        for prediction in () if small else stated:
            inside = comparisons.get(prediction.comparison, [])
            rounds = values(inside, prediction.variant, prediction.quantity, prediction.to)
            if prediction.card in card and rounds:
                value = mean(rounds)
                mark = "as believed" if prediction.below <= value <= prediction.above else "SURPRISE"
                ratio = f"measured ÷ predicted {value / prediction.middle:.2f}, {number(value)}"
                rows.append(f"  {mark}: {ratio}; predicted: {prediction}")
    return "\n".join(rows)


def _row(lines: list[Line], variant: str) -> str:
    """Return the first figure of a variant, its spread, its ratio to the baseline, and the load."""
    mine = of(lines, variant=variant)
    quantity, baseline = next(iter(mine[0]["figures"])), mine[0]["baseline"]
    found, text = values(lines, variant, quantity), f"{variant}: {quantity}"
    text += f" {number(mean(found))} ({number(min(found))} to {number(max(found))} in {len(found)})"
    if baseline != variant and (ratios := values(lines, variant, quantity, baseline)):
        text += f"; ÷ {baseline} {mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    for name in ("sm_clock_mhz", "power_w"):
        if known := [line["load"][name] for line in mine if line.get("load", {}).get(name)]:
            text += f"; {name} {statistics.fmean(known):,.0f}"
    return text
