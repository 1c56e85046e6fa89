"""Records a profile of a few training steps and writes a small trace for TensorBoard."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule, tensorboard_trace_handler

from stepscope import traces
from stepscope.base import staging
from stepscope.timing import loaders
from stepscope.timing.stopwatch import has_gpu, synchronize, timed, warmup_steps
from stepscope.traces import files

if TYPE_CHECKING:
    import pandas as pd

# The profiler's log level, read when the first profile starts: without a GPU, the log only says that there is no GPU.
if not has_gpu():
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def record(
    loader: Iterable[object], step: loaders.Step, folder: str | Path, *, active: int = 6, **options: bool
) -> Path:
    """Profile `active` training steps, or a few more, and return the folder of the trace.

    It waits until the loader runs evenly, profiles one step as a warm-up whose events are discarded, and then records.
    The trace is a gzip file, and replaces an earlier recording in the folder. A stopwatch also runs; see
    `stopwatch`. Warns if a GPU's trace lacks kernels (`traces.lost_kernels`).

    Parameters
    ----------
    loader : iterable
    step : callable
        Called with a batch as `call` does.
    folder : str or Path
        Where the trace goes: a new folder, an empty one, or one with an earlier recording, which is replaced.
    active : int
        Steps to record, 1 or more; rounded up to whole periods of the workers, see `whole_periods`.
    **options : bool
        Of `torch.profiler.profile`, such as ``record_shapes=True``. Each option adds time and bytes to every step.

    Raises
    ------
    FileExistsError
        If the folder holds files that do not belong to a recording.
    ValueError
        If there is no step to record.
    """
    if active < 1:
        raise ValueError(f"Expected at least one step to record, found {active=}.")
    folder = Path(folder)
    files.refuse_others(folder)
    wait, active = warmup_steps(loader), loaders.whole_periods(loader, active)
    plan = schedule(wait=wait, warmup=1, active=active, repeat=1)
    clock = {}
    settings: dict[str, Any] = dict(options)  # `profile` has further options, of other types
    with staging.folder(folder, replace=True) as staged:
        profiler = profile(activities=activities(), schedule=plan, on_trace_ready=trace_handler(staged), **settings)
        with loaders.batches(loader) as batches, profiler:
            for timed_step in timed(batches, step, wait + 1 + active):
                if profiler.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
                    clock[profiler.step_num] = {"wait": timed_step.wait * 1e6, "step": timed_step.duration * 1e6}
                elif profiler.current_action is ProfilerAction.WARMUP:
                    synchronize()  # kernels of earlier steps must not be in the recording
                profiler.step()
        (staged / files.STOPWATCH).write_text(json.dumps(clock), encoding="utf-8")
    if torch.cuda.is_available() and (lost := traces.lost_kernels(traces.load(folder))):
        warnings.warn(lost, stacklevel=2)
    return folder


def trace_handler(folder: Path, worker: str | None = None) -> Callable[[profile], None]:
    """Return a function that writes a profile's trace into `folder`, as a gzip file that names the `worker`.

    PyTorch's own handler with ``use_gzip=True`` packs lines at the highest level, which takes several times as long.
    """
    write = tensorboard_trace_handler(str(folder), worker)

    def write_packed(profiler: profile) -> None:
        write(profiler)
        for file in folder.glob("*.pt.trace.json"):
            with file.open("rb") as content, gzip.open(f"{file}.gz", "wb", compresslevel=6) as packed:
                shutil.copyfileobj(content, packed)
            file.unlink()

    return write_packed


def stopwatch(folder: Path) -> pd.DataFrame:
    """Return the times that `record` took by stopwatch, for comparison with the trace in `folder`.

    A row for each recorded step, by its number; columns ``wait``, for the batch, and ``step``, in total, in µs.
    """
    import pandas as pd

    table = pd.DataFrame.from_dict(json.loads((folder / files.STOPWATCH).read_text(encoding="utf-8")), orient="index")
    return table.set_axis(table.index.astype(int).rename("step"))


def activities() -> list[ProfilerActivity]:
    """The activities to profile here: CPU, and CUDA if there is a GPU."""
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


def size_kb(folder: Path) -> float:
    """Size of all traces in `folder`, in kB (10³ bytes)."""
    return sum(file.stat().st_size for file in folder.glob("*.pt.trace.json*")) / 1e3
