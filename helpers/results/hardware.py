"""The hardware and software of a recording."""

import datetime
import importlib.metadata
import platform
from pathlib import Path

import pynvml
import torch

from helpers import config
from stepscope.base import machine


def describe() -> dict[str, object]:
    """Return device, clocks, processor, cores, versions, preset and date; None where something is unknown."""
    properties = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    return {
        "device": torch.cuda.get_device_name() if properties else "CPU",
        "device memory": f"{properties.total_memory / 1e9:.0f} GB" if properties else None,
        "driver": _driver(),
        "clocks": _clocks() if properties else None,
        "processor": _processor(),
        "cores": machine.cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": importlib.metadata.version("torchvision"),
        "CUDA": torch.version.cuda if properties else None,
        "cuDNN": torch.backends.cudnn.version() if properties else None,
        "preset": config.preset().name,
        "date": datetime.date.today().isoformat(),
    }


def _driver() -> str | None:
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return None  # there is none


def _clocks() -> dict[str, int] | None:
    """MHz of the first GPU, now and at most; None if its driver does not say."""
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
        kinds = {"multiprocessors": pynvml.NVML_CLOCK_SM, "memory": pynvml.NVML_CLOCK_MEM}
        now = {kind: pynvml.nvmlDeviceGetClockInfo(gpu, clock) for kind, clock in kinds.items()}
        most = {f"{kind}, at most": pynvml.nvmlDeviceGetMaxClockInfo(gpu, clock) for kind, clock in kinds.items()}
        return now | most
    except pynvml.NVMLError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # on other systems than Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
