"""Lets a `Watch` see the training loop of a script: replaces functions of PyTorch when it is imported.

Python imports this module at the start of each process of the script: it must be quick, and import neither PyTorch nor
much else. Workers of a DataLoader are not watched.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

OPTIONS = "STEPSCOPE_RUN"  # environment variable that `start` sets: options as JSON


def install() -> None:
    """Watch this process if it begins to train."""
    if OPTIONS not in os.environ:
        return
    wanted = {"torch.utils.data.dataloader": _loading, "torch.optim.optimizer": _updating}
    for name in sys.modules.keys() & wanted:  # a .pth file imported PyTorch
        wanted.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(wanted))


def install_here(watch: object) -> None:
    """Let a watch see the loops of this process, which has imported PyTorch already."""
    from torch.optim import optimizer
    from torch.utils.data import dataloader

    if not _watches:
        _loading(dataloader)
        _updating(optimizer)
    _watches[os.getpid()] = watch


def watched() -> bool:
    """Return whether this process is watched, or was."""
    return os.getpid() in _watches or OPTIONS in os.environ


class _Finder:
    """Calls a function with a module when the module is imported, before anything uses it."""

    def __init__(self, wanted: dict[str, Callable[[ModuleType], None]]):
        self.wanted = wanted

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's usual spec, which also calls the function; None for other modules."""
        if name not in self.wanted:
            return None
        spec, then = importlib.machinery.PathFinder.find_spec(name, path, target), self.wanted.pop(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                then(module)

            spec.loader.exec_module = exec_module
        return spec


def _loading(module: ModuleType) -> None:
    """Let the watch see the start of each epoch and each request for a batch."""
    begin, following = module.DataLoader.__iter__, module._BaseDataLoaderIter.__next__

    def __iter__(loader: object) -> object:
        watch = _watch()
        return begin(loader) if watch is None else watch.begin(loader, begin)

    def __next__(iterator: object) -> object:
        watch = _watch()
        return following(iterator) if watch is None else watch.batch(iterator, following)

    module.DataLoader.__iter__, module._BaseDataLoaderIter.__next__ = __iter__, __next__


def _updating(module: ModuleType) -> None:
    """Let the watch see each step of an optimizer."""

    def updated(optimizer: object, *_: object) -> None:
        watch = _watch()
        if watch is not None:
            watch.updated(optimizer)

    module.register_optimizer_step_post_hook(updated)


_watches: dict[int, object] = {}  # by process: forks of a training process have none


def _watch() -> object | None:
    """Return the watch of this process; None if there is none, or if it is over."""
    process = os.getpid()
    if process not in _watches:
        from torch.utils.data import get_worker_info  # here: PyTorch is imported by now

        if _watches or get_worker_info() is not None:
            return None
        from stepscope.script.watch import Watch

        _watches[process] = Watch.of_environment(os.environ[OPTIONS])
    watch = _watches[process]
    return None if watch.over else watch
