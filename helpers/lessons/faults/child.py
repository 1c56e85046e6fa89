"""What runs in a process of its own: a training script, for some steps, by the stopwatch or for its losses."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from helpers import config, simulate  # no more: each takes its time

FUNCTIONS = ("make_loader", "make_model", "train_step", "main")
_FOR_EVER = 10**9  # epochs: whoever asks for steps ends the script when they are done


class Lacking(Exception):
    """The script is not built as it has to be; the message says what is missing."""


class _Enough(BaseException):  # not an Exception, which a script may catch
    """All steps that were asked for are done."""


def answer(
    connection: Connection, start_method: str | None, function: Callable, path: Path, *arguments: object
) -> None:
    """Call `function` with a script and `arguments`, and send what comes of it: its kind, and the result or a text."""
    # A process's workers are started as it was itself: those of a script started by hand are not
    multiprocessing.set_start_method(start_method, force=True)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what the script prints would end up between the lines of the notebook
        os.dup2(silence, stream)
    try:
        reply = "result", function(path, *arguments)
    except Lacking as error:
        reply = "lacking", str(error)
    except BaseException as error:  # also SystemExit: whatever ends the script is the reader's to see
        reply = "failed", traceback_of(error, path)
    connection.send(reply)


def timing(path: Path, warmup: int, steps: int) -> tuple[int, float, tuple[float, ...], tuple[float, ...]]:
    """Time `steps` steps of a script's ``main`` after `warmup` others, in front of an accelerator.

    All that ``main`` does between two steps counts. Without a GPU the model is that of `simulating`.

    Returns
    -------
    tuple
        What `timing.Timing` is made of: the images, all seconds, and for each step its waiting and its duration.
    """
    script = load(path)
    make_loader, make_model, train_step = script.make_loader, script.make_model, script.train_step
    starts, sizes, waits, loaders, called = [], [], [], [], []

    def watched_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor):
        if len(starts) in (warmup, warmup + steps) and torch.cuda.is_available():
            torch.cuda.synchronize()
        starts.append(time.perf_counter())
        sizes.append(len(images))
        waits.append(sum(loader.take() for loader in loaders))
        if len(starts) > warmup + steps:
            raise _Enough
        return train_step(model, optimizer, images, labels)

    def watched_loader() -> Watched:
        loaders.append(Watched(make_loader()))
        return loaders[-1]

    def watched_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = make_model()
        model.register_forward_pre_hook(lambda *_: called.append(True))
        return simulating(model), optimizer

    script.make_loader, script.make_model, script.train_step = watched_loader, watched_model, watched_step
    _run(script, warmup + steps + 1, starts)
    if not loaders or not called:
        raise Lacking("main no longer uses make_loader() and make_model(), whose results are watched here.")
    ends = starts[warmup + 1 :]
    durations = tuple(end - start for start, end in zip(starts[warmup:], ends, strict=False))
    timed = slice(warmup, warmup + steps)
    return sum(sizes[timed]), ends[-1] - starts[warmup], tuple(waits[warmup + 1 :]), durations


def losses(path: Path, steps: int) -> tuple[float, ...]:
    """Return the losses in nats of the first `steps` steps of a script's ``main``, with its own model."""
    script, found = load(path), []
    train_step = script.train_step

    def watched_step(*arguments: object, **settings: object) -> object:
        result = train_step(*arguments, **settings)
        found.append(float(result[0] if isinstance(result, tuple) else result))
        if len(found) == steps:
            raise _Enough
        return result

    script.train_step = watched_step
    _run(script, steps, found)
    return tuple(found)


def load(path: Path) -> ModuleType:
    """Import a script as it is now, in such a way that workers can import it too.

    Raises
    ------
    Lacking
        If one of `FUNCTIONS` is not there.
    Exception
        Whatever the script raises, or SyntaxError.
    """
    # Not by import, which takes a script that was changed twice within a second for the one it has compiled
    script = sys.modules[path.stem] = ModuleType(path.stem)
    script.__file__ = str(path)
    if sys.path[0] != str(path.parent):
        sys.path.insert(0, str(path.parent))  # where a spawned worker finds it
    exec(compile(path.read_bytes(), path, "exec"), script.__dict__)
    missing = [name for name in FUNCTIONS if not callable(getattr(script, name, None))]
    if missing:
        raise Lacking(f"it has no function {' and no function '.join(missing)}.")
    return script


def simulating(model: nn.Module) -> nn.Module:
    """Let a model on the CPU stand for one on an accelerator: the host calls every operator, then waits.

    The operators compute the first image only, as calling them takes the host some time in front of a GPU, too. The
    others take `simulate.SimulatedAccelerator`'s time and no CPU time. PyTorch is set to one thread, as calling
    operators is the work of one. The model is changed; one on a GPU stays as it is.
    """
    if config.device().type == "cuda":
        return model
    forward, accelerator = model.forward, simulate.SimulatedAccelerator()
    torch.set_num_threads(1)

    def simulated(images: torch.Tensor) -> torch.Tensor:
        logits = forward(images[:1])
        accelerator(images, logits)
        return logits.expand(len(images), -1)

    model.forward = simulated
    return model


def traceback_of(error: BaseException, path: Path) -> str:
    """Return the traceback from the script's first line on, without the lines of this module."""
    frame = error.__traceback__
    while frame and Path(frame.tb_frame.f_code.co_filename) != path:
        frame = frame.tb_next
    report = traceback.TracebackException(type(error), error, frame)
    report.stack = traceback.StackSummary.from_list([line for line in report.stack if line.filename != __file__])
    return "".join(report.format()).rstrip()


class Watched:
    """A loader that is timed while it is waited for.

    Parameters
    ----------
    loader : iterable
    """

    def __init__(self, loader: object):
        self._loader, self._waited = loader, 0.0

    def take(self) -> float:
        """Return the seconds waited since this was asked last."""
        waited, self._waited = self._waited, 0.0
        return waited

    def __iter__(self) -> Iterator:
        start = time.perf_counter()
        for batch in self._loader:
            self._waited += time.perf_counter() - start
            yield batch
            start = time.perf_counter()
        self._waited += time.perf_counter() - start

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _run(script: ModuleType, steps: int, done: list) -> None:
    with suppress(_Enough):
        script.main(_FOR_EVER)
    if len(done) < steps:
        raise Lacking(
            f"main ended after {len(done)} calls of train_step, and {steps} were expected: main(epochs) has to train "
            "as many epochs as its argument says, and to call train_step for each batch."
        )
