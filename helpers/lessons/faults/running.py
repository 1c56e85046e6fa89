"""Runs training scripts, each run in its own process, which has ended with all its workers when the run ends."""

import faulthandler
import functools
import io
import itertools
import multiprocessing
import os
import pkgutil
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter  # this one, even if a script replaces the clock in `time`
from types import ModuleType

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader

from helpers import config, simulate, training
from helpers.lessons.checks import answering
from helpers.lessons.faults.catalogue import EPOCH_STEPS, FAULTS, WORKERS
from stepscope import timing

LIMIT = 180.0  # seconds for one run: on two busy cores a script with six faults takes 5 s
FUNCTIONS = ("make_loader", "make_model", "train_step", "main")
GPU = simulate.SimulatedGPU(2.5)  # ms; 5 would hide more of loading a batch of 64
_FOR_EVER = 10**9  # epochs: the script is ended after the requested steps


class ScriptFailed(RuntimeError):
    """A training script failed, lacks one of its four functions, or does not end; the message says what, and where."""


@dataclass(frozen=True, kw_only=True)
class Run(timing.Timing):
    """A run of a script: how long it took, and what it did.

    `losses` has the loss of each step in nats, warm-up included; `printed` is the output of its ``main``, and `saved`
    says whether it wrote ``checkpoint.pt`` beside the script. `calls` says how often functions were called.
    """

    losses: tuple[float, ...]
    printed: str
    saved: bool
    calls: Mapping[str, int]


def compare(scripts: Mapping[str, Path]) -> timing.Comparison:
    """Time training scripts in interleaved runs, each in its own process, on a GPU or a simulated GPU.

    A run is an epoch of warm-up, then whole epochs, since restarting workers costs time once an epoch. They have about
    as many steps as the preset says. The timings are `Run`; raises `ScriptFailed`.
    """
    steps = max(config.preset().steps // EPOCH_STEPS, 1) * EPOCH_STEPS
    runs = {name: lambda path=path: run(path, steps, EPOCH_STEPS, simulated=True) for name, path in scripts.items()}
    return timing.interleaved(runs, config.preset().rounds)


def pipeline(path: Path) -> tuple[DataLoader, timing.Step]:
    """Return a script's loader and its training step on a GPU, for use in this process.

    Without a GPU the model is the one of `simulating`, with one thread during a step. Output of the step is discarded.
    Raises `ScriptFailed`.
    """
    path = _existing(path)
    try:
        script = _load(path)
        loader, (model, optimizer) = script.make_loader(), script.make_model()
    except Exception as error:
        raise ScriptFailed(f"{path}: {_said(error)}") from None
    simulating(model)

    def step(*batch: torch.Tensor) -> object:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with redirect_stdout(None):
                return script.train_step(model, optimizer, *batch)
        finally:
            torch.set_num_threads(threads)  # for this process's other work

    return loader, step


def run(path: Path, steps: int, warmup: int = 0, simulated: bool = False) -> Run:
    """Run a training script in its own process, and time it without the script's own clock.

    So many steps of its ``main`` are timed, after those of the warm-up. If `simulated`, and there is no GPU, the model
    is the one of `simulating`. If not `simulated`, the calls of each fault's mark are counted in ``main``; marks of
    loading, which other processes call there, are counted in a first batch without workers. Raises `ScriptFailed`.
    """
    path = _existing(path)
    if sys.platform == "linux":  # from a server that has imported PyTorch, which takes seconds
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "pandas", "torchvision.transforms"])
    else:
        context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    method = multiprocessing.get_start_method(allow_none=True)  # of the workers; None is the default
    process = context.Process(target=_answer, args=(theirs, method, path, steps, warmup, simulated))
    process.start()
    theirs.close()
    try:
        reply = ours.recv() if ours.poll(LIMIT) else (
            f"stopped it, because its steps took more than {LIMIT:.0f} s. Is there a loop without an end, or is this "
            "machine very busy?"
        )  # fmt: skip
    except EOFError:
        process.join()
        reply = (
            f"its process ended without an error, with exit code {process.exitcode}. Something called os._exit, "
            "crashed, or used up the memory; `python` followed by its path may show more."
        )
    finally:
        _end(process)
        ours.close()
    if isinstance(reply, str):
        raise ScriptFailed(f"{path}: {reply}")
    return reply


def _existing(path: Path) -> Path:
    """Return the absolute path of a script. A missing one is refused before a process starts, which takes seconds."""
    path = Path(path).resolve()
    if not path.is_file():
        raise ScriptFailed(f"{path}: expected a training script there, found none.")
    return path


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a process, and what it has started."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for member in [*family.children(recursive=True), family]:
            with suppress(psutil.NoSuchProcess):
                member.kill()
    process.join()
    process.close()


# -------------------------------------------------------------------------------------- in the process of the script


class _Enough(BaseException):  # not an Exception, which a script may catch
    """All steps that were asked for are done."""


def _answer(connection: Connection, method: str | None, path: Path, steps: int, warmup: int, simulated: bool) -> None:
    """Run a script, and send its `Run`, or what is wrong with it."""
    # Or workers would be started like this process, unlike those of a script that you start yourself
    multiprocessing.set_start_method(method, force=True)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what the script prints would end up between the lines of the notebook
        os.dup2(silence, stream)
    faulthandler.dump_traceback_later(2 * LIMIT, exit=True, file=silence)  # also if no process is left to end it
    try:
        reply: Run | str = _run_here(path, steps, warmup, simulated)
    except BaseException as error:  # also SystemExit: the reader should see whatever ends the script
        reply = _said(error)
    connection.send(reply)


def _run_here(path: Path, steps: int, warmup: int, simulated: bool) -> Run:
    """Run `warmup` + `steps` steps of a script's ``main``; their times include its work between two steps."""
    calls: Counter[str] = Counter()
    for mark in set() if simulated else {fault.mark for fault in FAULTS}:
        _count(mark, calls)
    if not simulated:  # its losses are compared: on a GPU, too, repetitions may differ by rounding only
        training.set_tf32(False)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.set_num_threads(1)  # on two busy cores a step takes half as long as with two threads
    checkpoint = path.with_name("checkpoint.pt")
    earlier = checkpoint.exists() and checkpoint.stat().st_mtime_ns
    script, printed = _load(path), io.StringIO()
    make_loader, make_model, train_step = script.make_loader, script.make_model, script.train_step
    begun, models = [], []
    losses: list[torch.Tensor | float] = []
    loaders: list[_Watched] = []

    def watched_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor):
        ends = len(losses) == warmup + steps
        if (ends or len(losses) == warmup) and torch.cuda.is_available():
            torch.cuda.synchronize()
        begun.append((perf_counter(), sum(loader.waited for loader in loaders), len(images)))
        if ends:
            raise _Enough
        result = train_step(model, optimizer, images, labels)
        loss = result[0] if isinstance(result, tuple) else result
        losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)  # read later: no GPU waits
        return result

    def watched_loader() -> _Watched:
        loaders.append(_Watched(make_loader()))
        return loaders[-1]

    def watched_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = make_model()
        models.append(simulating(model) if simulated else model)
        return model, optimizer

    vars(script).update(make_loader=watched_loader, make_model=watched_model, train_step=watched_step)
    with suppress(_Enough), redirect_stdout(printed):
        script.main(_FOR_EVER)
    if len(losses) < warmup + steps:
        raise ScriptFailed(
            f"main ended after {len(losses)} calls of train_step, and {warmup + steps} were expected: main(epochs) "
            "must train for as many epochs as its argument says, and call train_step for each batch."
        )
    if not loaders or not models:
        raise ScriptFailed("main no longer uses make_loader() and make_model(), whose results are watched here.")
    moments, waited, images = zip(*begun[warmup:], strict=True)
    if not simulated:
        for mark in {fault.mark for fault in FAULTS if fault.place == "loading"} - {WORKERS}:
            calls[mark] = 0
        fresh = make_loader()  # keeps nothing from earlier epochs
        with suppress(AttributeError):  # a list of batches has no workers
            fresh.num_workers = 0
        next(iter(fresh))
    durations, waits = (tuple(after - before for before, after in itertools.pairwise(of)) for of in (moments, waited))
    weights = sum(weight.nbytes for weight in models[0].parameters())
    found = checkpoint.stat() if checkpoint.exists() else None
    return Run(
        images=sum(images[:-1]), seconds=moments[-1] - moments[0], waits=waits, durations=durations, begin=moments[0],
        losses=tuple(map(float, losses)), printed=printed.getvalue(),
        saved=found is not None and found.st_mtime_ns != earlier and found.st_size > weights, calls=calls,
    )  # fmt: skip


def _count(name: str, calls: Counter[str]) -> None:
    """Count from now on all calls of a function in this process."""
    owner, _, attribute = name.rpartition(".")
    function = pkgutil.resolve_name(name)

    @functools.wraps(function)
    def counted(*args: object, **kwargs: object) -> object:
        calls[name] += 1
        return function(*args, **kwargs)

    setattr(pkgutil.resolve_name(owner), attribute, counted)


_READ = "read_by_the_course"  # the attribute of a script's module with its path and content


def _load(path: Path) -> ModuleType:
    """Import a script as it is now, so that workers can import it, too; an unchanged one only once.

    Otherwise an earlier loader's dataset would be of another class than the one that a spawned worker imports.
    """
    if sys.path[0] != str(path.parent):
        sys.path.insert(0, str(path.parent))  # where a spawned worker finds it
    read = (path, path.read_bytes())
    known = sys.modules.get(path.stem)
    script = known if known and getattr(known, _READ, None) == read else answering.imported(path)
    setattr(script, _READ, read)
    missing = [name for name in FUNCTIONS if not callable(getattr(script, name, None))]
    if missing:
        raise ScriptFailed(f"it has no function {' and no function '.join(missing)}.")
    return script


def simulating(model: nn.Module) -> nn.Module:
    """Let a model on the CPU stand for one on a GPU: the host calls every operator, then waits.

    The operators compute one image only: with a GPU, too, the host spends time on calling them. The other images take
    the time of `GPU` and no CPU time. The model is changed; one on a GPU stays as it is.
    """
    if config.device().type == "cuda":
        return model
    forward = model.forward

    def simulated(images: torch.Tensor) -> torch.Tensor:
        logits = forward(images[:1])
        GPU(images, logits)
        return logits.expand(len(images), -1)

    model.forward = simulated
    return model


def _said(error: BaseException) -> str:
    """Return what is wrong, or the traceback without the lines of the course."""
    if isinstance(error, ScriptFailed):
        return str(error)
    report = traceback.TracebackException.from_exception(error)
    ours = __file__, answering.__file__
    report.stack = traceback.StackSummary.from_list([line for line in report.stack if line.filename not in ours])
    return "it failed:\n" + "".join(report.format()).rstrip()


class _Watched:
    """A loader that records how many seconds the loop waited for its batches."""

    def __init__(self, loader: DataLoader | Sequence):
        self._loader, self.waited = loader, 0.0

    def __iter__(self) -> Iterator:
        start = perf_counter()
        for batch in self._loader:
            self.waited += perf_counter() - start
            yield batch
            start = perf_counter()
        self.waited += perf_counter() - start

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
