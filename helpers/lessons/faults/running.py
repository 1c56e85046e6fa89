"""Runs training scripts, each time in a process of its own that has ended, with all its workers, when the run has."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path

import psutil
import torch
from torch.utils.data import DataLoader

from helpers import config, timing
from helpers.lessons.faults import catalogue, child

LIMIT = 180.0  # seconds for one run: on two busy cores one of a script with six faults takes 10 s
_GRACE = 10.0  # seconds for a process to end its workers


class ScriptFailed(RuntimeError):
    """A training script raised an error, or Python cannot read it."""


class ScriptLacking(ValueError):
    """A training script has not the functions by which it is run, or does not use them."""


class ScriptNeverEnds(TimeoutError):
    """A training script does not get on with its steps."""


class ScriptDied(RuntimeError):
    """The process of a training script ended without an error."""


def compare(scripts: Mapping[str, Path]) -> timing.Comparison:
    """Time training scripts interleaved, each run in a process of its own, in front of an accelerator.

    A run is an epoch as a warm-up, and then whole epochs, about as many steps as the preset says: workers that are
    restarted cost once an epoch.

    Parameters
    ----------
    scripts : mapping of str to Path

    Raises
    ------
    ScriptFailed, ScriptLacking, ScriptNeverEnds, ScriptDied
    """
    warmup = catalogue.EPOCH_STEPS
    steps = max(config.preset().steps // warmup, 1) * warmup

    def timed(path: Path) -> timing.Timing:
        return timing.Timing(*run(child.timing, path, warmup, steps))

    runs = {name: lambda path=path: timed(path) for name, path in scripts.items()}
    return timing.interleaved(runs, config.preset().rounds)


def pipeline(path: Path) -> tuple[DataLoader, timing.Step]:
    """Return a script's loader, and its training step in front of an accelerator, to be used in this process.

    Without a GPU the model is that of `child.simulating`. What the step prints is swallowed.

    Raises
    ------
    ScriptFailed, ScriptLacking
    """
    path = Path(path).resolve()
    try:
        script = child.load(path)
        loader, (model, optimizer) = script.make_loader(), script.make_model()
    except child.Lacking as error:
        raise ScriptLacking(f"{path}: {error}") from None
    except Exception as error:
        raise ScriptFailed(f"{path} failed:\n{child.traceback_of(error, path)}") from None
    child.simulating(model)

    def step(*batch: torch.Tensor) -> object:
        with redirect_stdout(None):
            return script.train_step(model, optimizer, *batch)

    return loader, step


def run(function: Callable, path: Path, *arguments: object) -> object:
    """Return what a function of `child` returns for a script, in a process of its own.

    Raises
    ------
    ScriptFailed, ScriptLacking, ScriptNeverEnds, ScriptDied
    """
    path = Path(path).resolve()
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    method = multiprocessing.get_start_method(allow_none=True)  # of the workers; None is the default
    process = context.Process(target=child.answer, args=(theirs, method, function, path, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT):
            raise ScriptNeverEnds(
                f"{path}: expected its steps within {LIMIT:.0f} s, and stopped it then. Is there a loop without an "
                "end, or is this machine very busy?"
            )
        kind, reply = ours.recv()
        process.join(_GRACE)
    except EOFError:
        process.join(_GRACE)
        raise ScriptDied(
            f"{path}: its process ended without an error, with exit code {process.exitcode}. Something called "
            "os._exit, crashed, or used up the memory; `python` followed by its path may show more."
        ) from None
    finally:
        _end(process)
        ours.close()
    if kind == "failed":
        raise ScriptFailed(f"{path} failed:\n{reply}")
    if kind == "lacking":
        raise ScriptLacking(f"{path}: {reply}")
    return reply


def _context() -> multiprocessing.context.BaseContext:
    """Return how to start a process: on Linux from a server that has imported PyTorch, which takes seconds."""
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        context.set_forkserver_preload([child.__name__, "torchvision.transforms"])
    return context


def _end(process: multiprocessing.process.BaseProcess) -> None:
    """End a process, and what it has started, if it has not done so by itself."""
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid)
        for each in [*family.children(recursive=True), family]:
            with suppress(psutil.NoSuchProcess):
                each.kill()
    process.join()
    process.close()
