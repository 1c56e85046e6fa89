"""Records a profile of a few training steps and writes a small trace for TensorBoard."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule, tensorboard_trace_handler

from helpers import config, staging, traces
from helpers.timing import loaders
from helpers.timing.stopwatch import timed, warmup_steps

if TYPE_CHECKING:
    import pandas as pd

STOPWATCH = "stopwatch.json"  # beside the traces

# The profiler's own log: on a machine without a GPU all it says is that it started, stopped and found no GPU. With one
# it may say why it sees no kernels, so it is left on there. It is read when the first profile starts.
if not torch.cuda.is_available():
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


def record(
    loader: Iterable,
    step: loaders.Step,
    run: str | Path,
    *,
    active: int = 6,
    spans: int = 1,
    record_shapes: bool = False,
    profile_memory: bool = False,
    with_stack: bool = False,
    slim: bool = False,
) -> Path:
    """Profile `active` training steps, `spans` times, and return the folder of the traces.

    Each span waits until the loader runs evenly, profiles one step as a warm-up whose events are thrown away, and
    then records. The traces are gzip files, one a span, and replace those of an earlier recording of the same run. A
    stopwatch runs along; see `stopwatch`.

    Light by default. The options add to every step: with two workers, a tiny network and batches of 32 on two
    cores, activities alone took 4% more CPU time and 57 kB a step before gzip; with shapes it was 12% and
    88 kB, with memory 5% and 95 kB, with stacks 40% and 335 kB.

    Parameters
    ----------
    loader : iterable
    step : callable
        Called with a batch as `loaders.call` does.
    run : str or Path
        Notebook and experiment, such as ``"01-first-profile/one-worker"``: the folder below ``COURSE_RUNS``. Or any
        folder, by its absolute path: a new one, an empty one, or one with an earlier recording, which is replaced.
    active : int
        Steps to record in each span.
    spans : int
        How often to wait, warm up and record.
    record_shapes, profile_memory, with_stack : bool
        Passed to `torch.profiler.profile`.
    slim : bool
        Leave out what happened inside loading, and short Python frames; see `traces.slim`.

    Raises
    ------
    FileExistsError
        If the folder holds other files than a recording's.
    """
    folder = config.runs_dir() / run
    _refuse_other_files(folder)
    wait = warmup_steps(loader)
    plan = schedule(wait=wait, warmup=1, active=active, repeat=spans)
    clock = {}
    with staging.folder(folder, replace=True) as staged:
        with (
            loaders.batches(loader) as batches,
            warnings.catch_warnings(),
            profile(
                activities=activities(),
                schedule=plan,
                on_trace_ready=tensorboard_trace_handler(str(staged), use_gzip=True),
                record_shapes=record_shapes,
                profile_memory=profile_memory,
                with_stack=with_stack,
            ) as profiler,
        ):
            # The profiler itself keeps only the last span; the others are in their traces by then.
            warnings.filterwarnings("ignore", "Warning: Profiler clears events")
            for taken in timed(batches, step, spans * (wait + 1 + active)):
                if profiler.current_action in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE):
                    clock[profiler.step_num] = {"wait": taken.wait * 1e6, "step": taken.duration * 1e6}
                profiler.step()
        if slim:
            for file in staged.glob("*.pt.trace.json.gz"):
                traces.slim(file, file)
        (staged / STOPWATCH).write_text(json.dumps(clock))
    return folder


def _refuse_other_files(folder: Path) -> None:
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    shown = [name for name in names if not name.startswith(".")]  # without what systems leave everywhere
    others = [name for name in shown if name != STOPWATCH and not traces.TRACE_FILE.fullmatch(name)]
    if others:
        raise FileExistsError(
            f"{folder}: expected a new folder for the recording, or one that holds an earlier recording and nothing "
            f"else, and found {', '.join(others[:3])} in it. Name another one, or move that."
        )


def stopwatch(folder: Path) -> pd.DataFrame:
    """Return what a stopwatch saw while `record` recorded the traces in `folder`: they must agree.

    Returns
    -------
    DataFrame
        A row for each recorded step, by its number; columns ``wait`` (for the batch) and ``step`` (all of it, as
        seen by the host), in µs.
    """
    import pandas as pd

    table = pd.DataFrame.from_dict(json.loads((folder / STOPWATCH).read_text()), orient="index")
    return table.set_axis(table.index.astype(int).rename("step"))


def activities() -> list[ProfilerActivity]:
    """What there is to profile here: the CPU, and CUDA where there is a GPU."""
    cuda = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *cuda]


def size_kb(folder: Path) -> float:
    """Size of all traces in `folder`, in kB (10³ bytes)."""
    return sum(file.stat().st_size for file in folder.glob("*.pt.trace.json*")) / 1e3
