"""Compares a step with its alternatives in interleaved runs: settings of PyTorch, float32, and a larger batch.

No trace shows how long a step takes with another setting. A trial runs steps on a batch that is already loaded, and
only if a setting is known to slow steps.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

import psutil
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from stepscope import thresholds, timing
from stepscope.base import machine
from stepscope.facts.trials import Trial, Trials
from stepscope.observe import settings
from stepscope.timing.loaders import batch_size
from stepscope.timing.stopwatch import synchronize


@contextmanager
def double_weights() -> Iterator[list[bool]]:
    """Notice within the block whether optimizers change float64 weights: if so, the list is not empty."""
    found: list[bool] = []

    def notice(optimizer: torch.optim.Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        if not found and any(weight.dtype == torch.float64 for group in groups for weight in group["params"]):
            found.append(True)

    with register_optimizer_step_pre_hook(notice):
        yield found


def run(step: timing.Step, batch: object, *, threads: int | None, double: bool) -> Trials:
    """Time a step with each change that may gain, on a batch of the loop.

    `threads` is the number of free cores, None if a GPU computes; `double` says whether weights are float64.
    """

    def call() -> object:
        return timing.call(step, batch)

    size, now, tried = batch_size(batch), torch.get_num_threads(), dict[str, Trial]()
    other = now if threads is None else threads
    if now != other:
        tried["other"] = _compare(call, call, {"threads": other})
    if torch.is_anomaly_enabled():
        tried["anomaly"] = _compare(call, call, {"anomaly": False})
    if torch.are_deterministic_algorithms_enabled():
        tried["deterministic"] = _compare(call, call, {"deterministic": False})
    memory = thresholds.LARGER_BATCH * psutil.Process().memory_info().rss
    if size < thresholds.SMALL_BATCH and memory < machine.available_memory():
        with suppress(Exception):  # out of memory, or the step needs this batch size
            larger = tree_map_only(torch.Tensor, _repeated, batch)
            if batch_size(larger) > size:
                tried["larger"] = _compare(call, lambda: timing.call(step, larger), parts=thresholds.LARGER_BATCH)
    with suppress(Exception):  # the network cannot be copied, or not be called alone
        if double and (network := _network(call)):
            tried["single"] = _compare(_pass(*network, torch.float64), _pass(*network, torch.float32))
    return Trials(threads=now, other_threads=other, batch=size, **tried)


def _compare(
    before: Callable[[], object],
    after: Callable[[], object],
    change: Mapping[str, Any] = MappingProxyType({}),
    parts: int = 1,
) -> Trial:
    """Call two functions in interleaved rounds, and return how long a call of each takes.

    `change` has the settings of PyTorch for the second function: see `settings.torch_with`. The second time is divided
    by `parts`.
    """
    begin = time.perf_counter()
    before()
    repeat = min(thresholds.TRIAL_REPEATS, math.ceil(thresholds.TRIAL_S / (time.perf_counter() - begin)))
    as_it_is, changed = list[float](), list[float]()
    for _ in range(thresholds.TRIAL_ROUNDS + 1):
        as_it_is.append(_ms(before, repeat))
        with settings.torch_with(change):
            changed.append(_ms(after, repeat) / parts)
    del as_it_is[0], changed[0]  # the first round compiles, or starts threads
    faster = sum(less < more for more, less in zip(as_it_is, changed, strict=True))
    return Trial(min(as_it_is), min(changed), faster >= thresholds.TRIAL_ROUNDS - 1)


def _ms(call: Callable[[], object], repeat: int) -> float:
    """Return the mean time of `repeat` calls in ms."""
    begin = time.perf_counter()
    for _ in range(repeat):
        call()
    synchronize()
    return (time.perf_counter() - begin) / repeat * 1e3


def _repeated(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor] * thresholds.LARGER_BATCH) if tensor.ndim else tensor


def _network(call: Callable[[], object]) -> tuple[nn.Module, tuple[object, ...]] | None:
    """Return a copy of the float64 network that a step trains, and its arguments; None if there is none."""
    found = list[tuple[nn.Module, tuple[object, ...]]]()

    def notice(module: nn.Module, arguments: tuple[object, ...]) -> None:
        double = any(weight.dtype == torch.float64 for weight in module.parameters())
        if double and module.training and not found:  # the first module is the outermost
            found.append((copy.deepcopy(module), tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)))

    with nn.modules.module.register_module_forward_pre_hook(notice):
        call()
    return found[0] if found else None


def _pass(module: nn.Module, arguments: tuple[object, ...], dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that runs a copy of a network forward and backward in this dtype."""
    module = copy.deepcopy(module).to(dtype)
    arguments = tree_map_only(
        torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, arguments
    )

    def call() -> None:
        outputs = tree_leaves(module(*arguments))
        sums = [each.sum() for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
        torch.stack(sums).sum().backward()

    return call
