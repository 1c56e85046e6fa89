"""What costs time between the host and the accelerator, and on it, by a trace.

`Device` holds the facts, `RULES` is the table of findings; a new finding is a row of the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from stepscope import traces
from stepscope.base.wording import printable
from stepscope.diagnosis import result
from stepscope.diagnosis.profile import Profile
from stepscope.diagnosis.result import UNKNOWN, WORTH, Finding, Rule
from stepscope.traces.idleness import PAGEABLE, direction

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
    """What a trace says of host and accelerator. Shares are of the steps' time; what needs a GPU is 0 without one."""

    steps: int
    host: float  # share in which the accelerator has nothing to do, and the host does something else than loading
    idle: float  # share in which the accelerator would not idle if the host were ahead of it
    # The profiler: operators and frames of Python that it wrote down, and the share that this took, or the GPU idled
    operators: int
    frames: int
    settings: str
    recording: float
    communication: float  # share in which the step exchanges data with other processes, and computes nothing
    # The host's waits for the same call in every step, in which nothing is copied to the GPU
    synchronizing: float = 0.0
    synchronized: int = 0  # steps
    operator: str = ""  # in which the host waits most
    looks: str = ""  # how that looks in Python
    instead: str = ""  # how to do without
    # Copies while no kernel runs; those to the GPU, those of them from pageable memory, and those within the GPU
    copying: float = 0.0
    pageable: float = 0.0
    within: float = 0.0
    waiting: float = 0.0  # share in which the host waits in these and those of copies
    blocked: float = 0.0  # share in which the host waits for its copies to the GPU while the GPU idles
    # Gaps in which the GPU waits for a launch: share, gaps in a step, µs in the median
    launching: float = 0.0
    gaps: float = 0.0
    gap_us: float = 0.0
    # Longer gaps: share, and what the host does meanwhile
    long_gaps: float = 0.0
    doing: str = ""
    # Kernels: share, number in a step, mean µs
    kernels: float = 0.0
    launches: float = 0.0
    kernel_us: float = 0.0
    fill: float = 1.0  # part of the multiprocessors that have work while kernels run
    float32: float = 0.0  # share of products and convolutions in float32
    layouts: float = 0.0  # share of kernels that convert the memory format
    tensor_cores: tuple[int, int] | None = None  # `TENSOR_CORES` or `BFLOAT16`; None if neither, or if it is unknown

    @property
    def copies(self) -> str:
        """The finding about copies to the GPU: their memory is not pinned, or they block, or they are large."""
        if self.pageable > self.copying / 2:
            return "pageable copies"
        return "copies that block" if self.blocked >= WORTH else "large copies"

    @property
    def peak_ratio(self) -> float:
        """How many times as fast as in float32 the GPU's Tensor Cores multiply at most; 1 if there are none."""
        return PEAK_RATIO.get(self.tensor_cores, 1)

    @property
    def precision(self) -> str:
        """The type of 16 bits in which they do."""
        return "bfloat16" if self.tensor_cores == BFLOAT16 else "float16"


def read(profile: Profile) -> Device:
    """Return what a trace says of host and accelerator."""
    spans = profile.trace.spans
    operators = sum(int(span.events["operator"].sum()) for span in spans)
    frames = sum(span.counts["python_function"] for span in spans)
    settings = set().union(*(span.settings for span in spans))
    cost = operators * (OPERATOR_COST + SHAPES_COST * ("record_shapes" in settings)) + frames * FRAME_COST
    recording = float(cost / max(sum(span.events["end"].max() - span.events["start"].min() for span in spans), 1.0))
    device = Device(
        profile.steps,
        profile.host,
        profile.avoidable_idle,
        operators,
        frames,
        ", ".join(sorted(settings)) or "no options",
        min(recording, profile.avoidable_idle) if profile.on_device else recording,
        _communication(profile),
    )
    if not profile.on_device:
        return device
    device = replace(device, **_waits(profile), **_copies(profile), **_kernels(profile))
    return replace(device, **_gaps(profile, device))


def _communication(profile: Profile) -> float:
    share = float(profile.shares["Communication"])
    if share < WORTH or profile.on_device:
        return share
    (row,) = traces.communication({"this one": profile.trace}).itertuples()
    return row.exposed / row.step  # gloo's threads exchange while operators run, too


def _waits(profile: Profile) -> dict[str, object]:
    """Return what the host waits for those calls that are made in every step: not of a checkpoint, or at the end."""
    waits = traces.waits(profile.trace)
    waits = waits.assign(length=(waits["end"] - waits["start"]).astype(float), operator=waits["operator"].fillna(""))
    groups = waits.fillna({"copy": "none"}).groupby(["call", "operator", "copy"])["step"]
    waits = waits[groups.transform("nunique") >= EVERY * profile.steps]
    copied = waits["copy"] == TO_DEVICE
    seconds = waits[~copied].groupby("operator")["length"].sum()
    operator = str(seconds.idxmax()) if len(seconds) else ""
    looks, instead = next(text for name, text in _READS.items() if re.search(name, operator))
    return {
        "synchronizing": float(seconds.sum() / profile.total),
        "synchronized": waits.loc[~copied, "step"].nunique(),
        "operator": printable(operator) or "a call of its own",
        "looks": looks,
        "instead": instead,
        "blocked": min(float(waits.loc[copied, "length"].sum() / profile.total), profile.avoidable_idle),
        "waiting": float(waits["length"].sum() / profile.total),
    }


def _copies(profile: Profile) -> dict[str, object]:
    """Return what copies take while no kernel runs."""
    copies = traces.exposed_copies(profile.trace).sum() / profile.total

    def share(where: str, kind: str = "") -> float:
        return sum(float(share) for name, share in copies.items() if direction(name) == where and kind in name)

    return {"copying": share(TO_DEVICE), "pageable": share(TO_DEVICE, PAGEABLE), "within": share(WITHIN_DEVICE)}


def _gaps(profile: Profile, device: Device) -> dict[str, object]:
    """Return what the GPU waits for the host in its gaps, as far as neither waits nor the profiler explain it."""
    gaps = traces.idle(profile.trace)
    length, busy = gaps["end"] - gaps["start"], gaps[["waiting", *_DOING]].sum(axis="columns")
    short, long = (length > OWN_GAP) & (length <= LAUNCH_GAP), length > LAUNCH_GAP
    recording = device.recording if device.recording >= PROFILER else 0.0
    host = max(profile.host - device.waiting - recording, 0.0) / max(busy.sum(), 1e-6)
    doing = ""
    if long.any():
        doing = _DOING[gaps.loc[long, list(_DOING)].sum().idxmax()]
        longest = traces.gaps(profile.trace).sort_values("longest")["in_longest"].iat[-1]
        if longest != "other" and "DataLoader" not in longest:
            doing += f"; in the longest gap {printable(longest)}"
    return {
        "launching": host * float(busy[short].sum()),
        "gaps": short.sum() / profile.steps,
        "gap_us": length[short].median(),
        "long_gaps": host * float(busy[long].sum()),
        "doing": doing,
    }


def _kernels(profile: Profile) -> dict[str, object]:
    """Return what is known of the kernels."""
    share, number = float(profile.shares["Kernel"]), sum(len(span.kernels) for span in profile.trace.spans)

    def of(chosen: Callable) -> float:
        return traces.kernel_time(profile.trace, chosen) / (profile.total * profile.devices)

    return {
        "kernels": share,
        "launches": number / profile.steps,
        "kernel_us": share * profile.total / max(number, 1),
        "fill": traces.fill(profile.trace),
        "float32": of(traces.multiplies_float32),
        "layouts": of(traces.converts_layout),
        "tensor_cores": _tensor_cores(profile),
    }


def _tensor_cores(profile: Profile) -> tuple[int, int] | None:
    """Return which Tensor Cores NVIDIA's GPU has, as `Device.tensor_cores`."""
    spans = profile.trace.spans
    used = {int(device) for span in spans for device in span.kernels["device"].dropna()}
    for device in (device for span in spans for device in span.devices if device.get("id") in used):
        numbers = device.get("computeMajor"), device.get("computeMinor"), device.get("warpSize", 32)
        if all(isinstance(number, int) for number in numbers) and numbers[2] == 32:  # AMD's count otherwise
            known = WITHOUT_TENSOR_CORES not in str(device.get("name"))
            return max((least for least in PEAK_RATIO if known and numbers[:2] >= least), default=None)
    return None


def _copying(name: str, more: str, topic: str, change: str) -> Rule:
    """Return the row for one kind of copies to the GPU."""
    return Rule(
        name, "copies", topic,
        lambda device: device.copying + device.blocked if device.copies == name else None,
        "Copies to the GPU take {copying:%} of the time while no kernel runs, and the host waits for them so that the "
        f"GPU idles up to {{blocked:%}} of it{more}.",
        change,
    )  # fmt: skip


# A host that waits cannot prepare: afterwards the GPU idles. Both the waiting and the idling bound the gain.
RULES = (
    Rule(
        "the profiler itself in the way", UNKNOWN, "profiler overhead",
        lambda device: device.recording,
        "Writing down {operators:operator} and {frames:Python frame} (with {settings}) took about {recording:%} of the "
        "time: what the host seems to need is partly the profiler's.",
        "profile(activities=…, schedule=schedule(wait=5, warmup=1, active=8))  # no stacks, shapes or memory",
        least=PROFILER,
    ),
    Rule(
        "exposed communication", "communication", "overlapping communication with computation",
        lambda device: device.communication,
        "In {communication:%} of the time the step exchanges data with other processes, and computes nothing "
        "meanwhile. It may wait for a slower one: the diagnosis of all ranks together says whether it does.",
        "DDP(model, bucket_cap_mb=…)  # buckets that travel during backward\n"
        "with model.no_sync(): loss_of(model(images)).backward()  # but every n-th step; or a larger batch",
    ),
    Rule(
        "a synchronization in every step", "synchronization", "fewer synchronizations",
        lambda device: min(device.synchronizing, device.idle),
        "In {synchronized} of {steps} steps the host waits for the GPU, {synchronizing:%} of the time, mostly in "
        "{operator} ({looks}); in {host:%} of the time the GPU waits for the host.",
        "{instead}",
    ),
    _copying(
        "pageable copies", ". The memory is not pinned", "pinned memory",
        'DataLoader(…, pin_memory=True)\nimages.to("cuda", non_blocking=True)',
    ),
    _copying(
        "copies that block", ", though the memory may be pinned", "asynchronous copies",
        'images.to("cuda", non_blocking=True)  # from a DataLoader with pin_memory=True',
    ),
    _copying(
        "large copies", "", "normalization on the device",
        "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the GPU",
    ),
    Rule(
        "copies within the GPU", "copies", "fewer copies",
        lambda device: device.within,
        "They take {within:%} of the time, no kernel runs then.",
        "# look for .contiguous(), .clone(), torch.cat\nDDP(…, gradient_as_bucket_view=True)",
    ),
    Rule(
        "launch-bound steps", "launches", "fewer launches",
        lambda device: device.launching,
        "{gaps:,.0f} times a step the GPU waits for its next kernel, {gap_us:.0f} µs in the median, {launching:%} of "
        "the time; a step has {launches:,.0f} kernels of {kernel_us:.0f} µs on average.",
        'model = torch.compile(model, mode="reduce-overhead")\nSGD(…, fused=True)',
    ),
    Rule(
        "the host does something else", "launches", "less work between launches",
        lambda device: device.long_gaps,
        f"In gaps of more than {LAUNCH_GAP:.0f} µs the GPU waits {{long_gaps:%}} of the time for the host, mostly for "
        "{doing}.",
        "# move it out of the loop, or do it every n-th step",
    ),
    Rule(
        "float32 without Tensor Cores", "compute", "mixed precision",
        lambda device: device.float32 * (1 - 1 / device.peak_ratio),
        "Products and convolutions in float32 take {float32:%} of the time; this GPU has Tensor Cores, which multiply "
        "{precision} at most {peak_ratio} times as fast.",
        'with torch.autocast("cuda", torch.{precision}): …  # float16 also needs torch.amp.GradScaler()',
    ),
    Rule(
        "layout conversions", "compute", "channels-last memory format",
        lambda device: device.layouts,
        "Kernels that turn NCHW into NHWC, or back, take {layouts:%} of the time.",
        "model.to(memory_format=torch.channels_last)\nimages.to(memory_format=torch.channels_last)",
    ),
    Rule(
        "a batch too small to fill the GPU", "compute", "larger batches",
        lambda device: device.kernels * (1 - device.fill) if device.fill < LEAST_FILL else None,
        "While kernels run, {kernels:%} of the time, on average {fill:%} of the multiprocessors have work. Counted for "
        "each image; the step itself does not become shorter.",
        "DataLoader(…, batch_size=…)  # double it until the memory is full, and adapt the learning rate",
    ),
)  # fmt: skip


def findings(profile: Profile) -> Iterator[Finding]:
    """Yield what costs time, loading left out."""
    return result.findings(RULES, read(profile))
