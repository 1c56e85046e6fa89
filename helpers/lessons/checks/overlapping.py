"""The check of notebook 16: how the reader's code all-reduces gradients during the backward pass.

This process plays each of three ranks in turn, in a process group that sends nothing: the absent ranks' gradients are
two and three times those of the present rank. The check records when a bucket is started, how large it is, and who
waits for it, so no answer depends on this machine's speed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from helpers.lessons.checks.answering import answered, expect
from stepscope.base.wording import counted

RANKS = 3
SUM = 6  # over the ranks, as a multiple of this rank's gradient
BUCKETS = (10_000, 272, 1_000_000)  # bytes: more than several parameters, exactly the last layer's, more than all
DELAY = 0.01  # seconds of an all-reduce: long enough to expose code that does not wait for it
POLLS = 200  # most calls of done() in a backward pass: one per bucket and hook is allowed, a busy loop is not
HINT = (
    "Does each parameter have a hook that runs after .grad is set? Is the result written back? Does wait() start the "
    "last bucket, which is not full?"
)


@answered
def overlap(written: type) -> str:
    """Notebook 16: `Overlapped`, a class that averages gradients over the ranks in buckets, during backward."""
    calls_by_rank = []
    for rank in range(RANKS):
        with _process_group(rank):
            calls_by_rank.append(_check_steps(written))
    for (case, first), *others in zip(*calls_by_rank, strict=True):
        for _, other in others:
            expect(first == other, "all_reduce calls of the same bytes on each rank", f"{first} and {other}", case)
    return f"the mean on each of {RANKS} ranks in {len(calls_by_rank[0])} steps, in buckets sent during backward."


@contextmanager
def _process_group(rank: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # here: it registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- what the reader is given


class _Noted(torch.futures.Future):
    """The future of an all-reduce; it records who waits for it, or changes the tensor meanwhile."""

    def __init__(self, calls: _Calls, tensor: torch.Tensor):
        super().__init__()
        self.calls, self.step, self.given = calls, calls.step, tensor.clone()

    def arrive(self, tensor: torch.Tensor) -> None:
        self.calls.changed += not torch.equal(tensor, self.given)
        self.set_result(tensor.mul_(SUM))

    def done(self) -> bool:
        self.calls.polls += self.calls.in_backward
        return super().done()

    def wait(self) -> torch.Tensor:
        self.calls.blocked += self.calls.in_backward and not super().done()
        self.calls.again += self.step != self.calls.step
        self.calls.waited |= not self.calls.in_backward
        return super().wait()


class _Calls:
    """The `all_reduce` that the reader's class is given; it records each call, step by step.

    Its hooks run before those of the reader's class, so it knows which gradients are ready when a bucket is started.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int):
        self.bucket_bytes, self.step = bucket_bytes, 0
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._become_ready)

    def begin(self) -> None:
        """Begin a step, before its backward pass."""
        self.step, self.in_backward = self.step + 1, True
        self.order: list[str] = []  # in which the parameters' gradients become ready
        self.ready = self.blocked = self.polls = self.again = self.changed = 0
        self.waited = self.late = False  # after backward
        self.bytes: list[int] = []  # of each call
        self.pending: list[int] = []  # bytes that were ready and not started, before each gradient and after backward
        self.futures: list[_Noted] = []

    def end_of_backward(self) -> None:
        """Record how many bytes are not started when backward ends."""
        self.in_backward = False
        self.pending.append(self.ready - sum(self.bytes))

    def _become_ready(self, parameter: nn.Parameter) -> None:
        self.order.append(self.names[parameter])
        self.pending.append(self.ready - sum(self.bytes))
        self.ready += parameter.nbytes  # as many as its gradient has

    def __call__(self, tensor: torch.Tensor) -> _Noted:
        self.late |= self.waited
        self.bytes.append(tensor.nbytes)
        future = _Noted(self, tensor.detach())
        threading.Timer(DELAY, future.arrive, [tensor.detach()]).start()
        self.futures.append(future)
        return future

    def expect_done(self, case: str) -> None:
        """Expect each gradient in one call at most, and all calls to have ended."""
        expect(len(self.bytes) > 0, "calls of all_reduce, which Overlapped was given", "none", case)
        reduced = f"{_size(sum(self.bytes))} in {counted(len(self.bytes), 'call')}"
        hint = "After a bucket is started, begin a new, empty one, also for the next step."
        right = sum(self.bytes) <= self.ready
        expect(right, f"{_size(self.ready)} of gradients given to all_reduce", reduced, case, hint)
        under_way = sum(not future.done() for future in self.futures)
        expected = "all all-reduces to have ended when wait() returned"
        expect(not under_way, expected, f"{under_way} of {len(self.futures)} that had not", case)
        hint = "The network reads and writes it meanwhile: divide before, or after wait()."
        expect(not self.changed, "tensors left alone until their sum is there", f"{self.changed} changed", case, hint)

    def expect_buckets(self, case: str) -> None:
        """Expect buckets of the requested size, started as soon as they are full, and no waiting in backward."""
        case, bucket = f"{case}: the gradients are right, but", f"in buckets of {_size(self.bucket_bytes)}"
        hint = "Backward stops meanwhile, so nothing overlaps: wait in Overlapped.wait()."
        blocked = counted(self.blocked, "call")
        expect(not self.blocked, "no call of a future's wait() during backward", blocked, case, hint)
        polls = counted(self.polls, "call")
        expect(self.polls <= POLLS, "no loop that asks for a future's done() during backward", polls, case, hint)
        late = f"{_size(max(self.pending))} of {_size(self.ready)} ready and not started, {bucket}"
        hint = "The hook of the gradient that fills a bucket starts it; wait() starts the last, partly filled one."
        right = max(self.pending) < self.bucket_bytes
        expect(right, "each bucket to be started as soon as it is full", late, case, hint)
        expect(not self.late, "the last bucket to be started before wait() waits", "it later", case)
        hint = "Each call costs the latency of the network."
        for number, (one, other) in enumerate(itertools.pairwise(self.bytes), 1):
            pair = f"{_size(one)} and {_size(other)} in calls {number} and {number + 1} of {len(self.bytes)}, {bucket}"
            expect(one + other >= self.bucket_bytes, "full buckets", pair, case, hint)
        again = counted(self.again, "all-reduce")
        hint = "They and their tensors stay in memory, more in every step: drop them when they have ended."
        expect(not self.again, "wait() to wait for this step only", f"{again} of earlier steps", case, hint)


def _size(nbytes: int) -> str:
    return f"{nbytes:,} bytes" if nbytes < 1_000 else f"{nbytes / 1e3:,.3g} kB"


# --------------------------------------------------------------------------------------------- the steps of the reader


class _Network(nn.Module):
    """A few layers, wide and narrow, one of which can be skipped; always the same weights."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 32, 128, 32, 16, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(itertools.starmap(nn.Linear, itertools.pairwise(widths)))

    def forward(self, x: torch.Tensor, short: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if not (short and number == 1):
                x = torch.tanh(layer(x))
        return x


def _check_steps(written: type) -> list[tuple[str, list[int]]]:
    """Do a few steps with each size of buckets; return each step with the bytes of its calls."""
    steps = []
    for bucket_bytes in BUCKETS:
        model, alone = _Network(), _Network()
        calls = _Calls(model, bucket_bytes)
        overlapped = written(model, bucket_bytes, calls)
        for number, short in enumerate((False, False, True, False), 1):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            alone.zero_grad()
            alone(x, short).sum().backward()
            model.zero_grad()
            calls.begin()
            try:
                model(x, short).sum().backward()
            except AttributeError:
                early = any(parameter._backward_hooks for parameter in model.parameters())
                expect(not early, "hooks that run after .grad is set", "register_hook, whose hooks run before")
                raise
            calls.end_of_backward()
            overlapped.wait()
            case = f"step {number}, in buckets of {_size(bucket_bytes)}" + ", one layer unused" * short
            calls.expect_done(case)
            _expect_means(case, model, alone, calls.order)
            if not short:
                calls.expect_buckets(case)
            steps.append((case, calls.bytes))
    return steps


def _expect_means(case: str, model: nn.Module, alone: nn.Module, order: list[str]) -> None:
    """Expect means over the ranks; say what the gradient that was ready first is instead."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name in gradients.keys() - set(order):
        gradient = gradients[name]
        unused = gradient is None or not gradient.any()
        expect(unused, f"no gradient of {name}", f"one on rank {dist.get_rank()}", case)
    for name in order:
        gradient, own = gradients[name], alone.get_parameter(name).grad
        assert own is not None  # alone computed the same layers
        others = {"the sum": SUM * own, "the sum, divided by 2": SUM / 2 * own, "this rank's own": own}
        instead = next((title for title, other in others.items() if _close(gradient, other)), "neither mean nor sum")
        place = f"{case}: the gradient of {name} on rank {dist.get_rank()}"
        expect(_close(gradient, SUM / RANKS * own), "the mean over the ranks", instead, place, HINT)


def _close(gradient: torch.Tensor | None, expected: torch.Tensor) -> bool:
    if gradient is None or gradient.shape != expected.shape:
        return False
    return bool((gradient - expected).abs().max() <= 1e-4 * expected.abs().max())
