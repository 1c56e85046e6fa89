"""Time lost between the host and the accelerator, and on the accelerator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from stepscope import thresholds
from stepscope.base.wording import percent, printable
from stepscope.facts.device import Device
from stepscope.facts.host import Host, Optimizer
from stepscope.facts.loader import Loader
from stepscope.facts.profile import BUSY, Profile
from stepscope.report.findings import UNKNOWN
from stepscope.rules.host import at_once
from stepscope.rules.rule import Rule, mostly

# For each operator that reads from the GPU: the read in Python, and the code that avoids the read.
_READS = {
    "item|_local_scalar|is_nonzero|equal": (
        ".item(), float(loss), print(loss), if loss > …",
        "total += loss.detach()  # on the GPU; total.item() once, after many steps",
    ),
    "::_?(to|to_copy|copy_|cpu|numpy)$": (
        ".cpu(), .numpy(), .tolist()",
        "losses.append(loss.detach())  # on the GPU; .cpu() once, at the end",
    ),
    "^$": ("torch.cuda.synchronize() or event.synchronize()", "# remove torch.cuda.synchronize() from the loop"),
    "": (
        "the size of the result depends on values on the GPU, or the host needs a value",
        "torch.where(mask, x, 0)  # instead of x[mask]: keeps the size",
    ),
}


# Classes of kernels whose time is that of the bytes they move; compiled kernels may be of any class.
COMPILED, ELEMENTWISE, NORMALIZATION = "compiled", "elementwise", "normalization"
PINNED = 'DataLoader(…, pin_memory=True)\nimages.to("cuda", non_blocking=True)'
AS_BYTES = "transforms.PILToTensor()  # images as bytes, a quarter of the size; normalize on the GPU"
CHANNELS_LAST = "model.to(memory_format=torch.channels_last)\nimages.to(memory_format=torch.channels_last)"
_MOVING = (ELEMENTWISE, NORMALIZATION, "pooling", "layout", "reduction", "indexing", "optimizer")


@dataclass(frozen=True)
class Recorded:
    """A view of a profile, without an accelerator."""

    profile: Profile

    @property
    def settings(self) -> str:
        """Options of the profiler as text."""
        return ", ".join(self.profile.settings) or "no options"


@dataclass(frozen=True)
class Accelerated(Recorded):
    """A view of a profile with an accelerator; shares of the steps' time."""

    device: Device
    optimizer: Optimizer
    host: Host
    loader: Loader | None = None

    @property
    def operator(self) -> str:
        """The operator in which the host waits longest."""
        return printable(self.device.operator) or "a call outside of operators"

    @property
    def read(self) -> str:
        """The wait in Python."""
        return self._read[0]

    @property
    def instead(self) -> str:
        """The code that avoids the wait."""
        return self._read[1]

    @property
    def _read(self) -> tuple[str, str]:
        if self.host.on_gpu.scaling >= thresholds.MOSTLY_SCALING:
            return "GradScaler.step() reads whether a gradient is infinite", _scaling(self)
        return next(texts for name, texts in _READS.items() if re.search(name, self.device.operator))

    @property
    def kind_of_copies(self) -> str:
        """The key of the finding about copies to the GPU: from memory that is not pinned, or blocking, or large."""
        if self.device.pageable > self.device.copying / 2:
            return "copies.pageable"
        return "copies.blocking" if self.device.blocked >= thresholds.WORTH else "copies.large"

    @property
    def launching(self) -> float:
        """Share of short gaps, in which the GPU waits for a launch."""
        return self._of_busy * self.device.short_us

    @property
    def long_gaps(self) -> float:
        """Share of long gaps, in which the host does work other than launching."""
        return self._of_busy * self.device.long_us

    @property
    def _of_busy(self) -> float:
        """The host's share without waits and profiler overhead, divided by the time of all gaps in µs."""
        recording = self.profile.recording
        left = self.profile.host - self.device.waiting - (recording if recording >= thresholds.PROFILER else 0.0)
        return max(left, 0.0) / max(self.device.all_us, 1e-6)

    @property
    def tensor_cores(self) -> tuple[str, int]:
        """The data type of the GPU's Tensor Cores, and their largest speedup over float32; "" and 1 if unknown."""
        capability = self.device.capability or (0, 0)
        known = ((least <= capability, found) for least, found in thresholds.TENSOR_CORES.items())
        precision, ratio = next((found for has, found in known if has), ("", 1))
        return precision, max(1, ratio // thresholds.SLOWER_GEFORCE) if self.geforce else ratio

    @property
    def geforce(self) -> bool:
        """Whether the GPU is a GeForce card, as far as is known."""
        return any(thresholds.GEFORCE in (each.name or "") for each in self.device.accelerators)

    @property
    def deciding(self) -> float:
        """Upper bound for the share of the time in which the GPU decides how long a step takes.

        Faster kernels can shorten only this share. While the GPU waits for its launches, each kernel ends before the
        host has launched the next one: a faster kernel only makes the gap longer. Waits of the host for the GPU count.
        """
        return min(self.device.kernels, max(self.device.waiting, self.device.kernels - self.profile.host))

    @property
    def moving(self) -> float:
        """Share of kernels that read and write tensors and compute little."""
        return sum(share for name, share in self.device.classes.items() if name in _MOVING)

    @property
    def classes(self) -> str:
        """The classes of kernels that move bytes, with their shares."""
        parts = {name: share for name, share in self.device.classes.items() if name in _MOVING}
        largest = sorted(parts.items(), key=lambda part: -part[1])
        return ", ".join(f"{name} {percent(share)}" for name, share in largest if share >= thresholds.SLIGHT_SHARE)

    @property
    def fused(self) -> float | None:
        """The share that fused kernels save at most; None if the network is compiled."""
        classes = self.device.classes
        if classes.get(COMPILED, 0.0) >= thresholds.SLIGHT_SHARE:
            return None
        saved = classes.get(ELEMENTWISE, 0.0) + thresholds.FUSED_NORMALIZATION * classes.get(NORMALIZATION, 0.0)
        return min(saved, self.deciding)

    @property
    def precision(self) -> str:
        """The data type of the Tensor Cores."""
        return self.tensor_cores[0]

    @property
    def ratio(self) -> int:
        """The largest speedup of the Tensor Cores over float32."""
        return self.tensor_cores[1]

    @property
    def gain_of_a_larger_batch(self) -> float | None:
        """The gain per item of a batch that fills the GPU; None if the fill is unknown or sufficient."""
        fill = self.device.fill
        return self.device.kernels * (1 - fill) if fill is not None and fill < thresholds.LEAST_FILL else None


def without_profiler(profile: Profile, device: Device, step_ms: float) -> tuple[Profile, Device]:
    """Return both with shares of a step that nobody profiles, which takes `step_ms`.

    The profiler slows the host, and hardly the GPU: so a GPU that is always busy may be idle in the trace.
    """
    longer = min(profile.step_ms / step_ms, 1 / max(profile.busy, 1e-6))
    if longer <= 1:
        return profile, device
    idle = (1 - profile.busy * longer) / (1 - profile.busy)  # what is left of each part of the idle time
    shares = {name: share * (longer if name in BUSY else idle) for name, share in profile.shares.items()}
    # What recording takes of the host is in the difference
    profile = replace(profile, shares=shares, queued=profile.queued * idle, recorded_us=math.inf)
    of_gpu = ("kernels", "copying", "pageable", "within", "float32", "layouts", "native_bfloat16")
    device = replace(
        device,
        **{name: getattr(device, name) * longer for name in of_gpu},
        classes={name: share * longer for name, share in device.classes.items()},
        blocked=min(device.blocked, profile.avoidable_idle),
    )
    return profile, device


def _tensor_cores(view: Accelerated) -> str:
    """Return the changes that use Tensor Cores, the one that keeps float32's range and network as it is first."""
    tf32 = 'torch.set_float32_matmul_precision("high")  # TF32: float32 with products of 10 bits\n'
    autocast = 'with torch.autocast("cuda", torch.{}): …  # float16 also needs torch.amp.GradScaler()'
    first = tf32 if view.device.capability in thresholds.TF32_PAYS and not view.geforce else ""
    return first + autocast.format(view.precision)


def _scaling(view: Accelerated) -> str:
    """Return the changes without which a GradScaler reads from the GPU in each step."""
    known = view.optimizer
    fused = f"{known.name}(model.parameters(), …, fused=True)  # looks at it on the GPU, without a read"
    fused *= "fused" in known.faster
    bfloat16 = 'torch.autocast("cuda", torch.bfloat16)  # has the range of float32 and needs no GradScaler'
    changes = [fused, bfloat16 if view.precision == "bfloat16" else ""]
    return "\n".join(filter(None, changes)) or "# an optimizer with fused=True looks at it on the GPU, without a read"


def _pinned(view: Accelerated) -> str:
    if view.loader and view.loader.settings and view.loader.settings.pin_memory:
        return "# copy the loader's tensors, which are pinned, before any other change to them; convert on the GPU"
    return PINNED


def _smaller(view: Accelerated) -> str:
    items = view.loader.items if view.loader else None
    if items is None or items.images:
        return AS_BYTES
    return "# copy a smaller type, such as bytes, int32 or float16, and convert on the GPU"


def _channels_last(view: Accelerated) -> str:
    last = "channels_last_3d" if view.device.volumes else "channels_last"
    return CHANNELS_LAST.replace("channels_last", last)


def _fusing(view: Accelerated) -> str:
    compiled = "model = torch.compile(model)  # fuses elementwise kernels with their neighbours"
    if view.device.native_bfloat16 < thresholds.SLIGHT_SHARE:
        return compiled
    float16 = 'torch.autocast("cuda", torch.float16)  # with a GradScaler: cuDNN normalizes float16, not bfloat16'
    return f"{compiled}\n{float16}"


def _blocked(device: Device) -> str:
    """Return a sentence on the host's waits for copies; "" if it hardly waits."""
    if device.blocked < thresholds.SLIGHT_SHARE:
        return ""
    return f" The host waits for copies, which leaves the GPU idle for up to {percent(device.blocked)} of the time."


def _launched(host: Host) -> str:
    """Return a sentence on the line that launches most kernels of forward pass and update; "" if it is unknown."""
    return (
        f" Outside of the backward pass most are launched at {host.on_gpu.launching}" if host.on_gpu.launching else ""
    )


def _copying(
    key: str, name: str, more: str, topic: str, means: str, change: str, fit: Callable[[Accelerated], str] | None = None
) -> Rule[Accelerated]:
    """Return the row for one kind of copies to the GPU; `fit` returns the change for the loop, by default `change`."""
    return Rule(
        key, name, "copies", topic, means,
        lambda view: view.device.copying + view.device.blocked if view.kind_of_copies == key else None,
        lambda view: (
            f"For {percent(view.device.copying)} of the time copies to the GPU run and no kernel runs."
            f"{_blocked(view.device)}{more}{mostly(view.host.on_gpu.copying)}"
        ),
        fit or change,
        line=lambda view: view.host.on_gpu.copying,
        example=change,
    )  # fmt: skip


RULES: tuple[Rule[Recorded], ...] = (
    Rule(
        "profiler.overhead", "profiler overhead", UNKNOWN, "profiler overhead",
        "Recording took so much of the time that the trace shows the profiler rather than the training.",
        lambda view: view.profile.recording,
        "Recording {profile.operators:operator} and {profile.frames:Python frame} (with {settings}) took about "
        "{profile.recording:%} of the time, and all times of the host include this overhead.",
        "profile(activities=…, schedule=schedule(wait=5, warmup=1, active=8))  # no stacks, shapes or memory",
        least=thresholds.PROFILER,
    ),
    Rule(
        "communication.exposed", "exposed communication", "communication",
        "overlapping communication with computation",
        "By the trace of one rank, the step exchanges data with other processes and computes nothing meanwhile.",
        lambda view: view.profile.communication,
        "For {profile.communication:%} of the time the step exchanges data with other processes, and computes nothing "
        "meanwhile. The process may wait for a slower process: the diagnosis of all ranks together names a slow rank.",
        "DDP(model, bucket_cap_mb=…)  # sends buckets during the backward pass\n"
        "with model.no_sync(): loss_of(model(images)).backward()  # except every n-th step; or use a larger batch",
    ),
)  # fmt: skip
# A waiting host cannot launch ahead, so the GPU idles afterwards. Both the wait and the idle time bound the gain.
RULES_OF_A_GPU: tuple[Rule[Accelerated], ...] = (
    Rule(
        "device.synchronization", "a synchronization in every step", "synchronization", "fewer synchronizations",
        "In every step the host waits for the GPU, and afterwards the GPU waits for the host.",
        lambda view: min(view.device.synchronizing, view.profile.avoidable_idle),
        lambda view: (
            f"In {view.device.synchronized} of {view.profile.steps} steps the host waits for the GPU: "
            f"{percent(view.device.synchronizing)} of the time, mostly in {view.operator} ({view.read}). For "
            f"{percent(view.profile.host)} of the time the GPU waits for the host.{mostly(view.host.on_gpu.waiting)}"
        ),
        lambda view: view.instead,
        example=_READS["item|_local_scalar|is_nonzero|equal"][1],
        line=lambda view: view.host.on_gpu.waiting,
    ),
    _copying(
        "copies.pageable", "pageable copies", " Most copies are from memory that is not pinned.", "pinned memory",
        "Copies to the GPU come from memory that is not pinned, and no kernel runs meanwhile.",
        PINNED, _pinned,
    ),
    _copying(
        "copies.blocking", "blocking copies", " The copies block, even if the memory is pinned.", "asynchronous copies",
        "The host waits for copies to the GPU.",
        'images.to("cuda", non_blocking=True)  # from a DataLoader with pin_memory=True',
    ),
    _copying(
        "copies.large", "large copies", "", "normalization on the device",
        "Copies to the GPU take long, although they are asynchronous.",
        AS_BYTES, _smaller,
    ),
    Rule(
        "copies.within-device", "copies within the GPU", "copies", "fewer copies",
        "The GPU copies within its memory while no kernel runs.",
        lambda view: view.device.within,
        "For {device.within:%} of the time the GPU copies within its memory while no kernel runs.",
        "# look for .contiguous(), .clone(), torch.cat\nDDP(…, gradient_as_bucket_view=True)",
    ),
    Rule(
        "device.launch-bound", "launch-bound steps", "launches", "fewer launches",
        "The GPU waits for the launch of its next kernel, many times in a step.",
        lambda view: view.launching,
        lambda view: (
            f"In a step the GPU waits {view.device.gaps:,.0f} times for its next launch (median "
            f"{view.device.gap_us:.0f} µs): {percent(view.launching)} of the time. A step has "
            f"{view.device.launches:,.0f} kernels of {view.device.kernel_us:.0f} µs on average.{_launched(view.host)}"
        ),
        lambda view: f'model = torch.compile(model, mode="reduce-overhead")\n{at_once(view.optimizer)}'.rstrip(),
        example='model = torch.compile(model, mode="reduce-overhead")\nSGD(model.parameters(), …, fused=True)',
        line=lambda view: view.host.on_gpu.launching,
    ),
    Rule(
        "device.host-does-other-work", "other work between launches", "launches", "less work between launches",
        "The GPU waits while the host does work other than launching kernels.",
        lambda view: view.long_gaps,
        lambda view: (
            f"In gaps of more than {thresholds.LAUNCH_GAP_US:.0f} µs the GPU waits for the host, "
            f"{percent(view.long_gaps)} of the time, mostly for {view.device.doing}.{mostly(view.host.on_gpu.gaps)}"
        ),
        "# move this work out of the loop, or do it every n-th step",
        line=lambda view: view.host.on_gpu.gaps,
    ),
    Rule(
        "device.float32", "float32 without Tensor Cores", "compute", "mixed precision",
        "Matrix products and convolutions run in float32, without Tensor Cores.",
        lambda view: min(view.device.float32 * (1 - 1 / view.ratio), view.deciding),
        "Matrix products and convolutions in float32 take {device.float32:%} of the time. The Tensor Cores of this GPU "
        "are up to {ratio} times as fast, in {precision}.",
        _tensor_cores,
        example='torch.set_float32_matmul_precision("high")\nwith torch.autocast("cuda", torch.bfloat16): …',
    ),
    Rule(
        "device.layout-conversions", "layout conversions", "compute", "channels-last memory format",
        "Kernels convert the memory format of images back and forth.",
        lambda view: min(view.device.layouts, view.deciding),
        "Kernels that convert the memory format (NCHW to NHWC, or back) take {device.layouts:%} of the time.",
        _channels_last,
        example=CHANNELS_LAST,
    ),
    Rule(
        "device.memory-bound", "kernels that only move bytes", "compute", "fused kernels",
        "Many kernels read and write tensors and compute little: normalization, elementwise work.",
        lambda view: view.fused,
        "Kernels that read and write tensors, and compute little, take {moving:%} of the time: {classes}. The bound "
        "assumes that fusing saves all of the elementwise kernels, and half of the normalization: try it.",
        _fusing,
        example="model = torch.compile(model)  # fuses elementwise kernels with their neighbours",
    ),
    Rule(
        "device.small-batch", "a batch too small to fill the GPU", "compute", "larger batches",
        "While kernels run, most multiprocessors of the GPU have no work.",
        lambda view: view.gain_of_a_larger_batch,
        "Kernels run for {device.kernels:%} of the time. Meanwhile {device.fill:%} of the GPU's multiprocessors have "
        "work, on average. The gain is per item: the step itself does not become shorter.",
        "DataLoader(…, batch_size=…)  # double the size until the memory is full, and adapt the learning rate",
    ),
)  # fmt: skip
