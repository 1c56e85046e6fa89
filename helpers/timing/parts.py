"""Splits a training step, or what is done to an item, into its parts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise

import torch
from torch import nn

from helpers import config
from helpers.timing import loaders
from helpers.timing.stopwatch import limited, mark, warm_up, warmup_steps


def phases(loader: Iterable, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, float]:
    """Split a training step: mean milliseconds for loading, copy, forward, backward and optimizer.

    The device is waited for between the phases, since otherwise a GPU would do the work of one in the time of the
    next. That costs a little: the phases together are no throughput. Of slow steps fewer are taken, as in `loop`.
    """
    device, longest = next(model.parameters()).device, config.preset().longest_run

    def step() -> list[float]:
        marks = [mark()]
        images, labels = next(batches)
        marks.append(mark())
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        marks.append(mark())
        loss = nn.functional.cross_entropy(model(images), labels)
        marks.append(mark())
        loss.backward()
        marks.append(mark())
        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark())
        return [(end - start) * 1e3 for start, end in pairwise(marks)]

    with loaders.batches(loader) as batches:
        warm_up(step, warmup_steps(loader), longest)
        rows = [step() for _ in limited(range(steps), longest)]
    names = ("loading", "copy", "forward", "backward", "optimizer")
    return {name: statistics.mean(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def stages(functions: Mapping[str, Callable], items: Iterable) -> dict[str, float]:
    """Split what is done to an item: mean microseconds of each function, called with what the one before returned.

    Parameters
    ----------
    functions : mapping of str to callable
        The stages in their order; the first is called with an item.
    items : iterable
        Such as the paths of images. They are gone through twice, and timed the second time: files are read from
        the page cache then, as in every epoch but the first, where the memory is large enough. Of slow ones only the
        first are taken, as in `loop`.
    """
    items, longest = list(items), config.preset().longest_run
    for _ in range(2):
        spent, done = dict.fromkeys(functions, 0.0), 0
        for item in limited(items, longest):
            for name, function in functions.items():
                start = time.perf_counter()
                item = function(item)
                spent[name] += time.perf_counter() - start
            done += 1
        items = items[:done]
    return {name: seconds / len(items) * 1e6 for name, seconds in spent.items()}
