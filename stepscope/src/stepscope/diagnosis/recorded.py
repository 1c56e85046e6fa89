"""What a trace says of a training loop as a whole: where its time goes, and whether that suffices for a verdict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepscope import traces
from stepscope.base.wording import counted, milliseconds, percent, printable
from stepscope.diagnosis.result import WORTH, Rule
from stepscope.traces.events import CLASSIFIERS

if TYPE_CHECKING:
    import pandas as pd

# With n workers every n-th step waits, so fewer steps may show the one that waits, or all but that.
LEAST_STEPS = 3
# Times as long as most a single step must take, loading left out, so that the machine seems to have stood still.
STALL = 3
# Of a step without operators and without loading, on a machine without an accelerator: too much to judge the rest.
UNEXPLAINED = 1 / 3


@dataclass(frozen=True)
class Recorded:
    """A trace in numbers."""

    trace: traces.Trace
    steps: int  # recorded
    step_ms: float  # mean
    shares: pd.Series  # of the steps' time, of each category of `traces.breakdown`
    devices: int  # accelerators that ran kernels
    in_process: bool  # whether the loop itself made the batches, without workers
    stall_ms: float = 0.0  # of the one step that took far longer than the others, and counts as their mean

    @property
    def on_device(self) -> bool:
        """Whether an accelerator ran kernels."""
        return self.devices > 0

    @property
    def total(self) -> float:
        """Time of all steps in µs."""
        return self.steps * self.step_ms * 1e3

    @property
    def loading(self) -> float:
        """Share of the time in which the loop waited for batches, and the accelerator had nothing to do."""
        return float(self.shares["DataLoader"])

    @property
    def avoidable_idle(self) -> float:
        """Share of the time in which the accelerator idles, and would not if only the host were ahead of it.

        All that the host does counts, and loading, unless it is the workers who set the pace.
        """
        return self.host + (self.loading if self.in_process or self.loading < WORTH else 0.0)

    @property
    def host(self) -> float:
        """Share of the time in which the accelerator had nothing to do and the host did something else than loading."""
        return float(self.shares[["Runtime", "CPU Exec", "Other"]].sum())


def read(trace: traces.Trace) -> Recorded:
    """Return a trace in numbers.

    Raises
    ------
    traces.NoSteps, traces.SeveralRecordings
        As `traces.breakdown`.
    """
    table = traces.breakdown(trace)
    work = table.sum(axis="columns") - table["DataLoader"]  # with n workers every n-th step waits
    long, stall_ms = work > STALL * work.median(), 0.0
    if long.sum() == 1 and len(table) > LEAST_STEPS:
        stall_ms = float(table[long].to_numpy().sum()) / 1e3
        table[long] = table[~long].mean().to_numpy()
    total = float(table.to_numpy().sum())
    loading = {name for span in trace.spans for name in span.events["name"][span.events["kind"] == "DataLoader"]}
    return Recorded(
        trace,
        len(table),
        total / len(table) / 1e3,
        table.sum() / total,
        len(set().union(*(span.kernels["device"].dropna() for span in trace.spans))),
        any("SingleProcess" in name for name in loading),
        stall_ms,
    )


def _waiting(recorded: Recorded) -> str:
    made = ", which it makes itself: DataLoader without workers" if recorded.in_process else ""
    return f"In {percent(recorded.loading)} of the time the loop waits for its next batch{made}."


# What a trace alone says of loading.
RULES = (
    Rule(
        "loading in the loop itself", "loading", "more workers",
        lambda recorded: recorded.loading if recorded.in_process else None, _waiting,
        "DataLoader(…, num_workers=2)  # try more, up to your cores",
    ),
    Rule(
        "loading too slowly", "loading", "more workers",
        lambda recorded: None if recorded.in_process else recorded.loading, _waiting,
        "DataLoader(…, num_workers=…)  # more, or less work for each item",
    ),
)  # fmt: skip


def evidence(recorded: Recorded) -> list[tuple[str, str]]:
    """Return what a trace says, as names and values."""
    parts = [f"{traces.PLAIN_NAMES[name]} {percent(share)}" for name, share in recorded.shares.items() if share >= 5e-4]
    stall = f"; one of {milliseconds(recorded.stall_ms)} counts as the others do" if recorded.stall_ms else ""
    rows = [
        ("steps", f"{recorded.steps} recorded, on average {milliseconds(recorded.step_ms)}{stall}"),
        ("in a step", ", ".join(parts)),
    ]
    if not recorded.on_device:
        return [*rows, ("accelerator", "none in the trace: this is what the host did")]
    for device, row in traces.accelerators(recorded.trace).iterrows():
        columns = {"kernels run": "utilization", "SM efficiency": "sm_efficiency", "Tensor Cores": "tensor_core_share"}
        known = [f"{name} {percent(row[column])}" for name, column in columns.items() if not np.isnan(row[column])]
        if isinstance(row["name"], str):
            known.append(printable(row["name"]))
        rows.append((f"GPU {device}", ", ".join(known)))
    return rows


def doubt(recorded: Recorded) -> str | None:
    """Return why the trace allows no verdict, or None."""
    if recorded.steps < LEAST_STEPS:
        return (
            f"The trace holds {counted(recorded.steps, 'step')}; with n workers every n-th step waits, so a verdict "
            f"takes {LEAST_STEPS} or more. Record it with schedule(…, active=8)."
        )
    if recorded.on_device:
        return None
    categories = {category for span in recorded.trace.spans for category in span.counts}
    unknown = sorted(name for name in categories if name.endswith(("_runtime", "_driver")) and name not in CLASSIFIERS)
    if unknown:
        return f"The trace is of an accelerator whose events are unknown here: {', '.join(unknown)}."
    if _ran_on_a_gpu(recorded):
        return (
            "The network ran on a GPU, but its kernels are not in the trace. Record it with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
        )
    return None


def unexplained(recorded: Recorded) -> str | None:
    """Return why to find nothing does not mean that nothing is wrong, or None."""
    if recorded.on_device or recorded.shares["Other"] < UNEXPLAINED:
        return None
    return (
        f"In {percent(recorded.shares['Other'])} of the time the trace shows neither operators nor loading: Python, "
        "other libraries, or an accelerator that PyTorch's profiler does not see. Look there with py-spy or cProfile."
    )


_OF_A_GPU = "cudnn_(?!is_acceptable)|miopen_|_cuda"  # operators; the one left out is asked on the CPU, too


def _ran_on_a_gpu(recorded: Recorded) -> bool:
    """Whether an accelerator is known to have worked, though its kernels are not in the trace."""
    spans = recorded.trace.spans
    names = {name for span in spans for name in span.events["name"][span.events["operator"]].unique()}
    return any(len(span.kernels) for span in spans) or any(re.search(_OF_A_GPU, name) for name in names)
