"""Facts about a loop that hold for all its steps: the machine, the DataLoader and its items, and a batch."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_iter
from torch.utils.data import DataLoader, IterableDataset

from stepscope import thresholds
from stepscope.base import machine
from stepscope.base.wording import without_paths
from stepscope.facts import Facts
from stepscope.facts.batches import Batch
from stepscope.facts.hazards import Growth
from stepscope.facts.loader import Loader, Settings
from stepscope.facts.loop import Card, GpuMemory, Machine
from stepscope.observe import batches, hazards, items
from stepscope.observe.recorder import Recorder
from stepscope.timing.stopwatch import has_gpu


def this_machine(held_share: float = 0.0, card: Card | None = None, gpu: torch.device | None = None) -> Machine:
    """Return this machine; `held_share` is the share of the time in which other processes had the cores.

    `gpu` is the GPU of the loop, the current one by default, and `card` its state while the loop trained.
    """
    device = torch.cuda.get_device_name(gpu) if torch.cuda.is_initialized() else "CPU"
    processor, versions = platform.processor(), (str(torch.__version__), platform.python_version())
    with suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(errors="replace", encoding="utf-8").splitlines()
        processor = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), processor)
    return Machine(device, processor, machine.cores(), *versions, has_gpu(), held_share, _memory(gpu), card)


def _memory(gpu: torch.device | None) -> GpuMemory | None:
    """Return the memory of a GPU; None if this process has no tensors there, or its allocator does not say."""
    if not torch.cuda.is_initialized():
        return None
    with suppress(RuntimeError, KeyError):  # another allocator, such as CUDA's own
        statistics, (free, total) = torch.cuda.memory_stats(gpu), torch.cuda.mem_get_info(gpu)
        names = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")
        if statistics[names[0]]:
            return GpuMemory(
                total,
                free + torch.cuda.memory_reserved(gpu),
                *(statistics[name] for name in names),
            )
    return None


def with_items(facts: Facts, dataloader: DataLoader[Any] | None) -> Facts:
    """Return the facts with measurements of the DataLoader's items, or with the reason why there are none."""
    if facts.loader is None or facts.loop is None or dataloader is None:
        return facts
    irregular = facts.loop.usual_wait_ms < thresholds.USUAL_WAIT * facts.loop.wait_ms
    try:
        loaded = items.load(dataloader, irregular)
    except Exception as error:  # no fault of the loop: its workers could load the items
        why = f"loading items in this process failed. {type(error).__name__}: {without_paths(str(error))}"
        return replace(facts, loader=replace(facts.loader, unknown=why))
    settings = facts.loader.settings
    if settings is not None and dataloader.batch_sampler is not None:
        settings = replace(settings, batch_size=loaded.batch)  # a DataLoader with a batch_sampler knows no batch size
    return replace(facts, loader=replace(facts.loader, settings=settings, items=loaded))


def loader_of(recorder: Recorder, growth: Growth | None, digests: list[list[int | None]]) -> Loader:
    """Return the facts about the loader of the training batches; `digests` are of batches in each warm-up."""
    loader = recorder.dataloader
    if loader is None:
        return Loader("" if recorder.source is None else type(recorder.source).__name__)
    settings = Settings(
        type(loader.dataset).__name__,
        loader.batch_size,
        loader.num_workers,
        loader.prefetch_factor,
        loader.persistent_workers,
        bool(loader.pin_memory),
    )
    return Loader(
        type(loader).__name__,
        settings,
        generators=hazards.copied_generators(loader),
        growth=growth,
        yielded=loader.num_workers if batches.equal_workers(digests, loader.num_workers) else 1,
    )


def content(batch: object) -> Batch:
    """Return the facts about a batch; the defaults if they are unknown."""
    with suppress(Exception):  # a batch may hold tensors of any kind
        return batches.padding(batch)
    return Batch()


def is_stream(loader: DataLoader[Any] | None) -> bool:
    """Return whether several workers iterate over a dataset."""
    return loader is not None and loader.num_workers > 1 and isinstance(loader.dataset, IterableDataset)


def has_more(loader: DataLoader[Any] | None) -> bool:
    """Return whether a loader has workers, and several batches in an epoch; False if its length is unknown."""
    with suppress(TypeError, NotImplementedError):
        return loader is not None and loader.num_workers > 0 and len(loader) > 1
    return False


def array_bytes(batch: object) -> int:
    """Return the size of a batch's NumPy arrays in bytes."""
    return sum(leaf.nbytes for leaf in tree_iter(batch) if isinstance(leaf, np.ndarray))
