"""A rung elsewhere: recorded on other machines, calculated for a GPU, or published by others, each labelled so."""

import html
import json
import math
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

import pandas as pd
import torch

from helpers import config
from helpers.results import pairs, scoreboard
from helpers.training import calculated
from stepscope import timing, traces
from stepscope.base import machine
from stepscope.base.wording import counted, digits, rounded
from stepscope.timing.comparison import NOISY, outcome

PUBLISHED = scoreboard.REFERENCE / "published.csv"
"""Figures that others measured on real GPUs: a row each, with hardware, settings, versions, date and source."""

_TIMES = ("s", "ms")  # units in which less is better


@dataclass(frozen=True)
class Row:
    """A gain, and where it was found."""

    where: str  #: how the gain is known, and the machine
    change: str
    gain: str
    figures: str
    settings: str
    source: str
    url: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """What is known of a rung: a table in Jupyter, with settings and sources folded below it, and lines as text."""

    rows: tuple[Row, ...]
    caption: str

    def _repr_html_(self) -> str:
        left = ' style="text-align: left; vertical-align: top"'
        whole = ' style="white-space: nowrap"'
        heads = "".join(f"<th{left}>{name}</th>" for name in ("where", "change", "gain"))
        body, notes = "", ""
        for row in self.rows:
            where, change, gain, figures, settings, source = map(html.escape, astuple(row)[:-1])
            gain = f"<span{whole}>{f'<b>{gain}</b><br>' if gain else ''}{figures}</span>"
            body += f"<tr>{''.join(f'<td{left}>{cell}</td>' for cell in (where, change, gain))}</tr>"
            source = f'<a href="{html.escape(row.url)}">{source}</a>' if row.url else source
            notes += f"<li>{where}, {change}: {settings}; {source}</li>"
        return (
            f"<p>{html.escape(self.caption)}</p><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
            f"<details><summary>Settings and sources</summary><ul>{notes}</ul></details>"
        )

    def __repr__(self) -> str:
        lines = [f"{row.where}; {row.change}: {', '.join(filter(None, [row.gain, row.figures]))}" for row in self.rows]
        return "\n".join(filter(None, [self.caption, *lines]))


def show(rung: str) -> Elsewhere:
    """Return what is known of the rungs whose names begin with `rung`, such as ``"10"``: a row for each gain.

    Without a GPU the calculated gains come first.
    """
    rows = [*_measured(rung), *_calculated(rung[:2])]
    if config.device().type == "cpu":
        rows.sort(key=lambda row: not row.where.startswith("calculated"))
    public = published(rung[:2]).sort_values("gain")
    return Elsewhere((*rows, *_published(public)), _caption(public["gain"]))


def _caption(gains: pd.Series) -> str:
    """Return a sentence on the range of the published gains, empty with fewer than two."""
    if len(gains) < 2:
        return ""
    lowest, highest = gains.min(), gains.max()
    slower = ": below 1× the change made training slower" if lowest < 1 else ""
    return f"Published gains go from {digits(lowest)}× to {digits(highest)}×{slower}."


def verdict(comparison: timing.Comparison, name: str, to: str, rung: str) -> str:
    """Return the verdict on variant `name` over variant `to`, and below it, if need be, the gain on other machines.

    If the verdict is too noisy to say, the recorded gain of the nearest machine follows: with the same kind of device,
    then with the nearest number of cores. If the rung is made for a GPU, and none is here or the verdict is too noisy,
    the gain that a GPU recorded follows, or else the calculated gain. `rung` is the name for `scoreboard.add`, such as
    ``"03 more workers"``.
    """
    for_gpus, here = rung[:2] in scoreboard.FOR_GPUS, torch.cuda.is_available()
    noisy = outcome(comparison.ratio(name, to)) == NOISY
    others = [_nearest(rung) if noisy and not (for_gpus and here) else None]
    others.append(pairs.on_a_gpu(rung) if for_gpus and (noisy or not here) else None)
    lines = [
        f"{pair.origin[0].upper()}{pair.origin[1:]}: {pair.rung}, {pair.gain} against {pair.baseline}."
        for pair in others
        if pair is not None
    ]
    return "\n".join([comparison.verdict(name, to), *lines])


def _nearest(rung: str) -> pairs.Pair | None:
    """Return a rung as the nearest machine of ``data/reference`` recorded it; None if no clear gain is recorded."""

    def distance(place: tuple[str, scoreboard.Result]) -> tuple[bool, float]:
        _, result = place
        same = (result.device != "CPU") == torch.cuda.is_available()
        return not same, abs(math.log(result.cores / machine.cores()))

    others = [(name, each) for name, each in scoreboard.references(rung) if name != scoreboard.HERE]
    clear = [(name, each) for name, each in others if each.ratio and outcome(each.ratio) != NOISY]
    nearest = min(clear, key=distance, default=None)
    return pairs.measured(nearest[1], f"recorded on {_machine(*nearest)}") if nearest else None


def _machine(name: str, result: scoreboard.Result) -> str:
    """Return a recorded machine in words: "NVIDIA H200, 16 cores"."""
    described = scoreboard.REFERENCE / name / "machine.json"
    processor = json.loads(described.read_text(encoding="utf-8"))["processor"] if described.exists() else "CPU"
    return f"{processor if result.device == 'CPU' else result.device}, {counted(result.cores, 'core')}"


def _measured(rung: str) -> Iterator[Row]:
    results = scoreboard.references(rung)
    compared = {name for name, result in results if result.ratio}
    for name, result in results:
        if name in compared and not result.ratio:  # its figures are those before a change
            continue
        pair, here = pairs.measured(result), name == scoreboard.HERE
        settings = f"{result.step}, {result.images_a_step:,} images a step; host waits {result.loading_share:.0%}"
        settings += f", device idle {scoreboard.percent_or_dash(result.device_idle)}; PyTorch {result.torch}"
        yield Row(
            "measured here" if here else f"recorded on {_machine(name, result)}",
            f"{result.rung} (before: {pair.baseline})" if pair.baseline else result.rung,
            pair.gain,
            pair.rates,
            settings,
            f"{name}, {result.date[:10]}, in {counted(result.processes, 'process')}",
        )


def _calculated(number: str) -> Iterator[Row]:
    for change, before, after, images in calculated.changes(number):
        rates = (rounded(images / each.steady_ms * 1e3) for each in (before, after))
        limits = " → ".join(dict.fromkeys([before.limit, after.limit]))
        yield Row(
            f"calculated for {after.gpu.name}",
            change,
            f"{digits(before.steady_ms / after.steady_ms)}×",
            f"{' → '.join(rates)} images/s",
            f"ResNet-50{', float16' if number == '12' else ''}, {images} images a step, decided by {limits}",
            after.gpu.source,
        )


def _published(rows: pd.DataFrame) -> Iterator[Row]:
    for row in rows.itertuples():
        yield Row(
            f"published, {row.hardware}",
            row.change,
            f"{digits(row.gain)}×",
            f"{rounded(row.before)} → {rounded(row.after)} {row.unit}",
            f"{row.settings}, {row.versions}",
            f"{row.source}, {row.date}",
            row.url,
        )


def published(number: str | None = None) -> pd.DataFrame:
    """Return the published figures of a notebook, such as ``"10"``, or all, by their ids.

    Columns as in the file, and ``gain``: how many times as fast it was after the change.
    """
    rows = pd.read_csv(PUBLISHED, index_col="id", dtype={"notebooks": str}, keep_default_na=False)
    rows["gain"] = rows["after"] / rows["before"]
    rows["gain"] = rows["gain"].where(~rows["unit"].str.split().str[0].isin(_TIMES), 1 / rows["gain"])
    return rows if number is None else rows[[number in notebooks.split() for notebooks in rows["notebooks"]]]


_HALF, _AMP = {"autocast": torch.bfloat16}, {"autocast": torch.float16}  # AMP was float16 in 2021 and 2022
_LAST = {"channels_last": True}
# Published changes that can be calculated: network, GPU, and the step before and after
_STEPS: dict[str, tuple[str, str, dict, dict]] = {
    "F11 ResNet-50": ("resnet50", "RTX 3090", _AMP, _AMP | _LAST),
    "F12 A100": ("resnet50", "A100", {}, _AMP | _LAST),
    "F12 V100": ("resnet50", "V100", {}, _AMP | _LAST),
    "G13 float32": ("resnet50", "V100", {}, _LAST),
    "G13 AMP": ("resnet50", "V100", _AMP, _AMP | _LAST),
    "F11 ResNet-18": ("resnet18", "RTX 3090", _AMP, _AMP | _LAST),
    "F11 ViT": ("vit_b_16", "RTX 3090", _AMP, _AMP | _LAST),
    "F11 ConvNeXt": ("convnext_tiny", "RTX 3090", _AMP, _AMP | _LAST),
}


def kernel_classes(folder: Path) -> dict[str, pd.Series]:
    """Return the ms of each class of kernel in a step of ResNet-50 in bfloat16 on GPUs, without and with a compiler.

    First as recorded, from traces that are copied into `folder` (see `scoreboard.borrow_traces`); then as calculated
    for the H200 that recorded them. The index of each has the names of `traces.kernel_class`.
    """
    found = {}
    for name, trace in scoreboard.borrow_traces("11", folder).items():
        found[f"{name}, recorded"] = traces.kernel_classes(trace)["time"] / 1e3 / len(traces.steps(trace))
    photos = calculated.recorded(**_HALF, **_LAST, fused=True)
    for name, compiled in {"H200, calculated": False, "H200, calculated, compiled": True}.items():
        kernels = calculated.calculate(photos, "H200", compiled=compiled).kernels
        found[name] = kernels.groupby("class")["ms"].sum()
    return found


def calculated_and_measured(batch: int = 128) -> pd.DataFrame:
    """Calculate the changes that others published, where possible, and rung 11 as measured on GPUs, in about 25 s.

    Returns a row per change: ``change`` in words, and the ratios of calculated to measured figures, for the images per
    second ``before`` and ``after``, and for the ``gain``.
    """
    public, measured = published(), []
    for number, (network, gpu, *steps) in _STEPS.items():
        said = public.loc[number]
        rates = [batch / each * 1e3 if said.unit == "ms a step" else each for each in (said.before, said.after)]
        measured.append((f"{said.change}, {gpu}", network, gpu, steps, *rates))
    for name, result in scoreboard.references("11 mixed precision"):
        known = next((gpu for gpu in calculated.GPUS if re.search(rf"\b{gpu}\b", result.device)), None)
        if known and result.ratio and result.baseline == "TF32":
            origin = "measured here" if name == scoreboard.HERE else "recorded"
            change, after = f"TF32 to bfloat16, ResNet-50, {known}, {origin}", result.rate.mean
            measured.append((change, "resnet50", known, [_LAST, _HALF | _LAST], after / result.ratio.mean, after))
    rows = []
    for change, network, gpu, steps, *rates in measured:
        recorded = (calculated.recorded(network, batch, **step) for step in steps)
        milliseconds = [calculated.calculate(operators, gpu).step_ms for operators in recorded]
        before, after = (batch / each * 1e3 for each in milliseconds)
        off = before / rates[0], after / rates[1]
        rows.append((change, *off, off[1] / off[0]))
    return pd.DataFrame(rows, columns=["change", "before", "after", "gain"])
