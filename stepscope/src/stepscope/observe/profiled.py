"""Profiles some steps of a loop: for the trace that stays, and while the lines of the steps are sampled."""

from __future__ import annotations

import gzip
import json
import math
import tempfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as profiler

from stepscope import thresholds, traces
from stepscope.base import staging
from stepscope.observe import host
from stepscope.observe.recorder import LoopEnded, Recorder, StepRecord
from stepscope.observe.sampler import Sampler, common
from stepscope.timing import profiling
from stepscope.timing.stopwatch import synchronize
from stepscope.traces import files

Found = TypeVar("Found")
Phase = Generator[None, StepRecord, Found]  # receives each finished step


class OtherProfiler(RuntimeError):
    """The script uses a profiler while stepscope profiles: two profilers at once end the process."""

    def __init__(self) -> None:
        super().__init__(
            "The script runs PyTorch's profiler itself, so that the work within a step could not be profiled. Run the "
            "script without its profiler."
        )


class ProfiledSteps:
    """Profiles steps of a loop.

    Attributes
    ----------
    records : list of list of StepRecord
        Receives the records of each profile.
    prepared : callable
        Returns whether the script has prepared a profiler.
    rank, ranks : int
        Of the processes that train together.
    recording : bool
        Whether our profiler records.
    ended : bool
        Whether the loop ended while our profiler recorded.
    """

    def __init__(self, recorder: Recorder, records: list[list[StepRecord]]):
        self.recorder, self.records = recorder, records
        self.prepared: Callable[[], bool] = lambda: False
        self.rank, self.ranks = 0, 1
        self.recording = self.ended = False

    def recorded(self, folder: Path, count: int) -> Phase[traces.Trace]:
        """Profile `count` steps, or fewer, and return their trace, which stays in the folder."""
        active = self._of_one_epoch(count)
        folder = folder if self.ranks == 1 else folder / f"rank_{self.rank}"
        files.refuse_others(folder)
        with staging.folder(folder, replace=True) as staged:
            records = yield from self._profiled(staged, active)
            if self.ended and not records:
                raise LoopEnded
            clock = {number: {"wait": each.wait * 1e6, "step": each.duration * 1e6} for number, each in records}
            (staged / files.STOPWATCH).write_text(json.dumps(clock), encoding="utf-8")
        return _own_trace(folder)

    def sampled(self, count: int) -> Phase[host.Sampled | None]:
        """Profile `count` steps while their lines are sampled, and return both."""
        if not count:
            return None
        count, recorder = self._of_one_epoch(count + 1) - 1, self.recorder
        with tempfile.TemporaryDirectory() as folder, sampler_of(self.recorder) as sampler:
            records = [each for _, each in (yield from self._profiled(Path(folder), count + 1))]
            if self.ended and len(records) < 2:  # the last step only marks the end
                raise LoopEnded
            trace = _own_trace(Path(folder))
        if recorder.rest_is_step and recorder.source is None:
            stacks = (each.frames[::-1] for each in sampler.samples if each.frames)
            recorder.site = replace(recorder.site, requests=common(stacks))
        begun = [each for each in recorder.received if each >= records[0].begin]
        return host.of_samples(trace, sampler.samples, begun[: len(records)], recorder.stepping, recorder.site)

    def _profiled(self, folder: Path, active: int) -> Phase[list[tuple[int, StepRecord]]]:
        """Profile `active` steps after one step of warm-up, all in one epoch if the epoch is long enough.

        Write the trace to the folder; return the recorded steps with their numbers in the trace; fewer if the loop
        ends.
        """
        recorder, length = self.recorder, self.recorder.epoch_steps() or 0
        if self.ranks == 1 and active + 2 < length:
            for _ in range(active + 2):
                if length - recorder.steps_of_epoch() > active + 1:
                    break
                yield
        if torch.autograd._profiler_enabled() or self.prepared():
            raise OtherProfiler
        self.recording = True
        worker = f"rank_{self.rank}" if self.ranks > 1 else None
        with profiler(
            activities=_activities(),
            schedule=schedule(wait=0, warmup=1, active=active, repeat=1),
            on_trace_ready=profiling.trace_handler(folder, worker),
        ) as profile:
            records, self.ended = [], True
            with suppress(LoopEnded):
                for number in range(active + 1):
                    records.append((profile.step_num, (yield)))
                    if number == 0:
                        synchronize(recorder.gpu)  # of work that earlier steps launched, and that is not recorded
                    with _current(recorder.gpu):  # the profiler waits for the current GPU when it ends
                        profile.step()
                self.ended = False
        self.recording = False
        if self.ended:
            _cut(folder, f"ProfilerStep#{profile.step_num}")
        self.records.append([record for _, record in records[1:]])
        return records[1:]

    def _of_one_epoch(self, count: int) -> int:
        """Return `count`, or fewer steps so that they fit in one epoch with the steps before and after them."""
        fit = (self.recorder.epoch_steps() or 0) - 3
        if self.ranks > 1 or fit < 2 or count <= fit:
            return count
        return fit - fit % max(1, self.recorder.num_workers) or fit  # whole periods of the workers, if one fits


def _activities() -> list[ProfilerActivity]:
    """Return the activities to profile: CUDA only if this process uses a GPU.

    To ask for CUDA makes PyTorch use a GPU: a script that trains on the CPU would take memory of it, and could no
    longer fork processes that use it.
    """
    return profiling.activities() if torch.cuda.is_initialized() else [ProfilerActivity.CPU]


def _current(gpu: torch.device | None) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the process's current one."""
    return nullcontext() if gpu is None else torch.cuda.device(gpu)


def sampler_of(recorder: Recorder) -> Sampler:
    """Return a sampler of the steps, and of the requests for batches."""
    watched = (recorder.getting,) if recorder.rest_is_step else (recorder.getting, recorder.stepping)
    default = recorder.stepping if recorder.rest_is_step else None
    return Sampler(thresholds.STEP_SAMPLE_S, *watched, default=default)


def _cut(folder: Path, step: str) -> None:
    """Remove a step that the profiler saw only in part, and the host's later events, from the trace in a folder."""
    for file in folder.glob("*.pt.trace.json.gz"):
        content = json.loads(gzip.decompress(file.read_bytes()))
        events = content["traceEvents"]
        begin = min((each["ts"] for each in events if each.get("name") == step), default=math.inf)
        host = ("cpu_op", "user_annotation", "python_function")
        content["traceEvents"] = [each for each in events if each.get("cat") not in host or each["ts"] < begin]
        file.write_bytes(gzip.compress(json.dumps(content).encode()))


def _own_trace(folder: Path) -> traces.Trace:
    """Return the trace of our own recording; raises OtherProfiler if the script recorded at the same time."""
    try:
        return traces.load(folder)
    except files.SeveralRecordings as error:
        raise OtherProfiler from error
