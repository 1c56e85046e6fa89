"""Figures of networks: what they learn, how fast they can be, and in which number formats."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from helpers.figures.drawing import Picture, finish, legend, lines, listed, panel, panels, patches
from helpers.figures.palette import BLUE, GREEN, GREY, LOOKS, ORANGE, PALE, SKY, VERMILION
from helpers.training import precision
from helpers.training.roofline import Placed
from stepscope.base.wording import three_digits


def curves(losses: Mapping[str, Sequence[float]], source: str) -> Picture:
    """Draw the training loss of one or several runs over their steps; lines on top of each other stay visible."""
    figure, axes = lines({name: (range(len(values)), values) for name, values in losses.items()})
    for number, line in enumerate(axes.lines):
        line.set_linewidth(1.5 * (len(losses) - number))
    axes.set(xlabel="step", ylabel="cross-entropy in nats")
    ends = {name: f"from {values[0]:.2f} to {values[-1]:.2f}" for name, values in losses.items()}
    words = listed({f"Lines of the training loss over {max(map(len, losses.values()))} steps": ends})
    return finish(figure, words, source)


def accuracies(runs: Mapping[str, np.ndarray], source: str) -> Picture:
    """Draw the test accuracy after each epoch: a line for the mean of several seeds, a band from lowest to highest.

    `runs` has an array of shape (seeds, epochs) for each line, by its name: shares from 0 to 1.
    """
    percent = {name: 100 * np.asarray(values) for name, values in runs.items()}
    series = {name: (range(1, values.shape[1] + 1), values.mean(0).tolist()) for name, values in percent.items()}
    figure, axes = lines(series, marker=".")
    for line, values in zip(axes.lines, percent.values(), strict=True):
        low, high = values.min(0), values.max(0)
        axes.fill_between(line.get_xdata(), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="epoch", ylabel="test accuracy in %")
    ends = listed({"At the end": {name: f"{values.mean(0)[-1]:.0f}%" for name, values in percent.items()}})
    return finish(figure, f"Lines of the test accuracy by epoch, with bands over the seeds. {ends}", source)


def time_to_accuracy(epochs: pd.DataFrame, source: str) -> Picture:
    """Draw the test accuracy over the seconds since the start: a line for each training, naive or not.

    `epochs` has a row per epoch, as ``train_cifar10.py --log`` writes them: ``naive`` (bool); ``started``, the same in
    all rows of a training; ``seconds``; ``accuracy`` and ``goal``, shares from 0 to 1.
    """
    figure, axes = panel(7, 3.2)
    ends = []
    looks = {True: ("naive", GREY, ":"), False: ("as the course has it", BLUE, "-")}
    for naive, (name, colour, style) in looks.items():
        own = epochs[epochs["naive"] == naive]
        for number, (_, training) in enumerate(own.groupby("started")):
            label = None if number else name
            axes.plot(training["seconds"], 100 * training["accuracy"], style, color=colour, marker=".", label=label)
        if len(own):
            last, best = own.groupby("started")["seconds"].last(), 100 * own["accuracy"].max()
            ends.append(f"{name} up to {best:.0f}% in {three_digits(last.min())} to {three_digits(last.max())} s")
    goal = 100 * epochs["goal"].iloc[0]
    axes.axhline(goal, color="black", linewidth=0.8)
    axes.annotate(f"{goal:.0f}%", (1, goal), (3, 0), ("axes fraction", "data"), "offset points", va="center")
    axes.set(xscale="log", xlabel="seconds since the start, everything included", ylabel="test accuracy in %")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda seconds, _: three_digits(seconds))
    axes.xaxis.set_minor_formatter("")
    axes.legend(frameon=False, loc="lower right")
    return finish(figure, f"Lines of the test accuracy over time on a logarithmic scale: {'; '.join(ends)}", source)


def roofline(
    attainable: Callable[[float, float, float], float], steps: Mapping[str, Placed], groups: pd.DataFrame, source: str
) -> Picture:
    """Draw training steps, and groups of the last step's operators, below the limits of their device.

    Parameters
    ----------
    attainable : callable
        Returns the most TFLOP/s for operations per byte, peak in TFLOP/s and bandwidth in GB/s: it draws the roof.
    steps : mapping of str to Placed
        By name; each has the limits that it was measured with.
    groups : pandas.DataFrame
        A row per group, by name, with ``gflop``, ``mb`` and ``ms`` of a step; the area shows its share of the ms.
    """
    figure, axes = panel(7, 4.4)
    intensity, speed = groups["gflop"] / groups["mb"] * 1e3, groups["gflop"] / groups["ms"]
    least = min(intensity.min(), *(step.limits.ridge / 10 for step in steps.values())) / 3
    most = max(intensity.max(), *(step.limits.ridge for step in steps.values())) * 40
    places, words = np.geomspace(least, most, 400), []
    for (name, step), (colour, _, marker) in zip(steps.items(), LOOKS, strict=False):
        limits = step.limits
        roof = [attainable(place, limits.tflops, limits.gb_per_second) for place in places]
        axes.plot(places, roof, color=colour, linewidth=1.5)
        text = f"computing, {name}: {three_digits(limits.tflops)} TFLOP/s"
        axes.text(most / 1.1, limits.tflops * 1.06, text, ha="right", va="bottom", fontsize=9)
        label = f"the step in {name}: {three_digits(step.tflops)} TFLOP/s, {step.share_of_peak:.0%} of its peak"
        axes.plot(step.work.intensity, step.tflops, marker, color=colour, markersize=9, linestyle="", label=label)
        words.append(f"{label} at {three_digits(step.work.intensity)} operations per byte; {text}")
    shares = groups["ms"] / groups["ms"].sum()
    for (name, share), colour in zip(shares.items(), (SKY, GREEN, VERMILION, GREY, PALE), strict=False):
        axes.scatter(intensity[name], speed[name], max(1500 * share, 20), color=colour, edgecolor="black", alpha=0.8)
        label = f"{name}: {share:.0%} of the time"  # beside small circles, labels would cover each other
        axes.plot([], [], "o", color=colour, markeredgecolor="black", label=label)
        words.append(f"{label} at {three_digits(intensity[name])} operations per byte")
    axes.set(xscale="log", yscale="log", xlabel="floating-point operations per byte", ylabel="TFLOP/s")
    lowest = min(speed.min(), *(step.tflops for step in steps.values()))
    axes.set(xlim=(least, most), ylim=(lowest / 3, max(step.limits.tflops for step in steps.values()) * 2.5))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    legend(figure, columns=2)  # inside, its marks would look like steps
    bandwidth = next(iter(steps.values())).limits.gb_per_second
    x, y = least * 1.5, bandwidth / 1e3 * least * 1.5 * 1.6
    turned = {"rotation": np.degrees(np.arctan2(y, x)), "rotation_mode": "anchor", "transform_rotates_text": True}
    text = f"memory: {three_digits(bandwidth)} GB/s"
    axes.text(x, y, text, fontsize=9, **turned)
    return finish(figure, f"Roofline with steps and groups of operators. {'; '.join([*words, text])}", source, "both")


def memory_formats(tensors: Mapping[str, torch.Tensor]) -> Picture:
    """Draw where the elements of small images lie in memory: a box per element, coloured by its channel.

    The boxes of the first pixel have a thick edge. `tensors`, by the titles of their rows, have shape (1, 3, H, W).
    """
    figure, rows = panels(8, 1.25 * len(tensors) + 0.8, [1] * len(tensors), sharex=True)
    for axes, (title, tensor) in zip(rows, tensors.items(), strict=True):
        for index in np.ndindex(*tensor.shape):
            place = int(np.dot(index, tensor.stride()))
            _, channel, row, column = index
            first = (row, column) == (0, 0)
            colour, edge = (VERMILION, GREEN, SKY)[channel], 2.5 if first else 0.6
            axes.bar(place, 1, 0.86, color=colour, edgecolor="black", linewidth=edge, zorder=2 + first)
            axes.text(place, 0.5, f"{'RGB'[channel]}\n{row},{column}", ha="center", va="center", fontsize=8, zorder=4)
        axes.set_title(f"{title}: shape {tuple(tensor.shape)}, strides {tensor.stride()}", fontsize=10)
        axes.set(yticks=[], ylim=(-0.05, 1.05), xticks=range(0, tensor.numel(), 4))
        axes.spines["left"].set_visible(False)
    rows[-1].set_xlabel("place in memory, in elements; each box: channel, and row,column of its pixel")
    words = {
        title: {"strides": f"{each.stride()}: {each.stride(1)} between channels"} for title, each in tensors.items()
    }
    return finish(figure, f"Rows of boxes, one per element, in the order of memory. {listed(words)}")


def number_formats() -> Picture:
    """Draw the bits of `precision.FORMATS`, and the range of their numbers."""
    formats = precision.FORMATS
    figure, (bits, reach) = panels(8, 0.8 * len(formats) + 1.6, [1, 1])
    parts = {"sign": GREY, "exponent: the range": ORANGE, "mantissa: the precision": SKY}
    for row, number_format in enumerate(formats):
        start, counts = 0, (1, number_format.exponent, number_format.mantissa)
        for colour, count in zip(parts.values(), counts, strict=True):
            bits.barh([row] * count, 1, 0.7, start + np.arange(count), color=colour, edgecolor="white")
            bits.text(start + count / 2, row, str(count), ha="center", va="center", fontsize=9)
            start += count
        _, high = _range_bar(reach, row, 0.5, number_format, ORANGE)
        reach.text(high, row, f"  after 1 comes 1 + 2$^{{-{number_format.mantissa}}}$", va="center", fontsize=9)
    bits.set(xlabel="bits", xlim=(0, 33))
    bits.legend(handles=patches(parts), frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.97), fontsize=9)
    reach.set(xlabel="numbers above 0, as powers of 2 (hatched: with fewer bits of precision)", xlim=(-155, 215))
    reach.set_xticks(range(-150, 151, 50))
    for axes in (bits, reach):
        axes.set_yticks(range(len(formats)), [number_format.name for number_format in formats])
        axes.invert_yaxis()
    words = "; ".join(
        f"{each.name}: sign 1, exponent {each.exponent}, mantissa {each.mantissa} bits, "
        f"from {each.smallest_normal:.1e} to {each.largest:.1e}"
        for each in formats
    )
    words = f"Boxes for the bits of number formats, and bars from the smallest to the largest number. {words}"
    return finish(figure, words, grid="x")


def gradients(samples: Mapping[str, Mapping[str, torch.Tensor]], scale: float, source: str) -> Picture:
    """Draw how large gradients are, and above them the range of float16 without and with a loss scale.

    `samples` has for each panel, by its title, gradients by kind, as `precision.gradients` returns them. `scale` is
    the factor of the loss.
    """
    figure, rows = panels(8, 2.1 * len(samples) + 0.8, [1] * len(samples), sharex=True, sharey=True)
    bins, top, words = np.arange(-60, 21), 0.0, []
    for axes, (title, kinds) in zip(rows, samples.items(), strict=True):
        for (kind, values), (colour, style) in zip(kinds.items(), ((BLUE, "-"), (VERMILION, "--")), strict=False):
            sizes = np.log2(np.abs(values[values != 0].numpy().astype(float)))
            counts, _ = np.histogram(sizes.clip(bins[0], bins[-1]), bins)
            shares = counts / counts.sum() * 100
            axes.stairs(shares, bins, color=colour, linestyle=style, label=kind)
            top = max(top, shares.max())
            words.append(f"{title}, {kind}: half of them below 2^{np.median(sizes):.0f}")
        axes.set(title=title, ylabel="share in %")
    for axes in rows:
        for place, (factor, label) in enumerate(((1, "float16"), (scale, f"float16, loss × {scale:,.0f}"))):
            y = top * (1.15 + 0.22 * place)
            low, _ = _range_bar(axes, y, top * 0.16, precision.FLOAT16, GREEN, factor)
            axes.text(low - 0.5, y, label, ha="right", va="center", fontsize=8)
        axes.set_ylim(0, top * 1.5)
    rows[0].legend(frameon=False, fontsize=9, loc="center right")
    rows[-1].set_xlabel("size of a gradient's element, as a power of 2 (bars: what float16 can hold)")
    text = f"Histograms of the size of gradients; above them the range of float16. {'; '.join(words)}"
    return finish(figure, text, source)


def _range_bar(
    axes: Axes, y: float, height: float, number_format: precision.Format, colour: str, factor: float = 1
) -> tuple[float, float]:
    """Draw the range of a format over `factor`, in powers of 2, hatched where bits are missing; return its ends."""
    numbers = number_format.smallest, number_format.smallest_normal, number_format.largest
    low, normal, high = np.log2(numbers) - np.log2(factor)
    axes.barh(y, high - normal, left=normal, height=height, color=colour)
    axes.barh(y, normal - low, left=low, height=height, color=PALE, edgecolor=colour, hatch="///")
    return low, high
