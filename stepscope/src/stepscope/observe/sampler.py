"""Samples every few ms which line of the user's code a thread runs, and whether the thread works or waits."""

from __future__ import annotations

import gc
import itertools
import linecache
import math
import os
import re
import sys
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import TypeVar

from stepscope import thresholds
from stepscope.base.confidence import without_hiccup
from stepscope.base.wording import without_folders
from stepscope.observe import contention

T = TypeVar("T")
LONGEST = 70  # characters of a line that are shown

_COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}  # separate functions in Python 3.11
_PACKAGE = str(Path(thresholds.__file__).parent)
_PATHS = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
# torch.compile writes the code of compiled networks to files here
_GENERATED = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or os.path.join(tempfile.gettempdir(), "torchinductor_")
_FOREIGN = (*(f"{Path(path).resolve()}{os.sep}" for path in [*_PATHS, _PACKAGE]), _GENERATED)
_TYPED = ("<ipython", "<stdin>")  # what Python calls the user's code without a file; other names are generated code
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\](\w+)")
_GETS = ("__getitem__", "__getitems__", "__iter__", "__next__")
_LIBRARIES = ("", "torch")  # packages that run no loop; "" is the standard library


@dataclass(frozen=True)
class Frame:
    """A running function: `file`, `line` and `name`; `first` is the line at which the function begins."""

    file: str
    line: int
    name: str
    first: int
    qualified: str = ""  # the name with its class, such as "Logger.log"

    @property
    def own(self) -> bool:
        """Whether the code is the user's: not installed, of the standard library, of stepscope, or generated."""
        if self.file.startswith("<"):
            return self.file.startswith(_TYPED)
        return not (self.file.startswith(_FOREIGN) or self.package)

    @property
    def package(self) -> str:
        """The installed package with this code; "" for other code."""
        return package(self.file)

    @property
    def function(self) -> tuple[str, int, str]:
        """The function, without its current line."""
        return self.file, self.first, self.name

    def __str__(self) -> str:
        if not self.own and self.package:
            return f"{self.qualified or self.name} of {self.package}"
        text = without_folders(linecache.getline(self.file, self.line).strip())
        text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        place = _cell(self.file) or Path(self.file).name
        return f"{place}:{self.line}: {text}" if text else f"{place}:{self.line}"


def _cell(file: str) -> str:
    """Return the cell of a notebook that a file name of IPython stands for, by its number; "" for other files."""
    if named := re.match(r"<ipython-input-(\d+)", file):
        return f"cell {named[1]}"
    if "ipykernel_" not in file:
        return ""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})  # IPython's tracebacks use it, too
    return f"cell {numbers[file]}" if file in numbers else "cell"


def package(file: str) -> str:
    """Return the installed package, other than stepscope, that a file belongs to; "" for other files."""
    found = None if file.startswith(f"{_PACKAGE}{os.sep}") else _INSTALLED.search(file)
    return found[1] if found else ""


Stack = tuple[Frame, ...]  # of calls; in weights the outermost function comes first


@dataclass(frozen=True)
class Sample:
    """A thread's call stack, and its wait since the previous sample. Times in s of ``time.perf_counter()``."""

    begin: float  # when the previous sample was taken
    end: float
    # Seconds in which the thread neither worked nor was ready to work; 0 where the system does not report them. Only
    # sums over samples are right: a value is too large while the thread waits for a core, too small when it has a core.
    waited: float
    frames: Stack  # the innermost function first; empty outside of the watched functions
    within: CodeType | None = None  # the watched function that called `frames`

    @property
    def seconds(self) -> float:
        """Time since the previous sample."""
        return self.end - self.begin

    @property
    def path(self) -> Stack:
        """The user's functions, the outermost first; a comprehension belongs to the function around it."""
        frames = reversed(self.frames)
        return tuple(frame for frame in frames if frame.own and frame.name not in _COMPREHENSIONS)

    @property
    def own(self) -> Frame | None:
        """The innermost of the user's functions."""
        return self.path[-1] if self.path else None

    @property
    def library(self) -> Frame | None:
        """The outermost method of an installed package other than PyTorch, such as a transform in a ``Compose``."""
        frames = [frame for frame in reversed(self.frames) if frame.package not in _LIBRARIES]
        composed = [number for number, frame in enumerate(frames) if "Compose" in frame.qualified]
        frames = frames[composed[-1] + 1 if composed else 0 :]
        methods = [each for each in frames if "." in each.qualified and "<locals>" not in each.qualified]
        # A dataset's own method mostly calls the transform
        found = next((each for each in methods if each.name not in _GETS), methods[0] if methods else None)
        return None if found is None else replace(found, line=found.first)

    @property
    def to_network(self) -> Stack:
        """Like `path`, but without functions that `torch.nn` calls, such as ``forward``."""
        called = [each for each, frame in enumerate(self.frames) if re.search(r"[/\\]torch[/\\]nn[/\\]", frame.file)]
        return replace(self, frames=self.frames[called[-1] :]).path if called else self.path

    @property
    def inside(self) -> Stack:
        """The functions that `own` called, the innermost first."""
        return self.frames if self.own is None else self.frames[: self.frames.index(self.own)]


@dataclass(frozen=True)
class Site:
    """Where a loop is: the functions that run at an update of the weights, and at a request for a batch.

    The loop is in the innermost function of both; the outermost function comes first.
    """

    updates: Stack = ()
    requests: Stack = ()

    @cached_property
    def _shared(self) -> Stack:
        """The functions that contain the loop, without those of PyTorch and of the standard library."""
        frames = common([self.updates, self.requests])
        return tuple(frame for frame in frames if frame.own or frame.package not in _LIBRARIES)

    @property
    def framework(self) -> str:
        """The installed package that runs the loop, such as "lightning"; "" if the user's code does."""
        return self._shared[-1].package if self._shared else ""

    def changeable(self, path: Stack) -> Stack:
        """Return the functions of a sample's `path` that the user may change, from the one that updates the weights.

        Where a framework runs the loop, the functions that it calls remain: none if the framework itself works.
        """
        same = len(common([path, tuple(frame for frame in self.updates if frame.own)]))
        outside = sum(frame.own for frame in self._shared) if self.framework else 0
        return path[max(0, same - 1, min(same, outside)) :]


class Sampler:
    """Samples the thread that enters the ``with`` block, until the thread leaves the block.

    `within` is the code of the watched functions: a sample outside of them has no frames, or belongs to `default`.
    Sampling stops after `most` samples. Afterwards `worked` is the CPU time of the sampler in s.
    """

    def __init__(self, interval: float, *within: CodeType, default: CodeType | None = None, most: float = math.inf):
        self.within, self.interval, self.default, self.most = within, interval, default, most
        self.samples: list[Sample] = []
        self.worked = 0.0
        self._end = threading.Event()

    def __enter__(self) -> Sampler:
        arguments = threading.get_ident(), _waited(), time.perf_counter()
        self._thread = threading.Thread(target=self._run, args=arguments, name="sampler", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def task(self) -> str:
        """The sampler's thread, as `contention.queued` names it."""
        return f"self/task/{self._thread.native_id}"

    def _run(self, thread: int, waited: Callable[[], float], begin: float) -> None:
        before, late, switch = waited(), False, sys.getswitchinterval()
        sys.setswitchinterval(thresholds.SWITCH_INTERVAL_S)
        # No sample is possible while a call holds the GIL. This thread gets the GIL when the call is over, and samples
        # at once: a later sample would count the time of the call to another line.
        while len(self.samples) < self.most and not self._end.wait(0 if late else self.interval):
            frames = self._frames(_stack(thread))
            end, now = time.perf_counter(), waited()
            late = time.perf_counter() - end > self.interval
            self.samples.append(Sample(begin, end, now - before, *frames))
            begin, before = end, now
        self.worked = time.thread_time()
        sys.setswitchinterval(switch + 5e-7)  # Python keeps whole µs and rounds down: 100 µs would come back as 99

    def _frames(self, stack: list[tuple[CodeType, int]]) -> tuple[Stack, CodeType | None]:
        frames = list[Frame]()
        for code, line in stack:
            if code in self.within:
                return tuple(frames), code
            frames.append(_frame(code, line))
        return (tuple(frames), self.default) if self.default is not None and stack else ((), None)


def place(weights: Iterable[tuple[Frame | None, float]]) -> str:
    """Return the user's line with the largest sum of weights, as text; "" if too few samples show a line.

    A second line is also named if its sum is at least half as large.
    """
    lines = defaultdict[tuple[str, int], list[tuple[Frame, float]]](list)
    for frame, weight in _settled(weights):
        if frame is not None and weight:
            lines[frame.file, frame.line].append((frame, weight))
    sums = {line: sum(weight for _, weight in rows) for line, rows in lines.items()}
    best = sorted(sums, key=sums.__getitem__, reverse=True)[:2]
    if not best or len(lines[best[0]]) < thresholds.LEAST_SAMPLES:
        return ""
    most, least = sums[best[0]], thresholds.LEAST_SAMPLES
    named = [lines[line] for line in best if 2 * sums[line] >= most > 0 and len(lines[line]) >= least]
    return "; also ".join(str(rows[0][0]) for rows in named)


def hottest(weights: Iterable[tuple[Stack, float]]) -> str:
    """Return the line with most of the weight, as text; "" if too few samples show a line.

    The search starts at the outermost function, and goes on to the called function as long as one line has most of
    the weight. The text also names the line that calls this function, and the outermost line.
    """
    left, lines = _settled((stack, weight) for stack, weight in weights if stack and weight > 0), list[str]()
    while left:
        lines.append(place((stack[0], weight) for stack, weight in left))
        left = _behind_one_line(left)
    return called_at([line for line in reversed(lines) if line])


def _behind_one_line(weights: list[tuple[Stack, float]]) -> list[tuple[Stack, float]]:
    """Return the stacks in which one line of the outermost function has most of the weight, without this function.

    If there is no such line: the stacks from a line on that has most of the weight, such as a line of a layer that a
    network calls at several places. Empty if no line has.
    """
    least, sums = thresholds.MOSTLY_ONE_LINE * sum(weight for _, weight in weights), defaultdict[Frame, float](float)
    deeper, depths = defaultdict[Frame, float](float), defaultdict[Frame, list[int]](list)
    for stack, weight in weights:
        sums[stack[0]] += weight
        for frame in {*stack[1:]}:
            deeper[frame] += weight
            depths[frame].append(stack.index(frame, 1))
    best = max(sums, key=sums.__getitem__)
    inner = [(stack[1:], weight) for stack, weight in weights if stack[0] == best and len(stack) > 1]
    if sum(weight for _, weight in inner) >= least:
        return inner
    shared = [frame for frame, weight in deeper.items() if weight >= least]
    if not shared:
        return []
    first = min(shared, key=lambda frame: sum(depths[frame]) / len(depths[frame]))
    return [(stack[stack.index(first, 1) :], weight) for stack, weight in weights if first in stack[1:]]


def called_at(lines: list[str]) -> str:
    """Return the innermost line of a chain of calls, the line that calls its function, and the outermost line."""
    return ", called at ".join(dict.fromkeys([*lines[:2], *lines[-1:]]))


def _settled(weights: Iterable[tuple[T, float]]) -> list[tuple[T, float]]:
    """Set the largest weight to the second largest: if the machine stalled once, one sample contains the stall."""
    weights = list(weights)
    settled = without_hiccup([weight for _, weight in weights])
    return [(sampled, weight) for (sampled, _), weight in zip(weights, settled, strict=True)]


def any_of(pattern: str, frames: Iterable[Frame]) -> bool:
    """Return whether the file and name of any function match the pattern."""
    return any(re.search(pattern, f"{frame.file}:{frame.name}") for frame in frames)


def common(stacks: Iterable[Stack]) -> Stack:
    """Return the functions with which all stacks begin."""
    levels = itertools.takewhile(
        lambda level: len({frame.function for frame in level}) == 1, zip(*stacks, strict=False)
    )
    return tuple(level[0] for level in levels)


def here(*within: CodeType) -> Stack:
    """Return the functions that run in this thread, the outermost first; only the ones inside a function `within`."""
    frames, frame = list[Frame](), sys._getframe(1)
    while frame is not None and frame.f_code not in within:
        frames.append(_frame(frame.f_code, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return tuple(reversed(frames))


def _frame(code: CodeType, line: int | None) -> Frame:
    return Frame(code.co_filename, line or code.co_firstlineno, code.co_name, code.co_firstlineno, code.co_qualname)


_reading = False  # whether a stack is being read, with garbage collection off


def _stack(thread: int) -> list[tuple[CodeType, int]]:
    """Return the code and the line of each function that a thread is in, the innermost first.

    In Python 3.11 garbage may be collected while `sys._current_frames` holds the lock that every thread needs at its
    start and end (CPython issue 106883): a finalizer that gives the GIL to such a thread then blocks the process for
    ever. So garbage collection is off during the call. Frames are read at once, because a frame that the thread has
    left may contain anything; a stack with such a frame is discarded.
    """
    global _reading
    stack: list[tuple[CodeType, int]] = []
    collects = gc.isenabled()
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


if hasattr(os, "register_at_fork"):  # the thread that would enable garbage collection is not in the child
    os.register_at_fork(after_in_child=lambda: gc.enable() if _reading else None)


def _waited() -> Callable[[], float]:
    """Return a function that returns for how many seconds this thread has neither worked nor been ready to work.

    The function releases the GIL only once. It returns 0 where the system does not report both times: only Linux does.
    """
    queued = contention.queue_clock()
    if not Path("/proc/self/schedstat").exists():
        return queued
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.perf_counter() - time.clock_gettime(clock) - queued()
