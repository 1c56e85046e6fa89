"""A rung elsewhere: recorded on other machines, calculated for a GPU, or published by others, each labelled so."""

import html
import re
from collections.abc import Iterator

import pandas as pd
import torch
from pandas.io.formats.style import Styler

from helpers import config
from helpers.results import scoreboard
from helpers.training import calculated
from stepscope.base.wording import counted, digits, three_digits
from stepscope.timing.comparison import limits

PUBLISHED = scoreboard.REFERENCE / "published.csv"
"""Figures that others measured on real GPUs: a row each, with hardware, settings, versions, date and source."""

_COLUMNS = ["kind", "what changed", "gain", "figures", "on", "settings", "source"]
_TIMES = ("s", "ms")  # units in which less is better


def show(rung: str) -> Styler:
    """Return what is known of a rung, such as ``"10"``, as one table: a row per figure, with its origin.

    Without a GPU the calculated figures come first.
    """
    rows = [*_measured(rung), *_calculated(rung[:2])]
    if config.device().type == "cpu":
        rows.sort(key=lambda row: row[0] != "calculated")
    table = pd.DataFrame([*rows, *_published(rung[:2])], columns=_COLUMNS)
    shown = table.style.hide(axis="index").format(escape="html", subset=_COLUMNS[:-1])
    heads = {"selector": "th", "props": "text-align: left"}
    return shown.set_properties(**{"text-align": "left"}).set_table_styles([heads])


def _measured(rung: str) -> Iterator[tuple]:
    for machine, result in scoreboard.references(rung).items():
        here = machine == "your machine"
        figures = f"{result.rate.mean:,.0f} images/s, {result.step_ms:.1f} ms a step; host waits"
        figures += f" {result.loading_share:.0%}, device idle {scoreboard.percent_or_dash(result.device_idle)}"
        yield (
            "measured here" if here else "recorded",
            f"{result.rung} to {scoreboard.against(result)}" if result.ratio else result.rung,
            f"{digits(result.ratio.mean)}× ({limits(result.ratio)})" if result.ratio else "–",
            figures,
            f"{result.device}, {result.cores} cores",
            f"{result.step}, {result.images_a_step:,} images a step, PyTorch {result.torch}",
            f"{'your machine' if here else machine}, {result.date[:10]}, in {counted(result.processes, 'process')}",
        )


def _calculated(number: str) -> Iterator[tuple]:
    for change, before, after, images in calculated.changes(number):
        rates = (f"{images / each.steady_ms * 1e3:,.0f}" for each in (before, after))
        yield (
            "calculated",
            change,
            f"{digits(before.steady_ms / after.steady_ms)}×",
            f"{' → '.join(rates)} images/s; decided by {' → '.join(dict.fromkeys([before.limit, after.limit]))}",
            after.gpu.name,
            f"ResNet-50{', bfloat16' if number == '12' else ''}, {images} images a step",
            after.gpu.source,
        )


def _published(number: str) -> Iterator[tuple]:
    rows = published(number)
    for row in rows.sort_values("gain").itertuples():
        link = f'<a href="{html.escape(row.url)}">{html.escape(row.source)}</a>, {row.date}'
        figures = f"{three_digits(row.before)} → {three_digits(row.after)} {row.unit}"
        yield (
            "published",
            row.change,
            f"{digits(row.gain)}×",
            figures,
            row.hardware,
            f"{row.settings}, {row.versions}",
            link,
        )


def published(number: str | None = None) -> pd.DataFrame:
    """Return the published figures of a notebook, such as ``"10"``, or all, by their ids.

    Columns as in the file, and ``gain``: how many times as fast it was after the change.
    """
    rows = pd.read_csv(PUBLISHED, index_col="id", dtype={"notebooks": str}, keep_default_na=False)
    rows["gain"] = rows["after"] / rows["before"]
    rows["gain"] = rows["gain"].where(~rows["unit"].str.split().str[0].isin(_TIMES), 1 / rows["gain"])
    return rows if number is None else rows[[number in notebooks.split() for notebooks in rows["notebooks"]]]


_HALF = {"autocast": torch.bfloat16}
_LAST = {"channels_last": True}
# Published changes that can be calculated: network, GPU, and the step before and after. The constants of `calculated`
# were fitted to the first three, ResNet-50's.
_STEPS: dict[str, tuple[str, str, dict, dict]] = {
    "F11 ResNet-50": ("resnet50", "RTX 3090", _HALF, _HALF | _LAST),
    "F12 A100": ("resnet50", "A100", {}, _HALF | _LAST),
    "F12 V100": ("resnet50", "V100", {}, {"autocast": torch.float16} | _LAST),
    "F11 ResNet-18": ("resnet18", "RTX 3090", _HALF, _HALF | _LAST),
    "F11 ViT": ("vit_b_16", "RTX 3090", _HALF, _HALF | _LAST),
    "F11 ConvNeXt": ("convnext_tiny", "RTX 3090", _HALF, _HALF | _LAST),
}


def calculated_and_measured(batch: int = 128) -> pd.DataFrame:
    """Calculate the changes that others published, where possible, and rung 11 as measured on GPUs, in about 25 s.

    Returns a row per change: ``change`` in words, and the ratios of calculated to measured figures, for the images per
    second ``before`` and ``after``, and for the ``gain``.
    """
    public, measured = published(), []
    for number, (network, gpu, *steps) in _STEPS.items():
        said = public.loc[number]
        measured.append((f"{said.change}, {gpu}", network, gpu, steps, said.before, said.after))
    for machine, result in scoreboard.references("11").items():
        known = next((name for name in calculated.GPUS if re.search(rf"\b{name}\b", result.device)), None)
        if known and result.ratio and result.baseline == "TF32":
            origin = "measured here" if machine == "your machine" else "recorded"
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
