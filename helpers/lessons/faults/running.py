"""Runs training scripts, each time in a process of its own that has ended, with all its workers, when the run has."""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
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


@dataclass(frozen=True, kw_only=True)
class Run(timing.Timing):
    """A script that has run: how long it took by this process's clock, and what it has done.

    `waits` are what the script's process says, by its own clock; all other times are when its messages arrived here.

    Attributes
    ----------
    losses : tuple of float
        Nats, of each step from the first on, the warm-up included.
    printed : str
        What its ``main`` has printed.
    weights, checkpoint : dict of str to float
        `child.norms` of the model's weights as the last step had ended, and of those that were then in the file
        ``checkpoint.pt`` beside the script; empty if there was none that can be read.
    """

    losses: tuple[float, ...]
    printed: str
    weights: Mapping[str, float]
    checkpoint: Mapping[str, float]


def compare(scripts: Mapping[str, Path], seed: int = 0) -> timing.Comparison:
    """Time training scripts interleaved, each run in a process of its own, in front of an accelerator.

    A run is an epoch as a warm-up, and then whole epochs, about as many steps as the preset says: workers that are
    restarted cost once an epoch.

    Parameters
    ----------
    scripts : mapping of str to Path
    seed : int
        As in `run`.

    Returns
    -------
    timing.Comparison
        Its timings are `Run`.

    Raises
    ------
    ScriptFailed, ScriptLacking, ScriptNeverEnds, ScriptDied
    """
    warmup = catalogue.EPOCH_STEPS
    steps = max(config.preset().steps // warmup, 1) * warmup
    runs = {
        name: lambda path=path: run(path, steps, warmup, seed=seed, simulated=True) for name, path in scripts.items()
    }
    return timing.interleaved(runs, config.preset().rounds)


def pipeline(path: Path) -> tuple[DataLoader, timing.Step]:
    """Return a script's loader, and its training step in front of an accelerator, to be used in this process.

    Without a GPU the model is that of `child.simulating`, with one thread during a step. What the step prints is
    swallowed.

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
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with redirect_stdout(None):
                return script.train_step(model, optimizer, *batch)
        finally:
            torch.set_num_threads(threads)  # what this process does besides keeps its own

    return loader, step


def run(path: Path, steps: int, warmup: int = 0, seed: int = 0, simulated: bool = False) -> Run:
    """Run a training script in a process of its own, and time it from here: its clock is not asked.

    Parameters
    ----------
    path : Path
    steps, warmup : int
        Steps of its ``main`` that are timed, and those before them.
    seed : int
        Of the factor that all weights are multiplied by at first, as in `child.run`.
    simulated : bool
        Whether the model, if there is no GPU, is that of `child.simulating`, and not the script's own.

    Raises
    ------
    ScriptFailed, ScriptLacking, ScriptNeverEnds, ScriptDied
    """
    path = Path(path).resolve()
    context = _context()
    ours, theirs = context.Pipe(duplex=False)
    method = multiprocessing.get_start_method(allow_none=True)  # of the workers; None is the default
    process = context.Process(target=child.answer, args=(theirs, method, path, warmup, steps, seed, simulated))
    process.start()
    theirs.close()
    try:
        *taken, (_, kind, reply) = _messages(ours, path)
        checkpoint = _read(path.with_name("checkpoint.pt"))  # now: what a thread still writes comes too late
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
    (losses, printed, weights), (moments, _, batches) = reply, zip(*taken, strict=True)
    durations = tuple(after - before for before, after in itertools.pairwise(moments))
    images, waits = sum(images for images, _ in batches[:-1]), tuple(waited for _, waited in batches[1:])
    return Run(
        images,
        moments[-1] - moments[0],
        waits,
        durations,
        moments[0],
        losses=losses,
        printed=printed,
        weights=weights,
        checkpoint=checkpoint,
    )


def _messages(ours: Connection, path: Path) -> Iterator[tuple[float, str, object]]:
    """Yield each message of a script's process with the time at which it arrived; the last is no ``"step"``."""
    kind, end = "step", time.perf_counter() + LIMIT
    while kind == "step":
        if not ours.poll(max(end - time.perf_counter(), 0)):
            raise ScriptNeverEnds(
                f"{path}: expected its steps within {LIMIT:.0f} s, and stopped it then. Is there a loop without an "
                "end, or is this machine very busy?"
            )
        moment, (kind, content) = time.perf_counter(), ours.recv()
        yield moment, kind, content


def _read(checkpoint: Path) -> dict[str, float]:
    try:
        return child.norms(torch.load(checkpoint, map_location="cpu", weights_only=True))
    except Exception:  # torch.load raises what it likes, and anything may be in the file
        return {}


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
