"""Diagnoses a loop that is there to run: watches it, looks at its loader, and puts the findings together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch.utils.data import DataLoader

from helpers import config, traces
from helpers.diagnosis import calls, device, items, loading, recorded, steps, watching
from helpers.diagnosis.result import Diagnosis, Finding, conclude
from helpers.wording import counted, milliseconds, percent


def diagnose(loader: Iterable, step: Callable, count: int) -> Diagnosis:
    """Find the bottleneck of a training loop of which `count` steps are timed; see `helpers.diagnosis.diagnose`."""
    watched = watching.watch(loader, step, count)
    record = recorded.read(traces.load(watched.profile))
    unknown, sample = [], None
    try:
        sample = _items(loader, watched.usual_wait < loading.USUAL * (watched.wait - watched.held))
    except _CannotLook as error:
        unknown.append(str(error))
    facts = _loading(loader, watched, record, sample)
    found = [*device.findings(record), *_of_the_step(loader, step, facts, record), *loading.findings(facts)]
    if torch.cuda.is_available() and not record.on_device:
        unknown.append("what the GPU of this machine does: no kernel ran on it. Is the model on it?")
    which = f"mean of {count} without each epoch's first"
    timed = f"{milliseconds(watched.step)} a step ({which}), {milliseconds(watched.wait)} of it waiting"
    if watched.held >= loading.WORTH * watched.step:
        timed += f", of that {milliseconds(watched.held)} while others had the cores"
    if facts.restart:
        timed += f"; ending and starting workers adds {milliseconds(facts.restart)}"
    if milliseconds(facts.whole) != milliseconds(watched.step):
        timed += f"; gains are of a step of {milliseconds(facts.whole)}"
    rows = [
        ("stopwatch", timed),
        *recorded.evidence(record),
        *_of_the_loader(loader, sample),
        ("profile", str(watched.profile)),
    ]
    unexplained = loading.doubt(facts)
    if found and unexplained:
        unknown.append(unexplained)
    otherwise = recorded.doubt(record) or recorded.unexplained(record) or unexplained
    return conclude(facts.whole, rows, found, unknown, otherwise=otherwise)


def _of_the_step(loader: Iterable, step: Callable, facts: loading.Loading, record: recorded.Recorded) -> list[Finding]:
    """Return what the step does beside its operators, and which of them it calls very often; if so, sample it."""
    often = list(calls.findings(record))
    work = facts.work / facts.whole
    if facts.work < steps.LEAST_MS or (record.shares["Other"] < steps.SHARE and not often):
        return [finding for finding, _ in often]
    operators = sum(int(span.events["operator"].sum()) for span in record.trace.spans) / record.steps
    sampled = watching.sample(loader, step, steps.most(operators))
    names = frozenset().union(*(names for _, names in often))
    found = list(steps.findings(sampled, names, work, record.host if record.on_device else 1.0))
    for finding, names in often:
        line = sampled.line_of(names)
        evidence = f"{finding.evidence} Mostly at {line}" if line else finding.evidence
        found.append(replace(finding, gain=min(finding.gain, work), evidence=evidence))
    return found


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
    step, wait = watched.step - watched.held, watched.wait - watched.held
    usual = watched.usual_wait
    if not workers and sample and usual < loading.USUAL * wait:  # once in a while, for what the items do not take
        longer = max(0.0, wait - max(usual, sample.batch_ms))
        step, wait = step - longer, wait - longer
    if record.on_device:  # only what the GPU waits, too, can be gained
        wait = min(wait, record.loading * watched.step)
        usual = min(wait, usual)
    cores = config.cores()
    return loading.Loading(step, wait, usual, workers, cores, restart, sample, watched.transfer, watched.queued)


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
