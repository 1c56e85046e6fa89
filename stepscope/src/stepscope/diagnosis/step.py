"""What a step costs the host: short operators that are called very often, and what it does beside its operators.

The operators are in the trace. What runs between them is sampled line by line, while the profiler says when one runs.
"""

from __future__ import annotations

import bisect
import math
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, SimpleNamespace
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

# Calls of one operator, in a step by itself and in a call of an optimizer. A ResNet-50 has 161 tensors of weights, and
# 53 convolutions with as many batch norms.
MANY, MANY_WEIGHTS = 60, 16
# µs in the median. Of a tensor of a few numbers an operator takes 2 to 10 µs on the CPU, one that calls others some 40.
SHORT = 60.0

SAMPLE = 0.001  # seconds from one look at the line that runs to the next
SECONDS, LEAST_STEPS, MOST_STEPS = 0.5, 3, 50  # of sampling
MOST_OPERATORS = 20_000  # of all steps: reading so many takes a second
TOO_MANY_OPERATORS = 300_000  # of the fewest steps: then none is sampled
MORE = 1.5  # times as long as most steps: then it may do something that they do not
LEAST_MS = 1.0  # of a step: a shorter one is mostly calls, and samples say little of it
# Seconds without an operator that count: from one operator to the next, PyTorch's own code takes some 10 µs.
GAP = 1e-4
_FUSED_ON_CPU = r"Optimizer\.step#(SGD|Adam|AdamW|Adagrad)\.step"  # foreach gains nothing there
SHARE = 0.1  # of a step, of one function: with 200 samples it is 8 to 12%
LARGE = 0.3  # of a step, of large elementwise operators that the reader's lines call: any network has some
UPDATES = 0.5  # of a step, of an optimizer's
EVALUATED = 0.5  # of a step, of networks without gradients: one that teaches takes as long as another's forward pass
SLOWED = 1.5  # times as long as without the profiler, that a sampled step may take
_BACKWARD = "autograd::engine::evaluate_function"  # the operator that runs a part of the backward pass
# Operators that read and write each number and compute little with it
_ELEMENTWISE = (
    r"aten::(add|sub|rsub|mul|div|neg|abs|pow|square|sqrt|rsqrt|exp|log|sin|cos|clamp|where|maximum|minimum|masked_fill"
    r"|sum|mean|var|std|norm|amax|amin|cat|stack|repeat|clone|contiguous)_?"
)
_CELL = r"aten::(lstm|gru|rnn_tanh|rnn_relu)_cell"  # of a recurrent network, which has one operator for all of them

# What a line may call so that it counts to the training itself: between the operators this is PyTorch's own work. In
# a network that runs without gradients, its operators do not.
_OF_TRAINING = (
    r"nn[/\\]utils|optim|autograd|amp|distributed|compiler|_dynamo|_inductor|_functorch|_tensor\.py.*backward"
)
_TRAINING, _NETWORK = rf"[/\\]torch[/\\]({_OF_TRAINING})", r"[/\\]torch[/\\]nn[/\\]"
# Where a DataLoader makes a batch in the loop itself, waits for one of a worker, or starts and ends them: `loading`
# looks at that
_LOADING = (
    r"[/\\]torch[/\\]utils[/\\]data[/\\]"
    r"(_utils[/\\]fetch\.py|dataloader\.py:(_get_data|_try_get_data|_get_iterator|_shutdown_workers)$)"
)


@dataclass(frozen=True)
class Outside:
    """What lines of the reader's do that is none of the training."""

    share: float = 0.0  # of the time
    ms: float = 0.0  # a step
    waited: float = 0.0  # what of that they wait
    line: str = ""  # that takes most of it; "" if it is unknown


@dataclass(frozen=True)
class Sampled:
    """Steps that were sampled; times in s as those of the samples."""

    samples: list[stacks.Sample]  # those within steps, and within getting their batches
    operators: np.ndarray  # begin and end of each operator that no other one calls, in order; shape (operators, 2)
    names: list[str]  # of the operators
    kinds: list[str]  # of each operator: "training", "tracked" by autograd for nothing, or "untracked"
    starts: list[float]  # when each step began, after it had its batch
    step: CodeType | None  # the function of a step; samples within another one are of getting a batch

    @property
    def step_ms(self) -> float:
        """The mean time of a step without its batch."""
        return sum(each.seconds for each in self.in_steps) / len(self.starts) * 1e3

    @property
    def in_steps(self) -> list[stacks.Sample]:
        """The samples within steps."""
        return [each for each in self.samples if each.within is self.step]

    def outside(self, often: frozenset[str]) -> Outside:
        """Return what the reader's lines do in steps that is no training, as a share of the steps.

        It is what they do while no operator runs, and operators that no backward pass calls back. Those that are called
        `often` do not count, nor does the time between two of them: it belongs to calling them.
        """
        gaps, kinds, seldom = self._gaps(often), np.array(self.kinds, object), ~np.isin(self.names, list(often))
        calls = self.operators.copy()  # with the short time until the next one, which belongs to calling it
        calls[:-1, 1] = np.where(calls[1:, 0] - calls[:-1, 1] <= GAP, calls[1:, 0], calls[:-1, 1])
        tracked, untracked = (calls[seldom & (kinds == kind)] for kind in ("tracked", "untracked"))
        trains, rows, evaluated = self._calls_that_train(tracked, untracked), [], []
        for sample in self.in_steps:
            if not sample.path or _any(_TRAINING, sample.inside[-1:]):
                continue
            seconds, in_training = _within(untracked, sample), trains[sample.to_network]
            if not _any(_NETWORK, sample.frames) or not in_training:
                seconds += _within(tracked, sample)
            idle = 0.0 if in_training and _any(_NETWORK, sample.inside[-1:]) else _within(gaps, sample)
            own = (in_training and idle > seconds) or not _any(_NETWORK, sample.inside)
            (rows if own else evaluated).append((sample, sample.path if own else sample.to_network, seconds + idle))
        total = sum(sample.seconds for sample in self.in_steps)
        if sum(seconds for *_, seconds in evaluated) >= EVALUATED * total:
            rows += evaluated
        return self._summed(rows, total)

    def _calls_that_train(self, tracked: np.ndarray, untracked: np.ndarray) -> dict[tuple[stacks.Frame, ...], bool]:
        """Return of each stack that calls a network whether it is one to train: it may prepare its images, too."""
        training = self.operators[np.array(self.kinds, object) == "training"]
        times: dict[tuple[stacks.Frame, ...], float] = defaultdict(float)
        for sample in self.in_steps:
            others = _within(tracked, sample) + _within(untracked, sample)
            times[sample.to_network] += _within(training, sample) - others
        return {stack: seconds > 0 for stack, seconds in times.items()}

    def around(self) -> Outside:
        """Return what the reader's lines do between steps, but for what is loaded, as a share of all the time."""
        rows = [
            (sample, sample.path, sample.seconds)
            for sample in self.samples
            if sample.within is not self.step and sample.path and not _any(_LOADING, sample.frames)
        ]
        return self._summed(rows, sum(sample.seconds for sample in self.samples))

    def _summed(self, rows: list[tuple[stacks.Sample, tuple[stacks.Frame, ...], float]], total: float) -> Outside:
        """Return what samples show, each with the stack to look at and what of its time counts."""
        if not rows or not total:
            return Outside()
        steps = [bisect.bisect(self.starts, sample.begin) for sample, *_ in rows]
        by_step = np.bincount(steps, [seconds for *_, seconds in rows], len(self.starts) + 1).tolist()
        outside = sum(without_hiccup(by_step))  # the longest of them may be a stall
        share = outside / total
        waited = sum(sample.waited * seconds / sample.seconds for sample, _, seconds in rows)
        line = stacks.hottest((stack, seconds) for _, stack, seconds in rows)
        waited *= share / (sum(seconds for *_, seconds in rows) or 1.0)
        return Outside(share, outside / len(self.starts) * 1e3, waited, line)

    def calling(self, names: frozenset[str]) -> tuple[str, float]:
        """Return the reader's own line that calls most of the operators with these names, "" if it is unknown; and the
        share of the steps in samples with a call.
        """
        starts = self.operators[np.isin(self.names, list(names)), 0]
        counts = [float(np.diff(np.searchsorted(starts, [each.begin, each.end]))[0]) for each in self.in_steps]
        pairs = list(zip(self.in_steps, counts, strict=True))
        total = sum(each.seconds for each in self.in_steps)
        share = sum(each.seconds for each, count in pairs if count) / total if total else 0.0
        return stacks.hottest((each.path, count) for each, count in pairs), share

    def elementwise(self) -> tuple[float, str]:
        """Return what of the time of elementwise operators that train is of those that the reader's lines call without
        a function of `torch.nn`; and the line that takes most of it, "" if it is unknown.
        """
        chosen = [bool(re.fullmatch(_ELEMENTWISE, name)) for name in self.names]
        calls = self.operators[np.array(chosen, bool) & (np.array(self.kinds, object) == "training")]
        rows = [(sample, _within(calls, sample)) for sample in self.in_steps]
        own = [(sample.path, seconds) for sample, seconds in rows if sample.path and not _any(_NETWORK, sample.inside)]
        total = sum(seconds for _, seconds in rows)
        return sum(seconds for _, seconds in own) / total if total else 0.0, stacks.hottest(own)

    def updating(self) -> str:
        """Return the line that calls an optimizer, "" if it is unknown."""
        return stacks.hottest(
            (sample.path, sample.seconds) for sample in self.in_steps if _any(r"[/\\]torch[/\\]optim", sample.inside)
        )

    def getting(self) -> str:
        """Return the line that a batch is got at, "" if it is unknown."""
        return stacks.hottest(
            (sample.path, sample.seconds) for sample in self.samples if sample.within is not self.step
        )

    def _gaps(self, often: frozenset[str]) -> np.ndarray:
        """Return begin and end of each time without an operator; shape (gaps, 2). Those in `often` have none inside."""
        begins, ends = np.r_[-np.inf, self.operators[:, 1]], np.r_[self.operators[:, 0], np.inf]
        chosen = np.isin(self.names, list(often))
        within = np.r_[False, chosen[:-1] & chosen[1:], False][: len(begins)]
        return np.stack([begins, ends], axis=1)[(ends - begins > GAP) & ~within]


def _within(intervals: np.ndarray, sample: stacks.Sample) -> float:
    """Return for how many seconds of a sample these intervals last, of which none overlap."""
    return float(np.diff(intervals.clip(sample.begin, sample.end)).sum())


def _any(pattern: str, frames: Iterable[stacks.Frame]) -> bool:
    """Whether the file and name of one of these functions match."""
    return any(re.search(pattern, f"{frame.file}:{frame.name}") for frame in frames)


def sample(loader: Iterable, call: Callable, steps: int, getting: CodeType) -> Sampled:
    """Record so many steps with the profiler while they are sampled; no worker of the loader is left.

    `getting` is the code of the function that gets a batch of the loader. Steps before them do not count: the first
    ones wait for the workers, and the profiler makes itself ready. Nor does one more: the end of the last step may come
    before a look at it.
    """
    from stepscope.timing import profiling  # here, because the shell needs no torch, which takes seconds

    begun = []

    def step(*batch: object) -> None:
        begun.append(time.perf_counter())
        call(*batch)

    with tempfile.TemporaryDirectory() as folder, stacks.Sampler(SAMPLE, step.__code__, getting) as sampler:
        trace = traces.load(profiling.record(loader, step, Path(folder), active=steps + 1))
    return of_samples(trace, sampler.samples, begun[-steps - 1 :], step.__code__)


def of_samples(trace: traces.Trace, samples: list[stacks.Sample], begun: list[float], step: CodeType) -> Sampled:
    """Return what a profile and samples of the same steps say, which `begun` then; the last of them does not count.

    `step` is the code of the function of a step.
    """
    (span,), (*begun, end), shift = trace.spans, begun, time.perf_counter() - time.time()
    operators = _outermost(trace)
    times = (operators[["start", "end"]].to_numpy() + span.origin) / 1e6 + shift
    samples = [each for each in samples if each.within is not None and begun[0] <= each.begin < end]
    return Sampled(samples, times, operators["name"].tolist(), operators["kind"].tolist(), begun, step)


def _outermost(trace: traces.Trace) -> pd.DataFrame:
    """Return the operators of the thread that takes the steps, in order, without those that others call.

    Its columns are `name`, `start` and `end` in µs, `length`, `gap` to the next one, `backward`: what the backward pass
    takes for it, `optimizer`: whether an optimizer calls it, `faster`: whether that one has a faster way on a CPU, too,
    and `kind`, as of `Sampled`.
    """
    import pandas as pd

    tables = []
    for span in trace.spans:
        events = span.events.table()
        called_back = events[events["name"].str.startswith(_BACKWARD)].dropna(subset="sequence")
        between = (called_back.groupby("thread")["start"].shift(-1) - called_back["end"]).clip(0, GAP * 1e6).fillna(0)
        called_back = (called_back["end"] - called_back["start"] + between).groupby(called_back["sequence"]).sum()
        steps = events[events["kind"] == "step"]
        events = events[events["thread"].isin(steps["thread"]) & (events["end"] <= steps["end"].max())]
        loading = _during(events["start"], events[events["kind"] == "DataLoader"])  # in the loop itself: not the step
        operators = events.loc[events["operator"] & ~loading, ["name", "start", "end", "sequence"]]
        table = operators[operators["start"] >= operators["end"].cummax().shift(fill_value=-np.inf)]
        gap = (table["start"].shift(-1) - table["end"]).clip(0, GAP * 1e6).fillna(0)
        backward = table["name"].str.startswith("autograd::")
        optimizer = _during(table["start"], events[events["name"].str.startswith("Optimizer.")]) & ~backward
        faster = _during(table["start"], events[events["name"].str.fullmatch(_FUSED_ON_CPU)])
        # The last operator that has a number is the one that is called back: autograd counts on then
        trained = operators.assign(row=np.searchsorted(table["start"], operators["start"], "right") - 1)
        trained = trained[~backward.to_numpy()[trained["row"]] & trained["sequence"].isin(called_back.index)]
        trained = trained.drop_duplicates("sequence", keep="last")
        rows = trained["row"].to_numpy()
        back = np.bincount(rows, called_back[trained["sequence"]], len(table))
        training = backward | optimizer | np.isin(np.arange(len(table)), rows)
        kind = np.where(training, "training", np.where(table["sequence"].isna(), "untracked", "tracked"))
        length = table["end"] - table["start"]
        tables.append(
            table.assign(length=length, gap=gap, backward=back, optimizer=optimizer, faster=faster, kind=kind)
        )
    return pd.concat(tables, ignore_index=True)


def _during(moments: pd.Series, events: pd.DataFrame) -> np.ndarray:
    """Return whether each moment is during one of these events, of which none overlap."""
    inside = np.searchsorted(events["start"], moments, "right") - 1
    return (moments < np.append(events["end"].to_numpy(), -np.inf)[inside]).to_numpy()  # the last: before all of them


def read(
    profile: Profile, work: float = 1.0, step_ms: float = math.inf, sampled: Sampled | None = None
) -> SimpleNamespace:
    """Return what a step asks of the host beside the work of its operators.

    `work` is the share of a step in which it does not wait for its batch; `step_ms` is the time of a step, and
    `sampled` are steps of the loop, if it is there to run.
    """
    # The share that can be gained at most: while a GPU is busy, the host's calls cost nothing
    limit = min(work, profile.host) if profile.on_device else work
    operators = _outermost(profile.trace)
    operators = operators[~operators["name"].str.startswith("autograd::")]  # their calls are PyTorch's own choice
    optimizer = operators["optimizer"]
    many = math.inf if profile.on_device else MANY  # a GPU that waits for them is found by its gaps
    calls = {
        "optimizer": _often(
            operators[optimizer & (operators["faster"] | profile.on_device)], MANY_WEIGHTS * profile.steps
        ),
        "others": _often(operators[~optimizer], many * profile.steps),
    }
    # What a call takes beyond that is the work on a large tensor, or the machine stood still. What the backward pass
    # does for it may be several operators
    times = {}
    for name, table in calls.items():
        usual = table.groupby("name")["length"].transform("median").clip(lower=SHORT)
        times[name] = float((table["length"].clip(upper=usual) + table["gap"]).sum())
        times[name] += float(table["backward"].clip(upper=3 * usual).sum())
    shares = {name: min(us / profile.total, limit) for name, us in times.items()}
    often = frozenset().union(*(table["name"] for name, table in calls.items() if shares[name] >= SHARE))
    lines = dict.fromkeys(calls, "")
    for name, table in calls.items():
        if sampled and shares[name] >= SHARE:
            lines[name], most = sampled.calling(frozenset(table["name"]))
            # More than the calls: Python, and operators between them; not of an optimizer, which has a faster one.
            # The rest of a sampled step takes no less time than without the profiler
            if name == "others":
                rest = (1 - most) * sampled.step_ms / step_ms
                with_python = max(min(most * work, SLOWED * shares[name]), work - rest)
                shares[name] = min(limit, max(shares[name], with_python))
    on_cpu = sampled is not None and not profile.on_device  # of a GPU, `device` looks at the kernels
    large = operators["name"].str.fullmatch(_ELEMENTWISE) & (operators["kind"] == "training")
    large = operators[large & ~optimizer & ~operators["name"].isin(often)]
    own, lines["large"] = sampled.elementwise() if on_cpu else (0.0, "")
    shares["large"] = min(limit, own * float((large["length"] + large["backward"]).sum()) / profile.total)
    updates = operators[optimizer & ~operators["name"].isin(often)]
    shares["updates"] = min(limit, on_cpu * float((updates["length"] + updates["gap"]).sum()) / profile.total)
    lines["updates"] = sampled.updating() if on_cpu else ""
    outside, around = (sampled.outside(often), sampled.around()) if sampled else (Outside(), Outside())
    outside, around = _of_the_loop(outside, work, step_ms, limit), _of_the_loop(around, 1.0, step_ms, 1.0)
    return SimpleNamespace(
        steps=profile.steps, calls=calls, shares=shares, lines=lines, often=often, outside=outside, around=around
    )


def _of_the_loop(outside: Outside, work: float, step_ms: float, limit: float) -> Outside:
    """Return what was sampled as a share of a step of the loop as it is, at most the limit.

    The profiler slows operators, but hardly what is between them, so it may be more than of the sampled steps.
    """
    share = min(limit, max(outside.share * work, min(outside.ms / step_ms, SLOWED * outside.share * work)))
    return replace(outside, share=share, waited=outside.waited * share / (outside.share or 1.0))


def steps_to_sample(profile: Profile, step_ms: float, works: Sequence[float] = ()) -> int:
    """Return how many steps of so many ms to sample: for some time, and no more operators than can be read.

    `works` are the times of the steps before, in any unit: where some do far more than most, as every tenth that
    evaluates, two of these are sampled. It is 0 if a step is too short, or has too many operators.
    """
    operators = sum(int(span.events["operator"].sum()) for span in profile.trace.spans) / profile.steps
    if step_ms < LEAST_MS or LEAST_STEPS * operators > TOO_MANY_OPERATORS:
        return 0
    most = min(MOST_STEPS, MOST_OPERATORS / max(operators, 1), SECONDS * 1e3 / step_ms + 1)
    long = sum(work > MORE * statistics.median(works) for work in works)
    least = math.ceil(2 * len(works) / long) + 1 if long > 1 else LEAST_STEPS
    return max(LEAST_STEPS, int(most), least if least * operators <= TOO_MANY_OPERATORS else 0)


def _calls(host: SimpleNamespace, name: str) -> str:
    """Say which operators are called how often, the three that take most time, and what line calls them."""
    calls = host.calls[name]
    table = calls.groupby("name")["length"].agg(["size", "sum"]).sort_values("sum", ascending=False)
    names = [f"{printable(name)} {round(row['size'] / host.steps):,} times" for name, row in table.head(3).iterrows()]
    others = f" and {counted(len(table) - 3, 'other')}" if len(table) > 3 else ""
    return (
        f"{', '.join(names)}{others}, {calls['length'].median():.0f} µs each in the median; with what is between "
        f"them that takes {percent(host.shares[name])} of the time.{_mostly(host.lines[name])}"
    )


def _mostly(line: str) -> str:
    """Return a sentence on where it is, if that is known."""
    return f" Mostly at {line}" if line else ""


def _often(table: pd.DataFrame, least: float) -> pd.DataFrame:
    """Return the calls of those operators that are called so often, and are short, or cells."""
    calls = table.groupby("name")["length"]
    short = (calls.transform("median") <= SHORT) | table["name"].str.fullmatch(_CELL)
    return table[(calls.transform("size") >= least) & short]


RULES = (
    Rule(
        "an optimizer that goes weight by weight", "host", "fewer launches",
        lambda host: host.shares["optimizer"],
        lambda host: f"In a step the optimizer calls {_calls(host, 'optimizer')}",
        "SGD(model.parameters(), …, fused=True)  # or foreach=True: all weights at once",
        least=SHARE,
        line=lambda host: host.lines["optimizer"],
    ),
    Rule(
        "many small operators", "host", "fewer launches",
        lambda host: host.shares["others"],
        lambda host: f"A step calls {_calls(host, 'others')}",
        "# one call for the whole batch, or the whole sequence, in the place of a loop in Python",
        least=SHARE,
        line=lambda host: host.lines["others"],
    ),
    Rule(
        "large elementwise operators", "compute", "fewer launches",
        lambda host: host.shares["large"],
        lambda host: (
            f"Memory-bound operators, which read and write each number and compute little with it, take "
            f"{percent(host.shares['large'])} of the time with their backward pass.{_mostly(host.lines['large'])}"
        ),
        "torch.compile(…)  # makes one loop of several; or a product of matrices, as torch.cdist has for distances",
        least=LARGE,
        line=lambda host: host.lines["large"],
    ),
    Rule(
        "an optimizer that takes most of the step", "compute", "larger batches",
        lambda host: host.shares["updates"],
        lambda host: (
            f"Changing the weights takes {percent(host.shares['updates'])} of the time, however small the batch is."
            f"{_mostly(host.lines['updates'])}"
        ),
        "Adam(…, fused=True)  # and fewer updates: a larger batch, or SparseAdam for a large nn.Embedding(sparse=True)",
        least=UPDATES,
        line=lambda host: host.lines["updates"],
    ),
    Rule(
        "the step does something else", "host", "work between the operators",
        lambda host: host.outside.share,
        lambda host: f"In {percent(host.outside.share)} of the time a step does not train{_where(host.outside)}",
        "# move it out of the step, or do it every n-th step",
        least=SHARE,
        line=lambda host: host.outside.line,
    ),
    Rule(
        "work between the steps", "host", "work between the operators",
        lambda host: host.around.share,
        lambda host: (
            f"In {percent(host.around.share)} of the time the loop waits for its batch, but not for the dataset: "
            f"something is done between the steps{_where(host.around)}"
        ),
        "# do it once, ahead of time, or in the dataset, whose workers do it beside the steps",
        least=SHARE,
        line=lambda host: host.around.line,
    ),
)  # fmt: skip


def _where(outside: Outside) -> str:
    """Return the end of a sentence on what else is done: whether it waits, and where it is mostly."""
    waits = ", and mostly waits" if outside.waited >= outside.share / 2 else ""
    return f"{waits}{f': mostly at {outside.line}' if outside.line else '.'}"


def findings(host: SimpleNamespace) -> Iterator[Finding]:
    """Yield what the step asks of the host."""
    yield from result.findings(RULES, host)
