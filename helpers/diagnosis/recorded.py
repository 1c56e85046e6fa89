"""What a trace says of a training loop as a whole: where its time goes, and whether that suffices for a verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from helpers import traces
from helpers.diagnosis.result import WORTH, Finding
from helpers.traces.reading import CLASSIFIERS
from helpers.wording import counted, milliseconds, percent, printable

if TYPE_CHECKING:
    import pandas as pd

# With n workers every n-th step waits, so fewer steps may show the one that waits, or all but that.
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
        Whether the loop itself made the batches, without workers.
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
    """Yield what a trace alone says of loading."""
    share = recorded.loading
    if share < WORTH:
        return
    time = f"In {percent(share)} of the time the loop waits for its next batch"
    if recorded.in_process:
        yield Finding(
            "loading in the loop itself", "loading", share,
            f"{time}, which it makes itself: DataLoader without workers.",
            "DataLoader(…, num_workers=2)  # try more, up to your cores", "more workers",
        )  # fmt: skip
        return
    stall = ""
    if period := _stall_period(recorded):
        stall = f": every {period} steps for long, so there seem to be {period} workers"
    yield Finding(
        "loading too slowly", "loading", share, f"{time}{stall}.",
        "DataLoader(…, num_workers=…)  # more, or less work for each item", "more workers",
    )  # fmt: skip


def evidence(recorded: Recorded) -> list[tuple[str, str]]:
    """Return what a trace says, as names and values."""
    parts = [f"{traces.PLAIN_NAMES[name]} {percent(share)}" for name, share in recorded.shares.items() if share >= 5e-4]
    rows = [
        ("steps", f"{recorded.steps} recorded, on average {milliseconds(recorded.step_ms)}"),
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
    if foreign := _foreign(recorded):
        return f"The trace is of an accelerator whose events are unknown here: {', '.join(foreign)}."
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


def _stall_period(recorded: Recorded) -> int | None:
    """Return n if every n-th step waits for long, and the others do not: then there are n workers. Otherwise None."""
    waits = traces.breakdown(recorded.trace)["DataLoader"].to_numpy()
    long = np.flatnonzero(waits > waits.max() / 2)
    distances = set(np.diff(long).tolist())
    if len(long) < 3 or len(distances) > 1 or distances == {1}:
        return None
    return distances.pop()


def _foreign(recorded: Recorded) -> list[str]:
    """Return the categories of events that look like an accelerator's, and are unknown."""
    found = {category for span in recorded.trace.spans for category in span.counts}
    return sorted(each for each in found - CLASSIFIERS.keys() if each.endswith(("_runtime", "_driver", "_events")))


_OF_A_GPU = "cudnn_(?!is_acceptable)|miopen_|_cuda"  # operators; the one left out is asked on the CPU, too


def _ran_on_a_gpu(recorded: Recorded) -> bool:
    """Whether an accelerator is known to have worked, though its kernels are not in the trace."""
    spans = recorded.trace.spans
    names = {name for span in spans for name in span.events["name"][span.events["operator"]].unique()}
    return any(len(span.kernels) for span in spans) or any(re.search(_OF_A_GPU, name) for name in names)
