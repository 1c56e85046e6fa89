"""Watches the training loop of a script from within: what a step is, and the diagnosis of some steps.

A step ends at the request for a training batch after an optimizer has changed the weights. So several batches whose
gradients are accumulated are one step, and so are the updates of two optimizers for one batch. Batches of a validation
set belong to the step that they are in. Where no DataLoader gives batches, a step ends with the first optimizer's step.
Work between two epochs is in no step.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import signal
import stat
import statistics
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import psutil
import torch
from torch import distributed
from torch.profiler import profile, schedule
from torch.utils.data import DataLoader

from stepscope import timing, traces
from stepscope.base import machine, staging
from stepscope.base.wording import counted
from stepscope.diagnosis import profile as profiles
from stepscope.diagnosis import remarks, run, stacks, trials
from stepscope.diagnosis import step as steps
from stepscope.diagnosis.result import Diagnosis
from stepscope.script.pauses import Pauses
from stepscope.timing import profiling
from stepscope.timing.stopwatch import TimedStep, synchronize
from stepscope.traces import files

LEAST_STEPS = 36  # for the profiles, in addition to the timed steps and two warm-ups
ITEMS_SECONDS = 60  # that loading some items in another process may take
OTHER_PROFILER = "The script runs a profiler itself. Run it without its profiler."
SHORT = 1e-4  # seconds: others hardly have the core within, and asking takes microseconds
SAMPLED_TOGETHER = 10  # steps of each rank: all must stop after the same step
_Steps = Generator[None, tuple["run.Held", bool], object]  # receives each finished step, and whether it began an epoch


class Watch:
    """What a process of the script has done so far, and what to examine next.

    Attributes
    ----------
    over : bool
        Whether the diagnosis is over: then the script runs as if nobody watched.
    """

    def __init__(
        self,
        count: int,
        folder: Path,
        report: Callable[[dict], object],
        *,
        traces: Path | None = None,
        stop: bool = False,
    ):
        self.count, self.folder, self.report, self.stop, self.over = count, folder, report, stop, False
        self.traces = traces or folder  # where traces are recorded, if they move to the folder later
        self.rank, self.ranks = 0, 1  # of processes that train together
        self.process, self.thread = os.getpid(), threading.main_thread().ident
        self.loader: DataLoader | None = None  # that gives the training batches
        self.latest: DataLoader | None = None  # that gave the latest batch
        self.updated_after: DataLoader | None = None  # that gave the latest batch before the last update
        self.optimizer: int | None = None  # `id` of the optimizer that ends steps in a loop without a DataLoader
        self.remade = False  # whether the training loader changed
        self.seen, self.queued = Counter(), stacks.queue_clock()
        self.updates, self.wait, self.held, self.ready, self.new = 0, 0.0, 0.0, 0.0, False
        self.start = time.perf_counter()  # of the step
        self.passes, self.latest_pass = 0, 0  # over any loader: their number, and which gave the latest batch
        self.begun: dict[int, float] = {}  # when an epoch of each loader began, until its first batch
        self.starts, self.ends, self.received = [], [], []  # seconds of epochs; moments at which steps got a batch
        self.pauses, self.taken, self.sizes = Pauses(), 0, []  # batches of this step so far, and of earlier steps
        self.first = True  # whether the step has no batch yet
        self.kept: object | None = None  # a batch, if one is to be kept
        self.iterator: Iterator | None = None  # of the latest training batch
        self.others, self.records = lambda: None, False  # the script's last profiler; whether one of ours records
        self.phases = self._beside_profilers()
        next(self.phases)
        atexit.register(self.end)

    @classmethod
    def of_environment(cls, options: str) -> Watch:
        """Return the watch of this process, with the options that `start` put into the environment."""
        options = json.loads(options)
        reports = Path(options["reports"])

        def report(found: dict) -> None:
            staging.write(reports / f"{found['rank']}-{os.getpid()}.json", json.dumps(found))

        return cls(options["steps"], Path(options["folder"]), report, traces=reports / "traces", stop=options["stop"])

    def begin(self, loader: DataLoader, begin: Callable) -> Iterator:
        """Begin an epoch of a loader, whose iterator `begin` returns."""
        now = self.begun[id(loader)] = time.perf_counter()
        if threading.get_ident() == self.thread:
            self.pauses.begun(now, None if self.loader is None else loader is self.loader, int(self.updates > 0))
            if self.pauses.since is not None and self.updates and loader is not self.loader:
                self._stepped()
            if self.pauses.since is not None and not self.updates:  # work since then is in no step
                self.start, self.taken, self.wait, self.held = now, 0, 0.0, 0.0
                del self.received[len(self.received) - (not self.first) :]
                self.first = True
        iterator = begin(loader)
        self.passes += 1
        with suppress(AttributeError):  # a loader of its own kind
            iterator._stepscope_loader, iterator._stepscope_pass = loader, self.passes
        return iterator

    def batch(self, iterator: Iterator, following: Callable) -> object:
        """Return the next batch of an epoch, which `following` gets."""
        loader, number = vars(iterator).get("_stepscope_loader"), vars(iterator).get("_stepscope_pass")
        if threading.get_ident() != self.thread:
            self.seen["batches got in other threads"] += 1
            return following(iterator)
        evaluates = self.loader is None and not torch.is_grad_enabled()
        if loader is None or self.loader not in (None, loader) or evaluates:
            batch, self.latest_pass = following(iterator), number
            self.latest = self.latest if evaluates else loader
            self.seen["batches"] += 1
            return batch
        if self.updates:
            self._stepped()
            if self.over:
                return following(iterator)
        else:
            self.ready = self.queued()
        batch, self.latest_pass = self.next_batch(iterator, loader, following), number
        if self.kept is not None:
            self.kept = batch
        return batch

    def next_batch(self, iterator: Iterator, loader: DataLoader, following: Callable) -> object:
        """Return the next training batch: code that runs in here gets the batch, and all else is the step."""
        asked, before = time.perf_counter(), self.ready
        try:
            batch = following(iterator)
        except StopIteration:
            self.ends.append(time.perf_counter() - asked)
            if torch.cuda.is_initialized():  # its unfinished work belongs to the steps
                torch.cuda.synchronize()
            self.pauses.ended(time.perf_counter())
            raise
        finally:
            now = time.perf_counter()
            self.ready = before if now - asked < SHORT else self.queued()
            self.wait, self.held = self.wait + now - asked, self.held + self.ready - before
        if id(loader) in self.begun:
            self.starts.append(now - self.begun.pop(id(loader)))
            self.new = True
        self.seen["batches"] += 1
        self.taken += 1
        if self.first:
            self.received.append(now)
        self.first, self.latest, self.iterator = False, loader, iterator
        return batch

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has changed the weights."""
        self.seen["steps of optimizers"] += 1
        self.updates += 1
        here = threading.get_ident() == self.thread
        if self.latest is None:
            self.optimizer = self.optimizer or id(optimizer)
            if self.optimizer == id(optimizer) and here:
                self._stepped()
                self.received.append(self.start)
            return
        if here:
            self.pauses.updated(time.perf_counter(), self.latest_pass)
        if self.latest is not self.loader and self.latest is self.updated_after:
            self.remade |= self.loader is not None
            self.loader = self.latest  # it gave the batch before two updates in a row
        self.updated_after = self.latest

    def end(self) -> None:
        """Report what was seen if the script ends before its diagnosis."""
        if self.over or os.getpid() != self.process:
            return
        workers, warm_up = self.workers, timing.warmup_steps(self.loader)
        self._leave()
        self.phases.close()
        saw = ", ".join(f"{count:,} {name}" for name, count in self.seen.items())
        needed = LEAST_STEPS + max(self.count, 2 * workers) + 2 * warm_up
        needs = f"Some {needed} are needed: let it train longer, or time fewer than {self.count} steps (--steps)."
        if not self.seen["steps of optimizers"]:
            needs = "No optimizer of torch.optim has changed weights: use stepscope.diagnosis.diagnose(loader, step)."
        self._report(problem=f"The script ended before enough of its steps were seen: {saw or 'none'}. {needs}")

    def _stepped(self) -> None:
        """End a step, and go on with the diagnosis."""
        now, queued = time.perf_counter(), self.queued()
        held = (self.held, max(0.0, queued - self.ready))
        if self.pauses.until is not None:  # it ended before the pause, and its wait for a core is unknown
            self.pauses.look_away()
            now, held = self.pauses.since, (self.held, 0.0)
        step, new = TimedStep(self.start, self.wait, now - self.start, 0), self.new
        self.sizes.append(self.taken)
        self.pauses.steps += 1
        self.updates, self.taken, self.wait, self.held, self.new, self.first = 0, 0, 0.0, 0.0, False, True
        try:
            self.phases.send(((step, *held), new))
        except StopIteration:
            self._leave()
        except Exception as error:
            self._failed(error)
        if self.over and self.stop:
            raise SystemExit
        self.start = time.perf_counter()
        self.ready = queued if self.start - now < SHORT else self.queued()

    def _failed(self, error: Exception) -> None:
        """Report an error, after which the script goes on if it is ours; raise one of its signal handlers."""
        self._leave()
        self._report(problem=f"{type(error).__name__}: {error}", traceback="".join(traceback.format_exception(error)))
        handlers = {_code(handler) for handler in map(signal.getsignal, signal.valid_signals()) if callable(handler)}
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise error
        if self.stop:
            raise SystemExit(1)

    def _leave(self) -> None:
        """From now on, look at nothing, and keep no object of the script."""
        self.over = True
        self.pauses.look_away()
        self.loader = self.latest = self.updated_after = self.iterator = None

    def _diagnose(self) -> _Steps:
        yield  # the first step: it imports, compiles and chooses algorithms
        if distributed.is_available() and distributed.is_initialized():
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
        yield from self._warm_up()
        contention = stacks.Contention()
        loop, grown = yield from self._timed()
        recorded = yield from self._recorded()
        yield from self._warm_up()
        count = steps.steps_to_sample(recorded, loop.whole, loop.works)
        sampled = yield from self._sampled(count if self.ranks == 1 else SAMPLED_TOGETHER)
        held = contention.share()
        sample, unknown = _in_child(lambda: run.load_items(self.loader, self.loader, loop.irregular))
        if pauses := len(self.pauses.seconds):
            between, apart = sum(self.pauses.seconds) / pauses * 1e3, self.pauses.apart * 1e3
            loop = replace(loop, epoch=self.length, pauses=pauses, between=between, apart=apart, busy=self.pauses.line)
        loop = run.of_batches(loop, recorded, sample, sampled)
        rows = [run.stopwatch(loop), *profiles.evidence(recorded), *run.of_the_loader(self.loader, sample)]
        rows += [*grown, *remarks.compiled(), ("profile", str(self.folder))]
        self._report(run.concluded(loop, recorded, sampled, trials.Trials(), held, rows, unknown))

    @property
    def workers(self) -> int:
        """Workers of the DataLoader that trains."""
        return getattr(self.loader, "num_workers", 0)

    @property
    def length(self) -> int | None:
        """Steps of an epoch; None if that is unknown."""
        if self.pauses.length is not None:
            return self.pauses.length
        with suppress(TypeError, NotImplementedError):  # no loader, or one of an iterable dataset without a length
            return max(1, len(self.loader) // max(1, statistics.median_low(self.sizes)))
        return None

    def _of_one_epoch(self, count: int) -> int:
        """Return how many of `count` steps can be profiled within an epoch, with the steps before and after."""
        fit = (self.length or 0) - 3
        return min(count, fit) if self.ranks == 1 and fit >= 2 else count

    def _warm_up(self) -> _Steps:
        """Wait until the workers give batches evenly again."""
        for _ in range(timing.warmup_steps(self.loader)):
            yield

    def _timed(self) -> _Steps:
        """Time steps without profiling; return the loop that they show, and evidence on the workers' memory."""
        first, others, count = [], [], max(self.count, 2 * self.workers)
        workers = getattr(self.iterator, "_workers", [])  # processes
        memory = remarks.memory(workers)
        before, cpu = sum(stacks.queued(worker.pid) for worker in workers), time.process_time()
        contention = stacks.Contention()
        for number in range(count):
            self.kept = () if number == count - 1 else None
            held, new = yield
            (first if new else others).append(held)
        cpu, batch, self.kept = (time.process_time() - cpu) / count, self.kept, None
        first, others = run.of_others(contention, first, others)
        grown = remarks.growth(self.loader, memory, remarks.memory(workers), count)
        queued = max(0.0, sum(stacks.queued(worker.pid) for worker in workers) - before) / count
        epochs = run.Epochs(self.loader)
        epochs.starts, epochs.ends, epochs.remade = self.starts, self.ends, self.remade
        epochs.length = self.length
        seconds = sum(step.duration for step, *_ in [*first, *others])
        transfer = min(step.wait for step, *_ in others or first) if self.workers else 0.0
        return run.of_steps(epochs, seconds, first, others, batch, transfer, queued, cpu), grown

    def _recorded(self) -> _Steps:
        """Profile some steps, and return the profile."""
        active = self._of_one_epoch(max(run.PROFILED, self.workers))
        folder = self.traces if self.ranks == 1 else self.traces / f"rank_{self.rank}"
        files.refuse_others(folder)
        with staging.folder(folder, replace=True) as staged:
            yield from self._profiled(staged, active)
        return profiles.read(_own_trace(folder))

    def _sampled(self, count: int) -> _Steps:
        """Profile `count` steps while they are sampled, and return both."""
        if not count:
            return None
        count = self._of_one_epoch(count + 1) - 1
        getting, step = Watch.next_batch.__code__, Watch._stepped.__code__
        with (
            tempfile.TemporaryDirectory() as folder,
            stacks.Sampler(steps.SAMPLE, getting, rest=step) as sampler,
        ):
            yield from self._profiled(Path(folder), count + 1)  # one more than are used
            trace = _own_trace(Path(folder))
        return steps.of_samples(trace, sampler.samples, self.received[-count - 1 :], step)

    def _profiled(self, folder: Path, active: int) -> _Steps:
        """Profile `active` steps and one before them into a folder, all in one epoch if it is long enough."""
        if self.ranks == 1 and active + 2 < (self.length or 0):
            for _ in range(active + 2):
                if self.length - self.pauses.steps > active + 1:
                    break
                yield
        other = self.others()
        if torch.autograd._profiler_enabled() or (other is not None and other.kineto_results is None):
            raise RuntimeError(OTHER_PROFILER)
        self.records = True
        worker = f"rank_{self.rank}" if self.ranks > 1 else None
        with profile(
            activities=profiling.activities(),
            schedule=schedule(wait=0, warmup=1, active=active, repeat=1),
            on_trace_ready=profiling.trace_handler(folder, worker),
        ) as profiler:
            for number in range(active + 1):
                yield
                if number == 0:
                    synchronize()  # what earlier steps launched must not be in the recording
                profiler.step()
        self.records = False

    def _beside_profilers(self) -> _Steps:
        """Diagnose until the script uses a profiler while one of ours records: two at once end the process."""
        kind = torch.autograd.profiler.profile
        before = {name: getattr(kind, name) for name in ("_prepare_trace", "_start_trace")}

        def use(profiler: torch.autograd.profiler.profile, name: str) -> None:
            here = threading.get_ident() == self.thread and os.getpid() == self.process
            if here and not self.phases.gi_running:
                self.others = weakref.ref(profiler)
                if self.records and not self.over:
                    try:
                        self.phases.throw(RuntimeError(OTHER_PROFILER))
                    except Exception as error:
                        self._failed(error)
            before[name](profiler)

        for name in before:
            setattr(kind, name, partialmethod(use, name))
        try:
            yield from self._diagnose()
        finally:
            for name, method in before.items():
                setattr(kind, name, method)

    def _report(self, diagnosis: Diagnosis | None = None, **others: str) -> None:
        """Report the diagnosis, or why there is none."""
        device = torch.cuda.get_device_name() if torch.cuda.is_initialized() else "CPU"
        where = {"device": device, "cores": machine.cores(), "torch": str(torch.__version__)}
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.ranks))
        content = {"rank": self.rank, "ranks": self.ranks, "here": here, "machine": where, **others}
        if diagnosis is not None:
            content |= {"diagnosis": diagnosis.as_json(), "text": str(diagnosis)}
        self.report(content)


def _own_trace(folder: Path) -> traces.Trace:
    """Return the trace of a recording of this module, during which the script may have begun one."""
    try:
        return traces.load(folder)
    except files.SeveralRecordings as error:
        raise RuntimeError(OTHER_PROFILER) from error


def _code(handler: object) -> object:
    """Return the code of a signal handler, which may be any object that can be called; None if it is not of Python."""
    handler = getattr(handler, "func", handler)  # of functools.partial
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


def _in_child(call: Callable) -> object:
    """Return what a function returns in another process, so that this process does not change."""
    if not hasattr(os, "fork"):
        return None, ["how long an item takes: this system has no fork, and loading some here would change the script."]
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads, but the other process uses none of them
        process = os.fork()
    if not process:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(ITEMS_SECONDS)
            os.setpgid(0, 0)
            with os.fdopen(_separate(writing), "wb") as file:
                pickle.dump(call(), file)
        finally:
            os._exit(0)
    os.close(writing)
    try:
        content, status = _read(reading, process)
    finally:
        os.close(reading)
        with suppress(OSError):
            os.killpg(process, signal.SIGKILL)  # with what the dataset started there
    if content:
        return pickle.loads(content)
    late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
    why = (
        f"loading some took more than {counted(ITEMS_SECONDS, 'second')}"
        if late
        else "the process that loaded some died"
    )
    return None, [f"how long an item takes: {why}."]


def _read(file: int, process: int) -> tuple[bytes, int]:
    """Return what a child process writes until it ends, and its status. What it started may keep the file open."""
    content, status, ended, poll = [], 0, False, select.poll()
    poll.register(file, select.POLLIN)
    while True:
        if poll.poll(0 if ended else 50) and (part := os.read(file, 1 << 20)):
            content.append(part)
        elif ended:
            return b"".join(content), status
        else:
            with suppress(ChildProcessError):  # the script has the system wait for its children
                ended, status = os.waitpid(process, os.WNOHANG)
                continue
            ended = True


def _separate(but: int) -> int:
    """Open the files of this process, a fork, again, and replace its pipes and sockets by empty ones.

    Otherwise the process that it comes from would miss what this process reads. One stays open: it is returned.
    """
    import fcntl  # here: Windows has none, and no forks

    but = fcntl.fcntl(but, fcntl.F_DUPFD, 3)  # the script may have closed its standard output
    for file in psutil.Process().open_files():
        with suppress(OSError):
            access = fcntl.fcntl(file.fd, fcntl.F_GETFL)
            if access & os.O_ACCMODE != os.O_WRONLY:
                again = os.open(file.path, access)
                os.lseek(again, os.lseek(file.fd, 0, os.SEEK_CUR), os.SEEK_SET)
                os.dup2(again, file.fd)
    empty = os.open(os.devnull, os.O_RDWR)
    for printing in (1, 2):
        os.dup2(empty, printing)
    for shared in map(int, os.listdir("/dev/fd")):
        with suppress(OSError):
            mode = os.fstat(shared).st_mode
            if shared not in (1, 2, but) and (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
                os.dup2(empty, shared)
    return but
