"""Figures of networks: what they learn, how fast they can be, and in which numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from helpers.figures.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    Picture,
    angle_of_diagonal,
    three_digits,
    tidy,
    write_source,
)
from helpers.training import precision
from helpers.training.roofline import Placed
from helpers.wording import counted

if TYPE_CHECKING:
    import pandas as pd
    import torch


def curves(losses: Mapping[str, Sequence[float]], source: str) -> Picture:
    """Draw the training loss of one or several runs over their steps; lines that lie on each other all show."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    colours = (BLUE, ORANGE, GREEN, PURPLE, BLACK, VERMILION)
    styles = zip(colours, ("-", "--", ":", "-.", (0, (8, 3)), (0, (4, 1, 1, 1, 1, 1))), strict=True)
    for number, ((name, values), (colour, style)) in enumerate(zip(losses.items(), styles, strict=False)):
        axes.plot(values, color=colour, linestyle=style, linewidth=1.5 * (len(losses) - number), label=name)
    axes.set(xlabel="step", ylabel="cross-entropy in nats")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    tidy(axes)
    write_source(figure, source)
    ends = ", ".join(f"{name} from {values[0]:.2f} to {values[-1]:.2f}" for name, values in losses.items())
    return Picture(
        figure, f"Lines of the training loss: {ends}, over {max(map(len, losses.values()))} steps. {source}."
    )


def accuracies(runs: Mapping[str, np.ndarray], source: str) -> Picture:
    """Draw the test accuracy after each epoch: a line for the mean of several seeds, a band from lowest to highest.

    Parameters
    ----------
    runs : mapping of str to array of shape (seeds, epochs)
        Shares from 0 to 1.
    source : str
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for (name, values), colour, style in zip(
        runs.items(), (GREY, BLUE, ORANGE, GREEN), (":", "-", "--", "-."), strict=False
    ):
        values = 100 * np.asarray(values)
        epochs = np.arange(1, values.shape[1] + 1)
        axes.fill_between(epochs, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
        axes.plot(epochs, values.mean(0), style, color=colour, marker=".", label=name)
    axes.set(xlabel="epoch", ylabel="test accuracy in %")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    tidy(axes)
    write_source(figure, source)
    ends = ", ".join(f"{name} {100 * np.mean(values, axis=0)[-1]:.0f}%" for name, values in runs.items())
    return Picture(
        figure, f"Lines of the test accuracy by epoch, with bands over the seeds. At the end: {ends}. {source}."
    )


def time_to_accuracy(epochs: pd.DataFrame, source: str) -> Picture:
    """Draw the test accuracy over the seconds since the start: a line for each training, naive or not.

    Parameters
    ----------
    epochs : DataFrame
        A row an epoch, as ``train_cifar10.py --log`` writes them: ``naive`` (bool); ``started``, the same in all rows
        of a training; ``seconds``; ``accuracy`` and ``goal``, shares from 0 to 1.
    source : str
    """
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    ends = []
    for naive, name, colour, style in ((True, "naive", GREY, ":"), (False, "as the course has it", BLUE, "-")):
        trainings = [of_seed for _, of_seed in epochs[epochs["naive"] == naive].groupby("started")]
        for number, each in enumerate(trainings):
            label = None if number else name
            axes.plot(each["seconds"], 100 * each["accuracy"], style, color=colour, marker=".", label=label)
        if trainings:
            last = [each["seconds"].iloc[-1] for each in trainings]
            best = 100 * max(each["accuracy"].max() for each in trainings)
            ends.append(f"{name} up to {best:.0f}% in {three_digits(min(last))} to {three_digits(max(last))} s")
    goal = 100 * epochs["goal"].iloc[0]
    axes.axhline(goal, color=BLACK, linewidth=0.8)
    axes.annotate(f"{goal:.0f}%", (1, goal), (3, 0), ("axes fraction", "data"), "offset points", va="center")
    axes.set(xscale="log", xlabel="seconds since the start, with all that takes time", ylabel="test accuracy in %")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: three_digits(seconds)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(frameon=False, loc="lower right")
    tidy(axes)
    write_source(figure, source)
    return Picture(figure, f"Lines of the test accuracy over time on a logarithmic scale: {'; '.join(ends)}. {source}.")


def roofline(steps: Mapping[str, Placed], source: str) -> Picture:
    """Draw training steps below the two limits of their device: memory, which rises with the intensity, and computing.

    Parameters
    ----------
    steps : mapping of str to Placed
        Name of each step, and where it stands. Each has the limits that it was measured with.
    source : str
        What was measured, and on which machine.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    least = min(step.limits.ridge / 30 for step in steps.values())
    most = max(max(step.limits.ridge, step.work.intensity) * 30 for step in steps.values())
    for (name, step), colour, marker in zip(steps.items(), (BLUE, ORANGE, GREEN, PURPLE), "osD^", strict=False):
        limits, intensity = step.limits, step.work.intensity
        corners = [least, limits.ridge, most]
        axes.plot(corners, [min(x / limits.ridge, 1) * limits.tflops for x in corners], color=colour, linewidth=1.5)
        axes.text(
            most / 1.1, limits.tflops * 1.06, f"computing, {name}: {three_digits(limits.tflops)} TFLOP/s",
            ha="right", va="bottom", fontsize=9,
        )  # fmt: skip
        label = f"{name}: {three_digits(step.tflops)} TFLOP/s, {step.share_of_peak:.0%} of its peak"
        axes.plot(intensity, step.tflops, marker, color=colour, markersize=9, linestyle="", label=label)
    axes.set(
        xscale="log", yscale="log", xlabel="floating-point operations per byte", ylabel="TFLOP/s", xlim=(least, most)
    )
    lowest = min(min(step.tflops, step.limits.tflops / 30) for step in steps.values())
    axes.set_ylim(lowest / 3, max(step.limits.tflops for step in steps.values()) * 2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)  # inside, its marks look like steps
    bandwidth = next(iter(steps.values())).limits.gb_per_second
    axes.text(
        least * 1.5, bandwidth * least * 1.5e-3 * 1.3, f"memory: {three_digits(bandwidth)} GB/s",
        rotation=angle_of_diagonal(figure, axes), rotation_mode="anchor", fontsize=9,
    )  # fmt: skip
    tidy(axes, "both")
    write_source(figure, source)
    words = "; ".join(
        f"{name}: {three_digits(step.tflops)} of {three_digits(step.limits.tflops)} TFLOP/s "
        f"at {three_digits(step.work.intensity)} operations per byte, "
        f"memory {three_digits(step.limits.gb_per_second)} GB/s"
        for name, step in steps.items()
    )
    return Picture(figure, f"Roofline with a point a step. {words}. {source}.")


def memory_formats(tensors: Mapping[str, torch.Tensor]) -> Picture:
    """Draw where the elements of small images lie in memory: a box an element, coloured by its channel.

    The boxes of the first pixel have a thick edge.

    Parameters
    ----------
    tensors : mapping of str to Tensor, shape (1, 3, H, W)
        Title of each row, and the tensor, whose shape and strides are drawn.
    """
    figure = Figure(figsize=(8, 1.25 * len(tensors) + 0.8), layout="constrained")
    for axes, (title, tensor) in zip(figure.subplots(len(tensors), 1, sharex=True), tensors.items(), strict=True):
        for index in np.ndindex(*tensor.shape):
            place = int(np.dot(index, tensor.stride()))
            _, channel, row, column = index
            first = (row, column) == (0, 0)
            colour, edge = (VERMILION, GREEN, SKY)[channel], 2.5 if first else 0.6
            axes.bar(place, 1, 0.86, color=colour, edgecolor=BLACK, linewidth=edge, zorder=2 + first)
            axes.text(place, 0.5, f"{'RGB'[channel]}\n{row},{column}", ha="center", va="center", fontsize=8, zorder=4)
        axes.set_title(f"{title}: shape {tuple(tensor.shape)}, strides {tensor.stride()}", fontsize=10)
        axes.set(yticks=[], ylim=(-0.05, 1.05), xticks=range(0, tensor.numel(), 4))
        axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("place in memory, in elements; each box: channel, and row,column of its pixel")
    words = "; ".join(
        f"{title}, strides {tensor.stride()}: a pixel's channels are {counted(tensor.stride(1), 'element')} apart"
        for title, tensor in tensors.items()
    )
    return Picture(figure, f"Rows of boxes, one an element, in the order of memory. {words}.")


def number_formats() -> Picture:
    """Draw the bits of `precision.FORMATS`, and from where to where their numbers go."""
    formats = precision.FORMATS
    figure = Figure(figsize=(8, 0.8 * len(formats) + 1.6), layout="constrained")
    bits, reach = figure.subplots(2, 1)
    parts = {"sign": GREY, "exponent: the range": ORANGE, "mantissa: the precision": SKY}
    for row, each in enumerate(formats):
        start = 0
        for (label, colour), count in zip(parts.items(), (1, each.exponent, each.mantissa), strict=True):
            boxes = [(start + bit, 1) for bit in range(count)]
            bits.broken_barh(
                boxes, (row - 0.35, 0.7), facecolor=colour, edgecolor="white", label=label if row == 0 else None
            )
            bits.text(start + count / 2, row, str(count), ha="center", va="center", fontsize=9)
            start += count
        low, normal, high = np.log2(each.range)
        reach.barh(row, high - normal, left=normal, color=ORANGE, height=0.5)
        reach.barh(row, normal - low, left=low, color=PALE, edgecolor=ORANGE, hatch="///", height=0.5)
        reach.text(high, row, f"  after 1 comes 1 + 2$^{{-{each.mantissa}}}$", va="center", fontsize=9)
    bits.set(xlabel="bits", xlim=(0, 33))
    bits.legend(frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.97), fontsize=9)
    reach.set(xlabel="numbers above 0, as powers of 2 (hatched: with fewer bits of precision)", xlim=(-155, 215))
    reach.set_xticks(range(-150, 151, 50))
    for axes in (bits, reach):
        axes.set_yticks(range(len(formats)), [each.name for each in formats])
        axes.invert_yaxis()
        tidy(axes, "x")
    words = "; ".join(
        f"{each.name}: sign 1, exponent {each.exponent}, mantissa {each.mantissa} bits, "
        f"from {each.smallest_normal:.1e} to {each.largest:.1e}"
        for each in formats
    )
    return Picture(
        figure, f"Boxes for the bits of number formats, and bars from the smallest to the largest number. {words}."
    )


def gradients(samples: Mapping[str, Mapping[str, torch.Tensor]], scale: float, source: str) -> Picture:
    """Draw how large gradients are, above the range of float16 without and with a loss scale.

    Parameters
    ----------
    samples : mapping of str to mapping of str to Tensor
        Title of each panel, and its gradients by kind, as `precision.gradients` returns them.
    scale : float
        Factor of the loss.
    source : str
        Of which network and images.
    """
    figure = Figure(figsize=(8, 2.1 * len(samples) + 0.8), layout="constrained")
    panels = figure.subplots(len(samples), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    bins, top, words = np.arange(-60, 21), 0.0, []
    for axes, (title, kinds) in zip(panels, samples.items(), strict=True):
        for (kind, values), (colour, style) in zip(kinds.items(), ((BLUE, "-"), (VERMILION, "--")), strict=False):
            sizes = np.log2(np.abs(values[values != 0].numpy().astype(float)))
            counts, _ = np.histogram(sizes.clip(bins[0], bins[-1]), bins)
            shares = counts / counts.sum() * 100
            axes.stairs(shares, bins, color=colour, linestyle=style, label=kind)
            top = max(top, shares.max())
            words.append(f"{title}, {kind}: half of them below 2^{np.median(sizes):.0f}")
        axes.set(title=title, ylabel="share in %")
        tidy(axes)
    for axes in panels:
        for place, (factor, label) in enumerate(((1, "float16"), (scale, f"float16, loss × {scale:,.0f}"))):
            low, normal, high = np.log2([each / factor for each in precision.FLOAT16.range])
            height, y = top * 0.16, top * (1.15 + 0.22 * place)
            axes.barh(y, high - normal, left=normal, height=height, color=GREEN)
            axes.barh(y, normal - low, left=low, height=height, color=PALE, edgecolor=GREEN, hatch="///")
            axes.text(low - 0.5, y, label, ha="right", va="center", fontsize=8)
        axes.set_ylim(0, top * 1.5)
    panels[0].legend(frameon=False, fontsize=9, loc="center right")
    panels[-1].set_xlabel("size of a gradient's element, as a power of 2 (bars: what float16 can hold)")
    write_source(figure, source)
    return Picture(
        figure, f"Histograms of the size of gradients, below the range of float16. {'; '.join(words)}. {source}."
    )
