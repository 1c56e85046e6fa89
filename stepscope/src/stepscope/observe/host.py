"""Measures the host's overhead in a step: short operators that are called very often, and work outside of operators.

The trace shows the operators. The code between operators is sampled while the profiler records the operators.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import CodeType

import numpy as np
import pandas as pd

from stepscope import thresholds, traces
from stepscope.base.confidence import without_hiccup
from stepscope.facts.host import Calls, Framework, GpuLines, Host, Operator, Part, Work
from stepscope.facts.profile import Profile
from stepscope.observe.device import TO_DEVICE
from stepscope.observe.sampler import Sample, Site, Stack, any_of, hottest

_FUSED_ON_CPU = r"Optimizer\.step#(SGD|Adam|AdamW|Adagrad)\.step"  # foreach gains nothing on the CPU
_BACKWARD = "autograd::engine::evaluate_function"  # the operator that runs a part of the backward pass
# Memory-bound operators: they read and write each number, and compute little
_ELEMENTWISE = (
    r"aten::(add|sub|rsub|mul|div|neg|abs|pow|square|sqrt|rsqrt|exp|log|sin|cos|clamp|where|maximum|minimum|masked_fill"
    r"|sum|mean|var|std|norm|amax|amin|cat|stack|repeat|clone|contiguous)_?"
)
_CELL = r"aten::(lstm|gru|rnn_tanh|rnn_relu)_cell"  # one call of a recurrent network can replace all its cells

# A line that calls these functions counts as training: their code between operators is PyTorch's own work. The
# operators of a network that runs without gradients do not count as training.
_TRAINING = (
    r"[/\\]torch[/\\]"
    r"(nn[/\\]utils|optim|autograd|amp|distributed|_?compile|_dynamo|_inductor|_functorch|_tensor\.py.*backward)"
)
_NETWORK = r"[/\\]torch[/\\]nn[/\\]"
_UTILITIES = r"[/\\]torch[/\\]nn[/\\]utils[/\\]"
_NOTES_OPERATORS = r"[/\\]torch[/\\]fx[/\\]traceback\.py:format_stack$"  # in anomaly detection
_CHECKS_FOR_NAN = ("aten::isnan", "aten::_is_any_true", "aten::any", "aten::item")  # in a backward pass
_RECOMPUTES = r"[/\\]torch[/\\]utils[/\\]checkpoint\.py:(unpack_hook|recompute_fn|backward)$"
_BACKWARD_CALL = r"[/\\]torch[/\\](_tensor\.py:backward$|autograd[/\\]__init__\.py:backward$)"
_SCALES = r"[/\\]torch[/\\]amp[/\\]grad_scaler\.py"
_OPTIMIZER = r"[/\\]torch[/\\]optim"
# The functions in which a DataLoader makes a batch in the loop itself, waits for a worker's batch, starts and ends
# workers, or chooses indices: the facts of the loader contain their time
_LOADING = (
    r"[/\\]torch[/\\]utils[/\\]data[/\\]"
    r"(_utils[/\\]fetch\.py|dataloader\.py:(_get_data|_try_get_data|_get_iterator|_shutdown_workers|_next_index)$)"
)
# Parts of a framework that settings change, by the file and the qualified name of a function: the first match counts
_PARTS = {
    "progress": r"progress|[/\\]tqdm[/\\]",
    "logging": r"\.log$|[/\\](loggers?|integrations|tensorboardX?|wandb|mlflow|clearml|comet_ml)[/\\]",
    "saving": r"[Cc]heckpoint",
    "evaluation": r"evaluat|validat",
    "callback": r"callbacks?[/\\]|_callback\.py",
}
# Functions of frameworks that call several parts; the second pattern is for the ones that also log by themselves
_CALLS_PARTS, _LOGS = r"Handler|__call__|call_event|_maybe_", r"_maybe_log"


@dataclass(frozen=True)
class Gpu:
    """Where a GPU and its host wait for each other in sampled steps; begin and end in s, each of shape (…, 2)."""

    waits: np.ndarray  # of the host, for the GPU, except in copies to the GPU
    copies: np.ndarray  # waits of the host in copies to the GPU
    gaps: np.ndarray  # long gaps, in which the GPU waits for the host to launch its next kernel
    launches: np.ndarray  # calls of the step's thread that launch kernels


@dataclass(frozen=True)
class Sampled:
    """Steps that were sampled; times in s on the clock of the samples."""

    samples: list[Sample]  # within steps, and within the requests for batches
    operators: np.ndarray  # begin and end of each outermost operator, in order; float64, shape (operators, 2)
    names: list[str]  # of the operators
    # Of each operator: "training"; "recorded" by autograd for a backward pass that never comes; "tracked": called where
    # gradients are enabled, but not recorded; or "untracked"
    kinds: list[str]
    starts: list[float]  # when each step had its batch
    step: CodeType | None  # the function of a step; samples within another function belong to the wait for a batch
    site: Site  # of the loop
    often: frozenset[str] = frozenset()  # names of operators that are called too often, which is a fault of its own
    gpu: Gpu | None = None  # None if no GPU computes

    @cached_property
    def in_steps(self) -> list[Sample]:
        """The samples within steps."""
        return [each for each in self.samples if each.within is self.step]

    @property
    def step_ms(self) -> float:
        """The mean time of a step without its batch."""
        return _total(self.in_steps) / len(self.starts) * 1e3

    def without_long_steps(self, factor: float) -> Sampled:
        """Return the samples of the usual steps: `long_steps` examines the work of long steps."""
        ends = [*self.starts[1:], max(each.end for each in self.samples)]
        lengths = [end - begin for begin, end in zip(self.starts, ends, strict=True)]
        usual = [each <= factor * statistics.median(lengths) for each in lengths]
        steps = np.searchsorted(self.starts, [each.begin for each in self.samples], "right") - 1
        samples = [each for each, step in zip(self.samples, steps, strict=True) if usual[max(0, step)]]
        return replace(self, samples=samples, starts=[*itertools.compress(self.starts, usual)])

    def outside(self) -> Work:
        """Return the work of the user's lines in steps that is not training, as a share of the steps.

        The work includes time without operators, and operators without a backward counterpart. It excludes operators
        in `often`, and the time between two of these operators, which is the cost of calling them.
        """
        rows, total = [row for row in self._other_work() if row[1]], _total(self.in_steps)
        operators = self.operators[self._of_kind("recorded")]
        recorded = sum(min(seconds, _within(operators, sample)) for sample, _, seconds in rows)
        return replace(self._work(rows, total), recorded=recorded / total if rows else 0.0)

    def framework(self) -> Framework:
        """Return the work, other than training, of the framework that runs the loop, as `outside` does."""
        rows, total = [row for row in self._other_work() if not row[1]], _total(self.in_steps)
        by_part = defaultdict[tuple[str, str], list[_Row]](list)
        for row in rows:
            by_part[_part(row[0])].append(row)
        parts = [Part(*part, self._work(rows, total).share) for part, rows in by_part.items() if any(part)]
        return Framework(self.site.framework, self._work(rows, total), (*sorted(parts, key=lambda each: -each.share),))

    def evaluated(self) -> Work:
        """Return the networks that run without training and may be needed, as a teacher is; none if they take long."""
        _, evaluated = self._untrained
        total = _total(self.in_steps)
        return self._work(evaluated, total) if _seconds(evaluated) < thresholds.EVALUATED * total else Work()

    def constant(self) -> Work:
        """Return the work of trained networks that no gradient needs, such as masks, and features of a frozen part."""
        tracked = self.operators[self._of_kind("tracked")]
        not_trained = [self.operators[self._of_kind(*kinds)] for kinds in (("tracked", "recorded"), ("untracked",))]
        trains = self._trains(*not_trained)
        rows = [
            (each, self.site.changeable(each.path), _within(tracked, each))
            for each in self.in_steps
            if each.path and trains[each.to_network] and any_of(_NETWORK, each.frames)
        ]
        return self._work(rows, _total(self.in_steps))

    def _other_work(self) -> list[_Row]:
        """Return the samples in which a step does other work, with networks that take too long for a teacher."""
        rows, evaluated = self._untrained
        return rows + evaluated * (_seconds(evaluated) >= thresholds.EVALUATED * _total(self.in_steps))

    @cached_property
    def _untrained(self) -> tuple[list[_Row], list[_Row]]:
        """The samples in which a step does not train, with the lines that the user may change.

        The second list has networks that run without training.
        """
        gaps, seldom = self._gaps(), ~np.isin(self.names, list(self.often))
        calls = self.operators.copy()  # with the short gap until the next operator, which belongs to the call
        calls[:-1, 1] = np.where(calls[1:, 0] - calls[:-1, 1] <= thresholds.OPERATOR_GAP_S, calls[1:, 0], calls[:-1, 1])
        tracked = calls[seldom & self._of_kind("tracked", "recorded")]
        untracked = calls[seldom & self._of_kind("untracked")]
        trains = self._trains(tracked, untracked)
        rows, evaluated = list[_Row](), list[_Row]()
        for sample in self.in_steps:
            called = _called(sample)
            if not sample.path or any_of(_TRAINING, called):
                continue
            seconds, in_training = _within(untracked, sample), trains[sample.to_network]
            if not (in_training and any_of(_NETWORK, sample.frames)):
                seconds += _within(tracked, sample)
            idle = 0.0 if in_training and any_of(_NETWORK, called) else _within(gaps, sample)
            own = (in_training and idle > seconds) or not any_of(_NETWORK, sample.inside)
            (rows if own else evaluated).append((sample, sample.path if own else sample.to_network, seconds + idle))

        def changeable(rows: list[_Row]) -> list[_Row]:
            return [(sample, self.site.changeable(stack), seconds) for sample, stack, seconds in rows]

        return changeable(rows), changeable(evaluated)

    def _trains(self, tracked: np.ndarray, untracked: np.ndarray) -> dict[Stack, bool]:
        """Return for each stack whether the network that it calls is trained, perhaps behind a frozen part of it.

        Other networks only prepare images.
        """
        training = self.operators[self._of_kind("training")]
        trained, others = defaultdict[Stack, float](float), defaultdict[Stack, float](float)
        for sample in self.in_steps:
            trained[sample.to_network] += _within(training, sample)
            others[sample.to_network] += _within(tracked, sample) + _within(untracked, sample)
        return {stack: seconds > thresholds.TRAINED * others[stack] for stack, seconds in trained.items()}

    def _of_kind(self, *kinds: str) -> np.ndarray:
        return np.isin(self.kinds, kinds)

    def _gaps(self) -> np.ndarray:
        """Return begin and end of each gap, shape (gaps, 2); gaps between two operators in `often` are excluded."""
        begins, ends = np.r_[-np.inf, self.operators[:, 1]], np.r_[self.operators[:, 0], np.inf]
        chosen = np.isin(self.names, list(self.often))
        within = np.r_[False, chosen[:-1] & chosen[1:], False][: len(begins)]
        counts = (ends - begins > thresholds.OPERATOR_GAP_S) & ~within
        return np.stack([begins[counts], ends[counts]], axis=1)

    def around(self) -> Work:
        """Return the work of the user's lines between steps, without loading, as a share of the sampled time."""
        rows = [
            (each, each.path, each.seconds)
            for each in self.samples
            if each.within is not self.step and each.path and not any_of(_LOADING, each.frames)
        ]
        return self._work(rows, _total(self.samples))

    def _work(self, rows: list[_Row], total: float) -> Work:
        """Sum up rows as a share of `total` seconds."""
        if not rows:
            return Work()
        steps = np.searchsorted(self.starts, [sample.begin for sample, *_ in rows], "right")
        by_step = np.bincount(steps, [seconds for *_, seconds in rows], len(self.starts) + 1).tolist()
        outside = sum(without_hiccup(by_step))  # the longest step may have a stall of the machine
        share = outside / total
        waited = sum(sample.waited * seconds / sample.seconds for sample, _, seconds in rows)
        waited *= share / (_seconds(rows) or 1.0)
        return Work(share, outside / len(self.starts) * 1e3, waited, hottest(row[1:] for row in rows))

    def calling(self, names: frozenset[str]) -> tuple[str, float, float]:
        """Return the line that calls most of these operators, "" if unknown; the share of the time with calls; and the
        part of the calls that the line's function makes, 1 if the line is unknown.

        Calls by PyTorch's own functions for gradients, such as ``clip_grad_norm_``, are not the line's.
        """
        starts = self.operators[np.isin(self.names, list(names)), 0]
        counts = [(each, int(((each.begin <= starts) & (starts < each.end)).sum())) for each in self.in_steps]
        share = _total(each for each, count in counts if count) / (_total(self.in_steps) or 1.0)
        own = [
            (self.site.changeable(each.path), count) for each, count in counts if not any_of(_UTILITIES, _called(each))
        ]
        line = hottest(own)
        inner = line.partition(", called at ")[0]
        functions = {each.function for each in {frame for stack, _ in own for frame in stack} if str(each) in inner}
        its = sum(count for stack, count in own if functions & {frame.function for frame in stack})
        return line, share, its / (sum(count for _, count in counts) or 1) if line else 1.0

    def elementwise(self) -> tuple[float, str]:
        """Return the share of elementwise training operators called without `torch.nn`, and the user's main line."""
        chosen = [bool(re.fullmatch(_ELEMENTWISE, name)) for name in self.names]
        calls = self.operators[np.array(chosen, bool) & self._of_kind("training")]
        times = [(sample, _within(calls, sample)) for sample in self.in_steps]
        own = [
            (self.site.changeable(sample.path), seconds)
            for sample, seconds in times
            if sample.path and not any_of(_NETWORK, sample.inside)
        ]
        return sum(seconds for _, seconds in own) / (sum(seconds for _, seconds in times) or 1.0), hottest(own)

    def line_to(self, pattern: str) -> str:
        """Return the line that takes most time in calls of functions that match a pattern, "" if unknown."""
        calls = (each for each in self.in_steps if any_of(pattern, each.inside))
        return hottest((self.site.changeable(each.path), each.seconds) for each in calls)

    def share_of(self, pattern: str) -> float:
        """Return the share of the steps in functions that match a pattern, and in the functions that they call."""
        return _total(each for each in self.in_steps if any_of(pattern, each.frames)) / (_total(self.in_steps) or 1.0)

    def lines_of_gpu(self) -> GpuLines:
        """Return the lines at which the host and the GPU wait for each other."""
        if self.gpu is None:
            return GpuLines()

        def line_in(intervals: np.ndarray, samples: Iterable[Sample] = self.in_steps) -> str:
            covered = ((each, _within(intervals, each)) for each in samples)
            return hottest((self.site.changeable(each.path), weight) for each, weight in covered if weight)

        # Long gaps in the training itself, as in a backward pass, are no other work
        other = [each for each in self.in_steps if not any_of(f"{_TRAINING}|{_NETWORK}", each.inside)]
        begins = self.gpu.launches[:, 0]
        forward = [each for each in self.in_steps if not any_of(_BACKWARD_CALL, each.inside)]
        counts = ((each, float(((each.begin <= begins) & (begins < each.end)).sum())) for each in forward)
        launching = hottest((self.site.changeable(each.path), count) for each, count in counts if count)
        waited = [_within(self.gpu.waits, each) for each in self.in_steps]
        scaling = sum(itertools.compress(waited, [any_of(_SCALES, each.frames) for each in self.in_steps]))
        lines = line_in(self.gpu.waits), line_in(self.gpu.copies), line_in(self.gpu.gaps, other), launching
        return GpuLines(*lines, scaling=scaling / max(sum(waited), 1e-9))

    def growing(self) -> str:
        """Return the line whose time grows most from the first half of the steps to the second half, "" if unknown."""
        middle, halves = self.starts[len(self.starts) // 2], [defaultdict[Stack, float](float) for _ in range(2)]
        for each in self.in_steps:
            halves[each.begin >= middle][each.path] += each.seconds
        before, after = halves
        new = {path: max(0.0, 1 - before[path] / seconds) for path, seconds in after.items() if seconds}
        late = (each for each in self.in_steps if each.begin >= middle)
        rows = ((self.site.changeable(each.path), each.seconds * new.get(each.path, 0.0)) for each in late)
        return hottest(rows)

    def getting(self) -> str:
        """Return the line that gets a batch, "" if unknown."""
        return hottest((each.path, each.seconds) for each in self.samples if each.within is not self.step)


_Row = tuple[Sample, Stack, float]  # a sample, the stack to look at, and the seconds of the sample that count


def _total(samples: Iterable[Sample]) -> float:
    return sum(each.seconds for each in samples)


def _seconds(rows: Iterable[_Row]) -> float:
    return sum(seconds for *_, seconds in rows)


def _within(intervals: np.ndarray, sample: Sample) -> float:
    """Return how many seconds of a sample the intervals cover; they are disjoint and in order, shape (intervals, 2)."""
    first = np.searchsorted(intervals[:, 1], sample.begin, "right")
    chosen = intervals[first : np.searchsorted(intervals[:, 0], sample.end)]
    return float(np.diff(chosen.clip(sample.begin, sample.end)).sum())


def _called(sample: Sample) -> Stack:
    """Return the function that the user's line calls, without functions of other packages that only call PyTorch.

    A framework's functions that an optimizer calls back, in a closure, count as the framework's.
    """
    frames = [*reversed(sample.inside)]
    network = next((number for number, frame in enumerate(frames) if any_of(_NETWORK, [frame])), len(frames))
    others = [number for number, frame in enumerate(frames[:network]) if frame.package not in ("", "torch")]
    start = others[-1] + 1 if others else 0
    return tuple(frames[start : start + 1])


def _part(sample: Sample) -> tuple[str, str]:
    """Return which part of a framework works, and its kind; both "" for the work that no setting changes."""
    for frame in reversed(sample.inside):
        if not re.search(_CALLS_PARTS, frame.qualified):
            for kind, pattern in _PARTS.items():
                if re.search(pattern, f"{frame.file}:{frame.qualified}"):
                    return frame.qualified, kind
    logs = next((frame.qualified for frame in sample.inside if re.search(_LOGS, frame.qualified)), "")
    return logs, "logging" if logs else ""


def of_samples(trace: traces.Trace, samples: list[Sample], begun: list[float], step: CodeType, site: Site) -> Sampled:
    """Combine a profile and samples of the same steps. `begun` is when each step began; the last step is excluded."""
    (span,), (*begun, end), shift = trace.spans, begun, time.perf_counter() - time.time()
    operators = _outermost(trace)
    times = (operators[["start", "end"]].to_numpy() + span.origin) / 1e6 + shift
    samples = [each for each in samples if each.within is not None and begun[0] <= each.begin < end]
    names, kinds, gpu = operators["name"].tolist(), operators["kind"].tolist(), None
    if any(span.kernels.height for span in trace.spans):
        gpu = _gpu(trace, lambda table: (table[["start", "end"]].to_numpy(float) + span.origin) / 1e6 + shift)
    return Sampled(samples, times, names, kinds, begun, step, site, gpu=gpu)


def _gpu(trace: traces.Trace, seconds: Callable[[pd.DataFrame], np.ndarray]) -> Gpu:
    """Return where a GPU and its host wait for each other; `seconds` returns begin and end on the samples' clock."""
    waits, gaps = traces.waits(trace), traces.idle(trace)
    copied = waits["copy"] == TO_DEVICE
    late = gaps[gaps["late"] > thresholds.LAUNCH_GAP_US].assign(end=lambda gap: gap["start"] + gap["late"])
    events = pd.concat([span.events.table() for span in trace.spans], ignore_index=True)
    threads = events.loc[events["kind"] == "step", "thread"]
    launching = (events["kind"] == "Runtime") & events["name"].str.contains("Launch") & events["thread"].isin(threads)
    several = [waits[~copied], waits[copied], late.sort_values("start"), events[launching]]
    return Gpu(*map(seconds, several))


def _outermost(trace: traces.Trace) -> pd.DataFrame:
    """Return the outermost operators of the thread that runs the steps, in order.

    Columns, with times in µs: `name`, `start`, `end`, `length`; `gap` until the next operator; `backward`, the time of
    its backward pass; `optimizer`, whether an optimizer calls it; `faster`, whether that optimizer has a fused version
    for the CPU; and `kind`, as in `Sampled`.
    """
    return pd.concat([_outermost_of(span.events.table()) for span in trace.spans], ignore_index=True)


def _outermost_of(events: pd.DataFrame) -> pd.DataFrame:
    called_back = _called_back(events)
    steps = events[events["kind"] == "step"]
    events = events[events["thread"].isin(steps["thread"]) & (events["end"] <= steps["end"].max())]
    loading = _during(events["start"], events[events["kind"] == "DataLoader"])  # in the loop itself: not in a step
    operators = events.loc[events["operator"] & ~loading, ["name", "start", "end", "sequence"]]
    table = _without_nested(operators)
    backward = table["name"].str.startswith("autograd::")
    optimizer = _by_optimizers(table, events[events["name"].str.startswith("Optimizer.")], backward)
    # Only the last operator with a sequence number has a backward pass: autograd then takes the next number
    trained = operators.assign(row=np.searchsorted(table["start"], operators["start"], "right") - 1)
    trained = trained[~backward.to_numpy()[trained["row"]] & trained["sequence"].isin(called_back.index)]
    trained = trained.drop_duplicates("sequence", keep="last")
    training = backward | optimizer | np.isin(np.arange(len(table)), trained["row"])
    # An operator that autograd records takes a sequence number: the next operator has a larger one
    called = table.loc[~backward, "sequence"].dropna()
    recorded = (called.shift(-1) > called).reindex(table.index, fill_value=False)
    untrained = np.select([table["sequence"].isna(), recorded], ["untracked", "recorded"], "tracked")
    return table.assign(
        length=table["end"] - table["start"],
        gap=(table["start"].shift(-1) - table["end"]).clip(0, thresholds.OPERATOR_GAP_S * 1e6).fillna(0),
        backward=np.bincount(trained["row"], called_back[trained["sequence"]], len(table)),
        optimizer=optimizer,
        faster=_during(table["start"], events[events["name"].str.fullmatch(_FUSED_ON_CPU)]),
        kind=np.where(training, "training", untrained),
    )


def _by_optimizers(table: pd.DataFrame, calls: pd.DataFrame, backward: pd.Series) -> pd.Series:
    """Return which operators the calls of optimizers contain, without the closure that an optimizer calls first.

    Lightning trains in a closure. LBFGS calls its closure again and again, and works without gradients in between.
    """
    calls = _without_nested(calls)  # a closure may call `zero_grad`
    numbers = np.searchsorted(calls["start"], table["start"], "right") - 1
    within = _during(table["start"], calls)
    last = table["start"].where(backward & within).groupby(numbers).transform("max").fillna(-np.inf)
    repeats = np.append(calls["name"].str.contains("LBFGS").to_numpy(bool), False)[numbers]
    return within & ~backward & ((table["start"] > last) | (repeats & table["sequence"].isna()))


def _without_nested(operators: pd.DataFrame) -> pd.DataFrame:
    """Return the operators that begin when all earlier operators of the table have ended."""
    return operators[operators["start"] >= operators["end"].cummax().shift(fill_value=-np.inf)]


def _called_back(events: pd.DataFrame) -> pd.Series:
    """Return the time of each operator's backward pass in µs, by the operator's sequence number."""
    parts = events[events["name"].str.startswith(_BACKWARD)].dropna(subset="sequence")
    gap = parts.groupby("thread")["start"].shift(-1) - parts["end"]
    gap = gap.clip(0, thresholds.OPERATOR_GAP_S * 1e6).fillna(0)
    return (parts["end"] - parts["start"] + gap).groupby(parts["sequence"]).sum()


def _repeated(trace: traces.Trace) -> float:
    """Return the share of the backward passes that go through parts of a graph that an earlier pass went through."""
    again = total = 0.0
    for events in (span.events.table() for span in trace.spans):
        parts = events[events["name"].str.startswith(_BACKWARD)].dropna(subset="sequence").sort_values("start")
        us = parts["end"] - parts["start"]
        weights = parts["name"].str.endswith("AccumulateGrad")  # they have no number of their own
        again += float(us[parts.duplicated(["thread", "name", "sequence"]) & ~weights].sum())
        total += float(us.sum())
    return again / total if total else 0.0


def _total_us(trace: traces.Trace, chosen: Callable[[pd.DataFrame], pd.Series]) -> float:
    """Return the time of the chosen events in µs, each moment once."""
    total = 0.0
    for events in (span.events.table() for span in trace.spans):
        outermost = _without_nested(events[chosen(events)])
        total += float((outermost["end"] - outermost["start"]).sum())
    return total


def _checks_for_nan(events: pd.DataFrame) -> pd.Series:
    """Return which events are checks for NaN in backward passes."""
    passes = events[events["name"].str.startswith(_BACKWARD)]
    return events["name"].isin(_CHECKS_FOR_NAN) & _during(events["start"], passes)


def _during(moments: pd.Series, events: pd.DataFrame) -> pd.Series:
    """Return whether each moment is during one of the events, which are disjoint."""
    inside = np.searchsorted(events["start"], moments, "right") - 1
    return moments < np.append(events["end"].to_numpy(), -np.inf)[inside]  # −1: before all events


def read(trace: traces.Trace, profile: Profile, sampled: Sampled | None = None) -> Host:
    """Return the host's overhead in a step, beside the work of operators; `sampled` are sampled steps of the loop."""
    operators = _outermost(trace)
    phases = _phases(operators, profile.total_us)
    operators = operators[~operators["name"].str.startswith("autograd::")]  # PyTorch decides on these calls
    optimizer = operators["optimizer"]
    fusible = operators[optimizer & (operators["faster"] | profile.on_device)]
    # With a GPU, the gaps between its kernels show whether the GPU waits for launches
    other_operators = operators.head(0) if profile.on_device else operators[~optimizer]
    by_weight = _calls(fusible, thresholds.MANY_WEIGHTS, profile, sampled)
    calls = _calls(other_operators, thresholds.MANY_CALLS, profile, sampled)
    often = frozenset(
        each.name for group in (by_weight, calls) for each in group.operators if group.share >= thresholds.HOST_WORK
    )
    host = Host(by_weight, calls, phases=phases, repeated=_repeated(trace))
    if sampled is None:
        return host
    sampled = replace(sampled, often=often)
    host = replace(
        host,
        outside=sampled.outside(),
        evaluated=sampled.evaluated(),
        constant=sampled.constant(),
        around=sampled.around(),
        framework=sampled.framework(),
        backward_line=sampled.line_to(_BACKWARD_CALL),
        recomputed=sampled.share_of(_RECOMPUTES),
        debugging=sampled.share_of(_NOTES_OPERATORS) + _total_us(trace, _checks_for_nan) / profile.total_us,
        sampled_ms=sampled.step_ms,
    )
    if profile.on_device:  # `device` examines the kernels
        return replace(host, on_gpu=sampled.lines_of_gpu())
    seldom = ~operators["name"].isin(often)
    large = operators["name"].str.fullmatch(_ELEMENTWISE) & (operators["kind"] == "training") & ~optimizer & seldom
    own, line = sampled.elementwise()
    updates = operators[optimizer & seldom]
    dense = _total_us(trace, lambda events: events["name"] == "aten::embedding_dense_backward")
    return replace(
        host,
        embedding=dense / profile.total_us,
        elementwise=own * float((operators["length"] + operators["backward"])[large].sum()) / profile.total_us,
        elementwise_line=line,
        updates=float((updates["length"] + updates["gap"]).sum()) / profile.total_us,
        updates_line=sampled.line_to(_OPTIMIZER),
    )


def _phases(operators: pd.DataFrame, total_us: float) -> dict[str, float]:
    """Return the shares of the forward pass, the backward pass and the update."""
    us, backward = operators["length"] + operators["gap"], operators["name"].str.startswith("autograd::")
    update = operators["optimizer"].astype(bool)
    chosen = {"forward": ~(backward | update), "backward": backward, "update": update}
    return {name: float(us[rows].sum()) / total_us for name, rows in chosen.items()}


def _calls(operators: pd.DataFrame, many: int, profile: Profile, sampled: Sampled | None) -> Calls:
    """Return the calls of short operators, or of recurrent cells, that a step calls at least `many` times."""
    lengths = operators.groupby("name")["length"]
    short = lengths.transform("median") <= thresholds.SHORT_OPERATOR_US
    short |= operators["name"].str.fullmatch(_CELL).astype(bool)
    table = operators[(lengths.transform("size") >= many * profile.steps) & short]
    if not len(table):
        return Calls()
    # Time beyond the usual is work on a large tensor, or a stall of the machine. The backward pass of a call may have
    # several operators
    usual = table.groupby("name")["length"].transform("median").clip(lower=thresholds.SHORT_OPERATOR_US)
    us = (table["length"].clip(upper=usual) + table["gap"]).sum() + table["backward"].clip(upper=3 * usual).sum()
    sums = table.groupby("name")["length"].agg(["size", "sum"]).sort_values("sum", ascending=False)
    names = tuple(Operator(str(name), float(row["size"]) / profile.steps) for name, row in sums.iterrows())
    line, share, its = sampled.calling(frozenset(table["name"])) if sampled else ("", 0.0, 1.0)
    return Calls(float(us) / profile.total_us, names, float(table["length"].median()), line, share, its)


def steps_to_sample(profile: Profile, step_ms: float, works: Sequence[float] = ()) -> int:
    """Return how many steps of `step_ms` to sample, limited by time and by the number of operators.

    `works` is the duration of earlier steps, in any unit: if some steps take far longer, such as every tenth step that
    evaluates, two long steps are sampled. The number is 0 if a step is too short, or has too many operators.
    """
    operators, least = profile.operators / profile.steps, thresholds.LEAST_SAMPLED_STEPS
    if step_ms < thresholds.LEAST_SAMPLED_MS or least * operators > thresholds.TOO_MANY_OPERATORS:
        return 0
    by_time = thresholds.STEPS_SAMPLED_S * 1e3 / step_ms + 1
    most = min(thresholds.MOST_SAMPLED_STEPS, thresholds.MOST_OPERATORS / max(operators, 1), by_time)
    long = sum(work > thresholds.LONGER_STEP * statistics.median(works) for work in works)
    for_two = math.ceil(2 * len(works) / long) + 1 if long > 1 else 0
    return max(least, int(most), for_two if for_two * operators <= thresholds.TOO_MANY_OPERATORS else 0)
