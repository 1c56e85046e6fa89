"""Finds work that only some steps do, such as evaluating or saving in every tenth step, and its line."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from stepscope import thresholds
from stepscope.facts.loop import LongSteps
from stepscope.observe.recorder import StepRecord
from stepscope.observe.sampler import Sample, Site, any_of, hottest

_TRAINS = r"[/\\]torch[/\\](optim[/\\]|_tensor\.py:backward$|autograd[/\\]__init__\.py:(backward|grad)$)"
_Part = tuple[str, int | str]  # a line of the user's code, or a function of other code


def work(record: StepRecord) -> float:
    """Return the time of a step without its wait, and without queueing for a core, in s."""
    return max(0.0, record.duration - record.wait - record.queued_work)


def usual_works(records: Iterable[StepRecord]) -> list[float]:
    """Return the work of the steps that are not the first of an epoch, which starts workers; of all, if each is."""
    records = list(records)
    return [work(each) for each in records if not each.first] or [work(each) for each in records]


def factor(phases: Iterable[Sequence[StepRecord]]) -> float:
    """Return the factor over the median step from which a step is long; infinite if no phase has long steps.

    A phase has long steps if they take so much more than its median step that the difference is worth a finding, and
    can be sampled.
    """
    for records in filter(None, phases):
        works = usual_works(records)
        usual = statistics.median(works)
        long = [each for each in works if each > thresholds.LONGER_STEP * usual]
        worth = sum(long) - len(long) * usual >= thresholds.WORTH * sum(works)
        if usual > 0 and worth and max(long) - usual >= thresholds.LEAST_ADDITIONAL_S:
            return max(thresholds.LONGER_STEP, 1 + (max(long) / usual - 1) * thresholds.PART_OF_THE_LONGEST)
    return math.inf


def enough(records: Sequence[StepRecord], factor: float) -> bool:
    """Return whether so many steps were long that their work can be compared with the work of usual steps."""
    works = usual_works(records)
    return bool(works) and sum(each > factor * statistics.median(works) for each in works) >= thresholds.LONG_STEPS


def read(
    timed: Sequence[StepRecord],
    records: Sequence[StepRecord],
    samples: Iterable[Sample],
    factor: float,
    site: Site,
) -> LongSteps:
    """Return the facts about long steps, from steps that were only timed, and from `records`, which were sampled."""
    if not records:
        return LongSteps()
    works, median = np.array([*map(work, records)]), statistics.median(usual_works(records))
    first = np.array([each.first for each in records])
    (long,) = np.nonzero((works > factor * median) & (~first | first.all()))
    if not len(long):
        return LongSteps()
    weights = _other_work(records, samples, {*long.tolist()})
    other, sampled = np.zeros(len(works)), np.zeros(len(works))
    for step, sample, parts in weights:
        other[step] += sample.seconds if parts else 0.0
        sampled[step] += sample.seconds
    # A busy machine may hold up the sampler: then a part of a long step has no samples
    seen = np.minimum(works - median, sampled)
    distinct = long[(other[long] > 0) & (other[long] >= thresholds.OTHER_WORK * seen[long])]
    again = [step for step in distinct.tolist() if _does_again(step, weights)]
    # The machine stalled in the rest
    long = np.array(again or (distinct if len(distinct) else long))
    others = [sample for step, sample, parts in weights if parts and step in long]
    # Sampling lengthens a step, but does not double it: shorter steps among the timed ones were stalls of the machine
    timed_works = usual_works(timed) or [0.0]
    usual = statistics.median(timed_works)
    times = [each for each in timed_works if each > factor * usual and each >= works[long].min() / 2]
    if not times:
        usual, times = median, works[long].tolist()
    return LongSteps(
        len(long),
        # From the first long step to the last: whole periods
        float(long[-1] - long[0]) / (len(long) - 1) if len(long) > 1 else float(len(works)),
        usual * 1e3,
        min(times) * 1e3,
        statistics.mean(times) * 1e3,
        min(1.0, float(other[long].sum() / max(seen[long].sum(), 1e-9))),
        hottest((site.changeable(sample.path), sample.seconds) for sample in others),
        sum(sample.seconds for sample in others if any_of(_TRAINS, sample.frames))
        / (sum(sample.seconds for sample in others) or 1.0),
    )


def _other_work(
    records: Sequence[StepRecord], samples: Iterable[Sample], long: set[int]
) -> list[tuple[int, Sample, set[_Part]]]:
    """Return the samples in long steps, each with its step, and with its parts that usual steps do not do."""
    starts = [each.begin for each in records]
    in_usual, in_long = list[Sample](), list[tuple[int, Sample]]()
    for sample in samples:
        step = int(np.searchsorted(starts, sample.end, "right")) - 1  # at the end its stack was read
        if step < 0 or sample.end >= starts[step] + records[step].duration:
            continue
        if step in long:
            in_long.append((step, sample))
        else:
            in_usual.append(sample)
    usually, shares = _shares(in_usual), _shares([sample for _, sample in in_long])
    of_all = {part for part, share in shares.items() if usually[part] >= thresholds.USUAL_WORK * share}
    return [(step, sample, _parts(sample) - of_all) for step, sample in in_long]


def _does_again(step: int, weights: Iterable[tuple[int, Sample, set[_Part]]]) -> bool:
    """Return whether another long step does a part of the other work of this step: a stall may be at any line."""
    own, others = set[_Part](), set[_Part]()
    for number, _, parts in weights:
        (own if number == step else others).update(parts)
    return not own.isdisjoint(others)


def _parts(sample: Sample) -> set[_Part]:
    return {(frame.file, frame.line if frame.own else frame.name) for frame in sample.frames}


def _shares(samples: Sequence[Sample]) -> defaultdict[_Part, float]:
    """Return each part's share of the sampled time."""
    shares, total = defaultdict[_Part, float](float), sum(sample.seconds for sample in samples)
    for sample in samples:
        for part in _parts(sample):
            shares[part] += sample.seconds / total
    return shares
