"""Times the steps of one run of a script with changed settings, and notes what the first steps learn."""

from __future__ import annotations

import atexit
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.multiprocessing import get_context
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import IterableDataset

from stepscope import thresholds, timing
from stepscope.base import machine
from stepscope.observe import settings
from stepscope.observe.recorder import LoopEnded, Phases, StepRecord
from stepscope.observe.samples import Samples
from stepscope.observe.watched import Report, ScriptRecorder
from stepscope.timing.stopwatch import synchronize


class TrialRecorder(ScriptRecorder):
    """Times the steps of a loop with changed settings, reports their times, and ends the script if `stop`.

    What it changes in PyTorch is restored by `restore`; a script's process never calls it.

    Parameters
    ----------
    change : dict
        The changed settings; see `settings`.
    steps : int or None
        Steps to time, rounded up to whole periods of the workers; None for ``TRIAL_RUN_S`` seconds of steps, or for
        whole epochs, if epochs are short.
    report : callable
        Receives a dict with the ``"trial"``, or the ``"problem"``; see `ScriptRecorder`.
    stop : bool
        Whether to end the script afterwards.
    checks : bool
        Whether to report the samples of the first epoch instead of times; see `Samples`.
    """

    def __init__(
        self,
        change: settings.Change,
        steps: int | None,
        report: Report,
        *,
        stop: bool = True,
        checks: bool = False,
    ):
        self.samples = Samples() if checks else None
        self.change, self.steps_to_time = change, steps
        self.timed: list[StepRecord] = []
        self.losses: list[torch.Tensor] = []  # of the first backward passes
        self.optimizers: dict[int, torch.optim.Optimizer] = {}  # by `id`, in the order of their first steps
        self.kind, self.autocasts = "", False  # type of the network, and whether the script uses autocast
        self.network = settings.NetworkChange(change.get("network", {}))
        self.changes = ExitStack()
        self.changes.enter_context(settings.torch_with(change.get("torch", {})))
        super().__init__(steps or 1, Path(), report, stop=stop)
        self.changes.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._watch_backward()

    def restore(self) -> None:
        """Give back what was changed in PyTorch, and forget the loop."""
        if self.phases is not None:
            self.phases.close()  # which gives `nn.Module.__call__` back
        self.changes.close()
        self.network.restore()
        atexit.unregister(self.end)
        if not self.over:
            self._leave()

    def batch(self, iterator: Iterator[Any], get_next: Callable[[Iterator[Any]], object]) -> object:
        """Return the next batch of an epoch from `get_next`; note its samples, if they are checked."""
        loader = vars(iterator).get("_stepscope", (None,))[0]
        try:
            batch = super().batch(iterator, get_next)
        except StopIteration:
            if self.samples is not None:
                self.samples.end(loader)
            raise
        if self.samples is not None:
            self.samples.add(loader, batch)
        return batch

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer has changed the weights."""
        if self.network.scale is not None:
            self.network.scale.update()
        super().updated(optimizer)

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if id(optimizer) not in self.optimizers:
            self.optimizers[id(optimizer)] = optimizer
            self.changes.callback(settings.set_optimizer(optimizer, self.change.get("optimizer", {})))
        if self.network.scale is not None and self.network.scale.overflowed():
            optimizer.zero_grad(set_to_none=True)  # without gradients, an optimizer changes nothing

    def _watch_backward(self) -> None:
        """Keep the first losses, and scale all losses if float16 computes."""
        backward: Any = torch.Tensor.backward
        scale = self.network.scale

        def watched(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            # From the second epoch on, persistent workers leave the generator of the order in another state
            if len(self.losses) < thresholds.KEPT_LOSSES and len(self.starts) < 2 and loss.numel() == 1:
                self.losses.append(loss.detach().clone())
            if scale is None:
                backward(loss, *args, **kwargs)
            else:
                scale.backward(backward, loss, *args, **kwargs)

        torch.Tensor.backward = watched  # type: ignore[assignment, method-assign]
        self.changes.callback(setattr, torch.Tensor, "backward", backward)

    def _guarded_phases(self) -> Phases:
        with self.network.watching(), register_module_forward_pre_hook(self._note_network):
            yield  # the first step
            yield
        if self.samples is not None:
            with suppress(LoopEnded):
                while id(self.dataloader) not in self.samples.ended:
                    yield
            return self.samples.report(self.dataloader)
        warm, self.synchronizes = list[StepRecord](), True  # otherwise a step seems as short as its launches
        while len(warm) < timing.warmup_steps(self.dataloader):
            warm.append((yield))
        count, whole = self._count(statistics.median(each.duration for each in warm))
        # The last batch of an epoch may be smaller, and an evaluation may follow: PyTorch compiles again, or searches
        while whole and self._settles and not (yield).first:
            pass
        self.synchronizes = False
        synchronize(self.gpu)
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats(self.gpu)
        began, drained = time.perf_counter(), self.drained
        try:
            while len(self.timed) < count:
                self.timed.append((yield))
        except LoopEnded:
            if len(self.timed) < thresholds.LEAST_STEPS:
                raise
            whole = False
        ended = time.perf_counter()
        synchronize(self.gpu)
        left = time.perf_counter() - ended
        kept = [each for each in self.timed if whole or not each.first] or self.timed
        seconds = ended - began if whole else sum(each.duration for each in kept) + self.drained - drained
        return self._trial(kept, seconds + left, whole)

    @property
    def _settles(self) -> bool:
        """Whether the first calls with other shapes, or in another mode, take long."""
        return bool(self.change.get("network", {}).get("compile") or self.change.get("torch", {}).get("benchmark"))

    def _note_network(self, module: nn.Module, _: object) -> None:
        """Note the type of the network that is trained, and whether autocast is on while it computes."""
        self.autocasts |= settings.autocasts()
        if not self.kind and settings.trains(module):
            self.kind = type(module).__name__

    def _count(self, step_s: float) -> tuple[int, bool]:
        """Return how many steps to time, and whether these are whole epochs, of which starts and ends count too."""
        epoch, count = self.epoch_steps(), self.steps_to_time
        if count is None and self.examination.profiled.ranks > 1:
            count = thresholds.RANKS_TRIAL_STEPS  # equal on all ranks, or the job hangs
        if count is None:
            count = max(thresholds.LEAST_TRIAL_STEPS, math.ceil(thresholds.TRIAL_RUN_S / step_s))
            if epoch and epoch <= thresholds.WHOLE_EPOCHS * count:
                count = math.ceil(count / epoch) * epoch
        if epoch and count % epoch == 0:
            return count, True
        return timing.whole_periods(self.dataloader, count), False

    def _trial(self, kept: list[StepRecord], seconds: float, whole: bool) -> dict[str, Any]:
        loader = self.dataloader
        losses = [float(each) for each in self.losses]
        known = {} if loader is None else {
            "place": settings.place_of(loader), "line": settings.line_of(loader), "kind": type(loader).__name__,
            "workers": loader.num_workers, "prefetch": loader.prefetch_factor, "pinned": bool(loader.pin_memory),
            "persistent": loader.persistent_workers, "stream": isinstance(loader.dataset, IterableDataset),
            "in_order": getattr(loader, "in_order", None),
            "context": (loader.multiprocessing_context or get_context()).get_start_method(),
        }  # fmt: skip
        weights = [w for each in self.optimizers.values() for group in each.param_groups for w in group["params"]]
        capability = torch.cuda.get_device_capability(self.gpu) if torch.cuda.is_initialized() else None
        return {
            "waits": [each.wait for each in kept], "durations": [each.duration for each in kept], "seconds": seconds,
            "steps": len(self.timed), "whole_epochs": whole, "losses": losses,
            "memory_bytes": _memory(self.gpu), "loader": known,
            "optimizers": [
                {"name": type(each).__name__, "line": settings.line_of(each), "fused": settings.can_fuse(each)}
                for each in self.optimizers.values()
            ],
            "networks": self.network.changed, "network": self.kind, "autocasts": self.autocasts,
            "here": int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            "device": weights[0].device.type, "capability": capability,
            "dtype": str(weights[0].dtype).removeprefix("torch."), "images": any(w.ndim == 4 for w in weights),
            "threads": torch.get_num_threads(), "cores": machine.cores(),
            "deterministic": torch.are_deterministic_algorithms_enabled(), "anomaly": torch.is_anomaly_enabled(),
            "benchmark": torch.backends.cudnn.benchmark, "tf32": settings.uses_tf32(),
        }  # fmt: skip

    def _report_facts(self, observed: Any) -> None:
        self._report(trial=observed)
        self._leave()

    def _report_so_far(self) -> None:
        """Report nothing before the end."""

    def _too_few(self) -> str:
        return f"The script ended after {len(self.timed)} timed steps: {thresholds.LEAST_STEPS} are needed, or more."


def _memory(gpu: torch.device | None) -> int:
    """Return the bytes of a GPU's peak, or the bytes that this process and its workers use now."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated(gpu)
    total, processes = 0, [psutil.Process()]
    processes += processes[0].children(recursive=True)
    for process in processes:
        with suppress(psutil.Error):
            info = process.memory_full_info()
            total += getattr(info, "pss", info.rss)  # memory that processes share counts once
    return total
