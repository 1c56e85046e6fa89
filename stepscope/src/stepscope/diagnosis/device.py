"""What a trace shows of time lost between the host and the accelerator, and on the accelerator.

`read` returns the facts; `RULES` and `RULES_OF_A_GPU` are the tables of findings. A new finding is a row of a table.
"""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace

from stepscope import traces
from stepscope.base.wording import printable
from stepscope.diagnosis import result
from stepscope.diagnosis.profile import Profile
from stepscope.diagnosis.result import UNKNOWN, WORTH, Finding, Rule
from stepscope.traces.idle_time import PAGEABLE, direction

# Share of the steps that counts as every step: a value printed every tenth step is no fault.
EVERY = 0.8
# A GPU waits tens of µs for a missing launch. In public traces of ResNet-50 and DLRM, gaps up to this length hold nine
# tenths of the GPU's waits for launches; gaps of several ms are a separate group.
LAUNCH_GAP = 500.0  # µs
# Between two kernels that were launched long before, public traces show 1 to 2 µs: the GPU's own time.
OWN_GAP = 5.0  # µs
# Blocks for each multiprocessor, at most 1. ResNet-50 with 32 photos fills a V100 to 0.98; the emptiest of ten public
# training traces, with many small kernels, fills an A100 to 0.90.
LEAST_FILL = 0.5
# µs that recording takes, measured on one core with torch 2.15: a lower bound, older versions and CUDA take more
OPERATOR_COST, SHAPES_COST, FRAME_COST = 0.2, 0.15, 0.16
# Share of the time. On the smallest network a light profile takes 12% more CPU time, a full one 69%.
PROFILER = 0.15

# The type that Tensor Cores multiply, by the lowest compute capability that has them, highest first; and their peak for
# dense matrices over that of float32, at most, by NVIDIA's data sheets: V100 and T4 8, A100 16, A10 and L4 4, H100 15,
# B200 30, RTX cards 2.
TENSOR_CORES = {
    (12, 0): ("bfloat16", 4),
    (10, 0): ("bfloat16", 30),
    (9, 0): ("bfloat16", 15),
    (8, 6): ("bfloat16", 4),
    (8, 0): ("bfloat16", 16),
    (7, 0): ("float16", 8),
}
WITHOUT_TENSOR_CORES = "GTX 16"  # in the names of GPUs of 7.5 without them

TO_DEVICE, WITHIN_DEVICE = "to the device", "within the device"
# What the host does in a gap of the GPU, by the columns of `traces.idle`.
_DOING = {"launching": "calls of the runtime", "operators": "operators on the CPU", "other": "Python"}
# Operators around a read from the GPU: how the read looks in Python, and how to avoid it.
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
        "the size of its result depends on the values, or the host needs a value",
        "torch.where(mask, x, 0)  # instead of x[mask]: keeps the size",
    ),
}


def read(profile: Profile) -> SimpleNamespace:
    """Return what a trace says about host and accelerator; shares are shares of the steps' time."""
    spans = profile.trace.spans
    operators = sum(int(span.events["operator"].sum()) for span in spans)
    frames = sum(span.counts["python_function"] for span in spans)
    settings = set().union(*(span.settings for span in spans))
    cost = operators * (OPERATOR_COST + SHAPES_COST * ("record_shapes" in settings)) + frames * FRAME_COST
    recording = float(cost / max(sum(span.events["end"].max() - span.events["start"].min() for span in spans), 1.0))
    if profile.on_device:  # while a GPU is busy, recording costs nothing
        recording = min(recording, profile.avoidable_idle)
    facts = {
        "steps": profile.steps,
        "host": profile.host,
        "idle": profile.avoidable_idle,
        "operators": operators,  # recorded by the profiler, like the frames of Python
        "frames": frames,
        "settings": ", ".join(sorted(settings)) or "no options",
        "recording": recording,  # share
        "communication": _communication(profile),
    }
    if profile.on_device:
        facts |= _waits(profile) | _copies(profile) | _kernels(profile)
        facts |= _gaps(profile, facts["waiting"], recording)
    return SimpleNamespace(**facts)


def _communication(profile: Profile) -> float:
    """Return the share of time in which the step exchanges data with other processes, and computes nothing."""
    share = float(profile.shares["Communication"])
    if share < WORTH or profile.on_device:
        return share
    (row,) = traces.communication({"this one": profile.trace}).itertuples()
    return row.exposed / row.step  # gloo's threads exchange while operators run, too


def _waits(profile: Profile) -> dict[str, object]:
    """Return how long the host waits in calls of every step: not in those for a checkpoint, or at the end."""
    waits = traces.waits(profile.trace)
    waits = waits.assign(length=(waits["end"] - waits["start"]).astype(float), operator=waits["operator"].fillna(""))
    groups = waits.fillna({"copy": "none"}).groupby(["call", "operator", "copy"])["step"]
    waits = waits[groups.transform("nunique") >= EVERY * profile.steps]
    copied = waits["copy"] == TO_DEVICE
    lengths = waits[~copied].groupby("operator")["length"].sum()
    operator = str(lengths.idxmax()) if len(lengths) else ""
    looks, instead = next(text for name, text in _READS.items() if re.search(name, operator))
    return {
        "waiting": float(waits["length"].sum() / profile.total),  # share, as the next two
        "blocked": min(float(waits.loc[copied, "length"].sum() / profile.total), profile.avoidable_idle),
        "synchronizing": float(lengths.sum() / profile.total),  # without copies to the GPU
        "synchronized": waits.loc[~copied, "step"].nunique(),  # steps
        "operator": printable(operator) or "a call of its own",  # in which the host waits most
        "looks": looks,
        "instead": instead,
    }


def _copies(profile: Profile) -> dict[str, object]:
    """Return the shares that copies take while no kernel runs."""
    copies = traces.exposed_copies(profile.trace).sum() / profile.total

    def share(where: str, kind: str = "") -> float:
        return sum(float(share) for name, share in copies.items() if direction(name) == where and kind in name)

    return {"copying": share(TO_DEVICE), "pageable": share(TO_DEVICE, PAGEABLE), "within": share(WITHIN_DEVICE)}


def _gaps(profile: Profile, waiting: float, recording: float) -> dict[str, object]:
    """Return how long the GPU waits for the host in gaps that neither waits nor the profiler explain."""
    gaps = traces.idle(profile.trace)
    length, busy = gaps["end"] - gaps["start"], gaps[["waiting", *_DOING]].sum(axis="columns")
    short, long = (length > OWN_GAP) & (length <= LAUNCH_GAP), length > LAUNCH_GAP
    left = profile.host - waiting - (recording if recording >= PROFILER else 0.0)
    of_busy = max(left, 0.0) / max(busy.sum(), 1e-6)
    doing = ""
    if long.any():
        doing = _DOING[gaps.loc[long, list(_DOING)].sum().idxmax()]
        longest = traces.gaps(profile.trace).sort_values("longest")["in_longest"].iat[-1]
        if longest != "other" and "DataLoader" not in longest:
            doing += f"; in the longest gap {printable(longest)}"
    return {
        "launching": of_busy * float(busy[short].sum()),  # share of gaps in which the GPU waits for a launch
        "gaps": short.sum() / profile.steps,
        "gap_us": length[short].median(),
        "long_gaps": of_busy * float(busy[long].sum()),  # share of gaps in which the host does other work
        "doing": doing,
    }


def _kernels(profile: Profile) -> dict[str, object]:
    """Return what the trace shows of the kernels."""
    share, number = float(profile.shares["Kernel"]), sum(span.kernels.height for span in profile.trace.spans)

    def of(chosen: Callable) -> float:
        return traces.kernel_time(profile.trace, chosen) / (profile.total * profile.devices)

    precision, ratio = _tensor_cores(profile)
    return {
        "kernels": share,
        "launches": number / profile.steps,
        "kernel_us": share * profile.total / max(number, 1),
        "fill": traces.fill(profile.trace),  # share of the multiprocessors that have work while kernels run
        "float32": of(traces.multiplies_float32),  # share of the time, as the next one
        "layouts": of(traces.converts_layout),
        "precision": precision,
        "ratio": ratio,
    }


def _tensor_cores(profile: Profile) -> tuple[str, int]:
    """Return the type that the GPU's Tensor Cores multiply, and how much faster than float32; "" and 1 if unknown."""
    spans = profile.trace.spans
    used = {int(device) for span in spans for device in span.kernels["device"] if device >= 0}
    for device in (device for span in spans for device in span.devices if device.get("id") in used):
        numbers = device.get("computeMajor"), device.get("computeMinor"), device.get("warpSize", 32)
        if all(isinstance(number, int) for number in numbers) and numbers[2] == 32:  # AMD's numbers mean other things
            known = WITHOUT_TENSOR_CORES not in str(device.get("name"))
            return next((cores for least, cores in TENSOR_CORES.items() if known and numbers[:2] >= least), ("", 1))
    return "", 1


def _kind_of_copies(device: SimpleNamespace) -> str:
    """Return the finding about copies to the GPU: their memory is not pinned, or they block, or they are large."""
    if device.pageable > device.copying / 2:
        return "pageable copies"
    return "copies that block" if device.blocked >= WORTH else "large copies"


def _copying(name: str, more: str, topic: str, change: str) -> Rule:
    """Return the row for one kind of copies to the GPU."""
    return Rule(
        name, "copies", topic,
        lambda device: device.copying + device.blocked if _kind_of_copies(device) == name else None,
        "For {copying:%} of the time copies to the GPU run and no kernel does. The host waits for copies, so that the "
        f"GPU idles for up to {{blocked:%}} of the time{more}.",
        change,
    )  # fmt: skip


RULES = (
    Rule(
        "the profiler itself in the way", UNKNOWN, "profiler overhead",
        lambda device: device.recording,
        "Recording {operators:operator} and {frames:Python frame} (with {settings}) took about {recording:%} of the "
        "time: part of the host's time is the profiler's.",
        "profile(activities=…, schedule=schedule(wait=5, warmup=1, active=8))  # no stacks, shapes or memory",
        least=PROFILER,
    ),
    Rule(
        "exposed communication", "communication", "overlapping communication with computation",
        lambda device: device.communication,
        "For {communication:%} of the time the step exchanges data with other processes, and computes nothing "
        "meanwhile. It may wait for a slower process: the diagnosis of all ranks together says whether it does.",
        "DDP(model, bucket_cap_mb=…)  # buckets that are sent during backward\n"
        "with model.no_sync(): loss_of(model(images)).backward()  # except every n-th step; or a larger batch",
    ),
)  # fmt: skip
# A waiting host cannot launch ahead, so the GPU idles afterwards. Both the wait and the idle time bound the gain.
RULES_OF_A_GPU = (
    Rule(
        "a synchronization in every step", "synchronization", "fewer synchronizations",
        lambda device: min(device.synchronizing, device.idle),
        "In {synchronized} of {steps} steps the host waits for the GPU, {synchronizing:%} of the time, mostly in "
        "{operator} ({looks}). For {host:%} of the time the GPU waits for the host.",
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
        "They take {within:%} of the time while no kernel runs.",
        "# look for .contiguous(), .clone(), torch.cat\nDDP(…, gradient_as_bucket_view=True)",
    ),
    Rule(
        "launch-bound steps", "launches", "fewer launches",
        lambda device: device.launching,
        "{gaps:,.0f} times a step the GPU waits for its next kernel, {gap_us:.0f} µs in the median, {launching:%} of "
        "the time. A step has {launches:,.0f} kernels of {kernel_us:.0f} µs on average.",
        'model = torch.compile(model, mode="reduce-overhead")\nSGD(…, fused=True)',
    ),
    Rule(
        "the host does something else", "launches", "less work between launches",
        lambda device: device.long_gaps,
        f"In gaps of more than {LAUNCH_GAP:.0f} µs the GPU waits for the host, {{long_gaps:%}} of the time, mostly for "
        "{doing}.",
        "# move it out of the loop, or do it every n-th step",
    ),
    Rule(
        "float32 without Tensor Cores", "compute", "mixed precision",
        lambda device: device.float32 * (1 - 1 / device.ratio),
        "Matrix products and convolutions in float32 take {float32:%} of the time. The Tensor Cores of this GPU "
        "multiply {precision} at most {ratio} times as fast.",
        'with torch.autocast("cuda", torch.{precision}): …  # float16 also needs torch.amp.GradScaler()',
    ),
    Rule(
        "layout conversions", "compute", "channels-last memory format",
        lambda device: device.layouts,
        "Kernels that convert NCHW to NHWC, or back, take {layouts:%} of the time.",
        "model.to(memory_format=torch.channels_last)\nimages.to(memory_format=torch.channels_last)",
    ),
    Rule(
        "a batch too small to fill the GPU", "compute", "larger batches",
        lambda device: device.kernels * (1 - device.fill) if device.fill < LEAST_FILL else None,
        "While kernels run, {kernels:%} of the time, on average {fill:%} of the multiprocessors have work. The gain is "
        "per image; the step itself does not become shorter.",
        "DataLoader(…, batch_size=…)  # double it until the memory is full, and adapt the learning rate",
    ),
)  # fmt: skip


def findings(profile: Profile) -> Iterator[Finding]:
    """Yield what costs time, without loading."""
    return result.findings((*RULES, *RULES_OF_A_GPU) if profile.on_device else RULES, read(profile))
