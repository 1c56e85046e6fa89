"""Reads from a trace where the time of its steps goes, and whether the trace allows a verdict."""

from __future__ import annotations

import re

from stepscope import thresholds, traces
from stepscope.facts.profile import Profile
from stepscope.traces.events import CLASSIFIERS

_OF_A_GPU = "cudnn_(?!is_acceptable)|miopen_|_cuda"  # operators; PyTorch calls the excluded operator on the CPU, too


def read(trace: traces.Trace) -> Profile:
    """Return the profile of a trace; raises NoSteps and SeveralRecordings like `traces.breakdown`."""
    table = traces.breakdown(trace)
    work = table.sum(axis="columns") - table["DataLoader"]  # without waits: with n workers, every n-th step waits
    timed = zip(table["DataLoader"] / 1e3, table.sum(axis="columns") / 1e3, strict=True)
    long, stall_ms = work > thresholds.STALL * work.median(), 0.0
    if long.sum() == 1 and len(table) > thresholds.LEAST_STEPS:
        stall_ms = float(table[long].to_numpy().sum()) / 1e3
        table[long] = table[~long].mean().to_numpy()
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
