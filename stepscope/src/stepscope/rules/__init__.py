"""From facts to findings: pure functions and tables of rules.

Each rule is a row of a table; `loader`, `host`, `device`, `settings` and `job` have a table each. A rule reads a view
of the facts, which computes numbers that several rules need. All constants are in `stepscope.thresholds`.

The finding with the largest gain gives the verdict. A gain is the share of the step that the fault takes (Amdahl's
law): for a step of K ms and a share s it is s · K ms, or a speedup of 1 / (1 − s). In a timed loop it is an estimate
with a range; a trace alone gives an upper bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stepscope import thresholds
from stepscope.base.wording import percent
from stepscope.facts import Facts
from stepscope.facts.host import Host
from stepscope.facts.job import Job
from stepscope.facts.loop import Machine
from stepscope.facts.profile import Profile
from stepscope.report.findings import NOTHING, UNKNOWN, Diagnosis, Finding
from stepscope.rules import backward, batches, device, evidence, host, job, loader, loop, settings
from stepscope.rules.conclusion import conclude, together
from stepscope.rules.rule import Rule, findings

LOADING = (*loader.RULES, *loop.RULES)
ALL: tuple[Rule[Any], ...] = (
    *LOADING, *batches.RULES, *host.RULES, *backward.RULES, *settings.RULES, *device.RULES,
    *device.RULES_OF_A_GPU, *job.RULES,
)  # fmt: skip
NEEDS_THE_LOADER = (
    "why loading is slow. A trace contains neither the workers nor the dataset. `stepscope run` measures both, and so "
    "does stepscope.diagnosis.diagnose(loader, step) in a notebook or script."
)


def diagnose(facts: Facts | Job, alone: bool = True) -> Diagnosis:
    """Return the diagnosis that follows from facts, always the same for the same facts.

    `alone` is False for the facts of one of several ranks if the facts of all ranks together are known, too: a rank
    alone cannot tell an exchange of data from waiting for another rank.
    """
    if isinstance(facts, Job):
        return job.diagnose(facts)
    if alone or facts.profile is None or facts.profile.communication < thresholds.WORTH:
        return _of_a_process(facts)
    found = _of_a_process(replace(facts, profile=replace(facts.profile, communication=0.0)))
    if found.verdict != NOTHING:
        return found
    share = percent(facts.profile.communication)
    reason = f"The rank communicates for {share} of a step: see the diagnosis of all ranks together."
    return replace(found, verdict=UNKNOWN, reason=reason)


def _of_a_process(facts: Facts) -> Diagnosis:
    if facts.profile is None:
        return _of_few_steps(facts) if facts.loop else conclude(math.nan, (), (), doubt=facts.problem)
    loading = loader.view(facts, facts.profile)
    if facts.loop is None or facts.machine is None:
        diagnosis = _of_a_trace(facts, facts.profile, loading)
    else:
        diagnosis = _of_a_loop(facts, facts.profile, loading, facts.machine)
    return replace(diagnosis, shares=evidence.shares(facts.profile, facts.device, facts.host))


def _of_a_trace(facts: Facts, profile: Profile, loading: loader.Loading) -> Diagnosis:
    rows = [*evidence.rows(facts, profile, loading)]
    if doubt := evidence.doubt(profile):
        return conclude(profile.step_ms, rows, (), doubt=doubt, steps=profile.timed)
    found = [*_of_the_device(facts, profile)]
    if facts.host is not None:
        found += findings(host.RULES, host.view(facts.host, profile))
    found += findings(loader.RULES, loading)
    unknown = [NEEDS_THE_LOADER] if any(finding.verdict == "loading" for finding in found) else []
    otherwise, hidden = evidence.unexplained(profile), _hidden(profile, found)
    unknown += filter(None, [evidence.queued(profile)])
    return conclude(profile.step_ms, rows, found, unknown, hidden, otherwise, profile.timed)


def _hidden(profile: Profile, found: list[Finding]) -> str | None:
    """Return why there is no verdict if the GPU does what nobody knows for longer than any change gains, or None."""
    if not evidence.queued(profile) or any(finding.gain >= profile.queued for finding in found):
        return None
    return f"For {percent(profile.queued)} of the time it is unknown what the GPU does: see below."


def _of_few_steps(facts: Facts) -> Diagnosis:
    """Return the diagnosis of a loop that ended before its steps were profiled: it can only be about loading."""
    loading = loader.view(facts, None)
    waits = loading.loop.asynchronous  # perhaps not for the batch, but while a GPU computes
    timed = [(step.wait_ms, step.duration_ms) for step in loading.loop.steps]
    doubt = evidence.traced(loading.loop) or evidence.unseen(facts) or (facts.problem if waits else None)
    return conclude(
        loading.whole_ms, evidence.rows(facts, None, loading), findings(LOADING, loading), [facts.problem],
        doubt, facts.problem, timed, loading.loop.pauses.ms_per_step,
    )  # fmt: skip


def _of_a_loop(facts: Facts, profile: Profile, loading: loader.Loading, machine: Machine) -> Diagnosis:
    rows = [*evidence.rows(facts, profile, loading)]
    found, loading_alone = _of_the_step(facts, profile, loading)
    doubt = profile.lost_kernels or _hidden(profile, found)
    unknown = [*_unknown(facts, profile, machine), *filter(None, [facts.problem, evidence.queued(profile)])]
    if machine.held_share >= thresholds.BUSY and not profile.on_device:
        shortest = loading.wait_ms + loading.loop.least_ms
        fastest = loader.with_times(loading, shortest, loading.wait_ms, loading.usual_wait_ms)
        held = percent(machine.held_share)
        busy = f"Other processes used the cores for {held} of the time. Diagnose again on an idle machine."
        if _same_first(found, _of_the_step(facts, profile, fastest)[0]):
            unknown.append(f"how exact the gains are. {busy}")
        else:
            doubt = busy
    doubt = evidence.traced(loading.loop) or evidence.unseen(facts) or doubt
    unexplained = loader.doubt(loading_alone)
    if found and unexplained:
        unknown.append(unexplained)
    otherwise = evidence.doubt(profile) or evidence.unexplained(profile) or evidence.long_steps(loading) or unexplained
    otherwise = otherwise or evidence.compiled_again(facts) or evidence.recomputed(facts) or evidence.evaluated(facts)
    otherwise = otherwise or evidence.few_threads(facts, loading) or facts.problem or None
    timed = [(step.wait_ms, step.duration_ms) for step in loading.loop.steps]
    diagnosis = conclude(
        loading.whole_ms, rows, found, unknown, doubt, otherwise, timed, loading.loop.pauses.ms_per_step
    )
    if diagnosis.verdict == NOTHING:
        reason = diagnosis.reason
        if not profile.on_device:
            reason += f" {_not_tried(facts)}"
        if loading.loop.pauses.ms_per_step >= thresholds.WORTH * loading.whole_ms:
            reason += (
                f" Work between epochs takes {percent(loading.loop.pauses.ms_per_step / loading.whole_ms)} of the time."
            )
        diagnosis = replace(diagnosis, reason=reason)
    return diagnosis


def _same_first(found: list[Finding], other: list[Finding]) -> bool:
    """Return whether the first finding is the same, and surely worth a change, in two diagnoses."""
    firsts = [finding for each in (found, other) for finding in conclude(0, (), each).findings[:1]]
    surely = all((each.range[0] if each.range else each.gain) >= thresholds.WORTH for each in firsts)
    return len(firsts) == 2 and firsts[0].key == firsts[1].key and surely


def _not_tried(facts: Facts) -> str:
    """Return which changes were not tried, as a sentence."""
    names = ["bfloat16", "channels_last"]
    if not facts.trials.threads:  # `stepscope run` tries nothing
        names += ["another number of threads", "a larger batch"]
        names += ["algorithms that are not deterministic"] * facts.modes.deterministic
    return f"{', '.join(names[:-1])} and {names[-1]} were not tried."


def _of_the_step(facts: Facts, profile: Profile, loading: loader.Loading) -> tuple[list[Finding], loader.Loading]:
    """Return the findings of a loop, and the view of its loading without waits that workers cannot shorten."""
    work, whole = loading.work_ms, loading.whole_ms
    part = loading.step_ms / whole  # shares of the trace refer to a step without the work between epochs
    if facts.device is not None:
        profile, of_gpu = device.without_profiler(profile, facts.device, loading.step_ms)
        facts = replace(facts, device=of_gpu)
    found = [replace(each, gain=each.gain * part) for each in _of_the_device(facts, profile)]
    found = [each for each in found if each.verdict != UNKNOWN]  # the steps were timed without profiler overhead
    computing = profile.shares["Kernel"] * part if profile.on_device else work / whole
    if facts.host is not None:
        wait = loading.wait_ms / whole
        host_work = host.view(facts.host, profile, work / whole, whole, facts.optimizer, wait)
        found += findings(host.RULES, host_work, estimated=True)
        computing -= host_work.updates + host_work.optimizer + host_work.outside.about
        around = host_work.around.most * whole
        usual = max(0.0, loading.usual_wait_ms - around)
        loading = loader.with_times(loading, loading.step_ms, loading.wait_ms - around, usual)
    found += findings(LOADING, loading, estimated=loading.loaded)
    yielded = facts.loader.yielded if facts.loader else 1
    content = batches.Content(facts.batch, max(0.0, computing), yielded)
    found += findings(batches.RULES, content, estimated=True)
    known = facts.host or Host()
    kernels = profile.shares["Kernel"] * part if profile.on_device else None
    tried = settings.Tried(facts.trials, facts.modes, known, facts.optimizer, work / whole, kernels)
    found += findings(settings.RULES, tried, estimated=True)
    passes = backward.Passes(known, facts.gradients, facts.optimizer, work / whole, kernels)
    found += findings(backward.RULES, passes, estimated=True)
    return [loader.then_limited(each, loading) for each in together(found, loading.wait_ms / whole)], loading


def _of_the_device(facts: Facts, profile: Profile) -> Iterator[Finding]:
    """Yield the findings about the accelerator, and about the time between it and the host."""
    yield from findings(device.RULES, device.Recorded(profile))
    if facts.device is not None:
        known = facts.host or Host()
        view = device.Accelerated(profile, facts.device, facts.optimizer, known, facts.loader)
        yield from findings(device.RULES_OF_A_GPU, view)


def _unknown(facts: Facts, profile: Profile, machine: Machine) -> Iterator[str]:
    """Yield sentences on the parts that could not be examined."""
    if machine.card is not None:
        yield from evidence.slowed(machine.card)
    known = facts.loader
    if known is None or known.settings is None:
        kind = f"the loader is a {known.kind}" if known and known.kind else "there is no loader"
        yield f"how batches are made: {kind}, and only a DataLoader gives access to its workers and dataset."
    elif known.unknown:
        yield f"how long an item takes: {known.unknown}"
    if machine.cuda and not profile.on_device and facts.optimizer.device != "cuda":
        yield "the use of this machine's GPU: no kernel ran on the GPU. Is the model on the GPU?"


def page() -> str:
    """Return all rules as a table in Markdown: key, name, when the rule applies, and the change."""
    rows = []
    for rule in ALL:
        changes = "<br>".join(f"`{line}`" for line in rule.remedy.replace("|", "\\|").split("\n"))
        rows.append(f"| `{rule.key}` | {rule.name} | {rule.means} | {changes} |")
    return "\n".join(["| key | finding | when | change |", "|---|---|---|---|", *rows, ""])
