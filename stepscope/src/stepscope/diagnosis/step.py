"""What a step costs the host: short operators that are called very often, and what it does beside its operators.

The operators are in the trace. What runs between them is sampled line by line, while the profiler says when one runs.
"""

from __future__ import annotations

import bisect
import math
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from stepscope import traces
from stepscope.base.confidence import without_hiccup
from stepscope.base.wording import counted, percent, printable
from stepscope.diagnosis import result, stacks
from stepscope.diagnosis.profile import Profile
from stepscope.diagnosis.result import Finding, Rule

if TYPE_CHECKING:
    import pandas as pd

# Calls of one operator, in a step by itself and in a call of an optimizer. A ResNet-50 has 161 tensors of weights.
MANY, MANY_WEIGHTS = 100, 16
# µs in the median. Of a tensor of a few numbers an operator takes 2 to 10 µs on the CPU, where it mostly calls others.
SHORT = 30.0

SAMPLE = 0.001  # seconds from one look at the line that runs to the next
SECONDS, LEAST_STEPS, MOST_STEPS = 0.5, 3, 50  # of sampling
MOST_OPERATORS = 20_000  # of all steps: reading so many takes a second
LEAST_MS = 1.0  # of a step: a shorter one is mostly calls, and samples say little of it
# Seconds without an operator that count: from one operator to the next, PyTorch's own code takes some 10 µs.
GAP = 1e-4
SHARE = 0.1  # of a step, of one function: with 200 samples it is 8 to 12%

# What a line may call so that it counts to the training itself: between the operators this is PyTorch's own work.
_TRAINING = (
    r"[/\\]torch[/\\](nn|optim|autograd|amp|distributed|compiler|_dynamo|_inductor|_functorch|_tensor\.py.*backward)"
)


@dataclass(frozen=True)
class Outside:
    """What a function of the reader's does in steps while no operator runs."""

    share: float  # of the steps' time
    waited: float  # what of that the function waits
    line: str  # that takes most of it


@dataclass(frozen=True)
class Sampled:
    """Steps that were sampled; times in s as those of the samples."""

    samples: list[stacks.Sample]  # those within steps
    operators: np.ndarray  # begin and end of each operator that no other one calls, in order; shape (operators, 2)
    names: list[str]  # of the operators
    starts: list[float]  # when each step began

    def outside(self, often: frozenset[str]) -> list[Outside]:
        """Return what each function of the reader's does while no operator runs, the longest first.

        The time between two operators of those that are called `often` does not count: it belongs to calling them.
        """
        gaps, functions = self._gaps(often), {}
        total = sum(sample.seconds for sample in self.samples)
        for sample in self.samples:
            seconds, own = float(np.diff(gaps.clip(sample.begin, sample.end)).sum()), sample.own
            if own is not None and seconds > 0 and not _trains(sample):
                waited = sample.waited * seconds / sample.seconds
                step = bisect.bisect(self.starts, sample.begin)
                functions.setdefault((own.file, own.name, own.first), []).append((own, seconds, waited, step))
        found = []
        for frames, seconds, waited, steps in (zip(*rows, strict=True) for rows in functions.values()):
            by_step = np.bincount(steps, seconds, len(self.starts) + 1)[1:].tolist()
            share = sum(without_hiccup(by_step)) / total  # the longest of them may be a stall
            line = stacks.place(zip(frames, seconds, strict=True))
            found.append(Outside(share, share * sum(waited) / sum(seconds), line))
        return sorted((outside for outside in found if outside.line), key=lambda outside: -outside.share)

    def line_of(self, names: frozenset[str]) -> str:
        """Return the reader's own line that calls most of the operators with these names; "" if it is unknown.

        If that is in a ``forward``, the line that calls the network is named, too.
        """
        starts = self.operators[np.isin(self.names, list(names)), 0]
        counts = [float(np.diff(np.searchsorted(starts, [each.begin, each.end]))[0]) for each in self.samples]
        line = stacks.place(zip((each.own for each in self.samples), counts, strict=True))
        caller = stacks.place(zip((each.caller for each in self.samples), counts, strict=True))
        return line if caller in ("", line) else f"{line}, called at {caller}"

    def _gaps(self, often: frozenset[str]) -> np.ndarray:
        """Return begin and end of each time without an operator; shape (gaps, 2). Those in `often` have none inside."""
        begins, ends = np.r_[-np.inf, self.operators[:, 1]], np.r_[self.operators[:, 0], np.inf]
        chosen = np.isin(self.names, list(often))
        within = np.r_[False, chosen[:-1] & chosen[1:], False][: len(begins)]
        return np.stack([begins, ends], axis=1)[(ends - begins > GAP) & ~within]


def _trains(sample: stacks.Sample) -> bool:
    """Whether the reader's own line calls the network, the backward pass or the optimizer."""
    inside = sample.inside
    return bool(inside) and bool(re.search(_TRAINING, f"{inside[-1].file}:{inside[-1].name}"))


def sample(loader: Iterable, call: Callable, steps: int) -> Sampled:
    """Record so many steps with the profiler while they are sampled; no worker of the loader is left.

    Steps before them do not count: the first ones wait for the workers, and the profiler makes itself ready.
    """
    from stepscope.timing import profiling  # here, because the shell needs no torch, which takes seconds

    begun = []

    def step(*batch: object) -> None:
        begun.append(time.perf_counter())
        call(*batch)

    with tempfile.TemporaryDirectory() as folder, stacks.Sampler(step.__code__, SAMPLE) as sampler:
        trace = traces.load(profiling.record(loader, step, Path(folder), active=steps))
    (span,), begun, shift = trace.spans, begun[-steps:], time.perf_counter() - time.time()
    operators = _outermost(trace)
    times = (operators[["start", "end"]].to_numpy() + span.origin) / 1e6 + shift
    samples = [each for each in sampler.samples if each.frames and each.begin >= begun[0]]
    return Sampled(samples, times, operators["name"].tolist(), begun)


def _outermost(trace: traces.Trace) -> pd.DataFrame:
    """Return the operators of the thread that takes the steps, in order, without those that others call.

    Its columns are `name`, `start` and `end` in µs, `length`, `gap` to the next one, and `optimizer`: whether an
    optimizer calls it.
    """
    import pandas as pd

    tables = []
    for span in trace.spans:
        events = span.events.table()
        steps = events[events["kind"] == "step"]
        events = events[events["thread"].isin(steps["thread"]) & (events["end"] <= steps["end"].max())]
        optimizer = events[events["name"].str.startswith("Optimizer.step")]
        table = events.loc[events["operator"], ["name", "start", "end"]]
        table = table[table["start"] >= table["end"].cummax().shift(fill_value=-np.inf)]
        gap = (table["start"].shift(-1) - table["end"]).clip(0, GAP * 1e6).fillna(0)
        inside = np.searchsorted(optimizer["start"], table["start"], "right") - 1
        ends = np.append(optimizer["end"].to_numpy(), -np.inf)  # the last one for what is before all of them
        tables.append(
            table.assign(length=table["end"] - table["start"], gap=gap, optimizer=table["start"] < ends[inside])
        )
    return pd.concat(tables, ignore_index=True)


def read(profile: Profile, work: float = 1.0, sampled: Sampled | None = None) -> SimpleNamespace:
    """Return what a step asks of the host beside the work of its operators.

    `work` is the share of a step in which it does not wait for its batch; `sampled` are steps of the loop, if it is
    there to run.
    """
    # The share that can be gained at most: while a GPU is busy, the host's calls cost nothing
    limit = min(work, profile.host) if profile.on_device else work
    operators = _outermost(profile.trace)
    operators = operators[~operators["name"].str.startswith("autograd::")]  # their calls are PyTorch's own choice
    optimizer = operators["optimizer"]
    many = math.inf if profile.on_device else MANY  # a GPU that waits for them is found by its gaps
    calls = {
        "optimizer": _often(operators[optimizer], MANY_WEIGHTS * profile.steps),
        "others": _often(operators[~optimizer], many * profile.steps),
    }
    # What a call takes beyond that is the work on a large tensor, or the machine stood still
    times = {name: float((table["length"].clip(upper=SHORT) + table["gap"]).sum()) for name, table in calls.items()}
    shares = {name: min(us / profile.total, limit) for name, us in times.items()}
    often = frozenset().union(*(table["name"] for name, table in calls.items() if shares[name] >= SHARE))
    outside = [
        Outside(min(each.share * work, limit), min(each.waited * work, limit), each.line)
        for each in (sampled.outside(often) if sampled else ())
    ]
    return SimpleNamespace(
        steps=profile.steps, sampled=sampled, calls=calls, shares=shares, often=often, outside=outside
    )


def steps_to_sample(profile: Profile, step_ms: float, work: float) -> int:
    """Return how many steps of so many ms to sample: for some time, and no more operators than can be read.

    It is 0 if operators explain the steps and are not called too often, or if a step is too short.
    """
    if step_ms * work < LEAST_MS or (profile.shares["Other"] < SHARE and not read(profile, work).often):
        return 0
    operators = sum(int(span.events["operator"].sum()) for span in profile.trace.spans) / profile.steps
    most = min(MOST_STEPS, MOST_OPERATORS / max(operators, 1), SECONDS * 1e3 / step_ms + 1)
    return max(LEAST_STEPS, int(most))


def _calls(host: SimpleNamespace, name: str) -> str:
    """Say which operators are called how often, the three that take most time, and what line calls them."""
    calls = host.calls[name]
    table = calls.groupby("name")["length"].agg(["size", "sum"]).sort_values("sum", ascending=False)
    names = [f"{printable(name)} {round(row['size'] / host.steps):,} times" for name, row in table.head(3).iterrows()]
    others = f" and {counted(len(table) - 3, 'other')}" if len(table) > 3 else ""
    line = host.sampled.line_of(frozenset(calls["name"])) if host.sampled else ""
    return (
        f"{', '.join(names)}{others}, {calls['length'].median():.0f} µs each in the median; with what is between "
        f"them that takes {percent(host.shares[name])} of the time.{f' Mostly at {line}' if line else ''}"
    )


def _often(table: pd.DataFrame, least: float) -> pd.DataFrame:
    """Return the calls of those operators that are called so often, and are short."""
    calls = table.groupby("name")["length"]
    return table[(calls.transform("size") >= least) & (calls.transform("median") <= SHORT)]


RULES = (
    Rule(
        "an optimizer that goes weight by weight", "host", "fewer launches",
        lambda host: host.shares["optimizer"],
        lambda host: f"In a step the optimizer calls {_calls(host, 'optimizer')}",
        "SGD(model.parameters(), …, fused=True)  # or foreach=True: all weights at once",
        least=SHARE,
    ),
    Rule(
        "many small operators", "host", "fewer launches",
        lambda host: host.shares["others"],
        lambda host: f"A step calls {_calls(host, 'others')}",
        "# one call for the whole batch in the place of a loop in Python",
        least=SHARE,
    ),
)  # fmt: skip
RULES_OF_A_FUNCTION = (  # for each `Outside`
    Rule(
        "the step does something else", "host", "work between the operators",
        lambda outside: outside.share,
        lambda outside: (
            f"In {percent(outside.share)} of the time no operator runs, but a function of yours"
            f"{', and waits' if outside.waited >= outside.share / 2 else ''}: mostly at {outside.line}"
        ),
        "# move it out of the step, or do it every n-th step",
        least=SHARE,
    ),
)  # fmt: skip


def findings(host: SimpleNamespace) -> Iterator[Finding]:
    """Yield what the step asks of the host."""
    yield from result.findings(RULES, host)
    for outside in host.outside:
        yield from result.findings(RULES_OF_A_FUNCTION, outside)
