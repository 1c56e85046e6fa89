"""What costs time between the host and the accelerator, and on it, by a trace."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from helpers import traces
from helpers.diagnosis.recorded import Recorded
from helpers.diagnosis.result import UNKNOWN, WORTH, Finding
from helpers.traces.waiting import PAGEABLE, direction
from helpers.wording import counted, percent, printable

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


def findings(recorded: Recorded) -> Iterator[Finding]:
    """Yield what costs time, loading left out."""
    recording = _recording(recorded)
    if recording is not None:
        yield recording
    yield from _communication(recorded)
    if recorded.on_device:
        waits = _every_step(recorded, traces.waits(recorded.trace))
        yield from _synchronization(recorded, waits)
        yield from _copies(recorded, waits)
        yield from _launches(recorded, waits, recording.gain if recording else 0.0)
        yield from _kernels(recorded)


def _recording(recorded: Recorded) -> Finding | None:
    """The profiler itself: what writing down every event took of the time that the host needs."""
    spans = recorded.trace.spans
    settings = set().union(*(span.settings for span in spans))
    frames = sum(span.counts["python_function"] for span in spans)
    operators = sum(int(span.events["operator"].sum()) for span in spans)
    cost = operators * (OPERATOR_COST + SHAPES_COST * ("record_shapes" in settings)) + frames * FRAME_COST
    length = sum(span.events["end"].max() - span.events["start"].min() for span in spans)
    share = float(cost / max(length, 1.0))
    if recorded.on_device:  # while the GPU is busy, recording costs nothing
        share = min(share, recorded.avoidable_idle)
    if share < PROFILER:
        return None
    events = counted(operators, "operator")
    if frames:
        events += f" and {counted(frames, 'Python frame')}"
    if settings:
        events += f" (with {', '.join(sorted(settings))})"
    return Finding(
        "the profiler itself in the way", UNKNOWN, share,
        f"Writing down {events} took about {percent(share)} of the time: what the host seems to need is partly "
        "the profiler's.",
        "profile(activities=…, schedule=schedule(wait=5, warmup=1, active=8))  # no stacks, shapes or memory",
        "profiler overhead",
    )  # fmt: skip


def _communication(recorded: Recorded) -> Iterator[Finding]:
    share = float(recorded.shares["Communication"])
    if share >= WORTH and not recorded.on_device:  # gloo's threads exchange while operators run, too
        (row,) = traces.communication({"this one": recorded.trace}).itertuples()
        share = row.exposed / row.step
    if share >= WORTH:
        yield Finding(
            "exposed communication", "communication", share,
            f"In {percent(share)} of the time the step exchanges data with other processes, and computes nothing "
            "meanwhile. It may wait for a slower one: the diagnosis of all ranks together says whether it does.",
            "DDP(model, bucket_cap_mb=…)  # buckets that travel during backward\n"
            "with model.no_sync(): loss_of(model(images)).backward()  # but every n-th step; or a larger batch",
            "overlapping communication with computation",
        )  # fmt: skip


def _every_step(recorded: Recorded, waits: pd.DataFrame) -> pd.DataFrame:
    """Return the waits of those calls that are made in every step: all but those of a checkpoint, or at the end."""
    if waits.empty:
        return waits
    groups = waits.fillna("none").groupby(["call", "operator", "copy"])["step"]
    return waits[groups.transform("nunique") >= EVERY * recorded.steps]


def _shares(recorded: Recorded, waits: pd.DataFrame) -> tuple[float, float]:
    """Return the shares of the time in which the host waited for the GPU: to copy to it, and for other reasons."""
    length = (waits["end"] - waits["start"]).to_numpy(float)
    copying = (waits["copy"] == "to the device").to_numpy()
    return float(length[copying].sum() / recorded.total), float(length[~copying].sum() / recorded.total)


def _synchronization(recorded: Recorded, waits: pd.DataFrame) -> Iterator[Finding]:
    """A host that waits cannot prepare: afterwards the GPU idles. Both the waiting and the idling bound the gain."""
    _, share = _shares(recorded, waits)
    gain = min(share, recorded.avoidable_idle)
    if gain < WORTH:
        return
    rows = waits[waits["copy"] != "to the device"]
    length = (rows["end"] - rows["start"]).groupby(rows["operator"].fillna("")).sum()
    operator = str(length.idxmax())
    where, change = next(text for name, text in _READS.items() if re.search(name, operator))
    yield Finding(
        "a synchronization in every step", "synchronization", gain,
        f"In {rows['step'].nunique()} of {recorded.steps} steps the host waits for the GPU, {percent(share)} of the "
        f"time, mostly in {printable(operator) or 'a call of its own'} ({where}); in {percent(recorded.host)} of the "
        "time the GPU waits for the host.",
        change, "fewer synchronizations",
    )  # fmt: skip


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


def _copies(recorded: Recorded, waits: pd.DataFrame) -> Iterator[Finding]:
    exposed = traces.exposed_copies(recorded.trace).sum() / recorded.total
    to_device = {name: float(share) for name, share in exposed.items() if direction(name) == "to the device"}
    copying, blocked = sum(to_device.values()), min(_shares(recorded, waits)[0], recorded.avoidable_idle)
    gain = copying + blocked
    evidence = (
        f"Copies to the GPU take {percent(copying)} of the time while no kernel runs, and the host waits for them so "
        f"that the GPU idles up to {percent(blocked)} of it"
    )
    pageable = sum(share for name, share in to_device.items() if PAGEABLE in name)
    if gain >= WORTH and pageable > copying / 2:
        yield Finding(
            "pageable copies", "copies", gain, f"{evidence}. The memory is not pinned.",
            'DataLoader(…, pin_memory=True)\nimages.to("cuda", non_blocking=True)', "pinned memory",
        )  # fmt: skip
    elif gain >= WORTH and blocked >= WORTH:
        yield Finding(
            "copies that block", "copies", gain, f"{evidence}, though the memory may be pinned.",
            'images.to("cuda", non_blocking=True)  # from a DataLoader with pin_memory=True', "asynchronous copies",
        )  # fmt: skip
    elif gain >= WORTH:
        yield Finding(
            "large copies", "copies", gain, f"{evidence}.",
            "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the GPU",
            "normalization on the device",
        )  # fmt: skip
    within = float(sum(share for name, share in exposed.items() if direction(name) == "within the device"))
    if within >= WORTH:
        yield Finding(
            "copies within the GPU", "copies", within, f"They take {percent(within)} of the time, no kernel runs then.",
            "# look for .contiguous(), .clone(), torch.cat\nDDP(…, gradient_as_bucket_view=True)",
            "fewer copies",
        )  # fmt: skip


def _launches(recorded: Recorded, waits: pd.DataFrame, recording: float) -> Iterator[Finding]:
    """What the GPU waits for the host, as far as neither waiting for the GPU nor the profiler explains it."""
    left = max(recorded.host - sum(_shares(recorded, waits)) - recording, 0.0)
    gaps = traces.idle(recorded.trace)
    busy = gaps[["waiting", "launching", "operators", "other"]].sum(axis="columns")
    length = gaps["end"] - gaps["start"]
    short, long = (length > OWN_GAP) & (length <= LAUNCH_GAP), length > LAUNCH_GAP
    if not busy.sum():
        return
    share, others = (left * float(busy[chosen].sum() / busy.sum()) for chosen in (short, long))
    kernels = sum(len(span.kernels) for span in recorded.trace.spans)
    if share >= WORTH:
        yield Finding(
            "launch-bound steps", "launches", share,
            f"{short.sum() / recorded.steps:,.0f} times a step the GPU waits for its next kernel, "
            f"{length[short].median():.0f} µs in the median, {percent(share)} of the time; a step has "
            f"{kernels / recorded.steps:,.0f} kernels of "
            f"{recorded.shares['Kernel'] * recorded.total / max(kernels, 1):.0f} µs on average.",
            'model = torch.compile(model, mode="reduce-overhead")\nSGD(…, fused=True)', "fewer launches",
        )  # fmt: skip
    if others >= WORTH:
        doing = _DOING[gaps.loc[long, list(_DOING)].sum().idxmax()]
        longest = traces.gaps(recorded.trace).sort_values("longest")["in_longest"].iat[-1]
        named = "" if longest == "other" or "DataLoader" in longest else f"; in the longest gap {printable(longest)}"
        yield Finding(
            "the host does something else", "launches", others,
            f"In gaps of more than {LAUNCH_GAP:.0f} µs the GPU waits {percent(others)} of the time for the host, "
            f"mostly for {doing}{named}.",
            "# move it out of the loop, or do it every n-th step", "less work between launches",
        )  # fmt: skip


_DOING = {"launching": "calls of the runtime", "operators": "operators on the CPU", "other": "Python"}


def _kernels(recorded: Recorded) -> Iterator[Finding]:
    """Work of the GPU that could be less."""
    capability = _capability(recorded)
    each = recorded.total * recorded.devices
    share = traces.kernel_time(recorded.trace, traces.multiplies_float32) / each
    if share >= WORTH and capability and capability >= TENSOR_CORES:
        if capability >= BFLOAT16:
            ratio, format, change = PEAK_RATIO[BFLOAT16], "bfloat16", 'with torch.autocast("cuda", torch.bfloat16): …'
        else:
            ratio, format = PEAK_RATIO[TENSOR_CORES], "float16"
            change = 'with torch.autocast("cuda", torch.float16): …  # and torch.amp.GradScaler()'
        yield Finding(
            "float32 without Tensor Cores", "compute", share * (1 - 1 / ratio),
            f"Products and convolutions in float32 take {percent(share)} of the time; this GPU has Tensor Cores, "
            f"which multiply {format} at most {ratio} times as fast.",
            change, "mixed precision",
        )  # fmt: skip
    share = traces.kernel_time(recorded.trace, traces.converts_layout) / each
    if share >= WORTH:
        yield Finding(
            "layout conversions", "compute", share,
            f"Kernels that turn NCHW into NHWC, or back, take {percent(share)} of the time.",
            "model.to(memory_format=torch.channels_last)\nimages.to(memory_format=torch.channels_last)",
            "channels-last memory format",
        )  # fmt: skip
    fill, running = traces.fill(recorded.trace), float(recorded.shares["Kernel"])
    if fill < LEAST_FILL and running * (1 - fill) >= WORTH:
        yield Finding(
            "a batch too small to fill the GPU", "compute", running * (1 - fill),
            f"While kernels run, {percent(running)} of the time, on average {percent(fill)} of the multiprocessors "
            "have work. Counted for each image; the step itself does not become shorter.",
            "DataLoader(…, batch_size=…)  # double it until the memory is full, and adapt the learning rate",
            "larger batches",
        )  # fmt: skip


def _capability(recorded: Recorded) -> tuple[int, int] | None:
    """Return the compute capability of NVIDIA's GPU, or None if it is unknown or the GPU has no Tensor Cores."""
    used = {int(device) for span in recorded.trace.spans for device in span.kernels["device"].dropna()}
    devices = [each for span in recorded.trace.spans for each in span.devices if each.get("id") in used]
    for each in devices:
        numbers = each.get("computeMajor"), each.get("computeMinor"), each.get("warpSize", 32)
        if all(isinstance(number, int) for number in numbers) and numbers[2] == 32:
            return None if WITHOUT_TENSOR_CORES in str(each.get("name")) else numbers[:2]
    names = " ".join({name for span in recorded.trace.spans for name in span.kernels["name"]})
    found = re.search(r"(?<![a-z])(volta|turing|ampere)_|(?<![a-z])sm([7-9]|1[0-2])\d_", names)
    if found is None or devices:
        return None
    return BFLOAT16 if found[1] == "ampere" or found[2] not in (None, "7") else TENSOR_CORES
