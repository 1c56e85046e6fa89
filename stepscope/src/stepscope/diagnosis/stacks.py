"""Samples every few ms at which line of the user's code a thread is, and whether it works or waits."""

from __future__ import annotations

import gc
import linecache
import math
import os
import re
import sys
import sysconfig
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType

import psutil

import stepscope
from stepscope.base.confidence import without_hiccup

# Seconds. With Python's 5 ms, the sampler would mostly see the thread where it releases the GIL: in operators.
SWITCH = 1e-4
LEAST_SAMPLES = 2  # to name a line
MOSTLY = 0.6  # of a function's time: if one line takes this share, the function that it calls is examined
LONGEST = 70  # characters of a line that are shown

_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # separate functions in Python 3.11
_PATHS = {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_FOREIGN = tuple(f"{Path(path).resolve()}{os.sep}" for path in [*_PATHS, Path(stepscope.__file__).parent])


@dataclass(frozen=True)
class Frame:
    """A running function: `file`, `line` and `name`; `first` is the line at which the function begins."""

    file: str
    line: int
    name: str
    first: int

    @property
    def own(self) -> bool:
        """Whether it is the user's code: in no installed package, not in the standard library, and not here."""
        return not (
            self.file.startswith((*_FOREIGN, "<frozen", "<string>"))
            or re.search(r"[/\\](site|dist)-packages[/\\]", self.file)
        )

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.line).strip()
        text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        place = "cell" if "ipykernel_" in self.file else Path(self.file).name
        return f"{place}:{self.line}: {text}" if text else f"{place}:{self.line}"


@dataclass(frozen=True)
class Sample:
    """Where a thread was, and what it did since the previous sample. Times in s of ``time.perf_counter()``."""

    begin: float  # when the previous sample was taken
    end: float
    # Time in which the thread neither worked nor was ready to; 0 where the system does not report it. Only sums are
    # right: the value is too large while the thread waits for a core, and too small once it has one.
    waited: float
    frames: tuple[Frame, ...]  # the functions it was in, the innermost first; none outside of the watched functions
    within: CodeType | None = None  # the watched function that called them

    @property
    def seconds(self) -> float:
        """Time since the previous sample."""
        return self.end - self.begin

    @property
    def own(self) -> Frame | None:
        """The innermost function of the user's code; for a comprehension the one around it."""
        return next((frame for frame in self.frames if frame.own and frame.name not in _COMPREHENSIONS), None)

    @property
    def path(self) -> tuple[Frame, ...]:
        """The functions of the user's code, the outermost first."""
        frames = reversed(self.frames)
        return tuple(frame for frame in frames if frame.own and frame.name not in _COMPREHENSIONS)

    @property
    def to_network(self) -> tuple[Frame, ...]:
        """As `path`, but without functions that `torch.nn` calls: no ``forward``."""
        frames = list(self.frames)
        called = [number for number, frame in enumerate(frames) if re.search(r"[/\\]torch[/\\]nn[/\\]", frame.file)]
        return replace(self, frames=tuple(frames[called[-1] :] if called else frames)).path

    @property
    def inside(self) -> tuple[Frame, ...]:
        """The functions that `own` called, the innermost first."""
        return self.frames if self.own is None else self.frames[: self.frames.index(self.own)]


class Sampler:
    """Samples the thread that enters it, until the thread leaves it.

    `within` are the codes of the watched functions: outside of them a sample has no frames, or counts to `rest`. It
    stops after `most` samples. Afterwards `worked` is the CPU time of the sampler in s.
    """

    def __init__(self, interval: float, *within: CodeType, rest: CodeType | None = None, most: float = math.inf):
        self.within, self.interval, self.samples, self.worked = within, interval, [], 0.0
        self.rest, self.most = rest, most
        self._end, self._files = threading.Event(), ExitStack()

    def __enter__(self) -> Sampler:
        arguments = threading.get_ident(), _waited(self._files), time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=arguments, name="sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._end.set()
        self._thread.join()
        self._files.close()

    @property
    def task(self) -> str:
        """The sampler's thread, for `queued`."""
        return f"self/task/{self._thread.native_id}"

    def _run(self, thread: int, waited: Callable[[], float], begin: float) -> None:
        before, late, switch = waited(), False, sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        # No sample is possible while a call holds the GIL. This thread gets the GIL when the call is over, and samples
        # at once: later, another line would get the time of the call.
        while len(self.samples) < self.most and not self._end.wait(0 if late else self.interval):
            frames = _frames(_stack(thread), self.within, self.rest)
            end, now = time.perf_counter(), waited()
            late = time.perf_counter() - end > self.interval
            self.samples.append(Sample(begin, end, now - before, *frames))
            begin, before = end, now
        self.worked = time.thread_time()
        sys.setswitchinterval(switch + 5e-7)  # Python keeps whole µs and rounds down: 100 µs would come back as 99


def place(weights: Iterable[tuple[Frame | None, float]]) -> str:
    """Return the user's line with the largest sum of weights, as text; "" if too few samples show one.

    A second line is named if it has at least half as much. The largest weight counts as the second largest: if the
    machine stalled once, one sample has all of that time.
    """
    weights, lines = list(weights), {}
    for (frame, _), weight in zip(weights, without_hiccup([weight for _, weight in weights]), strict=True):
        if frame is not None and weight:
            lines.setdefault((frame.file, frame.line), []).append((weight, frame))
    sums = {line: sum(weight for weight, _ in rows) for line, rows in lines.items()}
    best = sorted((line for line in sums if sums[line] > 0), key=sums.get, reverse=True)[:2]
    if not best or len(lines[best[0]]) < LEAST_SAMPLES:
        return ""
    also = [line for line in best[1:] if 2 * sums[line] >= sums[best[0]] and len(lines[line]) >= LEAST_SAMPLES]
    return "; also ".join(str(lines[line][0][1]) for line in [best[0], *also])


def hottest(weights: Iterable[tuple[tuple[Frame, ...], float]]) -> str:
    """Return the line with most of the weight, as text; "" if too few samples show one.

    The weights belong to stacks, the outermost function first. The search starts at the outermost function and goes on
    to the called one as long as one line has most of the weight. The text also has the line that calls the result, and
    the outermost line.
    """
    weights, lines = [(stack, weight) for stack, weight in weights if stack and weight > 0], []
    settled = without_hiccup([weight for _, weight in weights])
    weights = [(stack, weight) for (stack, _), weight in zip(weights, settled, strict=True)]
    while weights:
        total, depth = sum(weight for _, weight in weights), len(lines)
        lines.append(place((stack[depth], weight) for stack, weight in weights))
        sums = Counter()
        for stack, weight in weights:
            sums[stack[: depth + 1]] += weight
        ((best, _),) = sums.most_common(1)
        inner = [(stack, weight) for stack, weight in weights if stack[: depth + 1] == best and len(stack) > depth + 1]
        if sum(weight for _, weight in inner) < MOSTLY * total:
            break
        weights = inner
    lines = [line for line in reversed(lines) if line]
    return ", called at ".join(dict.fromkeys([*lines[:2], *lines[-1:]]))


_reading = False  # whether a stack is being read, with garbage collection off


def _stack(thread: int) -> list[tuple[CodeType, int]]:
    """Return the code and the line of each function that a thread is in, the innermost first.

    In Python 3.11 garbage may be collected while `sys._current_frames` holds the lock that every thread needs at its
    start and end (CPython issue 106883): a finalizer that gives the GIL to such a thread then stops the process for
    ever. So garbage collection is off meanwhile. Frames are read at once, because a frame that the thread has left may
    contain anything; such a stack is discarded.
    """
    global _reading
    stack, collects = [], gc.isenabled()
    if collects:
        _reading = True
        gc.disable()
    try:
        frame = sys._current_frames().get(thread)
        while frame is not None:
            stack.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
    finally:
        if collects:
            gc.enable()
            _reading = False
    return stack if all(isinstance(code, CodeType) for code, _ in stack) else []


if hasattr(os, "register_at_fork"):  # the thread that would enable it is not in the child
    os.register_at_fork(after_in_child=lambda: gc.enable() if _reading else None)


def _frames(
    stack: list[tuple[CodeType, int]], within: Iterable[CodeType], rest: CodeType | None
) -> tuple[tuple[Frame, ...], CodeType | None]:
    frames = []
    for code, line in stack:
        if code in within:
            return tuple(frames), code
        frames.append(Frame(code.co_filename, line or code.co_firstlineno, code.co_name, code.co_firstlineno))
    return (tuple(frames), rest) if rest is not None and stack else ((), None)


def _waited(files: ExitStack) -> Callable[[], float]:
    """Return a function that returns for how many seconds this thread has neither worked nor been ready to.

    It releases the GIL only once, and reads a file that `files` closes. Where the system does not report both times
    (only Linux does), it returns 0.
    """
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not path.exists():
        return lambda: 0.0
    clock, file = time.pthread_getcpuclockid(threading.get_ident()), files.enter_context(path.open("rb"))

    def waited() -> float:
        queued = int(os.pread(file.fileno(), 100, 0).split()[1]) / 1e9
        return time.perf_counter() - time.clock_gettime(clock) - queued

    return waited


def queued(process: int | str = "thread-self") -> float:
    """Return for how many seconds this thread, a process's first one, or a `task` was ready while others had the cores.

    It is 0 if unknown, and for what has ended.
    """
    try:
        return int(Path("/proc", str(process), "schedstat").read_text().split()[1]) / 1e9  # see proc_pid_schedstat(5)
    except (OSError, IndexError):
        return 0.0


def queue_clock() -> Callable[[], float]:
    """Return a function like `queued` for the main thread that takes a microsecond or two, as its file stays open."""
    path = Path(f"/proc/self/task/{threading.main_thread().native_id}/schedstat")
    if not path.exists():
        return lambda: 0.0
    file = os.open(path, os.O_RDONLY)

    def clock() -> float:
        try:
            return int(os.pread(file, 100, 0).split()[1]) / 1e9
        except (OSError, IndexError, ValueError):  # the script closed all files; the number may be another file's now
            return 0.0

    return clock


class Contention:
    """Measures, from its creation on, whether others have the cores while this thread is ready to work."""

    def __init__(self):
        self.begin, self.queued, self.others = time.perf_counter(), queued(), _others()

    def share(self) -> float:
        """Return the share of the time in which others than this process and its workers had the cores."""
        held = queued() - self.queued
        return held * self.part(held) / (time.perf_counter() - self.begin)

    def part(self, held: float) -> float:
        """Return the part of `held` seconds of waiting for a core that is due to others; the rest is to its workers."""
        return min(1.0, max(0.0, _others() - self.others) / held) if held > 0 else 0.0


def _others() -> float:
    """Return the CPU time of all others than this process and its children, in s."""
    all_ = psutil.cpu_times()
    idle = sum(getattr(all_, name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
    own = sum(os.times()[:4])  # with children that have ended
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            own += sum(child.cpu_times()[:2])
    return sum(all_) - idle - own
