"""What costs time between the host and the accelerator, and on it, by a trace.

`Device` holds the facts, `RULES` is the table of findings; a new finding is a row of the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from stepscope import traces
from stepscope.base.wording import counted, percent, printable
from stepscope.diagnosis import result
from stepscope.diagnosis.recorded import Recorded
from stepscope.diagnosis.result import UNKNOWN, WORTH, Finding, Rule
from stepscope.traces.idleness import PAGEABLE, direction

if TYPE_CHECKING:
    import pandas as pd

# Of the steps must do it, for it to be done in every step: what is printed every tenth step is no fault.
EVERY = 0.8
# A GPU that lacks a launch waits tens of µs for it. In public traces of ResNet-50 and DLRM gaps up to this length hold
# nine tenths of what the GPU waits for launches; those of several ms are a group of their own.
LAUNCH_GAP = 500.0  # µs
# Between two kernels that were launched long before, public traces show 1 to 2 µs: the GPU's own time.
OWN_GAP = 5.0  # µs
# Blocks for each multiprocessor, of 1. ResNet-50 with 32 photos fills a V100 to 0.98; the emptiest of ten public
# training traces, with many small kernels, an A100 to 0.90.
LEAST_FILL = 0.5
# µs that recording takes, measured on one core with torch 2.15: a lower bound, older versions and CUDA take more
OPERATOR_COST, SHAPES_COST, FRAME_COST = 0.2, 0.15, 0.16
# Of the time: a light profile of the smallest network takes 12% more CPU time, one with everything 69%.
PROFILER = 0.15

TENSOR_CORES = (7, 0)  # compute capability from which on GPUs have them, and for bfloat16 and TF32:
BFLOAT16 = (8, 0)
WITHOUT_TENSOR_CORES = "GTX 16"  # in the names of those of 7.5 that have none
# Peak of the Tensor Cores over that of float32, as NVIDIA states it: V100 and T4 8, A100 16, H100 15, others less.
PEAK_RATIO = {TENSOR_CORES: 8, BFLOAT16: 16}

TO_DEVICE, WITHIN_DEVICE = "to the device", "within the device"
# What the host does in a gap of the GPU, by the columns of `traces.idle`.
_DOING = {"launching": "calls of the runtime", "operators": "operators on the CPU", "other": "Python"}
# What reads from the GPU, by the operator around it: how it looks in Python, and how to do without.
_READS = {
    "item|_local_scalar|is_nonzero|equal": (
        ".item(), float(loss), print(loss), if loss > …",
        "total += loss.detach()  # on the GPU; total.item() once, after many steps",
    ),
    "::_?(to|to_copy|copy_|cpu|numpy)$": (
        ".cpu(), .numpy(), .tolist()",
        "losses.append(loss.detach())  # on the GPU; .cpu() once, at the end",
    ),
    "^$": ("torch.cuda.synchronize() or an event's", "# remove torch.cuda.synchronize() from the loop"),
    "": (
        "its result's size depends on the values, or a value is needed on the host",
        "torch.where(mask, x, 0)  # in the place of x[mask]: keeps the size",
    ),
}


@dataclass(frozen=True)
class Device:
    """What a trace says of host and accelerator: shares of the steps' time, but for tables."""

    recorded: Recorded

    @cached_property
    def recording(self) -> float:
        """What the profiler takes by writing down every event; while a GPU is busy, that costs nothing."""
        operators, frames, settings = self.written
        spans = self.recorded.trace.spans
        cost = operators * (OPERATOR_COST + SHAPES_COST * ("record_shapes" in settings)) + frames * FRAME_COST
        length = sum(span.events["end"].max() - span.events["start"].min() for span in spans)
        share = float(cost / max(length, 1.0))
        return min(share, self.recorded.avoidable_idle) if self.recorded.on_device else share

    @property
    def written(self) -> tuple[int, int, set[str]]:
        """The operators and the frames of Python that the profiler wrote down, and its settings."""
        spans = self.recorded.trace.spans
        return (
            sum(int(span.events["operator"].sum()) for span in spans),
            sum(span.counts["python_function"] for span in spans),
            set().union(*(span.settings for span in spans)),
        )

    @cached_property
    def communication(self) -> float:
        """What the step exchanges with other processes and computes nothing meanwhile."""
        share = float(self.recorded.shares["Communication"])
        if share < WORTH or self.recorded.on_device:
            return share
        (row,) = traces.communication({"this one": self.recorded.trace}).itertuples()
        return row.exposed / row.step  # gloo's threads exchange while operators run, too

    @cached_property
    def waits(self) -> pd.DataFrame:
        """The waits of the host for those calls that are made in every step: not of a checkpoint, or at the end."""
        waits = traces.waits(self.recorded.trace)
        groups = waits.fillna("none").groupby(["call", "operator", "copy"])["step"]
        waits = waits[groups.transform("nunique") >= EVERY * self.recorded.steps] if len(waits) else waits
        return waits.assign(length=(waits["end"] - waits["start"]).astype(float))

    @cached_property
    def synchronizations(self) -> pd.DataFrame:
        """Those of `waits` in which nothing is copied to the GPU."""
        return self.waits[self.waits["copy"] != TO_DEVICE]

    @property
    def synchronizing(self) -> float:
        """What they take."""
        return float(self.synchronizations["length"].sum() / self.recorded.total)

    @property
    def read(self) -> tuple[str, str, str]:
        """The operator in which the host waits most, how that looks in Python, and how to do without."""
        operators = self.synchronizations.assign(operator=self.synchronizations["operator"].fillna(""))
        operator = str(operators.groupby("operator")["length"].sum().idxmax())
        return operator, *next(text for name, text in _READS.items() if re.search(name, operator))

    @cached_property
    def copies(self) -> pd.Series:
        """Copies while no kernel runs, by their names."""
        return traces.exposed_copies(self.recorded.trace).sum() / self.recorded.total

    def copying(self, where: str, kind: str = "") -> float:
        """Return the part of `copies` in this direction, of those whose name holds `kind`."""
        return sum(float(share) for name, share in self.copies.items() if direction(name) == where and kind in name)

    @property
    def blocked(self) -> float:
        """What the host waits for its copies to the GPU while the GPU idles."""
        copied = self.waits.loc[self.waits["copy"] == TO_DEVICE, "length"].sum()
        return min(float(copied / self.recorded.total), self.recorded.avoidable_idle)

    @property
    def kind_of_copies(self) -> str:
        """Which row is about the copies to the GPU: those of memory that is not pinned, that block, or are large."""
        if self.copying(TO_DEVICE, PAGEABLE) > self.copying(TO_DEVICE) / 2:
            return "pageable copies"
        return "copies that block" if self.blocked >= WORTH else "large copies"

    @cached_property
    def gaps(self) -> pd.DataFrame:
        """Gaps of the GPU, as `traces.idle` returns them, with their `length` in µs and `busy`, that of the host."""
        gaps = traces.idle(self.recorded.trace)
        busy = gaps[["waiting", *_DOING]].sum(axis="columns")
        return gaps.assign(length=gaps["end"] - gaps["start"], busy=busy)

    @property
    def short(self) -> pd.DataFrame:
        """Gaps in which the GPU waits for a launch."""
        return self.gaps[(self.gaps["length"] > OWN_GAP) & (self.gaps["length"] <= LAUNCH_GAP)]

    @property
    def long(self) -> pd.DataFrame:
        """Gaps in which the host does something else than to launch."""
        return self.gaps[self.gaps["length"] > LAUNCH_GAP]

    def launching(self, gaps: pd.DataFrame) -> float:
        """Return what the GPU waits for the host in these gaps, if neither waits nor the profiler explain it."""
        busy = self.gaps["busy"].sum()
        recording = self.recording if self.recording >= PROFILER else 0.0
        left = self.recorded.host - float(self.waits["length"].sum() / self.recorded.total) - recording
        return max(left, 0.0) * float(gaps["busy"].sum() / busy) if busy else 0.0

    @cached_property
    def tensor_cores(self) -> tuple[int, int] | None:
        """`TENSOR_CORES` or `BFLOAT16`, whichever NVIDIA's GPU has; None if neither, or if it is unknown."""
        spans = self.recorded.trace.spans
        used = {int(device) for span in spans for device in span.kernels["device"].dropna()}
        for device in (device for span in spans for device in span.devices if device.get("id") in used):
            numbers = device.get("computeMajor"), device.get("computeMinor"), device.get("warpSize", 32)
            if all(isinstance(number, int) for number in numbers) and numbers[2] == 32:
                known = WITHOUT_TENSOR_CORES not in str(device.get("name"))
                return max((least for least in PEAK_RATIO if known and numbers[:2] >= least), default=None)
        return None

    def kernels(self, chosen) -> float:
        """Return what kernels whose name `chosen` accepts take of the GPUs' time."""
        return traces.kernel_time(self.recorded.trace, chosen) / (self.recorded.total * self.recorded.devices)

    @cached_property
    def fill(self) -> float:
        """The part of the multiprocessors that have work while kernels run; no share of the time."""
        return traces.fill(self.recorded.trace)


def _recording(device: Device) -> str:
    operators, frames, settings = device.written
    return (
        f"Writing down {counted(operators, 'operator')} and {counted(frames, 'Python frame')} (with "
        f"{', '.join(sorted(settings)) or 'no options'}) took about {percent(device.recording)} of the time: what the "
        "host seems to need is partly the profiler's."
    )


def _synchronizing(device: Device) -> str:
    operator, where, _ = device.read
    return (
        f"In {device.synchronizations['step'].nunique()} of {device.recorded.steps} steps the host waits for the GPU, "
        f"{percent(device.synchronizing)} of the time, mostly in {printable(operator) or 'a call of its own'} "
        f"({where}); in {percent(device.recorded.host)} of the time the GPU waits for the host."
    )


def _copies(name: str, more: str, change: str, topic: str) -> Rule:
    """Return the row for one kind of copies to the GPU."""
    return Rule(
        name, "copies", topic,
        lambda device: device.copying(TO_DEVICE) + device.blocked if device.kind_of_copies == name else None,
        lambda device: (
            f"Copies to the GPU take {percent(device.copying(TO_DEVICE))} of the time while no kernel runs, and the "
            f"host waits for them so that the GPU idles up to {percent(device.blocked)} of it{more}."
        ),
        change,
    )  # fmt: skip


def _launching(device: Device) -> str:
    short, recorded = device.short, device.recorded
    kernels = sum(len(span.kernels) for span in recorded.trace.spans)
    mean = recorded.shares["Kernel"] * recorded.total / max(kernels, 1)
    return (
        f"{len(short) / recorded.steps:,.0f} times a step the GPU waits for its next kernel, "
        f"{short['length'].median():.0f} µs in the median, {percent(device.launching(short))} of the time; a step has "
        f"{kernels / recorded.steps:,.0f} kernels of {mean:.0f} µs on average."
    )


def _doing(device: Device) -> str:
    doing = _DOING[device.long[list(_DOING)].sum().idxmax()]
    longest = traces.gaps(device.recorded.trace).sort_values("longest")["in_longest"].iat[-1]
    named = "" if longest == "other" or "DataLoader" in longest else f"; in the longest gap {printable(longest)}"
    return (
        f"In gaps of more than {LAUNCH_GAP:.0f} µs the GPU waits {percent(device.launching(device.long))} of the time "
        f"for the host, mostly for {doing}{named}."
    )


def _float32(device: Device) -> float | None:
    share = device.kernels(traces.multiplies_float32)
    return share * (1 - 1 / PEAK_RATIO[device.tensor_cores]) if share >= WORTH and device.tensor_cores else None


def _emptiness(device: Device) -> float | None:
    return float(device.recorded.shares["Kernel"]) * (1 - device.fill) if device.fill < LEAST_FILL else None


RULES = (
    Rule(
        "the profiler itself in the way", UNKNOWN, "profiler overhead",
        lambda device: device.recording, _recording,
        "profile(activities=…, schedule=schedule(wait=5, warmup=1, active=8))  # no stacks, shapes or memory",
        least=PROFILER,
    ),
    Rule(
        "exposed communication", "communication", "overlapping communication with computation",
        lambda device: device.communication,
        lambda device: (
            f"In {percent(device.communication)} of the time the step exchanges data with other processes, and "
            "computes nothing meanwhile. It may wait for a slower one: the diagnosis of all ranks together says "
            "whether it does."
        ),
        "DDP(model, bucket_cap_mb=…)  # buckets that travel during backward\n"
        "with model.no_sync(): loss_of(model(images)).backward()  # but every n-th step; or a larger batch",
    ),
)  # fmt: skip
# A host that waits cannot prepare: afterwards the GPU idles. Both the waiting and the idling bound the gain.
RULES_OF_A_GPU = (
    Rule(
        "a synchronization in every step", "synchronization", "fewer synchronizations",
        lambda device: min(device.synchronizing, device.recorded.avoidable_idle),
        _synchronizing, lambda device: device.read[2],
    ),
    _copies(
        "pageable copies", ". The memory is not pinned",
        'DataLoader(…, pin_memory=True)\nimages.to("cuda", non_blocking=True)', "pinned memory",
    ),
    _copies(
        "copies that block", ", though the memory may be pinned",
        'images.to("cuda", non_blocking=True)  # from a DataLoader with pin_memory=True', "asynchronous copies",
    ),
    _copies(
        "large copies", "",
        "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the GPU",
        "normalization on the device",
    ),
    Rule(
        "copies within the GPU", "copies", "fewer copies",
        lambda device: device.copying(WITHIN_DEVICE),
        lambda device: f"They take {percent(device.copying(WITHIN_DEVICE))} of the time, no kernel runs then.",
        "# look for .contiguous(), .clone(), torch.cat\nDDP(…, gradient_as_bucket_view=True)",
    ),
    Rule(
        "launch-bound steps", "launches", "fewer launches",
        lambda device: device.launching(device.short), _launching,
        'model = torch.compile(model, mode="reduce-overhead")\nSGD(…, fused=True)',
    ),
    Rule(
        "the host does something else", "launches", "less work between launches",
        lambda device: device.launching(device.long), _doing,
        "# move it out of the loop, or do it every n-th step",
    ),
    Rule(
        "float32 without Tensor Cores", "compute", "mixed precision", _float32,
        lambda device: (
            f"Products and convolutions in float32 take {percent(device.kernels(traces.multiplies_float32))} of the "
            f"time; this GPU has Tensor Cores, which multiply "
            f"{'bfloat16' if device.tensor_cores == BFLOAT16 else 'float16'} at most "
            f"{PEAK_RATIO[device.tensor_cores]} times as fast."
        ),
        lambda device: (
            'with torch.autocast("cuda", torch.bfloat16): …'
            if device.tensor_cores == BFLOAT16
            else 'with torch.autocast("cuda", torch.float16): …  # and torch.amp.GradScaler()'
        ),
    ),
    Rule(
        "layout conversions", "compute", "channels-last memory format",
        lambda device: device.kernels(traces.converts_layout),
        lambda device: (
            f"Kernels that turn NCHW into NHWC, or back, take {percent(device.kernels(traces.converts_layout))} of "
            "the time."
        ),
        "model.to(memory_format=torch.channels_last)\nimages.to(memory_format=torch.channels_last)",
    ),
    Rule(
        "a batch too small to fill the GPU", "compute", "larger batches", _emptiness,
        lambda device: (
            f"While kernels run, {percent(float(device.recorded.shares['Kernel']))} of the time, on average "
            f"{percent(device.fill)} of the multiprocessors have work. Counted for each image; the step itself does "
            "not become shorter."
        ),
        "DataLoader(…, batch_size=…)  # double it until the memory is full, and adapt the learning rate",
    ),
)  # fmt: skip


def findings(recorded: Recorded) -> Iterator[Finding]:
    """Yield what costs time, loading left out."""
    return result.findings((*RULES, *RULES_OF_A_GPU) if recorded.on_device else RULES, Device(recorded))
