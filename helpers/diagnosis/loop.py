"""Diagnoses a loop that is there to run: watches it, looks at its loader, and puts the findings together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.data import DataLoader

from helpers import config, traces
from helpers.diagnosis import device, items, loading, recorded, watching
from helpers.diagnosis.result import Diagnosis, conclude
from helpers.wording import counted, milliseconds, percent


def diagnose(loader: Iterable, step: Callable, steps: int) -> Diagnosis:
    """Find the bottleneck of a training loop; see `helpers.diagnosis.diagnose`."""
    watched = watching.watch(loader, step, steps)
    record = recorded.read(traces.load(watched.profile))
    unknown, sample = [], None
    try:
        sample = _items(loader, watched.usual_wait < loading.USUAL * watched.wait)
    except _CannotLook as error:
        unknown.append(str(error))
    facts = _loading(loader, watched, record, sample)
    found = [*device.findings(record), *loading.findings(facts)]
    if torch.cuda.is_available() and not record.on_device:
        unknown.append("what the GPU of this machine does: no kernel ran on it. Is the model on it?")
    timed = f"{milliseconds(watched.step)} a step (mean of {steps}), {milliseconds(watched.wait)} of it waiting"
    if facts.restart:
        timed += f"; starting workers adds {milliseconds(facts.restart)}"
    rows = [
        ("stopwatch", timed),
        *recorded.evidence(record),
        *_of_the_loader(loader, sample),
        ("profile", str(watched.profile)),
    ]
    otherwise = recorded.doubt(record) or recorded.unexplained(record)
    return conclude(facts.whole, rows, found, unknown, otherwise=otherwise)


class _CannotLook(Exception):
    """No items can be loaded here."""


def _items(loader: Iterable, irregular: bool) -> items.Items:
    if not isinstance(loader, DataLoader):
        raise _CannotLook(
            f"how the batches are made: the loader is a {type(loader).__name__}, and only of a DataLoader are the "
            "workers and the dataset known."
        )
    try:
        return items.load(loader, irregular)
    except Exception as error:  # the workers could load them, so that it is no fault of the loop
        raise _CannotLook(
            f"how long an item takes: loading some in this process failed. {type(error).__name__}: {error}"
        ) from error


def _loading(
    loader: Iterable, watched: watching.Watched, record: recorded.Recorded, sample: items.Items | None
) -> loading.Loading:
    """Put together what is known of loading."""
    workers = getattr(loader, "num_workers", 0)
    restart = 0.0
    if workers and watched.epoch and sample and not getattr(loader, "persistent_workers", False):
        restart = max(0.0, watched.start - sample.batch_ms) / watched.epoch
    wait = watched.wait
    if record.on_device:  # only what the GPU waits, too, can be gained
        wait = min(wait, record.loading * watched.step)
    usual = min(wait, watched.usual_wait)
    return loading.Loading(watched.step, wait, usual, workers, config.cores(), restart, sample)


def _of_the_loader(loader: Iterable, sample: items.Items | None) -> list[tuple[str, str]]:
    """Return the loader's settings, and how it loads, as evidence."""
    rows = []
    if isinstance(loader, DataLoader):
        names = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
        settings = ", ".join(f"{name}={getattr(loader, name)}" for name in names)
        rows.append(("DataLoader", f"{type(loader.dataset).__name__}, {settings}; {counted(config.cores(), 'core')}"))
    if sample:
        parts = sorted(sample.parts.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {percent(share)}" for name, share in parts if share >= 0.005)
        took = f"{milliseconds(sample.ms)} in one process, {milliseconds(sample.cpu_ms)} of it on a core"
        rows.append(("an item", f"{took}; {shares} (mean of {sample.count})"))
    return rows
