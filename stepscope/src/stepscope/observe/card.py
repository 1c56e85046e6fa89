"""How fast a GPU may run while a loop trains: its clock, its power, and who else computes on it; asked of NVML."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from stepscope.facts.loop import Card

# Bits of the reasons why a clock is lower than it could be. Source: "NVML API Reference Guide", nvmlClocksEventReasons
LIMITS = {
    0x1: "a lack of work",
    0x2: "a clock that somebody set",
    0x4: "its power limit",
    0x8: "its hardware, against heat or overload",
    0x80: "its power supply",
    0x20 | 0x40: "its temperature",
    0x10: "another GPU, whose clock it shares",
}


def seen(loop_gpu: torch.device | None = None) -> Card | None:
    """Return the state of a GPU, the current one by default.

    None if this process uses no GPU, without nvidia-ml-py, or if NVML says nothing.
    """
    if not torch.cuda.is_initialized():
        return None
    with suppress(Exception):  # a driver, a container or a part of a GPU that does not answer: never an error of ours
        import pynvml

        pynvml.nvmlInit()
        try:
            gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(loop_gpu).uuid}")
            clock = float(pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM))
            most = float(pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM))

            def answer(question: Callable[[Any], Any], otherwise: Any) -> Any:
                with suppress(pynvml.NVMLError):  # not every GPU knows each of these
                    return question(gpu)
                return otherwise

            power = answer(pynvml.nvmlDeviceGetPowerUsage, 0) / 1e3
            limit_w = answer(pynvml.nvmlDeviceGetEnforcedPowerLimit, 0) / 1e3
            reasons = answer(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, 0)
            # In a container the numbers of processes are those of the host: this one cannot be told from others
            processes = answer(pynvml.nvmlDeviceGetComputeRunningProcesses, ())
            limits = tuple(limit for bits, limit in LIMITS.items() if reasons & bits)
            return Card(clock, most, power, limit_w, limits, max(0, len(processes) - 1))
        finally:
            pynvml.nvmlShutdown()
    return None
