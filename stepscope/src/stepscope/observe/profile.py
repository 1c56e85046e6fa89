"""Reads from a trace where the time of its steps goes, and whether the trace allows a verdict."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from dataclasses import dataclass

from stepscope import thresholds, traces
from stepscope.facts.profile import Profile
from stepscope.traces.columns import named
from stepscope.traces.events import CLASSIFIERS
from stepscope.traces.step_times import step_at

_OF_A_GPU = "cudnn_(?!is_acceptable)|miopen_|_cuda"  # operators; PyTorch calls the excluded operator on the CPU, too


@dataclass(frozen=True)
class Stall:
    """A single step that is far longer than all other steps; `ms` is its duration, 0 if there is none."""

    ms: float = 0.0
    begins_epoch: bool = False  # whether an epoch with workers begins in the step


def usual(trace: traces.Trace) -> tuple[traces.Trace, Stall]:
    """Return a trace without a single step far longer than all others, and that step.

    Raises NoSteps and SeveralRecordings like `traces.breakdown`.
    """
    table = traces.breakdown(trace)
    work = table.sum(axis="columns") - table["DataLoader"]  # without waits: with n workers, every n-th step waits
    long = work > thresholds.STALL * work.median()
    if long.sum() != 1 or len(table) <= thresholds.LEAST_STEPS:
        return trace, Stall()
    step = int(table.index[long][0])
    stall = Stall(float(table[long].to_numpy().sum()) / 1e3, _begins_epoch(trace, step))
    return traces.without_step(trace, step), stall


def _begins_epoch(trace: traces.Trace, step: int) -> bool:
    """Return whether an epoch with workers begins in a step: the request that ends the epoch before is one more.

    A step that validates with a DataLoader mostly asks for several more.
    """
    asked = Counter[int]()
    for span in trace.spans:
        events = span.events.rows(named(span.events["name"], lambda name: "MultiProcessingDataLoader" in name))
        asked.update(step_at(span, events["start"]).tolist())
    own = asked.pop(step, 0)
    asked.pop(-1, None)
    return bool(asked) and own == statistics.median(asked.values()) + 1


def read(trace: traces.Trace, stall: Stall = Stall()) -> Profile:
    """Return the profile of a trace from which `usual` took a step, if there was a stall.

    Raises NoSteps and SeveralRecordings like `traces.breakdown`.
    """
    table = traces.breakdown(trace)
    timed = zip(table["DataLoader"] / 1e3, table.sum(axis="columns") / 1e3, strict=True)
    total = float(table.to_numpy().sum())
    if not total > 0:
        raise traces.NoSteps(f"The steps of {trace.path} take no time: the trace is damaged. Copy or record it again.")
    spans = trace.spans
    waits = (name for span in spans for name in span.events["name"][span.events["kind"] == "DataLoader"])
    devices = {device for span in spans for device in span.kernels["device"] if device >= 0}
    operators = [name for span in spans for name in span.events["name"][span.events["operator"]]]
    unknown = {category for span in spans for category in span.counts if category.endswith(("_runtime", "_driver"))}
    shares = table.sum() / total
    queued, between = _queued(trace, total) if devices else (0.0, 0.0)
    return Profile(
        steps=len(table),
        step_ms=total / len(table) / 1e3,
        shares={str(name): float(share) for name, share in shares.items()},
        devices=len(devices),
        in_process=any("SingleProcess" in name for name in waits),
        stall_ms=stall.ms,
        begins_epoch=stall.begins_epoch,
        queued=queued,
        between=between,
        timed=tuple((float(wait), float(step)) for wait, step in timed),
        recorded_us=float(sum(span.events["end"].max() - span.events["start"].min() for span in spans)),
        operators=len(operators),
        frames=sum(span.counts["python_function"] for span in spans),
        settings=tuple(sorted(set().union(*(span.settings for span in spans)))),
        communication=_communication(trace, float(shares["Communication"]), bool(devices)),
        lost_kernels=traces.lost_kernels(trace),
        unknown_accelerators=tuple(sorted(unknown - CLASSIFIERS.keys())),
        without_kernels=not devices
        and (any(span.kernels.height for span in spans) or any(re.search(_OF_A_GPU, name) for name in set(operators))),
    )


def _queued(trace: traces.Trace, total_us: float) -> tuple[float, float]:
    """Return the share of the steps in which no kernel runs, and nothing is copied, after the next kernel's launch.

    The first number is of gaps that need a reason, the second of gaps as short as between any two kernels.
    """
    gaps = traces.idle(trace)
    length = gaps["end"] - gaps["start"]
    idle = (length - gaps["copying"] - gaps["loading"]) * (1 - gaps["late"] / length)
    own, total_us = length <= thresholds.OWN_GAP_US, total_us * max(1, gaps["device"].nunique())
    return float(idle[~own].sum() / total_us), float(idle[own].sum() / total_us)


def _communication(trace: traces.Trace, share: float, on_device: bool) -> float:
    """Return the share of time in which the step exchanges data with other processes, and computes nothing."""
    if not share or on_device:
        return share
    (row,) = traces.communication({"this one": trace}).itertuples()
    return float(row.exposed / row.step)  # gloo's threads also exchange data while operators run
