"""Reads from a trace how much time is lost between the host and the accelerator, and on the accelerator."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from stepscope import thresholds, traces
from stepscope.base.wording import printable, without_paths
from stepscope.facts.device import Accelerator, Device
from stepscope.facts.profile import Profile
from stepscope.traces.idle_time import PAGEABLE, direction

NATIVE_BFLOAT16 = r"native::batch_norm\w*<.*BFloat16"  # in the names of kernels
WITHOUT_TENSOR_CORES = "GTX 16"  # in the names of GPUs of compute capability 7.5 without Tensor Cores
TO_DEVICE, WITHIN_DEVICE = "to the device", "within the device"
# The host's activities in a gap of the GPU, by the columns of `traces.idle`
_DOING = {"launching": "calls of the runtime", "operators": "operators on the CPU", "other": "Python"}


def read(trace: traces.Trace, profile: Profile) -> Device | None:
    """Return the facts about all accelerators of a trace; None without accelerators."""
    if not profile.on_device:
        return None
    return Device(
        accelerators=tuple(_accelerators(trace)),
        **_waits(trace, profile),
        **_copies(trace, profile),
        **_gaps(trace, profile),
        **_kernels(trace, profile),
    )


def _accelerators(trace: traces.Trace) -> Iterator[Accelerator]:
    for device, row in traces.accelerators(trace).iterrows():
        shares = [_known(row[column]) for column in ("utilization", "sm_efficiency", "tensor_core_share")]
        yield Accelerator(int(device), row["name"] if isinstance(row["name"], str) else None, *shares)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _waits(trace: traces.Trace, profile: Profile) -> dict[str, Any]:
    """Return how long the host waits in calls that every step makes: not in calls for a checkpoint, or at the end."""
    waits = traces.waits(trace)
    waits = waits.assign(length=(waits["end"] - waits["start"]).astype(float), operator=waits["operator"].fillna(""))
    groups = waits.fillna({"copy": "none"}).groupby(["call", "operator", "copy"])["step"]
    waits = waits[groups.transform("nunique") >= thresholds.EVERY_STEP * profile.steps]
    copied = waits["copy"] == TO_DEVICE
    lengths = waits[~copied].groupby("operator")["length"].sum()
    return {
        "waiting": float(waits["length"].sum() / profile.total_us),
        "blocked": min(float(waits.loc[copied, "length"].sum() / profile.total_us), profile.avoidable_idle),
        "synchronizing": float(lengths.sum() / profile.total_us),
        "synchronized": int(waits.loc[~copied, "step"].nunique()),
        "operator": str(lengths.idxmax()) if len(lengths) else "",
    }


def _copies(trace: traces.Trace, profile: Profile) -> dict[str, Any]:
    """Return the shares of the steps that copies take while no kernel runs."""
    copies = traces.exposed_copies(trace).sum() / profile.total_us

    def share(where: str, kind: str = "") -> float:
        return sum(float(share) for name, share in copies.items() if direction(name) == where and kind in name)

    return {"copying": share(TO_DEVICE), "pageable": share(TO_DEVICE, PAGEABLE), "within": share(WITHIN_DEVICE)}


def _gaps(trace: traces.Trace, profile: Profile) -> dict[str, Any]:
    """Return how long the GPU waits for the host, in short gaps and in long ones: until the next kernel is launched."""
    gaps = traces.idle(trace)
    late, busy = gaps["late"], gaps[["waiting", *_DOING]].sum(axis="columns").clip(upper=gaps["late"])
    short = (late > thresholds.OWN_GAP_US) & (late <= thresholds.LAUNCH_GAP_US)
    long, doing = late > thresholds.LAUNCH_GAP_US, ""
    if long.any():
        doing = _DOING[gaps.loc[long, list(_DOING)].sum().idxmax()]
        longest = traces.gaps(trace).sort_values("longest")["in_longest"].iat[-1]
        if longest != "other" and "DataLoader" not in longest:
            doing += f"; in the longest gap {without_paths(printable(longest))}"
    return {
        "gaps": float(short.sum() / profile.steps),
        "gap_us": _known(late[short].median()),
        "short_us": float(busy[short].sum()),
        "long_us": float(busy[long].sum()),
        "all_us": float(busy.sum()),
        "doing": doing,
    }


def _kernels(trace: traces.Trace, profile: Profile) -> dict[str, Any]:
    """Return the facts about kernels."""
    share, number = profile.shares["Kernel"], sum(span.kernels.height for span in trace.spans)

    def of(chosen: Callable[..., Any]) -> float:
        return float(traces.kernel_time(trace, chosen) / (profile.total_us * profile.devices))

    classes = traces.kernel_classes(trace)["time"]
    return {
        "kernels": share,
        "launches": number / profile.steps,
        "kernel_us": share * profile.total_us / max(number, 1),
        "fill": _known(traces.fill(trace)),
        "float32": of(traces.multiplies_float32),
        "layouts": of(traces.converts_layout),
        "volumes": of(lambda name: traces.converts_layout(name) and "dhw" in name) > 0,
        "classes": {name: float(time) / (profile.total_us * profile.devices) for name, time in classes.items()},
        "native_bfloat16": of(lambda name: bool(re.search(NATIVE_BFLOAT16, name))),
        "capability": _capability(trace),
    }


def _capability(trace: traces.Trace) -> tuple[int, int] | None:
    """Return the compute capability of the GPU that ran kernels; None without Tensor Cores, or if it is unknown."""
    used = {int(device) for span in trace.spans for device in span.kernels["device"] if device >= 0}
    for device in (device for span in trace.spans for device in span.devices if device.get("id") in used):
        major, minor, warp = device.get("computeMajor"), device.get("computeMinor"), device.get("warpSize", 32)
        if isinstance(major, int) and isinstance(minor, int) and warp == 32:  # AMD's numbers mean something else
            return None if WITHOUT_TENSOR_CORES in str(device.get("name")) else (major, minor)
    return None
