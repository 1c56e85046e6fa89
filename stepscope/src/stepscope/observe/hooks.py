"""Lets a recorder see the training loop of a script: replaces functions of PyTorch when PyTorch is imported.

Python imports this module at the start of each process of the script: the import must be fast, without PyTorch. Workers
of a DataLoader are not watched.
"""

from __future__ import annotations

import functools
import importlib.machinery
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepscope.observe.recorder import Recorder

OPTIONS = "STEPSCOPE_RUN"  # environment variable that `launch` sets: options as JSON
_RANKS = {"rank": ("RANK", 0), "ranks": ("WORLD_SIZE", 1), "here": ("LOCAL_WORLD_SIZE", 1)}  # as torchrun sets them


def install() -> None:
    """Watch this process if it begins to train."""
    if OPTIONS not in os.environ:
        return
    wanted: dict[str, Callable[[Any], Any]] = {
        "torch.utils.data.dataloader": _patch_dataloader,
        "torch.optim.optimizer": _hook_optimizers,
    }
    if "change" in json.loads(os.environ[OPTIONS]):
        wanted["torch.utils.data.dataloader"] = _note_loaders
        wanted["torch.optim.optimizer"] = _note_optimizers
    for name in sys.modules.keys() & wanted:  # a .pth file has imported PyTorch
        wanted.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(wanted))


def install_here(recorder: Recorder) -> None:
    """Let a recorder see the loops of this process, which has imported PyTorch already."""
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    if not _recorders:
        _patch_dataloader(dataloader)
        _hook_optimizers(optimizer)
    _recorders[os.getpid()] = recorder


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Let a recorder see this process within the block; restore PyTorch's functions afterwards."""
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    loader, iterator, process = dataloader.DataLoader, dataloader._BaseDataLoaderIter, os.getpid()
    before, methods = dict(_recorders), (loader.__iter__, iterator.__next__)
    hook = None
    if loader.__iter__.__module__ != __name__:  # otherwise `stepscope run` has replaced the methods
        _patch_dataloader(dataloader)
        hook = _hook_optimizers(optimizer)
    _recorders[process] = recorder
    try:
        yield
    finally:
        loader.__iter__, iterator.__next__ = methods  # type: ignore[method-assign]
        if hook is not None:
            hook.remove()
        del _recorders[process]
        _recorders.update(before)


def give_way() -> None:
    """Let the recorder of this process stop its profiler."""
    recorder = _recorders.get(os.getpid())
    if recorder is not None:
        recorder.give_way()


def watched() -> bool:
    """Return whether this process is or was watched."""
    return os.getpid() in _recorders or OPTIONS in os.environ


class _Finder:
    """Calls a function with a module when the module is imported, before any other code uses it."""

    def __init__(self, wanted: dict[str, Callable[[Any], None]]):
        self.wanted = wanted

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's usual spec, with a loader that also calls the function; None for other modules."""
        if name not in self.wanted:
            return None
        spec, then = importlib.machinery.PathFinder.find_spec(name, path, target), self.wanted.pop(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                then(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _patch_dataloader(module: Any) -> None:
    """Let the recorder see the start of each epoch and each request for a batch."""
    begin, get_next = module.DataLoader.__iter__, module._BaseDataLoaderIter.__next__

    def __iter__(loader: Any) -> object:
        recorder = _recorder()
        return begin(loader) if recorder is None else _observed(recorder, recorder.begin, begin, loader)

    def __next__(iterator: Any) -> object:
        recorder = _recorder()
        return get_next(iterator) if recorder is None else _observed(recorder, recorder.batch, get_next, iterator)

    module.DataLoader.__iter__, module._BaseDataLoaderIter.__next__ = __iter__, __next__


def _hook_optimizers(module: Any) -> Any:
    """Let the recorder see each step of an optimizer; return a handle, by which the hook can be removed."""

    def updated(optimizer: Any, *_: object) -> None:
        recorder = _recorder()
        if recorder is not None:
            try:
                recorder.updated(optimizer)
            except BaseException as error:
                recorder.failed(error)

    return module.register_optimizer_step_post_hook(updated)


def _note_loaders(module: Any) -> None:
    """Do as `_patch_dataloader`, and prepare `settings.noting_loaders` for the first DataLoader."""
    options = json.loads(os.environ[OPTIONS])
    _patch_dataloader(module)

    def note() -> None:
        from stepscope.observe import settings

        noting = settings.noting_loaders(options["change"].get("loader", {}), options["place"])
        settings.for_ever.enter_context(noting)

    _before_the_first(module.DataLoader, note)


def _note_optimizers(module: Any) -> None:
    """Do as `_hook_optimizers`, and prepare `settings.noting_optimizers` for the first optimizer."""
    _hook_optimizers(module)

    def note() -> None:
        from stepscope.observe import settings

        settings.for_ever.enter_context(settings.noting_optimizers())

    _before_the_first(module.Optimizer, note)


def _before_the_first(kind: Any, prepare: Callable[[], None]) -> None:
    """Call a function before the first object of a class is made: PyTorch is imported completely by then."""
    init = kind.__init__

    @functools.wraps(init)
    def __init__(made: object, *args: Any, **kwargs: Any) -> None:
        kind.__init__ = init
        prepare()
        kind.__init__(made, *args, **kwargs)

    kind.__init__ = __init__


class _Call:
    """A call of PyTorch's own function by a recorder, which may fail before the call, or after it."""

    def __init__(self, function: Callable[[Any], Any]):
        self.function = function
        self.made = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, argument: Any) -> Any:
        self.made = True
        try:
            self.result = self.function(argument)
        except BaseException as error:
            self.error = error
            raise
        return self.result


def _observed(
    recorder: Recorder, event: Callable[[Any, Any], Any], function: Callable[[Any], Any], argument: Any
) -> Any:
    """Return the result of PyTorch's function, which the event of a recorder calls.

    The script gets this result, or the error of PyTorch's function, even if the recorder fails.
    """
    call = _Call(function)
    try:
        try:
            return event(argument, call)
        except BaseException as error:
            if error is call.error:
                raise
            recorder.failed(error)
        if call.error is not None:
            raise call.error
        return call.result if call.made else function(argument)
    finally:
        call.error = None  # whose traceback has this frame: a cycle, which would keep the loader


# By process id: a fork of a training process has no recorder; None where stepscope cannot observe
_recorders: dict[int, Recorder | None] = {}


def _recorder() -> Recorder | None:
    """Return the recorder of this process; None if there is none, or if its examination is over."""
    process = os.getpid()
    if process not in _recorders:
        from torch.utils.data import get_worker_info  # here: PyTorch is imported by now

        if _recorders or get_worker_info() is not None:
            return None
        _recorders[process] = _new_recorder(json.loads(os.environ[OPTIONS]))
    recorder = _recorders[process]
    return None if recorder is None or recorder.over else recorder


def _new_recorder(options: dict[str, Any]) -> Recorder | None:
    """Return a new recorder, with the options that `launch` put into the environment; None if stepscope cannot run."""
    reports = Path(options["reports"])

    def report(found: dict[str, Any]) -> None:
        from stepscope.base import staging

        staging.write(reports / f"{found['rank']}-{os.getpid()}.json", json.dumps(found))

    try:
        from stepscope.base import environment

        environment.refuse()
        if "change" in options:
            from stepscope.observe.trial import TrialRecorder

            return TrialRecorder(options["change"], options["steps"], report, checks=options["checks"])
        from stepscope.observe.watched import ScriptRecorder  # here: importing it takes seconds

        return ScriptRecorder(options["steps"], reports / "traces", report, stop=options["stop"])
    except Exception as error:  # such as a package that this environment lacks: the script must not notice
        problem = f"stepscope cannot observe this process. {type(error).__name__}: {error}"
        ranks = {name: int(os.environ.get(variable, least)) for name, (variable, least) in _RANKS.items()}
        with suppress(Exception):
            report({**ranks, "problem": problem})
        return None
