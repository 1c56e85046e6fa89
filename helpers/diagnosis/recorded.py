"""What a trace tells of a training loop as a whole: where its time goes, and whether that suffices for a verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from helpers import traces
from helpers.diagnosis.result import WORTH, Finding, milliseconds, percent
from helpers.traces.reading import CLASSIFIERS
from helpers.traces.report import printable

# With n workers every n-th step waits (notebook 03), so fewer steps may show the one that waits, or all but that.
LEAST_STEPS = 3
# Of a step without operators and without loading, on a machine without an accelerator: too much to judge the rest.
UNEXPLAINED = 1 / 3


@dataclass(frozen=True)
class Recorded:
    """A trace in numbers.

    Attributes
    ----------
    trace : traces.Trace
    steps : int
        Steps recorded.
    step_ms : float
        Mean duration of a step in milliseconds.
    shares : Series
        Share of the steps' time of each category of `traces.breakdown`, 0 to 1.
    devices : int
        Accelerators that ran kernels.
    in_process : bool
        Whether the loop itself made the mini-batches, without workers.
    """

    trace: traces.Trace
    steps: int
    step_ms: float
    shares: pd.Series
    devices: int
    in_process: bool

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
        """Share of the time in which the loop waited for mini-batches, and the accelerator had nothing to do."""
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
    loading = {name for span in trace.spans for name in span.events["name"][span.events["kind"] == "DataLoader"]}
    return Recorded(
        trace,
        len(table),
        table.attrs["total"] / len(table) / 1e3,
        table.sum() / table.attrs["total"],
        len(set().union(*(span.kernels["device"].dropna() for span in trace.spans))),
        any("SingleProcess" in name for name in loading),
    )


def loading(recorded: Recorded) -> Iterator[Finding]:
    """Yield what a trace alone can tell of loading."""
    share = recorded.loading
    if share < WORTH:
        return
    time = f"In {percent(share)} of the time the loop waits for its next mini-batch"
    if recorded.in_process:
        yield Finding(
            "loading in the loop itself", "loading", share,
            f"{time}, which it makes itself: DataLoader without workers.",
            "DataLoader(…, num_workers=2)  # try more, up to your cores", "03-more-workers",
        )  # fmt: skip
    else:
        yield Finding(
            "loading too slowly", "loading", share, f"{time}{_comb(recorded)}.",
            "DataLoader(…, num_workers=…)  # more, or less work for each item", "03-more-workers",
        )  # fmt: skip


def evidence(recorded: Recorded) -> list[tuple[str, str]]:
    """Return what a trace tells, as names and values."""
    parts = [f"{traces.PLAIN_NAMES[name]} {percent(share)}" for name, share in recorded.shares.items() if share >= 5e-4]
    rows = [
        ("steps", f"{recorded.steps} recorded, on average {milliseconds(recorded.step_ms)}"),
        ("in a step", ", ".join(parts)),
    ]
    if not recorded.on_device:
        return [*rows, ("accelerator", "none in the trace: all of this is the processor's time")]
    for device, row in traces.accelerators(recorded.trace).iterrows():
        parts = {
            "kernels run": row["utilization"], "SM efficiency": row["sm_efficiency"], "Tensor Cores":
            row["tensor_core_share"],
        }  # fmt: skip
        told = [f"{name} {percent(share)}" for name, share in parts.items() if not np.isnan(share)]
        name = f", {printable(row['name'])}" if isinstance(row["name"], str) else ""
        rows.append((f"GPU {device}", f"{', '.join(told)}{name}"))
    return rows


def doubt(recorded: Recorded) -> str | None:
    """Return why the trace allows no verdict, or None."""
    if recorded.steps < LEAST_STEPS:
        return (
            f"The trace holds {recorded.steps} step{'s' * (recorded.steps > 1)}; with n workers every n-th step waits, "
            f"so it takes {LEAST_STEPS} or more to tell. Record it with schedule(…, active=8)."
        )
    if recorded.on_device:
        return None
    if foreign := _foreign(recorded):
        return f"The trace is of an accelerator whose events are unknown here: {', '.join(foreign)}."
    if _ran_on_a_gpu(recorded):
        return (
            "The network ran on a GPU, but the trace does not tell what its kernels did. Record it with "
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


def _comb(recorded: Recorded) -> str:
    """Say how many workers there are, if every n-th step waits."""
    waits = traces.breakdown(recorded.trace)["DataLoader"].to_numpy()
    long = np.flatnonzero(waits > waits.max() / 2)
    between = set(np.diff(long))
    if len(long) < 3 or len(between) != 1 or between == {1}:
        return ""
    return f": every {between.copy().pop()} steps for long, so there seem to be {between.pop()} workers"


def _foreign(recorded: Recorded) -> list[str]:
    """Return the categories of events that look like an accelerator's, and are unknown."""
    counted = {category for span in recorded.trace.spans for category in span.counts}
    return sorted(each for each in counted - CLASSIFIERS.keys() if each.endswith(("_runtime", "_driver", "_events")))


_OF_A_GPU = "cudnn_(?!is_acceptable)|miopen_|_cuda"  # operators; the one left out is asked on the CPU, too


def _ran_on_a_gpu(recorded: Recorded) -> bool:
    """Whether an accelerator is known to have worked, though its kernels are not told."""
    spans = recorded.trace.spans
    names = {name for span in spans for name in span.events["name"][span.events["operator"]].unique()}
    return any(len(span.kernels) for span in spans) or any(re.search(_OF_A_GPU, name) for name in names)
