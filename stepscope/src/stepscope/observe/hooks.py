"""Lets a recorder see the training loop of a script: replaces functions of PyTorch when PyTorch is imported.

Python imports this module at the start of each process of the script: the import must be fast, without PyTorch. Workers
of a DataLoader are not watched.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

    from stepscope.observe.recorder import Recorder

OPTIONS = "STEPSCOPE_RUN"  # environment variable that `launch` sets: options as JSON
_RANKS = {"rank": ("RANK", 0), "ranks": ("WORLD_SIZE", 1), "here": ("LOCAL_WORLD_SIZE", 1)}  # as torchrun sets them


def install() -> None:
    """Watch this process if it begins to train."""
    if OPTIONS not in os.environ:
        return
    if "torch" in sys.modules:  # a .pth file has imported PyTorch
        _watch_script()
    else:
        sys.meta_path.insert(0, _Finder())


def install_here(recorder: Recorder) -> None:
    """Let a recorder see the loops of this process, which has imported PyTorch already."""
    if not _recorders:
        _watch()
    _recorders[os.getpid()] = recorder


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Let a recorder see this process within the block; restore PyTorch's functions afterwards."""
    from torch.utils.data import dataloader

    loader, iterator, process = dataloader.DataLoader, dataloader._BaseDataLoaderIter, os.getpid()
    before, methods = dict(_recorders), (loader.__iter__, iterator.__next__)
    replaced = loader.__iter__.__module__ == __name__  # by `stepscope run`
    hook = None if replaced else _watch()
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
    """Calls `_watch_script` when PyTorch has been imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return PyTorch's usual spec, with a loader that also calls the function; None for other modules."""
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                with suppress(Exception):  # such as a package that this environment lacks: the script must not notice
                    _watch_script()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _watch_script() -> None:
    """Watch this process of a script, and change its settings if `launch` says so."""
    _watch()
    options = json.loads(os.environ[OPTIONS])
    if "change" in options:
        from stepscope.observe import settings

        noting = settings.noting(options["change"].get("loader", {}), options["place"])
        settings.for_ever.enter_context(noting)


def _watch() -> Any:
    """Let the recorder of this process see epochs, batches and updates; return a handle of the hook for updates."""
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    loader: Any = dataloader.DataLoader
    epoch: Any = dataloader._BaseDataLoaderIter
    begin, get_next = loader.__iter__, epoch.__next__

    def __iter__(loader: Any) -> Any:
        recorder = _recorder()
        return begin(loader) if recorder is None else _observed(recorder, recorder.begin, begin, loader)

    def __next__(iterator: Any) -> Any:
        recorder = _recorder()
        return get_next(iterator) if recorder is None else _observed(recorder, recorder.batch, get_next, iterator)

    def updated(optimizer: Any, *_: object) -> None:
        recorder = _recorder()
        if recorder is not None:
            try:
                recorder.updated(optimizer)
            except BaseException as error:
                recorder.failed(error)

    loader.__iter__, epoch.__next__ = __iter__, __next__
    return optimizer.register_optimizer_step_post_hook(updated)


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
