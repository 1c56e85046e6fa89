"""What a recorded profile shows of a whole training loop: where its time goes, and whether it allows a verdict."""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from stepscope import traces
from stepscope.base.wording import counted, milliseconds, percent, printable
from stepscope.diagnosis.result import WORTH
from stepscope.traces.events import CLASSIFIERS

# With n workers every n-th step waits, so fewer steps may show only the waiting step, or only the others.
LEAST_STEPS = 3
# Times the median: if a single step takes longer, without loading, the machine probably stalled.
STALL = 3
# Of a step without operators and without loading, on a machine without an accelerator: too much to judge the rest.
UNEXPLAINED = 1 / 3
_OF_A_GPU = "cudnn_(?!is_acceptable)|miopen_|_cuda"  # operators; the excluded one is called on the CPU, too


@dataclass(frozen=True)
class Profile:
    """A trace in numbers."""

    trace: traces.Trace
    steps: int  # recorded
    step_ms: float  # mean
    shares: pd.Series  # of the steps' time, for each category of `traces.breakdown`
    devices: int  # accelerators that ran kernels
    in_process: bool  # whether the loop itself made the batches, without workers
    stall_ms: float = 0.0  # duration of the one step that took far longer than the others, and counts as their mean
    timed: tuple[tuple[float, float], ...] = ()  # for each step its loading time and its whole duration, in ms

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
    def host(self) -> float:
        """Share of the time in which the accelerator had nothing to do and the host did other work than loading."""
        return float(self.shares[["Runtime", "CPU Exec", "Other"]].sum())

    @property
    def avoidable_idle(self) -> float:
        """Share of the time in which the accelerator would not idle if the host were ahead of it.

        All work of the host counts, and loading counts unless the workers limit the speed.
        """
        return self.host + (self.loading if self.in_process or self.loading < WORTH else 0.0)


def read(trace: traces.Trace) -> Profile:
    """Return a trace in numbers; raises NoSteps and SeveralRecordings like `traces.breakdown`."""
    table = traces.breakdown(trace)
    work = table.sum(axis="columns") - table["DataLoader"]  # with n workers every n-th step waits
    timed = zip(table["DataLoader"] / 1e3, table.sum(axis="columns") / 1e3, strict=True)
    long, stall_ms = work > STALL * work.median(), 0.0
    if long.sum() == 1 and len(table) > LEAST_STEPS:
        stall_ms = float(table[long].to_numpy().sum()) / 1e3
        table[long] = table[~long].mean().to_numpy()
    total = float(table.to_numpy().sum())
    if not total > 0:
        raise traces.NoSteps(f"The steps of {trace.path} take no time: it is damaged. Copy it or record it again.")
    waits = (span.events["name"][span.events["kind"] == "DataLoader"] for span in trace.spans)
    return Profile(
        trace,
        steps=len(table),
        step_ms=total / len(table) / 1e3,
        shares=table.sum() / total,
        devices=len({device for span in trace.spans for device in span.kernels["device"] if device >= 0}),
        in_process=any("SingleProcess" in name for names in waits for name in names),
        stall_ms=stall_ms,
        timed=tuple((float(wait), float(step)) for wait, step in timed),
    )


def evidence(profile: Profile) -> list[tuple[str, str]]:
    """Return the evidence of a profile, as names and values."""
    parts = [f"{traces.PLAIN_NAMES[name]} {percent(share)}" for name, share in profile.shares.items() if share >= 5e-4]
    stall = (
        f"; one of {milliseconds(profile.stall_ms)}, far longer, counts as the others' mean" if profile.stall_ms else ""
    )
    rows = [
        ("steps", f"{profile.steps} recorded, on average {milliseconds(profile.step_ms)}{stall}"),
        ("in a step", ", ".join(parts)),
    ]
    if not profile.on_device:
        return [*rows, ("accelerator", "none in the trace: this is what the host did")]
    for device, row in traces.accelerators(profile.trace).iterrows():
        columns = {"kernels run": "utilization", "SM efficiency": "sm_efficiency", "Tensor Cores": "tensor_core_share"}
        known = [f"{name} {percent(row[column])}" for name, column in columns.items() if not np.isnan(row[column])]
        if isinstance(row["name"], str):
            known.append(printable(row["name"]))
        whole = ["in all recorded steps"] if profile.stall_ms and known else []
        rows.append((f"GPU {device}", ", ".join(known + whole)))
    return rows


def doubt(profile: Profile) -> str | None:
    """Return why the profile allows no verdict, or None."""
    if profile.steps < LEAST_STEPS:
        return (
            f"The trace holds {counted(profile.steps, 'step')}; with n workers every n-th step waits, so a verdict "
            f"needs {LEAST_STEPS} or more. Record it with schedule(…, active=8)."
        )
    if profile.on_device:
        return traces.lost_kernels(profile.trace) or None
    categories = {category for span in profile.trace.spans for category in span.counts}
    unknown = sorted(name for name in categories if name.endswith(("_runtime", "_driver")) and name not in CLASSIFIERS)
    if unknown:
        return f"The trace has events of an accelerator that stepscope does not know: {', '.join(unknown)}."
    operators = {name for span in profile.trace.spans for name in span.events["name"][span.events["operator"]]}
    of_a_gpu = any(re.search(_OF_A_GPU, name) for name in operators)
    if of_a_gpu or any(span.kernels.height for span in profile.trace.spans):
        return (
            "The network ran on a GPU, but its kernels are not in the trace. Record it with "
            "activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]."
        )
    return None


def unexplained(profile: Profile) -> str | None:
    """Return why something may be wrong even if nothing is found, or None."""
    if profile.on_device or profile.shares["Other"] < UNEXPLAINED:
        return None
    return (
        f"For {percent(profile.shares['Other'])} of the time the trace shows neither operators nor loading: Python, "
        "other libraries, or an accelerator that PyTorch's profiler does not see. Look there with  py-spy record -o "
        "flames.svg -- python train.py  or  python -m cProfile -s tottime train.py."
    )
