"""Reads from a trace where the time of its steps goes, and whether the trace allows a verdict."""

from __future__ import annotations

import re

from stepscope import thresholds, traces
from stepscope.facts.profile import Profile
from stepscope.traces.events import CLASSIFIERS

_OF_A_GPU = "cudnn_(?!is_acceptable)|miopen_|_cuda"  # operators; PyTorch calls the excluded operator on the CPU, too


def usual(trace: traces.Trace) -> tuple[traces.Trace, float]:
    """Return a trace without a single step far longer than all others, and its duration in ms; or the trace and 0.

    Raises NoSteps and SeveralRecordings like `traces.breakdown`.
    """
    table = traces.breakdown(trace)
    work = table.sum(axis="columns") - table["DataLoader"]  # without waits: with n workers, every n-th step waits
    long = work > thresholds.STALL * work.median()
    if long.sum() != 1 or len(table) <= thresholds.LEAST_STEPS:
        return trace, 0.0
    return traces.without_step(trace, int(table.index[long][0])), float(table[long].to_numpy().sum()) / 1e3


def read(trace: traces.Trace, stall_ms: float = 0.0) -> Profile:
    """Return the profile of a trace from which `usual` took a step of `stall_ms`; 0 if it took none.

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
    return Profile(
        steps=len(table),
        step_ms=total / len(table) / 1e3,
        shares={str(name): float(share) for name, share in shares.items()},
        devices=len(devices),
        in_process=any("SingleProcess" in name for name in waits),
        stall_ms=stall_ms,
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


def _communication(trace: traces.Trace, share: float, on_device: bool) -> float:
    """Return the share of time in which the step exchanges data with other processes, and computes nothing."""
    if not share or on_device:
        return share
    (row,) = traces.communication({"this one": trace}).itertuples()
    return float(row.exposed / row.step)  # gloo's threads also exchange data while operators run
