"""Tries settings in a loop of this process: of a function that makes the DataLoader, and one that makes the step."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from stepscope import thresholds, timing
from stepscope.base import terminal
from stepscope.observe import hooks, settings
from stepscope.observe.trial import TrialRecorder
from stepscope.trying.offered import Change, Report
from stepscope.trying.results import ROUNDS, Trials
from stepscope.trying.runs import OutOfTime, Runner, tried


def tries(
    make_loader: Callable[[], Iterable[Any]],
    make_step: Callable[[], timing.Step],
    *,
    settings: Sequence[str] | None = None,
    rounds: int = ROUNDS,
    minutes: float = 5.0,
    steps: int | None = None,
) -> Trials:
    """Try settings in a training loop, as ``stepscope try`` does in a script.

    Each run calls both functions, with one setting changed from outside, and runs the loop for some steps. All runs
    start with the same states of the random generators. Afterwards generators and PyTorch are as they were, except that
    PyTorch has forgotten the peak of a GPU's memory.

    Parameters
    ----------
    make_loader : callable
        Returns a new DataLoader.
    make_step : callable
        Returns a function that trains on a batch, with a new network and a new optimizer of `torch.optim`. It is called
        as ``step(*batch)`` if the batch is a tuple or a list, otherwise as ``step(batch)``.
    settings : sequence of str, optional
        Some of `stepscope.trying.GROUPS`; by default all that may help.
    rounds : int
        Runs of each of the settings that looked fastest in the first rounds, at most.
    minutes : float
        No run begins that is expected to end later.
    steps : int, optional
        Steps to time in each run; by default as many as take some seconds.

    Raises
    ------
    CannotTry
        If the loop as it is cannot be timed, such as one without an optimizer.
    ValueError
        If a group of settings is unknown, or if there is no round.

    Examples
    --------
    >>> print(stepscope.tries(lambda: DataLoader(images, 64), make_step))  # doctest: +SKIP
    """
    with terminal.bar("trying settings", "run") as bar, _generators() as restart:
        runner = _Loop(make_loader, make_step, restart, bar, minutes)
        return tried(runner, settings, rounds, steps, "The loop")


class _Loop(Runner):
    """Runs a loop of this process."""

    def __init__(
        self,
        make_loader: Callable[[], Iterable[Any]],
        make_step: Callable[[], timing.Step],
        restart: Callable[[], None],
        bar: Any,
        minutes: float,
    ):
        super().__init__(minutes)
        self.make_loader, self.make_step, self.restart, self.bar = make_loader, make_step, restart, bar

    def say(self, text: str) -> None:
        self.bar.set_description(text or "trying settings")

    def run(self, change: Change, steps: int | None, checks: bool = False) -> Report | str:
        reported = list[dict[str, Any]]()
        self.restart()
        gc.collect()  # the network of the run before
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
        recorder = TrialRecorder(change, steps, reported.append, stop=False, checks=checks)
        try:
            with settings.noting(change.get("loader", {}), self.place), hooks.watching(recorder):
                self._train(recorder)
            if not recorder.optimizers:
                return "no optimizer of torch.optim has changed weights"
            recorder.end()
        except (OutOfTime, KeyboardInterrupt):
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        finally:
            recorder.restore()
            self.bar.update()
        found: dict[str, Any] = reported[-1] if reported else {"problem": "it was not seen"}
        if "trial" not in found:
            return str(found["problem"]).rstrip(".")
        # On a CPU this process has more in its memory than the loop
        trial: Report = found["trial"]
        return trial | ({} if torch.cuda.is_initialized() else {"memory_bytes": None})

    def _train(self, recorder: TrialRecorder) -> None:
        """Run the loop until the recorder has seen enough, epoch after epoch."""
        loader, step = self.make_loader(), self.make_step()
        with timing.batches(loader) as batches:
            for taken, batch in enumerate(batches, 1):
                timing.call(step, batch)
                if recorder.over or (not recorder.optimizers and taken >= thresholds.LEAST_STEPS):
                    return
                if time.monotonic() > self.limit:
                    raise OutOfTime


@contextmanager
def _generators() -> Iterator[Callable[[], None]]:
    """Give a function that sets all random generators back to their states; do so at the end, too."""
    cpu, cuda = torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    python, numpy = random.getstate(), np.random.get_state()

    def restart() -> None:
        torch.set_rng_state(cpu)
        torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        np.random.set_state(numpy)

    try:
        yield restart
    finally:
        restart()
