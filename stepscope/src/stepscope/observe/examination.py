"""Examines a loop while it runs: times some steps, profiles some steps, and samples the lines of some steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import distributed
from torch.utils._pytree import tree_iter

from stepscope import thresholds, timing, traces
from stepscope.facts import Facts
from stepscope.facts.hazards import Growth
from stepscope.facts.host import Gradients, Optimizer
from stepscope.facts.loop import Card, LongSteps, Loop, Step, Trend
from stepscope.facts.profile import Profile
from stepscope.facts.trials import Modes
from stepscope.observe import card, circumstances, device, hazards, host, keeping, long_steps, profile, trends
from stepscope.observe.contention import Contention
from stepscope.observe.gradients import GradientWatcher
from stepscope.observe.profiled import OtherProfiler, Phase, ProfiledSteps, sampler_of
from stepscope.observe.recorder import LoopEnded, Recorder, StepRecord
from stepscope.observe.sampler import Site, here
from stepscope.timing.loaders import processes
from stepscope.timing.stopwatch import synchronize

Observed = tuple[Facts, object]  # facts, still without the loader's items and without trials; and a batch


class Examination:
    """The phases of an examination, in the order of `phases`.

    Parameters
    ----------
    recorder : Recorder
        Sends the finished steps.
    count : int
        Minimum number of steps to time; ValueError if there is none.
    folder : Path
        Folder for the trace.

    Attributes
    ----------
    draw : callable or None
        Returns one more batch without a step, to time the arrival of a ready batch; None in a script.
    profiled : ProfiledSteps
        Profiles the steps.
    """

    def __init__(self, recorder: Recorder, count: int, folder: Path):
        if count < 1:
            raise ValueError(f"Expected at least one step to time, found steps={count}.")
        self.recorder, self.count, self.folder = recorder, count, folder
        self.draw: Callable[[], object] | None = None
        self.whole = False  # whether all phases are over
        self.why = ""  # why not, if it is not the end of the loop
        self.tracers: tuple[str, ...] = ()
        self.modes = Modes()
        self.early: list[StepRecord] = []  # steps of the warm-up
        self.phase_records: list[list[StepRecord]] = []  # timed, recorded and sampled steps
        self.profiled = ProfiledSteps(recorder, self.phase_records)
        self.digests: list[list[int | None]] = []  # of the batches of each warm-up
        # The results of the phases so far
        self.loop: Loop | None = None
        self.growth: Growth | None = None
        self.card: Card | None = None
        self.batch: object = None
        self.trace: traces.Trace | None = None
        self.stall = profile.Stall()
        self.recorded: Profile | None = None
        self.sampled: host.Sampled | None = None
        self.long = LongSteps()
        self.gradients = Gradients()

    @property
    def step_s(self) -> float:
        """Median duration of the steps before the timed steps, in s; 0 if unknown."""
        return statistics.median(each.duration for each in self.early) if self.early else 0.0

    @property
    def steps_seen(self) -> int:
        """Number of steps so far."""
        return 1 + sum(map(len, [self.early, *self.phase_records]))

    @property
    def steps_needed(self) -> int:
        """Approximate number of steps of the whole examination."""
        warm_up = [self._fit(self._warm_up_steps, seconds) for seconds in (thresholds.WARM_UP_S, thresholds.PAUSED_S)]
        sampled = thresholds.STEPS_SAMPLED_S / self.step_s if self.step_s else thresholds.MOST_SAMPLED_STEPS / 2
        sampled = min(max(sampled, thresholds.LEAST_SAMPLED_STEPS), thresholds.MOST_SAMPLED_STEPS)
        followed = self._fit(thresholds.FOLLOWED_STEPS, thresholds.FOLLOWED_S)
        marks = 4  # the first step, a step before each profile, and the step that marks the end of the second
        return round(sum(warm_up) + self._steps_to_time + self._steps_to_profile + sampled) + followed + marks

    @property
    def _steps_to_time(self) -> int:
        # At least two steps for each worker, since a slow worker makes only every n-th step wait
        count, least = max(self.count, 2 * self.recorder.num_workers), thresholds.LEAST_TIMED_STEPS
        return timing.whole_periods(self.recorder, max(least, self._fit(count, thresholds.TIMED_STEP_S * self.count)))

    @property
    def _steps_to_profile(self) -> int:
        count, least = thresholds.PROFILED_STEPS, thresholds.LEAST_STEPS
        return timing.whole_periods(self.recorder, min(count, max(least, self._fit(count, thresholds.PROFILED_S))))

    def _fit(self, count: int, seconds: float) -> int:
        """Return `count`, or fewer steps if so many take longer than `seconds`; at least 1."""
        if self.profiled.ranks > 1 or not self.step_s:  # all ranks must take the same steps
            return count
        return min(count, math.ceil(seconds / self.step_s))

    def phases(self) -> Phase[Observed]:
        """Receive each finished step; return the facts and a batch.

        If the loop ends early, or the script profiles, return the facts of the phases so far; raises LoopEnded or
        OtherProfiler if there are too few steps.
        """
        try:
            yield from self._all_phases()
        except (LoopEnded, OtherProfiler) as why:
            if not self.suffices:
                raise
            self.why = str(why)
        return self.facts(), self.batch

    def _all_phases(self) -> Phase[None]:
        yield  # the first step imports, compiles and chooses algorithms: skip it
        if distributed.is_available() and distributed.is_initialized():
            self.profiled.rank, self.profiled.ranks = distributed.get_rank(), distributed.get_world_size()
        self.contention = Contention()
        yield from self._warm_up(thresholds.WARM_UP_S, self.early)
        self.loop = loop = yield from self._timed()
        recorder = self.recorder
        by_batches = recorder.rest_is_step and recorder.source is not None  # the loop has just asked for a batch
        recorder.site, recorder.notes_site = Site(requests=here() if by_batches else ()), True
        trace = yield from self.profiled.recorded(self.folder, self._steps_to_profile)
        self.trace, self.stall = profile.usual(trace)
        if self.profiled.ended:
            raise LoopEnded
        yield from self._warm_up(thresholds.PAUSED_S, [])
        self.card = card.seen(recorder.gpu)  # after steps that nothing times, and before the GPU has finished them
        works = [step.duration_ms - step.wait_ms for step in loop.steps]
        self.recorded = recorded = profile.read(self.trace, self.stall)
        count = host.steps_to_sample(recorded, loop.work_ms + loop.wait_ms, works)
        several = self.profiled.ranks > 1
        self.sampled = yield from self.profiled.sampled(thresholds.SAMPLED_STEPS_OF_A_RANK if several else count)
        if self.profiled.ended:
            raise LoopEnded
        self.gradients = yield from self._gradients()
        factor = long_steps.factor(self.phase_records)
        if factor != math.inf:
            self.long = yield from self._long_steps(factor)
        if self.sampled and self.long.distinct:
            self.sampled = self.sampled.without_long_steps(factor)
        longer = trends.longer_s(self.phase_records[:3])
        line = self.sampled.growing() if self.sampled and longer else ""
        self.loop = replace(loop, trend=replace(loop.trend, longer_ms=longer * 1e3, line=line))
        self.whole = True

    @property
    def _persistent(self) -> bool:
        return getattr(self.recorder.dataloader, "persistent_workers", False) and not self.recorder.loader_changed

    @property
    def suffices(self) -> bool:
        """Whether the steps so far suffice for facts: each worker made a batch."""
        records = self._records_so_far()
        return self.loop is not None or len(records) >= self._least_steps

    def facts(self) -> Facts:
        """Return the facts of the phases so far; see `suffices`."""
        recorder, sampled = self.recorder, self.sampled
        loop = replace(
            self.loop or self._loop(self._records_so_far()),
            line=sampled.getting() if sampled else "",
            epoch_steps=recorder.epoch_steps(),
            pauses=recorder.pauses(),
            long=self.long,
            loader_changed=recorder.loader_changed,
            persistent=self._persistent,
            tracers=self.tracers,
        )
        facts = Facts(
            loop=loop,
            loader=circumstances.loader_of(recorder, self.growth, self.digests),
            machine=circumstances.this_machine(self.contention.share(), self.card, recorder.gpu),
            compilation=hazards.compiled(),
            optimizer=recorder.optimizer or Optimizer(),
            batch=circumstances.content(self.batch),
            gradients=self.gradients,
            modes=self.modes,
            problem="" if self.whole else self.why or self._few_steps(),
        )
        if self.trace is None:
            return facts
        recorded = self.recorded or profile.read(self.trace, self.stall)
        found = host.read(self.trace, recorded, sampled)
        return replace(facts, profile=recorded, host=found, device=device.read(self.trace, recorded))

    def _few_steps(self) -> str:
        """Return in a sentence that the loop ended before its examination, and which part of it is missing."""
        profiled = "not profiled" if self.trace is None else "profiled only in part"
        return (
            f"The loop ended after few steps: about {self.steps_seen} of the {self.steps_needed} or so that the whole "
            f"examination takes. The work within a step was {profiled}."
        )

    def _warm_up(self, seconds: float, records: list[StepRecord]) -> Phase[None]:
        """Let steps pass until the workers deliver batches at a steady rate, but hardly longer than `seconds`.

        Add the steps to `records`.
        """
        recorder, digests = self.recorder, list[int | None]()
        recorder.digests = digests if circumstances.is_stream(recorder.dataloader) else None
        while len(records) < (self._fit(self._warm_up_steps, seconds) if records else 1):
            record = yield
            records.append(record)
        recorder.digests = None
        self.digests.append(digests)

    @property
    def _warm_up_steps(self) -> int:
        return timing.warmup_steps(self.recorder.dataloader)

    @property
    def _least_steps(self) -> int:
        return max(thresholds.LEAST_STEPS, self.recorder.num_workers)

    def _records_so_far(self) -> list[StepRecord]:
        """Return the timed steps; as long as they are few, with the steps before them."""
        timed = self.phase_records[0] if self.phase_records else []
        return timed if len(timed) > self._least_steps else [*self.early, *timed]

    def _timed(self) -> Phase[Loop]:
        """Time steps without the profiler; return the facts about them."""
        recorder, records, sizes = self.recorder, list[StepRecord](), list[tuple[int, int]]()
        count = self._steps_to_time
        before, cpu = hazards.of_workers(processes(recorder.iterator)), time.process_time()
        self.tracers, self.modes = hazards.tracers(), hazards.modes()
        if self.profiled.ranks > 1:  # the ranks share the cores
            self.modes = replace(self.modes, threads=0)
        synchronize(recorder.gpu)
        contention, drained = Contention(), recorder.drained
        self.phase_records.append(records)
        for number in range(count):
            recorder.keeps = number == count - 1
            records.append((yield))
            sizes.append(trends.memory(recorder.gpu))
        cpu, end = time.process_time() - cpu, time.perf_counter()
        synchronize(recorder.gpu)
        left = time.perf_counter() - end + recorder.drained - drained
        after = hazards.of_workers(processes(recorder.iterator))
        self.growth, self.batch = hazards.growth(recorder.dataloader, before, after, count), recorder.kept
        recorder.keeps, recorder.kept = False, None
        loop = self._loop(records, contention)
        if self.draw is not None:
            transfer = self._transfer(self.draw, loop.total_ms / count / 1e3) if recorder.num_workers else 0.0
            loop, self.batch = replace(loop, transfer_ms=transfer * 1e3), self.draw()
        grown, grown_gpu = map(trends.steady_growth, zip(*sizes, strict=True))
        kept = (yield from self._keeping()) if grown or grown_gpu else ""
        return replace(
            loop,
            total_ms=loop.total_ms + left * 1e3,
            cpu_ms=cpu / count * 1e3,
            trend=Trend(0.0, 1 + len(self.early) + count / 2, "", grown, grown_gpu, kept),
            pickled_bytes=float(circumstances.array_bytes(self.batch)) if recorder.num_workers else 0.0,
            tensors=sum(isinstance(leaf, torch.Tensor) for leaf in tree_iter(self.batch)),
            on_gpu=any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in tree_iter(self.batch)),
        )

    def _keeping(self) -> Phase[str]:
        """Return the user's line that keeps what the next step makes; "" if unknown, or if the loop ends."""
        before = keeping.sizes()
        with suppress(LoopEnded):
            yield
            return keeping.line(before)
        return ""

    def _loop(self, records: Sequence[StepRecord], contention: Contention | None = None) -> Loop:
        """Return the facts about timed steps, without numbers that need a batch or the CPU time of all steps."""
        recorder = self.recorder
        # The part of the queueing that other processes caused, and not the loop's own workers
        queued = sum(record.queued_wait + record.queued_work for record in records)
        part = (contention or self.contention).part_of_others(queued)
        waits = [record.wait for record in records if not record.first] or [record.wait for record in records]
        steps = tuple(
            Step(each.wait * 1e3, each.duration * 1e3, each.queued_wait * part * 1e3, each.queued_work * part * 1e3,
                 each.first)
            for each in records
        )  # fmt: skip
        epochs = (recorder.starts, recorder.ends)
        return Loop(
            steps,
            sum(record.duration for record in records) * 1e3,
            asynchronous=torch.cuda.is_initialized(),
            workers=getattr(recorder.source, "num_workers", None),
            start_ms=sum(statistics.median_low(seconds) for seconds in epochs if seconds) * 1e3,
            persistent=self._persistent,
            epoch_steps=recorder.epoch_steps(),
            only_first=recorder.epoch_steps() == 1 and circumstances.has_more(recorder.dataloader),
            transfer_ms=min(waits) * 1e3 if recorder.num_workers else 0.0,
            queued_ms=recorder.worker_queued() * 1e3,
        )

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

    def _gradients(self) -> Phase[Gradients]:
        """Follow the gradients for some steps; return the facts about them. The loop may end meanwhile."""
        self.recorder.gradients = watcher = GradientWatcher()
        with suppress(LoopEnded):
            for _ in range(self._fit(thresholds.FOLLOWED_STEPS, thresholds.FOLLOWED_S)):
                yield
        self.recorder.gradients = None
        return watcher.facts()

    def _long_steps(self, factor: float) -> Phase[LongSteps]:
        """Sample the lines of steps until some were long; return the facts about them. The loop may end meanwhile."""
        recorder, records, begin = self.recorder, list[StepRecord](), time.perf_counter()
        recorder.synchronizes = True  # otherwise a step that waits for the GPU seems long
        with sampler_of(recorder) as sampler, suppress(LoopEnded):
            while (
                len(records) < thresholds.MOST_STEPS_UNTIL_LONG
                and time.perf_counter() - begin < thresholds.SECONDS_UNTIL_LONG
                and not long_steps.enough(records, factor)
            ):
                records.append((yield))
        recorder.synchronizes = False
        samples = (each for each in sampler.samples if each.within is recorder.stepping)
        timed = [] if torch.cuda.is_initialized() else self.phase_records[0]  # without the work of a GPU
        return long_steps.read(timed, records, samples, factor, recorder.site)
