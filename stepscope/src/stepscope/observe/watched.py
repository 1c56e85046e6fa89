"""Records the training loop of an unedited script from within: its steps, and where epochs begin and end.

A step ends when the script asks for a training batch after an optimizer has changed the weights. So several batches
with accumulated gradients are one step, and so are the updates of two optimizers for one batch. Validation batches
within a step belong to that step. In a loop without a DataLoader, each step of the first optimizer ends a step. Work
between two epochs belongs to no step.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import statistics
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from stepscope import thresholds
from stepscope.facts import Facts, saving
from stepscope.facts.loop import Pauses
from stepscope.observe import apart, circumstances, contention, hazards
from stepscope.observe.examination import Examination, Observed
from stepscope.observe.pauses import PauseRecorder
from stepscope.observe.profiled import OtherProfiler
from stepscope.observe.recorder import LoopEnded, Pass, Phases, Recorder
from stepscope.timing.stopwatch import synchronize

Report = Callable[[dict[str, Any]], object]  # receives the facts or the problem of a process, with its rank


class ScriptRecorder(Recorder):
    """Records the training loop of one process of the script.

    Parameters
    ----------
    count : int
        Steps to time.
    folder : Path
        Folder for the traces.
    report : callable
        Receives a dict: ``"facts"``, or the ``"problem"`` that prevented them; ``"rank"``, ``"ranks"``, and the number
        of ranks on this machine, ``"here"``.
    stop : bool
        Whether to end the script after the examination.
    """

    rest_is_step = True

    def __init__(self, count: int, folder: Path, report: Report, *, stop: bool = False):
        super().__init__()
        self.queued = contention.queue_clock(threading.main_thread().native_id)
        self.report, self.stop = report, stop
        self.process, self.thread = os.getpid(), threading.main_thread().ident
        self.latest_loader: DataLoader[Any] | None = None  # of the latest batch
        self.updated_after: DataLoader[Any] | None = None  # loader of the latest batch before the last update
        self.stepper: int | None = None  # `id` of the optimizer that ends steps in a loop without a DataLoader
        self.updates = 0  # of the weights in the step so far
        self.seen: Counter[str] = Counter()
        self.latest_pass: int | None = None  # number of the pass that gave the latest batch
        self.training_pass: tuple[object, int | None] | None = None  # the latest training loader, and its pass
        self.pausing = PauseRecorder()
        self.reported = time.perf_counter()
        self.sizes: list[int] = []  # number of batches of each finished step
        self.examination = Examination(self, count, folder)
        self.script_profiler: Callable[[], Any] = lambda: None  # reference to the script's last profiler
        self.examination.profiled.prepared = self._prepared
        self.examine(self._guarded_phases())
        atexit.register(self.end)

    # Events that `hooks` reports

    def begin(self, loader: DataLoader[Any], begin: Callable[[DataLoader[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Begin an epoch of a loader; `begin` returns its iterator."""
        now = time.perf_counter()
        if threading.get_ident() == self.thread:
            trains = None if self.dataloader is None else loader is self.dataloader
            self.pausing.begun(now, trains, int(self.updates > 0))
            if self.pausing.since is not None and self.updates and loader is not self.dataloader:
                self._stepped()
            if self.pausing.since is not None and not self.updates:  # work in a pause belongs to no step
                del self.received[len(self.received) - bool(self.batches) :]
                self.start, self.batches, self.wait, self.queued_wait = now, 0, 0.0, 0.0
        return super().begin(loader, begin)

    def batch(self, iterator: Iterator[Any], get_next: Callable[[Iterator[Any]], object]) -> object:
        """Return the next batch of an epoch from `get_next`."""
        loader, number, began, start = vars(iterator).get("_stepscope", (None, None, None, None))
        if threading.get_ident() != self.thread:
            self.seen["batches loaded in other threads"] += 1
            return get_next(iterator)
        evaluates = self.dataloader is None and not torch.is_grad_enabled()
        if loader is None or self.dataloader not in (None, loader) or evaluates:
            batch, self.latest_pass = get_next(iterator), number
            if began is not None and start is None:  # this loader may turn out to be the training loader
                vars(iterator)["_stepscope"] = Pass(loader, number, began, time.perf_counter() - began)
            self.latest_loader = self.latest_loader if evaluates else loader
            self.seen["batches"] += 1
            return batch
        if self.updates:
            self._stepped()
            if self.over:
                return get_next(iterator)
        else:
            self.last_queued = self.queued()

        def next_batch() -> object:
            try:
                return self.request(iterator, get_next)
            except StopIteration:
                begin = time.perf_counter()
                synchronize(self.gpu)  # the GPU's unfinished work belongs to the steps
                self.drained += time.perf_counter() - begin
                self.pausing.ended(time.perf_counter())
                raise

        batch = self.get(next_batch)
        if loader is self.dataloader:
            before, self.training_pass = self.training_pass, (loader, number)
            if before and before[0] is loader and before[1] != number:  # an earlier DataLoader was only tried
                self.loader_changed = False
        self.seen["batches"] += 1
        self.latest_loader, self.latest_pass = loader, number
        return batch

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has changed the weights."""
        super().updated(optimizer)
        self.seen["steps of optimizers"] += 1
        self.updates += 1
        here = threading.get_ident() == self.thread
        if self.latest_loader is None:
            self.stepper = self.stepper or id(optimizer)
            if self.stepper == id(optimizer) and here:
                self._stepped()
                self.received.append(self.start)
            return
        if here:
            self.pausing.updated(time.perf_counter(), self.latest_pass)
        if self.latest_loader is not self.dataloader and self.latest_loader is self.updated_after:
            self.loader_changed |= self.dataloader is not None
            self.dataloader = self.latest_loader  # the loader of the batches before two updates in a row
        self.updated_after = self.latest_loader

    def end(self) -> None:
        """Report the events so far, if the script ends before the examination."""
        if self.over or os.getpid() != self.process:
            return
        problem = self._too_few()
        try:
            if self.phases is not None:
                self.phases.throw(LoopEnded())
        except StopIteration as ended:
            self._report_facts(ended.value)
            return
        except LoopEnded:
            pass
        except Exception as error:
            self.failed(error)
            return
        self._leave()
        self._report(problem=problem)

    def _too_few(self) -> str:
        """Return in sentences which events were seen, and what is missing for a diagnosis."""
        saw = ", ".join(f"{count:,} {name}" for name, count in self.seen.items())
        needs = (
            f"About {self.examination.steps_needed} steps are needed: let the script train longer, or time fewer than "
            f"{self.examination.count} steps (--steps)."
        )
        if not self.seen["steps of optimizers"]:
            needs = "No optimizer of torch.optim has changed weights: use stepscope.diagnosis.diagnose(loader, step)."
        return f"The script ended before enough of its steps were seen: {saw or 'none'}. {needs}"

    # The recorder's view of epochs

    def epoch_steps(self) -> int | None:
        if self.pausing.length is not None:
            return self.pausing.length
        with suppress(TypeError, NotImplementedError):  # no loader, or a loader without a length
            return max(1, len(self.dataloader) // max(1, statistics.median_low(self.sizes)))  # type: ignore[arg-type]
        return None

    def steps_of_epoch(self) -> int:
        return self.pausing.steps

    def pauses(self) -> Pauses:
        count = len(self.pausing.seconds)
        if not count:
            return Pauses()
        mean_ms = sum(self.pausing.seconds) / count * 1e3
        line, of_workers = self.pausing.line(self.site), self.pausing.of_workers
        return Pauses(count, mean_ms, self.pausing.seconds_per_step * 1e3, line, of_workers)

    def _stepped(self) -> None:
        """End a step, and continue the examination."""
        ended = None
        if self.pausing.until is not None:  # the step ended when the pause began
            self.pausing.stop_sampling()
            ended = self.pausing.since
        self.sizes.append(self.batches)
        self.pausing.steps += 1
        self.updates = 0
        found = self.end_step(ended)
        if found is not None:
            self._report_facts(found)
        if self.over and self.stop:
            raise SystemExit
        if not self.over:
            self._report_so_far()

    def _report_so_far(self) -> None:
        """Report now and then what was seen, because a signal may end the process at any time."""
        examined, now = self.examination, time.perf_counter()
        if now - self.reported < thresholds.REPORT_EVERY_S or examined.profiled.recording:
            return
        found = {"facts": _plain(examined.facts())} if examined.suffices else {"problem": self._too_few()}
        left = max(0, examined.steps_needed - examined.steps_seen)
        so_far = {"steps_seen": examined.steps_seen, "steps_left": left, "seconds_left": left * examined.step_s}
        self._report(so_far=so_far, **found)
        self.reported = self.start = time.perf_counter()
        self.last_queued = self.queued()

    def _report_facts(self, observed: Observed) -> None:
        """Report the result of the examination, with measurements of items, and leave the loop."""
        self._report(facts=_plain(self._with_items(observed[0])))
        self._leave()

    def _with_items(self, facts: Facts) -> Facts:
        """Return the facts with measurements of items, made in a child process so that this process does not change."""
        dataloader = self.dataloader
        if dataloader is None or facts.loader is None:
            return facts

        def with_items() -> Facts:
            hazards.stop_tracing()
            return circumstances.with_items(facts, dataloader)

        try:
            return apart.call(with_items)
        except (OSError, RuntimeError) as why:  # at the end of Python, no fork may be possible
            return replace(facts, loader=replace(facts.loader, unknown=str(why)))

    def failed(self, error: BaseException) -> None:
        """Report an error of stepscope, after which the script goes on; raise an error of the script."""
        if not isinstance(error, Exception):  # such as KeyboardInterrupt
            raise error
        self._leave()
        with suppress(Exception):  # it was the error's place, or our profiler still records
            if self.phases is not None:
                self.phases.close()
        text = "".join(traceback.format_exception(error))
        with suppress(OSError):  # a full disk: `launch` then says that nothing was seen
            self._report(problem=f"{type(error).__name__}: {error}", traceback=text)
        handlers = {_code(handler) for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)}
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise error
        if self.stop:
            raise SystemExit(1)

    def _leave(self) -> None:
        """Stop recording, and keep no object of the script."""
        self.over = True
        self.pausing.stop_sampling()
        self.dataloader = self.latest_loader = self.updated_after = self.training_pass = None
        self.iterator = self.kept = None

    def _guarded_phases(self) -> Phases:
        """Run the examination; stop if the script uses a profiler while ours records: two at once end the process."""
        kind = torch.autograd.profiler.profile
        before = {name: getattr(kind, name) for name in ("_prepare_trace", "_start_trace")}

        def use(profiler: torch.autograd.profiler.profile, name: str) -> None:
            here = threading.get_ident() == self.thread and os.getpid() == self.process
            phases = self.phases
            if here and phases is not None and not getattr(phases, "gi_running", False):  # else the profiler is ours
                self.script_profiler = weakref.ref(profiler)
                self.give_way()
            before[name](profiler)

        for name in before:
            setattr(kind, name, partialmethod(use, name))
        try:
            return (yield from self.examination.phases())
        finally:
            for name, method in before.items():
                setattr(kind, name, method)

    def give_way(self) -> None:
        """End the examination with the steps so far if our profiler records, since another one is about to start."""
        if self.phases is None or self.over or not self.examination.profiled.recording:
            return
        try:
            self.phases.throw(OtherProfiler())
        except StopIteration as ended:
            self._report_facts(ended.value)
            if self.stop:
                raise SystemExit from None
        except Exception as error:
            self.failed(error)

    def _prepared(self) -> bool:
        """Return whether the script has prepared a profiler that records nothing yet."""
        other = self.script_profiler()
        return other is not None and other.kineto_results is None

    def _report(self, **content: object) -> None:
        """Report the facts, or the problem."""
        profiled = self.examination.profiled
        here = int(os.environ.get("LOCAL_WORLD_SIZE", profiled.ranks))
        self.report({"rank": profiled.rank, "ranks": profiled.ranks, "here": here, **content})

    getting, stepping = Recorder.get.__code__, _stepped.__code__


def _plain(facts: Facts) -> object:
    """Return facts as a file contains them, with lists."""
    return json.loads(json.dumps(saving.as_json(facts)["facts"]))


def _code(handler: object) -> object:
    """Return the code of a signal handler, which may be any callable; None if the handler is not written in Python."""
    handler = getattr(handler, "func", handler)  # of functools.partial
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)
