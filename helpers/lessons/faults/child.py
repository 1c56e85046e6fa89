"""What runs in a process of its own: a training script, for some steps, which are reported to the parent."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from types import ModuleType

import torch
from torch import nn

from helpers import config, simulate  # no more: each takes its time

FUNCTIONS = ("make_loader", "make_model", "train_step", "main")
_synchronize = torch.cuda.synchronize
_FOR_EVER = 10**9  # epochs: whoever asks for steps ends the script when they are done


class Lacking(Exception):
    """The script is not built as it has to be; the message says what is missing."""


class _Enough(BaseException):  # not an Exception, which a script may catch
    """All steps that were asked for are done."""


def answer(connection: Connection, start_method: str | None, path: Path, *arguments: object) -> None:
    """Run a script as `run` does, which sends its steps, and send what comes of it: its kind, and the result or a text.

    What is needed to send is looked up before the script runs, as is the clock: it may put others in their places.
    """
    # A process's workers are started as it was itself: those of a script started by hand are not
    multiprocessing.set_start_method(start_method, force=True)
    silence, send = os.open(os.devnull, os.O_WRONLY), connection.send
    for stream in (1, 2):  # what the script prints would end up between the lines of the notebook
        os.dup2(silence, stream)
    try:
        reply = "result", run(send, path, *arguments)
    except Lacking as error:
        reply = "lacking", str(error)
    except BaseException as error:  # also SystemExit: whatever ends the script is the reader's to see
        reply = "failed", traceback_of(error, path)
    send(reply)


def run(
    send: Callable, path: Path, warmup: int, steps: int, seed: int, simulated: bool
) -> tuple[tuple[float, ...], str, dict[str, float]]:
    """Run `warmup` + `steps` steps of a script's ``main``; the parent, who has the clock, hears of each as it begins.

    Sent are ``("step", (images, waited))`` for each step after the warm-up, and for the one after the last, which does
    not take place: the images in its batch, and the seconds that were waited since the step before. All that ``main``
    does between two steps is in between. Before the last of these messages the losses have been read: they are there.

    Parameters
    ----------
    send : callable
        Takes a message.
    path : Path
    warmup, steps : int
    seed : int
        Of the factor, 0.9 to 1, that all weights are multiplied by at first: so the losses cannot be known before.
    simulated : bool
        Whether the model, if there is no GPU, is that of `simulating`.

    Returns
    -------
    tuple
        The losses of all steps in nats, what ``main`` has printed, and the `norms` of the model's weights at the end.
    """
    chance, printed = random.Random(seed), io.StringIO()
    torch.set_num_threads(1)  # on two busy cores a step of the script's network takes half as long as with two
    script = load(path)
    make_loader, make_model, train_step = script.make_loader, script.make_model, script.train_step
    taken, losses, weights, loaders, called = 0, [], {}, [], []

    def watched_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor):
        nonlocal taken, losses, weights
        ended = taken == warmup + steps
        if ended:
            losses = [float(loss) for loss in losses]
        if (ended or taken == warmup) and torch.cuda.is_available():
            _synchronize()
        if taken >= warmup:
            send(("step", (len(images), sum(loader.take() for loader in loaders))))
        if ended:
            weights = norms(dict(model.named_parameters()))
            raise _Enough
        taken += 1
        result = train_step(model, optimizer, images, labels)
        loss = result[0] if isinstance(result, tuple) else result
        losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)  # read later: no GPU waits
        return result

    def watched_loader() -> Watched:
        loaders.append(Watched(make_loader()))
        return loaders[-1]

    def watched_model() -> tuple[nn.Module, torch.optim.Optimizer]:
        model, optimizer = make_model()
        model.register_forward_pre_hook(lambda *_: called.append(True))
        with torch.no_grad():
            factor = chance.uniform(0.9, 1)  # from 1.2 on rounding grows five times as fast
            for parameter in model.parameters():
                parameter.mul_(factor)
        return (simulating(model, seed) if simulated else model), optimizer

    script.make_loader, script.make_model, script.train_step = watched_loader, watched_model, watched_step
    with suppress(_Enough), redirect_stdout(printed):
        script.main(_FOR_EVER)
    if taken < warmup + steps:
        raise Lacking(
            f"main ended after {taken} calls of train_step, and {warmup + steps} were expected: main(epochs) has to "
            "train as many epochs as its argument says, and to call train_step for each batch."
        )
    if not loaders or not called:
        raise Lacking("main no longer uses make_loader() and make_model(), whose results are watched here.")
    return tuple(losses), printed.getvalue(), weights


def norms(weights: Mapping[str, object]) -> dict[str, float]:
    """Return the Euclidean norm of each tensor: short, and another one after each step.

    The names are those of a model that is not compiled: `torch.compile` puts ``_orig_mod.`` before them.
    """
    tensors = {name: each.detach().cpu().double() for name, each in weights.items() if isinstance(each, torch.Tensor)}
    return {name.removeprefix("_orig_mod."): float(each.norm()) for name, each in tensors.items()}


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


def simulating(model: nn.Module, seed: int = 0) -> nn.Module:
    """Let a model on the CPU stand for one on an accelerator: the host calls every operator, then waits.

    The operators compute one image only, drawn for each batch by `seed`, as calling them takes the host some time in
    front of a GPU, too. The others take `simulate.SimulatedAccelerator`'s time and no CPU time. Let PyTorch have one
    thread meanwhile, as calling operators is the work of one. The model is changed; one on a GPU stays as it is.
    """
    if config.device().type == "cuda":
        return model
    forward, accelerator, chance = model.forward, simulate.SimulatedAccelerator(), random.Random(seed)

    def simulated(images: torch.Tensor) -> torch.Tensor:
        drawn = chance.randrange(len(images))
        logits = forward(images[drawn : drawn + 1])
        begin = perf_counter()
        accelerator(images, logits)
        if perf_counter() - begin < accelerator.step_ms / 1e3:
            raise Lacking(
                "its steps no longer wait for the simulated accelerator, or the clock that it waits by is off."
            )
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
        start = perf_counter()
        for batch in self._loader:
            self._waited += perf_counter() - start
            yield batch
            start = perf_counter()
        self._waited += perf_counter() - start

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)
