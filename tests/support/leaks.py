"""What a measurement may leave behind in its process, so that those after it measure something else."""

import multiprocessing
import os
from pathlib import Path

import torch


def state() -> dict[str, object]:
    """Return the settings of this process that change how fast it is, or what it computes.

    Without TF32: notebooks 08 to 11 set it on purpose, for all that follows. The first start method is the default.
    """
    return {
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "default type": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "oneDNN": torch.backends.mkldnn.enabled,
        "start method": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "folder": Path.cwd(),
        "variables": {
            name: value for name, value in os.environ.items() if name.startswith(("COURSE_", "OMP_", "MKL_"))
        },
    }


def left_behind(before: dict[str, object]) -> dict[str, tuple[object, object]]:
    """Return what has changed since, by its name: what it was, and what it is."""
    return {name: (before[name], now) for name, now in state().items() if before[name] != now}
