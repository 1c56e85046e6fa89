"""Measures one run: variants in interleaved rounds, a line of JSON for each, traces; goes on where it stopped."""

import contextlib
import datetime
import functools
import gc
import gzip
import itertools
import json
import re
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pynvml
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from helpers import config
from helpers.data import synthetic
from stepscope import timing
from stepscope.timing import comparison as comparing
from stepscope.timing import loaders
from tests.gpu import results

Figures = dict[str, float]
Measure = Callable[[], Figures]
_TRACED = 3  # steps in a trace
_LOOK = 0.1  # seconds between two samples of clock and power
_SLOWEST_GPU = 3e12  # operations a second in float32: a T4 reaches more, a few cores of a CPU do not


@dataclass(frozen=True)
class Steps:
    """Times training steps of a loop: to call it is to time `count` of them, after a warm-up.

    The `others` are figures that were measured when the step was built.
    """

    step: timing.Step
    loader: Iterable
    count: int
    others: Figures = field(default_factory=dict)

    def __call__(self) -> Figures:
        timed = timing.loop(self.loader, self.step, self.count)
        return {"images_per_second": timed.images_per_second, "step_ms": timed.step_ms, **self.others}


class Run:
    """One run of the queue: what is finished, what is missing, and the time that is left.

    Parameters
    ----------
    number : int
    folder : Path
        For ``results.jsonl`` and ``traces``. What is finished there, on this card and in this size, is not repeated.
    seconds : float
        After these no further variant is built, and no further measurement begins.
    small : bool
        Whether sizes are small, so that the run ends on any machine; its figures then say nothing about a card.
    process : int
        The number of this process, if several repeat the run. Only the first one writes traces.
    """

    def __init__(self, number: int, folder: Path, seconds: float, small: bool = False, process: int = 0):
        self.number, self.folder, self.small, self.process = number, folder, small, process
        self.rounds = 1 if small else 3
        self.missing: dict[str, str] = {}  #: for each missing variant, why
        (folder / "traces").mkdir(parents=True, exist_ok=True)
        self._end = time.monotonic() + seconds
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        self._where = {"run": number, "process": process, "card": card, "torch": torch.__version__, "small": small}
        self._lines = results.of(results.read(folder / results.NAME), **self._where)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def compare(
        self,
        comparison: str,
        variants: Mapping[str, Callable[[], Measure]],
        rounds: int | None = None,
        traced: Iterable[str] = (),
    ) -> None:
        """Measure variants in interleaved rounds, then trace some of them, and free their memory.

        A variant that raises is reported as missing, and the rest goes on. Rounds that an earlier call has finished are
        left out, so in a round where that call stopped, a ratio compares two processes.

        Parameters
        ----------
        variants : mapping of str to callable
            Each builds a variant, and returns a function that measures it once. The first one is the baseline.
        rounds : int, optional
            By default the run's.
        traced : iterable of str
            Variants, measured by `Steps`, of which three steps are traced after the last round.
        """
        rounds, measures = rounds or self.rounds, {}
        traced = tuple(traced) if self.process == 0 else ()
        for variant, build in variants.items():
            wanted = [*range(rounds), *([None] if variant in traced else [])]
            if not all(self._finished(comparison, variant, number) for number in wanted):
                measures[variant] = self._attempt(comparison, variant, build)
        for number, order in itertools.chain(enumerate(comparing.shuffled(variants, rounds)), [(None, traced)]):
            for variant in order:
                if measures.get(variant) and not self._finished(comparison, variant, number):
                    named = {"comparison": comparison, "variant": variant, "baseline": next(iter(variants))}
                    self._measure(named | {"round": number}, measures[variant])
        measures.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _finished(self, comparison: str, variant: str, number: int | None) -> bool:
        return bool(results.of(self._lines, comparison=comparison, variant=variant, round=number))

    def _measure(self, named: results.Line, measure: Measure) -> None:
        comparison, variant = named["comparison"], named["variant"]
        if named["round"] is None:
            measure = partial(self._trace, comparison, variant, measure)
        with load() as found:
            figures = self._attempt(comparison, variant, measure)
        if figures:
            self._write(named | {"figures": figures, "load": found})

    def _attempt(self, comparison: str, variant: str, call: Callable):
        """Return what `call` returns; None, and the variant is missing, if no time is left or if it raises."""
        name = f"{comparison}: {variant}"
        if self.left <= 0:
            self.missing.setdefault(name, "no time was left")
            return None
        try:
            return call()
        except Exception as error:  # of any kind: a card may lack memory, a compiler or a counter
            traceback.print_exc()
            self.missing[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            self._write({"comparison": comparison, "variant": variant, "error": self.missing[name]})
            return None

    def _write(self, measured: results.Line) -> None:
        now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        line = self._where | measured | {"time": now}
        results.append(self.folder / results.NAME, line)
        self._lines += results.of([line])
        print(self.number, json.dumps(measured, ensure_ascii=False), flush=True)

    def _trace(self, comparison: str, variant: str, steps: Steps) -> Figures:
        """Trace three steps; return their kernels, and their share of a step's time without the profiler."""
        name = re.sub(r"[^\w.]+", "-", f"{self.number}-{comparison}-{variant}")
        figures = trace(steps, self.folder / "traces" / f"{name}.pt.trace.json.gz")
        times = results.values(results.of(self._lines, comparison=comparison), variant, "step_ms")
        if times and figures["kernels"]:
            step_ms = statistics.geometric_mean(times)
            figures["us_per_kernel"] = step_ms * 1e3 / figures["kernels"]
            figures["kernel_share"] = figures["kernel_ms"] / step_ms
        return figures


def trace(steps: Steps, path: Path) -> Figures:
    """Write a trace of three steps into a gzip file.

    Returns the number of kernels in a step, and the milliseconds of a step in which they run: of all, and of those that
    batch normalization launches, forward and backward.
    """
    plan = schedule(wait=0, warmup=1, active=_TRACED, repeat=1)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with loaders.batches(steps.loader) as batches:
        loaders.call(steps.step, next(batches))
        with profile(
            activities=kinds, schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path))
        ) as profiler:
            for number in range(1 + _TRACED):
                loaders.call(steps.step, next(batches))
                if number == 0 and torch.cuda.is_available():
                    torch.cuda.synchronize()  # kernels of the warm-up must not be in the trace
                profiler.step()
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    operators = {event["args"].get("External id"): event["name"] for event in events if event.get("cat") == "cpu_op"}
    kernels = [event for event in events if event.get("cat") == "kernel"]
    norms = [each for each in kernels if "batch_norm" in operators.get(each["args"].get("External id"), "")]
    ms, norm_ms = (sum(each["dur"] for each in some) / 1e3 / _TRACED for some in (kernels, norms))
    return {"kernels": len(kernels) / _TRACED, "kernel_ms": ms, "batch_norm_ms": norm_ms}


@contextlib.contextmanager
def load() -> Iterator[dict[str, float | None]]:
    """Sample the GPU while the block runs, and give the medians when it has ended; None where they are unknown.

    ``sm_clock_mhz`` is the clock of the multiprocessors in MHz, ``power_w`` the power of the card in watts.
    """
    found: dict[str, float | None] = {"sm_clock_mhz": None, "power_w": None}
    samples: list[tuple[float, float]] = []
    ended = threading.Event()

    gpu = _asked_of_nvml()

    def look() -> None:
        with contextlib.suppress(pynvml.NVMLError):
            over = gpu is None
            while not over:
                over = ended.wait(_LOOK)  # a block that is shorter is looked at when it has ended
                clock = pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)
                samples.append((clock, pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
        found.update(zip(found, map(statistics.median, zip(*samples, strict=True)), strict=False))


@functools.cache
def _asked_of_nvml() -> object:
    """The current GPU as NVML names it; None without one, or if NVML does not answer. To start NVML takes long."""
    with contextlib.suppress(pynvml.NVMLError, RuntimeError, AssertionError):
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")
    return None


def is_gpu() -> bool:
    """Whether CUDA is there and as fast as a GPU: a product of matrices in float32 tells a simulated one."""
    if not torch.cuda.is_available():
        return False
    matrix = torch.ones(1024, 1024, device="cuda")
    seconds = timing.call_ms(lambda: matrix @ matrix, repeats=3) / 1e3
    return 2 * 1024**3 / seconds > _SLOWEST_GPU


def batch(images: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return drawn images as bytes, of shape (images, 3, 32, 32), and their labels, both in pinned memory."""
    drawn, labels = synthetic.draw(range(images), config.SEED)
    return torch.from_numpy(drawn).permute(0, 3, 1, 2).contiguous().pin_memory(), torch.from_numpy(labels).pin_memory()
