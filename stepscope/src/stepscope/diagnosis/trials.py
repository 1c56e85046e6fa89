"""Compares a step with its alternatives in interleaved runs: settings of PyTorch, 32-bit numbers, and a larger batch.

No trace shows how long a step takes with another setting. A trial runs steps on a batch that is already loaded, and
only if a setting is known to slow steps.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import psutil
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from stepscope import timing
from stepscope.diagnosis.result import Rule
from stepscope.timing.loaders import batch_size
from stepscope.timing.stopwatch import synchronize

ROUNDS, SECONDS, MOST_STEPS = 5, 0.05, 20  # rounds; seconds to repeat a step in each; most repetitions in each
LEAST_BATCH, LARGER = 8, 8  # smaller batches are tried at so many times the size, and up to as much more memory


@dataclass(frozen=True)
class Trial:
    """A step as it is, and changed: ms in the fastest round, in which other processes had the cores least."""

    before: float = 0.0
    after: float = 0.0
    sure: bool = False  # whether it was faster in all rounds but one at most

    @property
    def gain(self) -> float:
        """The share of the step that the change saves."""
        return max(0.0, 1 - self.after / self.before) if self.sure else 0.0


@dataclass(frozen=True)
class Trials:
    """What was tried with a step; a `Trial` without times was not tried."""

    work: float = 1.0  # the share of the step in which it does not wait for its batch
    threads: int = 0
    other_threads: int = 0  # the number of cores that no worker keeps busy
    batch: int = 0  # items
    other: Trial = Trial()  # with `other_threads`
    anomaly: Trial = Trial()
    deterministic: Trial = Trial()
    single: Trial = Trial()  # a forward and a backward pass with float64, and with float32
    larger: Trial = Trial()  # a batch, and an equal part of a larger one


@contextmanager
def double_weights() -> Iterator[list[bool]]:
    """Notice within the block whether optimizers change 64-bit weights: if so, the list is not empty."""
    found: list[bool] = []

    def notice(optimizer: torch.optim.Optimizer, *_: object) -> None:
        groups = optimizer.param_groups
        if not found and any(weight.dtype == torch.float64 for group in groups for weight in group["params"]):
            found.append(True)

    hook = register_optimizer_step_pre_hook(notice)
    try:
        yield found
    finally:
        hook.remove()


def run(step: timing.Step, batch: object, *, threads: int | None, double: bool) -> Trials:
    """Try all changes that may gain, with a batch of the loop.

    `threads` is the number of free cores, None if the CPU does not matter; `double` is whether weights have 64 bits.
    """

    def call(batch: object = batch) -> None:
        timing.call(step, batch)

    now, tried = torch.get_num_threads(), {}
    other = now if threads is None else threads
    if now != other:
        tried["other"] = _compare(call, call, lambda: _with(torch.set_num_threads, other, now))
    if torch.is_anomaly_enabled():
        tried["anomaly"] = _compare(call, call, lambda: torch.autograd.set_detect_anomaly(False))
    if torch.are_deterministic_algorithms_enabled():
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        set_to = partial(torch.use_deterministic_algorithms, warn_only=warn_only)
        tried["deterministic"] = _compare(call, call, lambda: _with(set_to, False, True))
    size = batch_size(batch)
    small = size < LEAST_BATCH and any(isinstance(leaf, torch.Tensor) and leaf.ndim for leaf in tree_leaves(batch))
    if small and LARGER * psutil.Process().memory_info().rss < psutil.virtual_memory().available:
        with suppress(Exception):  # out of memory, or a step that takes no other number of items
            larger = tree_map_only(torch.Tensor, _repeated, batch)
            tried["larger"] = _compare(call, lambda: call(larger), parts=LARGER)
    with suppress(Exception):  # a network that cannot be copied, or not be called so
        if double and (network := _network(call)):
            tried["single"] = _compare(_pass(*network, torch.float64), _pass(*network, torch.float32))
    return Trials(threads=now, other_threads=other, batch=size, **tried)


def _compare(before: Callable, after: Callable, setting: Callable = nullcontext, parts: int = 1) -> Trial:
    """Call two functions in interleaved rounds, the second within a `setting`, and return how long a call of each
    takes; for the second, divided by `parts`.
    """
    begin = time.perf_counter()
    before()
    repeat = min(MOST_STEPS, math.ceil(SECONDS / (time.perf_counter() - begin)))
    times: tuple[list[float], list[float]] = ([], [])
    for taken in range(2 * (ROUNDS + 1)):
        with setting() if taken % 2 else nullcontext():
            begin = time.perf_counter()
            for _ in range(repeat):
                (after if taken % 2 else before)()
            synchronize()
            times[taken % 2].append((time.perf_counter() - begin) / repeat * 1e3)
    as_it_is = times[0][1:]  # without the first round, which compiles or starts threads
    other = [each / parts for each in times[1][1:]]
    less = sum(least < most for most, least in zip(as_it_is, other, strict=True))
    return Trial(min(as_it_is), min(other), less >= ROUNDS - 1)


@contextmanager
def _with(set_to: Callable, value: object, before: object) -> Iterator:
    """Set something to a value within the block, and afterwards to the value before."""
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


def _repeated(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor] * LARGER) if tensor.ndim else tensor


def _network(call: Callable) -> tuple[nn.Module, tuple] | None:
    """Return a copy of the 64-bit network that a step trains, and its arguments; None if there is none."""
    found = []

    def notice(module: nn.Module, arguments: tuple) -> None:
        double = any(weight.dtype == torch.float64 for weight in module.parameters())
        if double and module.training and not found:  # the first module calls all others
            detached = tree_map_only(torch.Tensor, torch.Tensor.detach, arguments)
            found.append((copy.deepcopy(module), detached))

    hook = nn.modules.module.register_module_forward_pre_hook(notice)
    try:
        call()
    finally:
        hook.remove()
    return found[0] if found else None


def _pass(module: nn.Module, arguments: tuple, dtype: torch.dtype) -> Callable:
    """Return a function that runs a copy of a network forward and backward with numbers of this type."""
    module = copy.deepcopy(module).to(dtype)
    arguments = tree_map_only(
        torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, arguments
    )

    def call() -> None:
        outputs = tree_leaves(module(*arguments))
        sum(each.sum() for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad).backward()

    return call


def _threads_rule(name: str, too_many: bool) -> Rule:
    """Return the row for too few or too many threads."""

    def gain(trials: Trials) -> float | None:
        return trials.work * trials.other.gain if (trials.threads > trials.other_threads) is too_many else None

    text = "A step took {other.before:ms} with PyTorch's {threads:thread}, and {other.after:ms} with {other_threads}."
    change = "torch.set_num_threads({other_threads})  # OMP_NUM_THREADS in the environment may set it, too"
    return Rule(name, "settings", "number of threads", gain, text, change)


RULES = (
    _threads_rule("too few threads", False),
    _threads_rule("too many threads", True),
    Rule(
        "anomaly detection", "settings", "debugging settings",
        lambda trials: trials.work * trials.anomaly.gain,
        "Autograd checks each operator for NaN: a step took {anomaly.before:ms}, without checks {anomaly.after:ms}.",
        "torch.autograd.set_detect_anomaly(False)  # only to look for a NaN",
    ),
    Rule(
        "deterministic algorithms", "settings", "debugging settings",
        lambda trials: trials.work * trials.deterministic.gain,
        "A step took {deterministic.before:ms}, with the default algorithms {deterministic.after:ms}.",
        "torch.use_deterministic_algorithms(False)  # seeds alone reproduce a run about as well",
    ),
    Rule(
        "numbers of 64 bits", "settings", "mixed precision",
        lambda trials: trials.work * trials.single.gain,
        "The weights are float64: a forward and a backward pass took {single.before:ms}, with float32 "
        "{single.after:ms}.",
        "model.float()  # and the batches: NumPy computes in float64",
    ),
    Rule(
        "a small batch", "settings", "larger batches",
        lambda trials: trials.work * trials.larger.gain,
        f"A step of {{batch}} took {{larger.before:ms}}; in one {LARGER} times as large, as many took "
        "{larger.after:ms}.",
        "DataLoader(…, batch_size=…)  # larger, with a learning rate for it; or accumulate fewer",
    ),
)  # fmt: skip
