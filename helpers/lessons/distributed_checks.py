"""What each rank does while `checks.overlap` checks how the reader all-reduces gradients; `torchrun` starts this file.

``distributed_checks.py FILE ANSWER`` writes into ANSWER, as JSON, whether FILE is right, and what to say about it. Most
of it is counted: when a bucket is started, how large it is, who waits for it. A clock only has the last word.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # before the process group: else DDP imports it, and gloo's threads outlive the group
from torch import nn

from helpers import simulate, timing
from helpers.wording import counted, milliseconds

PATIENCE = 10.0  # seconds that a rank waits for an all-reduce of some ms, before it says that another takes no part
BUCKETS = (10_000, 1_000, 1_000_000)  # bytes: several parameters in each, less than most of them, more than all
QUICK = simulate.SlowNetwork(mb_per_s=1_000, latency_ms=5)  # 10 ms each time: who does not wait for it is found out
SLOW = simulate.SlowNetwork(mb_per_s=12, latency_ms=0.5)
LAYERS, MEGABYTES, FORWARD_MS, BACKWARD_MS = 6, 0.2, 1.0, 20.0  # the gradient of a layer travels for 18 ms
ROUNDS = 6
EXPOSED = 0.6  # at most, of what is exposed after backward: 0.2 was found if it is right, 1.1 without overlap

_ERROR, _STUCK, _WRONG = range(3)  # what comes first: an error leaves others stuck, and what is stuck is no mean

Gradients = Mapping[str, torch.Tensor | None]


class Wrong(Exception):
    """What was written does something else; the message says what was expected and what was found."""


class Stuck(Exception):
    """This rank has waited for an all-reduce that does not end; the message says which."""


def main(file: Path, answer: Path) -> None:
    """Check a file on all ranks; rank 0 writes what is to be said."""
    dist.init_process_group("gloo")
    group = dist.new_group()  # for the file's calls: what another rank never joins there does no harm to the rest
    try:
        make = _together(file, None, _load, file)
        steps = _check_gradients(file, make, group)
        right, said = True, _check_exposed(file, make, group, steps)
    except Wrong as wrong:
        right, said = False, str(wrong)
    if dist.get_rank() == 0:
        answer.write_text(json.dumps({"right": right, "said": said}), encoding="utf-8")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # an all-reduce that another rank never joins would keep this process


def _load(file: Path) -> type:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Overlapped


def _together(file: Path, calls: _Calls | None, part: Callable[..., object], *arguments: object) -> object:
    """Do a part of the check on all ranks; where it fails on one of them, raise the same `Wrong` on all."""
    rank, result, found = dist.get_rank(), None, None
    try:
        result = part(*arguments)
    except Stuck as stuck:
        found = _STUCK, f"rank {rank} has waited {PATIENCE:.0f} s for {stuck}."
    except Wrong as wrong:
        found = _WRONG, str(wrong)
    except Exception as error:
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == str(file)]
        where = f" (line {lines[-1]} of {file.name})" if lines else ""
        found = _ERROR, f"on rank {rank} it raised {type(error).__name__}: {error}{where}"
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (found, len(calls.bytes) if calls else 0))
    if any(found for found, _ in ranks):
        kind, said = min(found for found, _ in ranks if found)
        if kind == _STUCK:
            counts = ", ".join(f"{count} on rank {each}" for each, (_, count) in enumerate(ranks))
            said += f" Calls of all_reduce in this step: {counts}. All ranks must call it equally often, in one order."
        raise Wrong(said)
    return result


# ------------------------------------------------------------------------------------------- what is given to the file


class _Noted(torch.futures.Future):
    """The future of an all-reduce, which notes when it is waited for."""

    def __init__(self, calls: _Calls, future: torch.futures.Future, title: str):
        super().__init__()
        self.calls, self.step, self.title, self.arrived = calls, calls.step, title, threading.Event()
        future.add_done_callback(self._arrive)

    def _arrive(self, future: torch.futures.Future) -> None:
        self.arrived.set()  # before what the reader has chained with `then`, which runs in `set_result`
        try:
            self.set_result(future.value())
        except Exception as error:
            self.set_exception(error)

    def wait(self) -> torch.Tensor:
        self.calls.blocked += self.calls.in_backward and not self.arrived.is_set()
        self.calls.again += self.step != self.calls.step
        if not self.arrived.wait(PATIENCE):
            raise Stuck(self.title)
        return super().wait()


class _Calls:
    """The `all_reduce` that the reader's class is given: over a simulated network, each call noted, step by step.

    Made before the reader's class, it has its hooks first: it knows which gradients are ready when a bucket is started.
    """

    def __init__(self, network: simulate.SlowNetwork, group: dist.ProcessGroup, model: nn.Module, bucket_bytes: int):
        self.network, self.group, self.bucket_bytes, self.step = network, group, bucket_bytes, 0
        self.largest = max(each.nbytes for each in model.parameters())
        self.names = {each: name for name, each in model.named_parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._become_ready)
        self._clear()

    def begin(self) -> None:
        """Begin a step, before its backward pass."""
        self.step += 1
        self._clear()

    def _clear(self) -> None:
        self.in_backward = True
        self.order: list[str] = []  # of the parameters, as their gradients become ready
        self.ready = self.left = self.blocked = self.again = 0
        self.bytes: list[int] = []  # of each call
        self.pending: list[int] = []  # bytes that were ready and not started, just before each call
        self.futures: list[_Noted] = []

    def end_of_backward(self) -> None:
        """Note what is not started when the backward pass has ended."""
        self.in_backward, self.left = False, self.ready - sum(self.bytes)

    def _become_ready(self, parameter: nn.Parameter) -> None:
        self.order.append(self.names[parameter])
        self.ready += parameter.grad.nbytes

    def __call__(self, tensor: torch.Tensor) -> _Noted:
        if not isinstance(tensor, torch.Tensor):
            raise Wrong(f"all_reduce takes a tensor, and was given {type(tensor).__name__}.")
        self.pending.append(self.ready - sum(self.bytes))
        self.bytes.append(tensor.nbytes)
        title = f"all-reduce number {len(self.bytes)} of step {self.step}, of {_size(tensor.nbytes)}"
        self.futures.append(_Noted(self, self.network.all_reduce(tensor.detach(), self.group), title))
        return self.futures[-1]

    def expect_done(self, title: str) -> None:
        """Expect each gradient in one call at most, and all calls to have ended."""
        _expect(len(self.bytes) > 0, f"{title}: all_reduce, which Overlapped was given, was never called.")
        _expect(
            sum(self.bytes) <= self.ready,
            f"{title}: backward made {_size(self.ready)} of gradients, and all_reduce was given "
            f"{_size(sum(self.bytes))}, in {counted(len(self.bytes), 'call')}. Once a bucket is started, a new one "
            "begins, which is empty, also for the next step.",
        )
        under_way = sum(not each.arrived.is_set() for each in self.futures)
        _expect(
            not under_way,
            f"{title}: wait() returned while {under_way} of {counted(len(self.futures), 'all-reduce')} had not ended.",
        )

    def expect_buckets(self, title: str) -> None:
        """Expect buckets of the size that was asked for, started as they are full, and nobody who waits before."""
        title, bucket = f"{title}: the gradients are right, but", _size(self.bucket_bytes)
        _expect(
            not self.blocked,
            f"{title} during backward a future's wait() was called {counted(self.blocked, 'time')} before its "
            "all-reduce had ended. Backward stands still meanwhile, so nothing overlaps: wait in Overlapped.wait().",
        )
        _expect(
            self.left <= max(self.bucket_bytes, self.largest),
            f"{title} buckets are started only in wait(): when backward had ended, {_size(self.left)} of "
            f"{_size(self.ready)} had not been started, in buckets of {bucket}. Expected only the last bucket there, "
            "partly filled; each other one is started in a hook, as soon as it is full.",
        )
        latest = max(self.pending)
        _expect(
            latest <= self.bucket_bytes + self.largest,
            f"{title} a bucket is started late: {_size(latest)} were ready and not started, in buckets of {bucket}. "
            "Expected each one to be started as soon as it is full.",
        )
        for number, (one, other) in enumerate(itertools.pairwise(self.bytes), 1):
            _expect(
                one + other >= self.bucket_bytes,
                f"{title} all_reduce was called {counted(len(self.bytes), 'time')} for "
                f"{counted(len(self.order), 'parameter')}: calls {number} and {number + 1}, of {_size(one)} and "
                f"{_size(other)}, fit into one bucket of {bucket}. Each call costs the latency of the network.",
            )
        _expect(
            not self.again,
            f"{title} wait() waited once more for {counted(self.again, 'all-reduce')} of earlier steps: they and "
            "their tensors are kept, more in every step. Forget them when they have ended.",
        )


def _expect(right: bool, message: str) -> None:
    if not right:
        raise Wrong(message)


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1_000 else f"{nbytes / 1e3:,.3g} kB"


# -------------------------------------------------------------------------------------------- are the gradients right?


class _Network(nn.Module):
    """A few layers, wide and narrow, of which one can be left out; the same weights on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(itertools.starmap(nn.Linear, itertools.pairwise((16, 32, 32, 128, 32, 16, 4))))

    def forward(self, x: torch.Tensor, short: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if not (short and number == 1):
                x = torch.tanh(layer(x))
        return x


def _check_gradients(file: Path, make: type, group: dist.ProcessGroup) -> int:
    """Compare the gradients of a few steps, with each size of buckets; return the number of steps."""
    steps = 0
    for bucket_bytes in BUCKETS:
        model, alone = _Network(), _Network()
        calls = _Calls(QUICK, group, model, bucket_bytes)
        QUICK.all_reduce(torch.zeros(1), group).wait()  # the first one on a group makes it ready, on all ranks at once
        overlapped = _together(file, calls, make, model, bucket_bytes, calls)
        for number, short in enumerate((False, False, True, False), 1):
            drawn = torch.Generator().manual_seed(10 * number + dist.get_rank())
            x = torch.randn(8, 16, generator=drawn)
            alone.zero_grad()
            alone(x, short).sum().backward()
            own = {name: each.grad for name, each in alone.named_parameters()}
            total = {name: None if each is None else _summed(each) for name, each in own.items()}
            title = f"step {number}, in buckets of {_size(bucket_bytes)}" + ", one layer unused" * short
            _together(file, calls, _step, overlapped, calls, model, x, short, title, own, total)
            steps += 1
    return steps


def _summed(tensor: torch.Tensor) -> torch.Tensor:
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def _step(
    overlapped: object, calls: _Calls, model: _Network, x: torch.Tensor, short: bool, title: str,
    own: Gradients, total: Gradients,
) -> None:  # fmt: skip
    """Do a step as the reader would, and look at what came of it."""
    model.zero_grad()
    calls.begin()
    model(x, short).sum().backward()
    calls.end_of_backward()
    overlapped.wait()
    calls.expect_done(title)
    _expect_means(title, {name: each.grad for name, each in model.named_parameters()}, own, total, calls.order)
    if not short:
        calls.expect_buckets(title)


def _expect_means(title: str, found: Gradients, own: Gradients, total: Gradients, order: list[str]) -> None:
    """Expect means over the ranks; say what is there instead, of the gradient that was ready first."""
    rank, world, missed = dist.get_rank(), dist.get_world_size(), []
    for name in found.keys() - set(order):
        unused = found[name] is None or not found[name].any()
        _expect(unused, f"{title}: expected no gradient of {name}, found one on rank {rank}.")
    for name in order:
        place, mean = f"{title}: the gradient of {name} on rank {rank}", total[name] / world
        _expect(found[name] is not None, f"{place} is None.")
        shape, expected = tuple(found[name].shape), tuple(mean.shape)
        _expect(shape == expected, f"{place}: expected the shape {expected}, found {shape}.")
        if _close(found[name], mean):
            continue
        if _close(found[name], own[name]):
            missed.append(name)
            continue
        wrong = f"differs from the mean by up to {(found[name] - mean).abs().max():.2g}"
        raise Wrong(f"{place} {'is the sum, not the mean' if _close(found[name], total[name]) else wrong}.")
    mistakes = " Has each parameter a hook, and is the result written back? (register_hook runs before .grad is there.)"
    last = " They are the last that become ready: their bucket is not full, so that wait() has to start it."
    _expect(
        not missed,
        f"{title}: of {len(order)} gradients rank {rank} has only its own, not the mean, of {', '.join(missed[:3])}"
        f"{', …' if len(missed) > 3 else ''} ({len(missed)} in all)."
        + (last if missed == order[-len(missed) :] else mistakes),
    )


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


# ---------------------------------------------------------------------------------- how much communication is exposed?


def _check_exposed(file: Path, make: type, group: dist.ProcessGroup, steps: int) -> str:
    """Time steps without communication, with all of it after backward, and as written; return the praise."""
    bare, model = (
        nn.Sequential(*(simulate.SleepingLayer(MEGABYTES, FORWARD_MS, BACKWARD_MS) for _ in range(LAYERS)))
        for _ in range(2)
    )
    x, bucket_bytes = torch.ones(1, requires_grad=True), round(MEGABYTES * 1e6)
    calls = _Calls(SLOW, group, model, bucket_bytes)
    overlapped = _together(file, calls, make, model, bucket_bytes, calls)

    def alone() -> None:
        bare.zero_grad()
        bare(x).sum().backward()

    def after() -> None:
        alone()
        SLOW.all_reduce(torch.cat([each.grad for each in bare.parameters()]), group).wait()

    def written() -> None:
        model.zero_grad()
        calls.begin()
        model(x).sum().backward()
        calls.end_of_backward()
        overlapped.wait()

    ways = {"alone": alone, "after": after, "written": written}
    timed = _together(file, calls, lambda: timing.interleaved_ranks(ways, ROUNDS, steps=1, warmup=0))
    # The least of each: what sleeps can take longer on a busy machine, and never less
    ms = {name: 1e3 * min(run.seconds for run in runs) for name, runs in timed.timings.items()}
    all_of_it, exposed = ms["after"] - ms["alone"], ms["written"] - ms["alone"]
    found = (
        f"a step takes {milliseconds(ms['alone'])} without communication, {milliseconds(ms['after'])} with all of it "
        f"after backward, and {milliseconds(ms['written'])} as written, over a {SLOW}"
    )
    _expect(
        exposed < EXPOSED * all_of_it,
        f"the gradients are right, but too little overlaps: {found}. Expected about "
        f"{milliseconds(ms['alone'] + all_of_it / LAYERS)}: of {LAYERS} buckets only the last one is exposed.",
    )
    return (
        f"the mean on each of {dist.get_world_size()} ranks in {steps} steps. Of {milliseconds(all_of_it)} of "
        f"communication {milliseconds(max(exposed, 0.0))} are exposed: {found}."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
