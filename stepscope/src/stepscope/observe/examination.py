"""Examines a loop while it runs: times some steps, profiles some steps, and samples the lines of some steps."""

from __future__ import annotations

import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed
from torch.profiler import profile as profiler
from torch.profiler import schedule
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader

from stepscope import thresholds, timing, traces
from stepscope.base import machine, staging
from stepscope.base.wording import without_paths
from stepscope.facts import Facts
from stepscope.facts.hazards import Growth
from stepscope.facts.host import Optimizer
from stepscope.facts.loader import Loader, Settings
from stepscope.facts.loop import LongSteps, Loop, Machine, Step
from stepscope.observe import device, hazards, host, items, long_steps, profile
from stepscope.observe.contention import Contention
from stepscope.observe.recorder import LoopEnded, Recorder, StepRecord
from stepscope.observe.sampler import Sampler
from stepscope.timing import profiling
from stepscope.timing.loaders import processes
from stepscope.timing.stopwatch import synchronize
from stepscope.traces import files

Found = TypeVar("Found")
Phase = Generator[None, StepRecord, Found]


class OtherProfiler(RuntimeError):
    """The script uses a profiler while stepscope profiles: two profilers at once end the process."""

    def __init__(self) -> None:
        super().__init__("The script runs a profiler itself. Run the script without its profiler.")


Observed = tuple[Facts, object]  # facts, still without the loader's items and without trials; and a batch


class Examination:
    """The phases of an examination, in the order of `phases`.

    Parameters
    ----------
    recorder : Recorder
        Sends the finished steps.
    count : int
        Minimum number of steps to time.
    folder : Path
        Folder for the trace.

    Attributes
    ----------
    draw : callable or None
        Returns one more batch without a step, to time the arrival of a ready batch; None in a script.
    prepared : callable
        Returns whether the script has prepared a profiler.
    """

    def __init__(self, recorder: Recorder, count: int, folder: Path):
        self.recorder, self.count, self.folder = recorder, count, folder
        self.draw: Callable[[], object] | None = None
        self.prepared: Callable[[], bool] = lambda: False
        self.rank, self.ranks = 0, 1  # of the processes that train together
        self.recording = False  # whether our own profiler records
        self.phase_records: list[list[StepRecord]] = []  # timed, recorded and sampled steps

    @property
    def steps_needed(self) -> int:
        """Approximate number of steps of the whole examination, with 36 steps for the profiles."""
        return 36 + self._whole_periods(max(self.count, 2 * self.recorder.num_workers)) + 2 * self._warm_up_steps

    def phases(self) -> Phase[Observed]:
        """Receive each finished step; return the facts and a batch."""
        yield  # the first step imports, compiles and chooses algorithms: skip it
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        yield from self._warm_up()
        contention = Contention()
        loop, growth, batch = yield from self._timed()
        trace = yield from self._recorded()
        recorded = profile.read(trace)
        yield from self._warm_up()
        works = [step.duration_ms - step.wait_ms for step in loop.steps]
        whole_ms = loop.work_ms + loop.wait_ms
        count = host.steps_to_sample(recorded, whole_ms, works)
        sampled = yield from self._sampled(count if self.ranks == 1 else thresholds.SAMPLED_STEPS_OF_A_RANK)
        factor = long_steps.factor(self.phase_records)
        long = LongSteps() if factor == math.inf else (yield from self._long_steps(factor))
        if sampled and long.distinct:
            sampled = sampled.without_long_steps(factor)
        held_share = contention.share()
        line = sampled.getting() if sampled else ""
        epoch_steps, pauses = self.recorder.epoch_steps(), self.recorder.pauses()
        changed = self.recorder.loader_changed
        loop = replace(loop, line=line, epoch_steps=epoch_steps, pauses=pauses, long=long, loader_changed=changed)
        facts = Facts(
            recorded,
            host.read(trace, recorded, sampled),
            device.read(trace, recorded),
            loop,
            _loader(self.recorder, growth),
            this_machine(held_share),
            compilation=hazards.compiled(),
            optimizer=self.recorder.optimizer or Optimizer(),
        )
        return facts, batch

    def _warm_up(self) -> Phase[None]:
        """Skip steps until the workers deliver batches at a steady rate."""
        for _ in range(self._warm_up_steps):
            yield

    @property
    def _warm_up_steps(self) -> int:
        return timing.warmup_steps(self.recorder.dataloader)

    def _timed(self) -> Phase[tuple[Loop, Growth | None, object]]:
        """Time steps without the profiler; return the loop's facts, the growth of its workers' memory, and a batch."""
        recorder, records = self.recorder, list[StepRecord]()
        # At least two steps for each worker, since a slow worker makes only every n-th step wait
        count = self._whole_periods(max(self.count, 2 * recorder.num_workers))
        before, cpu = hazards.of_workers(processes(recorder.iterator)), time.process_time()
        synchronize()
        contention = Contention()
        for number in range(count):
            recorder.keeps = number == count - 1
            records.append((yield))
        cpu, end = time.process_time() - cpu, time.perf_counter()
        self.phase_records.append(records)
        synchronize()
        total = sum(record.duration for record in records) + time.perf_counter() - end
        # The part of the queueing that other processes caused, and not the loop's own workers
        part = contention.part_of_others(sum(record.queued_wait + record.queued_work for record in records))
        growth = hazards.growth(recorder.dataloader, before, hazards.of_workers(processes(recorder.iterator)), count)
        queued, batch = recorder.worker_queued(), recorder.kept
        recorder.keeps, recorder.kept = False, None
        waits = [record.wait for record in records if not record.first] or [record.wait for record in records]
        transfer = min(waits) if recorder.num_workers else 0.0
        if self.draw is not None:
            transfer = self._transfer(self.draw, total / count) if recorder.num_workers else 0.0
            batch = self.draw()
        steps = tuple(
            Step(each.wait * 1e3, each.duration * 1e3, each.queued_wait * part * 1e3, each.queued_work * part * 1e3,
                 each.first)
            for each in records
        )  # fmt: skip
        epochs = (recorder.starts, recorder.ends)
        loop = Loop(
            steps,
            total * 1e3,
            asynchronous=torch.cuda.is_available(),
            workers=getattr(recorder.source, "num_workers", None),
            start_ms=sum(statistics.median_low(seconds) for seconds in epochs if seconds) * 1e3,
            persistent=getattr(recorder.dataloader, "persistent_workers", False) and not recorder.loader_changed,
            epoch_steps=recorder.epoch_steps(),
            only_first=recorder.epoch_steps() == 1 and _has_more(recorder.dataloader),
            transfer_ms=transfer * 1e3,
            queued_ms=queued * 1e3,
            cpu_ms=cpu / count * 1e3,
            pickled_bytes=float(_array_bytes(batch)) if recorder.num_workers else 0.0,
            tensors=sum(isinstance(leaf, torch.Tensor) for leaf in tree_iter(batch)),
        )
        return loop, growth, batch

    def _transfer(self, draw: Callable[[], object], step: float) -> float:
        """Return how long a ready batch takes to arrive from a worker, in s; a step takes `step` seconds."""
        # At one batch or more per step, the workers make the next 2 × num_workers batches in this time
        time.sleep(min(thresholds.LONGEST_PAUSE_S, 2 * self.recorder.num_workers * step))
        took = []
        for _ in range(thresholds.READY_BATCHES):
            begin = time.perf_counter()
            draw()
            took.append(time.perf_counter() - begin)
        return min(took)

    def _whole_periods(self, count: int) -> int:
        """Return `count` rounded up to a multiple of the workers: with w workers, waits have a period of w steps."""
        workers = max(1, self.recorder.num_workers)
        return workers * math.ceil(count / workers)

    def _of_one_epoch(self, count: int) -> int:
        """Return `count`, or fewer steps so that they fit in one epoch with the steps before and after them."""
        fit = (self.recorder.epoch_steps() or 0) - 3
        if self.ranks > 1 or fit < 2 or count <= fit:
            return count
        return fit - fit % max(1, self.recorder.num_workers) or fit  # whole periods of the workers, if one fits

    def _recorded(self) -> Phase[traces.Trace]:
        """Profile some steps, and return their trace, which stays in the folder."""
        active = self._of_one_epoch(self._whole_periods(thresholds.PROFILED_STEPS))
        folder = self.folder if self.ranks == 1 else self.folder / f"rank_{self.rank}"
        files.refuse_others(folder)
        with staging.folder(folder, replace=True) as staged:
            records = yield from self._profiled(staged, active)
            clock = {number: {"wait": each.wait * 1e6, "step": each.duration * 1e6} for number, each in records}
            (staged / files.STOPWATCH).write_text(json.dumps(clock))
        return _own_trace(folder)

    def _sampled(self, count: int) -> Phase[host.Sampled | None]:
        """Profile `count` steps while their lines are sampled, and return both."""
        if not count:
            return None
        count, recorder = self._of_one_epoch(count + 1) - 1, self.recorder
        with tempfile.TemporaryDirectory() as folder, self._sampler() as sampler:
            yield from self._profiled(Path(folder), count + 1)  # the last step only marks the end
            trace = _own_trace(Path(folder))
        return host.of_samples(trace, sampler.samples, recorder.received[-count - 1 :], recorder.stepping)

    def _profiled(self, folder: Path, active: int) -> Phase[list[tuple[int, StepRecord]]]:
        """Profile `active` steps after one step of warm-up, all in one epoch if the epoch is long enough.

        Write the trace to the folder; return the recorded steps with their numbers in the trace.
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
            activities=profiling.activities(),
            schedule=schedule(wait=0, warmup=1, active=active, repeat=1),
            on_trace_ready=profiling.trace_handler(folder, worker),
        ) as profile:
            records = []
            for number in range(active + 1):
                records.append((profile.step_num, (yield)))
                if number == 0:
                    synchronize()  # earlier steps may have launched work that must not be in the recording
                profile.step()
        self.recording = False
        self.phase_records.append([record for _, record in records[1:]])
        return records[1:]

    def _long_steps(self, factor: float) -> Phase[LongSteps]:
        """Sample the lines of steps until some were long; return the facts about them. The loop may end meanwhile."""
        recorder, records, begin = self.recorder, list[StepRecord](), time.perf_counter()
        recorder.synchronizes = True  # otherwise a step that waits for the GPU seems long
        with self._sampler() as sampler, suppress(LoopEnded):
            while (
                len(records) < thresholds.MOST_STEPS_UNTIL_LONG
                and time.perf_counter() - begin < thresholds.SECONDS_UNTIL_LONG
                and not long_steps.enough(records, factor)
            ):
                records.append((yield))
        recorder.synchronizes = False
        samples = (each for each in sampler.samples if each.within is recorder.stepping)
        timed = [] if torch.cuda.is_available() else self.phase_records[0]  # without the work of a GPU
        return long_steps.read(timed, records, samples, factor)

    def _sampler(self) -> Sampler:
        """Return a sampler of the steps, and of the requests for batches."""
        recorder = self.recorder
        watched = (recorder.getting,) if recorder.rest_is_step else (recorder.getting, recorder.stepping)
        default = recorder.stepping if recorder.rest_is_step else None
        return Sampler(thresholds.STEP_SAMPLE_S, *watched, default=default)


def this_machine(held_share: float = 0.0) -> Machine:
    """Return this machine; `held_share` is the share of the time in which other processes had the cores."""
    device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "CPU"
    processor, versions = platform.processor(), (str(torch.__version__), platform.python_version())
    with suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), processor)
    return Machine(device, processor, machine.cores(), *versions, torch.cuda.is_available(), held_share)


def with_items(facts: Facts, dataloader: DataLoader[Any] | None) -> Facts:
    """Return the facts with measurements of the DataLoader's items, or with the reason why there are none."""
    if facts.loader is None or facts.loop is None or dataloader is None:
        return facts
    irregular = facts.loop.usual_wait_ms < thresholds.USUAL_WAIT * facts.loop.wait_ms
    try:
        loaded = items.load(dataloader, irregular)
    except Exception as error:  # no fault of the loop: its workers could load the items
        why = f"loading items in this process failed. {type(error).__name__}: {without_paths(str(error))}"
        return replace(facts, loader=replace(facts.loader, unknown=why))
    settings = facts.loader.settings
    if settings is not None and dataloader.batch_sampler is not None:
        settings = replace(settings, batch_size=loaded.batch)  # a DataLoader with a batch_sampler knows no batch size
    return replace(facts, loader=replace(facts.loader, settings=settings, items=loaded))


def _loader(recorder: Recorder, growth: Growth | None) -> Loader:
    loader = recorder.dataloader
    if loader is None:
        return Loader("" if recorder.source is None else type(recorder.source).__name__)
    settings = Settings(
        type(loader.dataset).__name__,
        loader.batch_size,
        loader.num_workers,
        loader.prefetch_factor,
        loader.persistent_workers,
        bool(loader.pin_memory),
    )
    return Loader(type(loader).__name__, settings, generators=hazards.copied_generators(loader), growth=growth)


def _has_more(loader: DataLoader[Any] | None) -> bool:
    """Return whether a loader has workers, and several batches in an epoch; False if its length is unknown."""
    with suppress(TypeError, NotImplementedError):
        return loader is not None and loader.num_workers > 0 and len(loader) > 1
    return False


def _array_bytes(batch: object) -> int:
    """Return the size of a batch's NumPy arrays in bytes."""
    return sum(leaf.nbytes for leaf in tree_iter(batch) if isinstance(leaf, np.ndarray))


def _own_trace(folder: Path) -> traces.Trace:
    """Return the trace of our own recording; raises OtherProfiler if the script recorded at the same time."""
    try:
        return traces.load(folder)
    except files.SeveralRecordings as error:
        raise OtherProfiler from error
