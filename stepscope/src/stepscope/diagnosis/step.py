"""What a step costs the host: short operators that are called very often, and work outside of operators.

The operators are in the trace. Code between them is sampled line by line while the profiler records the operators.
"""

import bisect
import math
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, SimpleNamespace

import numpy as np
import pandas as pd

from stepscope import traces
from stepscope.base.confidence import without_hiccup
from stepscope.base.wording import counted, percent, printable
from stepscope.diagnosis import stacks
from stepscope.diagnosis.profile import Profile
from stepscope.diagnosis.result import Rule

# Calls of one operator, in a step and in a call of an optimizer. A ResNet-50 has 161 tensors of weights, and 53
# convolutions with as many batch norms.
MANY, MANY_WEIGHTS = 60, 16
# Median µs. On a tensor of a few numbers an operator takes 2 to 10 µs on the CPU, one that calls others some 40.
SHORT = 60.0

SAMPLE = 0.001  # seconds between samples
SECONDS, LEAST_STEPS, MOST_STEPS = 0.5, 3, 50  # of sampling
MOST_OPERATORS = 20_000  # in all steps: reading so many takes a second
TOO_MANY_OPERATORS = 300_000  # in the fewest steps: then no step is sampled
MORE = 1.5  # times the median: a step that takes longer may do work that others do not
LEAST_MS = 1.0  # of a step: a shorter step is mostly calls, and samples say little about it
# Shortest gap between operators that counts, in seconds: PyTorch's own code between two operators takes some 10 µs.
GAP = 1e-4
_FUSED_ON_CPU = r"Optimizer\.step#(SGD|Adam|AdamW|Adagrad)\.step"  # foreach gains nothing there
SHARE = 0.1  # of a step, for one function: with 200 samples it is 8 to 12%
LARGE = 0.3  # of a step, for large elementwise operators that the user's lines call: any network has some
UPDATES = 0.5  # of a step, for the optimizer
EVALUATED = 0.5  # of a step, for networks without gradients: a teacher takes as long as a forward pass
SLOWED = 1.5  # a sampled step may take this many times as long as one without the profiler
_BACKWARD = "autograd::engine::evaluate_function"  # the operator that runs a part of the backward pass
# Memory-bound operators: they read and write each number and compute little with it
_ELEMENTWISE = (
    r"aten::(add|sub|rsub|mul|div|neg|abs|pow|square|sqrt|rsqrt|exp|log|sin|cos|clamp|where|maximum|minimum|masked_fill"
    r"|sum|mean|var|std|norm|amax|amin|cat|stack|repeat|clone|contiguous)_?"
)
_CELL = r"aten::(lstm|gru|rnn_tanh|rnn_relu)_cell"  # one call of a recurrent network can replace all its cells

# A line that calls these counts as training: between operators they are PyTorch's own work. The operators of a network
# that runs without gradients do not count as training.
_OF_TRAINING = (
    r"nn[/\\]utils|optim|autograd|amp|distributed|_?compile|_dynamo|_inductor|_functorch|_tensor\.py.*backward"
)
_TRAINING, _NETWORK = rf"[/\\]torch[/\\]({_OF_TRAINING})", r"[/\\]torch[/\\]nn[/\\]"
# Where a DataLoader makes a batch in the loop itself, waits for a worker's batch, or starts and ends workers: `loading`
# covers these
_LOADING = (
    r"[/\\]torch[/\\]utils[/\\]data[/\\]"
    r"(_utils[/\\]fetch\.py|dataloader\.py:(_get_data|_try_get_data|_get_iterator|_shutdown_workers)$)"
)


@dataclass(frozen=True)
class Outside:
    """Work of the user's lines that is not training."""

    share: float = 0.0  # of the time
    ms: float = 0.0  # a step
    waited: float = 0.0  # the part of `share` spent waiting
    line: str = ""  # that takes most of it; "" if unknown


@dataclass(frozen=True)
class Sampled:
    """Steps that were sampled; times in s on the clock of the samples."""

    samples: list[stacks.Sample]  # those within steps, and within getting their batches
    operators: np.ndarray  # begin and end of each operator that no other calls, in order; shape (operators, 2)
    names: list[str]  # of the operators
    kinds: list[str]  # of each operator: "training", "tracked" by autograd for nothing, or "untracked"
    starts: list[float]  # when each step began, after it had its batch
    step: CodeType | None  # the function of a step; samples within another function belong to getting a batch

    @property
    def step_ms(self) -> float:
        """The mean time of a step without its batch."""
        return sum(each.seconds for each in self.in_steps) / len(self.starts) * 1e3

    @property
    def in_steps(self) -> list[stacks.Sample]:
        """The samples within steps."""
        return [each for each in self.samples if each.within is self.step]

    def outside(self, often: frozenset[str]) -> Outside:
        """Return the work of the user's lines in steps that is not training, as a share of the steps.

        It includes the time without operators, and operators that the backward pass does not call back. Operators in
        `often` do not count, nor does the time between two of them, which belongs to calling them.
        """
        gaps, kinds, seldom = self._gaps(often), np.array(self.kinds, object), ~np.isin(self.names, list(often))
        calls = self.operators.copy()  # with the short time until the next operator, which belongs to the call
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
        """Return for each stack that calls a network whether it trains it: a network may also prepare images."""
        training = self.operators[np.array(self.kinds, object) == "training"]
        times: dict[tuple[stacks.Frame, ...], float] = defaultdict(float)
        for sample in self.in_steps:
            others = _within(tracked, sample) + _within(untracked, sample)
            times[sample.to_network] += _within(training, sample) - others
        return {stack: seconds > 0 for stack, seconds in times.items()}

    def around(self) -> Outside:
        """Return the work of the user's lines between steps, without loading, as a share of all the time."""
        rows = [
            (sample, sample.path, sample.seconds)
            for sample in self.samples
            if sample.within is not self.step and sample.path and not _any(_LOADING, sample.frames)
        ]
        return self._summed(rows, sum(sample.seconds for sample in self.samples))

    def _summed(self, rows: list[tuple[stacks.Sample, tuple[stacks.Frame, ...], float]], total: float) -> Outside:
        """Sum up rows of a sample, the stack to look at, and the part of the sample's time that counts, in s."""
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
        """Return the user's line that calls most of the operators with these names, "" if unknown; and the share of the
        steps in samples with a call.
        """
        starts = self.operators[np.isin(self.names, list(names)), 0]
        counts = [float(np.diff(np.searchsorted(starts, [each.begin, each.end]))[0]) for each in self.in_steps]
        pairs = list(zip(self.in_steps, counts, strict=True))
        total = sum(each.seconds for each in self.in_steps)
        share = sum(each.seconds for each, count in pairs if count) / total if total else 0.0
        return stacks.hottest((each.path, count) for each, count in pairs), share

    def elementwise(self) -> tuple[float, str]:
        """Return which share of the time of elementwise training operators the user's lines call without a function of
        `torch.nn`; and the line that takes most of it, "" if unknown.
        """
        chosen = [bool(re.fullmatch(_ELEMENTWISE, name)) for name in self.names]
        calls = self.operators[np.array(chosen, bool) & (np.array(self.kinds, object) == "training")]
        rows = [(sample, _within(calls, sample)) for sample in self.in_steps]
        own = [(sample.path, seconds) for sample, seconds in rows if sample.path and not _any(_NETWORK, sample.inside)]
        total = sum(seconds for _, seconds in rows)
        return sum(seconds for _, seconds in own) / total if total else 0.0, stacks.hottest(own)

    def updating(self) -> str:
        """Return the line that calls an optimizer, "" if unknown."""
        return stacks.hottest(
            (sample.path, sample.seconds) for sample in self.in_steps if _any(r"[/\\]torch[/\\]optim", sample.inside)
        )

    def getting(self) -> str:
        """Return the line that gets a batch, "" if unknown."""
        return stacks.hottest(
            (sample.path, sample.seconds) for sample in self.samples if sample.within is not self.step
        )

    def _gaps(self, often: frozenset[str]) -> np.ndarray:
        """Return begin and end of each gap, shape (gaps, 2); gaps between two operators in `often` do not count."""
        begins, ends = np.r_[-np.inf, self.operators[:, 1]], np.r_[self.operators[:, 0], np.inf]
        chosen = np.isin(self.names, list(often))
        within = np.r_[False, chosen[:-1] & chosen[1:], False][: len(begins)]
        return np.stack([begins, ends], axis=1)[(ends - begins > GAP) & ~within]


def _within(intervals: np.ndarray, sample: stacks.Sample) -> float:
    """Return how many seconds of a sample these disjoint intervals cover."""
    return float(np.diff(intervals.clip(sample.begin, sample.end)).sum())


def _any(pattern: str, frames: Iterable[stacks.Frame]) -> bool:
    """Whether the file and name of one of these functions match."""
    return any(re.search(pattern, f"{frame.file}:{frame.name}") for frame in frames)


def sample(loader: Iterable, call: Callable, steps: int, getting: CodeType) -> Sampled:
    """Record `steps` steps with the profiler while they are sampled; no worker of the loader is left.

    `getting` is the code of the function that gets a batch of the loader. Earlier steps do not count: they wait for the
    workers, and the profiler starts up. One more step does not count either: the last step may end before it is
    sampled.
    """
    from stepscope.timing import profiling  # here, since torch takes seconds, and the shell does not need it

    begun = []

    def step(*batch: object) -> None:
        begun.append(time.perf_counter())
        call(*batch)

    with tempfile.TemporaryDirectory() as folder, stacks.Sampler(SAMPLE, step.__code__, getting) as sampler:
        trace = traces.load(profiling.record(loader, step, Path(folder), active=steps + 1))
    return of_samples(trace, sampler.samples, begun[-steps - 1 :], step.__code__)


def of_samples(trace: traces.Trace, samples: list[stacks.Sample], begun: list[float], step: CodeType) -> Sampled:
    """Combine a profile and samples of the same steps. `begun` is when each step began; the last step does not count.

    `step` is the code of the function of a step.
    """
    (span,), (*begun, end), shift = trace.spans, begun, time.perf_counter() - time.time()
    operators = _outermost(trace)
    times = (operators[["start", "end"]].to_numpy() + span.origin) / 1e6 + shift
    samples = [each for each in samples if each.within is not None and begun[0] <= each.begin < end]
    return Sampled(samples, times, operators["name"].tolist(), operators["kind"].tolist(), begun, step)


def _outermost(trace: traces.Trace) -> pd.DataFrame:
    """Return the operators of the thread that runs the steps, in order, without those that other operators call.

    The columns, with times in µs: `name`, `start`, `end`, `length`, `gap` to the next operator; `backward`, its time in
    the backward pass; `optimizer`, whether an optimizer calls it; `faster`, whether that optimizer has a faster way on
    a CPU, too; and `kind`, as of `Sampled`.
    """
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
        # Of operators with the same number, the last is the one that is called back: then autograd counts on
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
    """Return whether each moment is during one of these disjoint events."""
    inside = np.searchsorted(events["start"], moments, "right") - 1
    return (moments < np.append(events["end"].to_numpy(), -np.inf)[inside]).to_numpy()  # −1: before all events


def read(
    profile: Profile, work: float = 1.0, step_ms: float = math.inf, sampled: Sampled | None = None
) -> SimpleNamespace:
    """Return what a step costs the host beside the work of its operators.

    `work` is the share of a step in which it does not wait for its batch, `step_ms` the time of a step, and `sampled`
    are sampled steps, if the loop could run.
    """
    # The largest share that can be gained: while a GPU is busy, the host's calls cost nothing
    limit = min(work, profile.host) if profile.on_device else work
    operators = _outermost(profile.trace)
    operators = operators[~operators["name"].str.startswith("autograd::")]  # their calls are PyTorch's own choice
    optimizer = operators["optimizer"]
    many = math.inf if profile.on_device else MANY  # on a GPU, gaps show whether it waits for launches
    calls = {
        "optimizer": _often(
            operators[optimizer & (operators["faster"] | profile.on_device)], MANY_WEIGHTS * profile.steps
        ),
        "others": _often(operators[~optimizer], many * profile.steps),
    }
    # Time beyond the usual is work on a large tensor, or a stall of the machine. The backward pass of a call may be
    # several operators
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
            # More than the calls: Python, and operators between them; not in an optimizer, which has a faster version.
            # The profiler makes the rest of a sampled step no shorter
            if name == "others":
                rest = (1 - most) * sampled.step_ms / step_ms
                with_python = max(min(most * work, SLOWED * shares[name]), work - rest)
                shares[name] = min(limit, max(shares[name], with_python))
    on_cpu = sampled is not None and not profile.on_device  # for a GPU, `device` examines the kernels
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
    """Return sampled work as a share of a step without the profiler, at most the limit.

    The profiler slows operators, but hardly the code between them, so this share may exceed that of the sampled steps.
    """
    share = min(limit, max(outside.share * work, min(outside.ms / step_ms, SLOWED * outside.share * work)))
    return replace(outside, share=share, waited=outside.waited * share / (outside.share or 1.0))


def steps_to_sample(profile: Profile, step_ms: float, works: Sequence[float] = ()) -> int:
    """Return how many steps of `step_ms` to sample, limited by time and by the number of operators.

    `works` are the times of earlier steps, in any unit: if some do far more than most, such as every tenth that
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
    """Return a text with the three operators that take most time, how often they are called, and by which line."""
    calls = host.calls[name]
    table = calls.groupby("name")["length"].agg(["size", "sum"]).sort_values("sum", ascending=False)
    names = [f"{printable(name)} {round(row['size'] / host.steps):,} times" for name, row in table.head(3).iterrows()]
    others = f" and {counted(len(table) - 3, 'other')}" if len(table) > 3 else ""
    return (
        f"{', '.join(names)}{others}, {calls['length'].median():.0f} µs each in the median. With the code between "
        f"them, that takes {percent(host.shares[name])} of the time.{_mostly(host.lines[name])}"
    )


def _mostly(line: str) -> str:
    return f" Mostly at {line}" if line else ""


def _often(table: pd.DataFrame, least: float) -> pd.DataFrame:
    """Return the calls of operators that are called at least so often, and are short, or cells."""
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
        "# one call for the whole batch, or the whole sequence, instead of a loop in Python",
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
        "torch.compile(…)  # fuses several loops into one; or a matrix product, as torch.cdist uses for distances",
        least=LARGE,
        line=lambda host: host.lines["large"],
    ),
    Rule(
        "an optimizer that takes most of the step", "compute", "larger batches",
        lambda host: host.shares["updates"],
        lambda host: (
            f"Updating the weights takes {percent(host.shares['updates'])} of the time, however small the batch is."
            f"{_mostly(host.lines['updates'])}"
        ),
        "Adam(…, fused=True)  # and fewer updates: a larger batch, or SparseAdam for a large nn.Embedding(sparse=True)",
        least=UPDATES,
        line=lambda host: host.lines["updates"],
    ),
    Rule(
        "the step does something else", "host", "work between the operators",
        lambda host: host.outside.share,
        lambda host: f"For {percent(host.outside.share)} of the time a step does not train{_where(host.outside)}",
        "# move it out of the step, or do it every n-th step",
        least=SHARE,
        line=lambda host: host.outside.line,
    ),
    Rule(
        "work between the steps", "host", "work between the operators",
        lambda host: host.around.share,
        lambda host: (
            f"For {percent(host.around.share)} of the time the loop waits for its batch, but not for the dataset: "
            f"it does other work between the steps{_where(host.around)}"
        ),
        "# do it once, ahead of time, or in the dataset, whose workers run in parallel with the steps",
        least=SHARE,
        line=lambda host: host.around.line,
    ),
)  # fmt: skip


def _where(outside: Outside) -> str:
    """Return the end of a sentence: whether the other work waits, and its line."""
    waits = ", and mostly waits" if outside.waited >= outside.share / 2 else ""
    return f"{waits}{f': mostly at {outside.line}' if outside.line else '.'}"
