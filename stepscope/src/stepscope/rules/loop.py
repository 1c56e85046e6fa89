"""Work of the loop that is not a part of each step: between epochs, in some steps, and more from step to step."""

from __future__ import annotations

from stepscope import thresholds
from stepscope.base.wording import counted, milliseconds, percent
from stepscope.facts.loop import LongSteps, Pauses
from stepscope.rules.loader import Loading, at
from stepscope.rules.rule import Gain, Rule

PERSISTENT = "DataLoader(…, persistent_workers=True)  # also the loader for evaluation, made once"
EVALUATE_LESS = "# evaluate less often, on fewer images, or in larger batches; save in a thread"


def _of_long_steps(loading: Loading) -> Gain | float | None:
    """Return the gain without the work of long steps: if only one long step was seen, it may be the only one."""
    long = loading.loop.long
    if long.distinct:
        return long.ms_per_step / loading.whole_ms
    if not long.once:
        return None
    gain = long.ms_per_step / (loading.whole_ms + long.ms_per_step)
    return Gain(gain, 0.0, gain)


def _long_steps(long: LongSteps) -> str:
    """Return how often steps are long, and why, as sentences."""
    if long.once:
        return (
            f"One of {long.every:.0f} steps took {milliseconds(long.mean_ms)}, and the median step "
            f"{milliseconds(long.usual_ms)}. The long step did other work, such as evaluating or saving"
            f"{at(long.line)}. Does this come again?"
        )
    return (
        f"About one in {long.every:.3g} steps takes {milliseconds(long.mean_ms)}, and the median step "
        f"{milliseconds(long.usual_ms)}. The long steps do other work, such as evaluating or saving"
        f"{at(long.line)}: {milliseconds(long.ms_per_step)} a step on average."
    )


def _of_workers(pauses: Pauses) -> str:
    """Return which part of the pauses workers take to start and end, as a sentence; "" for a small part."""
    if pauses.of_workers < thresholds.SLOW_STARTS:
        return ""
    return (
        f" The start and end of workers, as those of a loader for evaluation, take {percent(pauses.of_workers)} of it."
    )


RULES: tuple[Rule[Loading], ...] = (
    Rule(
        "loop.work-between-epochs", "work between the epochs", "host", "work between the operators",
        "The script does other work after each epoch, such as evaluating or saving, for a large part of the time.",
        lambda loading: loading.loop.pauses.ms_per_step / loading.whole_ms,
        lambda loading: (
            f"After an epoch of {counted(loading.loop.epoch_steps or 0, 'step')} the script does other work, such as "
            f"evaluating or saving, for {milliseconds(loading.loop.pauses.mean_ms)} "
            f"(mean of {counted(loading.loop.pauses.count, 'pause')})"
            f"{at(loading.loop.pauses.line)}: {milliseconds(loading.loop.pauses.ms_per_step)} a step on average."
            + _of_workers(loading.loop.pauses)
        ),
        lambda loading: (
            PERSISTENT if loading.loop.pauses.of_workers >= thresholds.SLOW_STARTS else EVALUATE_LESS
        ),
        example=f"{EVALUATE_LESS}\n{PERSISTENT}",
        least=thresholds.BETWEEN_EPOCHS,
        line=lambda loading: loading.loop.pauses.line,
    ),
    Rule(
        "loop.work-in-some-steps", "work in every n-th step", "host", "work between the operators",
        "Some steps do work that most steps do not do, such as evaluating or saving, for a large part of the time.",
        _of_long_steps,
        lambda loading: _long_steps(loading.loop.long),
        "# do this work less often, for fewer batches, or in a thread",
        line=lambda loading: loading.loop.long.line,
    ),
    Rule(
        "loop.growing-steps", "steps that take longer and longer", "host", "work between the operators",
        "Each step takes longer than the step before it, such as by hooks or data that gather from step to step.",
        lambda loading: (
            min(loading.loop.trend.longer_ms * loading.loop.trend.steps, loading.work_ms) / loading.whole_ms or None
        ),
        lambda loading: (
            f"Each step takes {milliseconds(loading.loop.trend.longer_ms)} longer than the step before it"
            f"{at(loading.loop.trend.line)}. The gain is for the steps so far, and grows with each step."
        ),
        "# hooks, callbacks, graphs and data that gather from step to step: register once, remove or detach",
        line=lambda loading: loading.loop.trend.line,
    ),
)  # fmt: skip
