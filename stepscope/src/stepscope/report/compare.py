"""Two runs of a training script compared: ``stepscope compare BEFORE AFTER``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.base import confidence
from stepscope.base.confidence import Interval
from stepscope.base.wording import counted, milliseconds, printable
from stepscope.report.documents import WANTED, ResultError, read
from stepscope.report.findings import UNKNOWN, Diagnosis, Finding
from stepscope.thresholds import WORTH

LEAST = 1e-6  # ms of a step: no clock measures a shorter time
# The fewest means into which many steps are divided: 10 to 30 are enough, and longer batches depend less on each other
# (Schmeiser, Batch size effects in the analysis of simulation output, Operations Research 30, 1982).
BATCHES = 10


@dataclass(frozen=True)
class Side:
    """The results of one run, or of several repeated runs, before or after a change."""

    diagnosis: Diagnosis  #: Of the first run; with several ranks, of the slowest rank, for which the job waits
    found: dict[str, str]  #: Keys and names of the findings worth a change, in any rank of any run
    #: Values to average, in ms: the means of several runs, or of successive groups of steps of one run, see
    #: `batch_means`; with work between epochs.
    values: tuple[float, ...]
    group: int  #: The number of steps in each value of one run; 0 if `values` are means of runs
    workers: int | None  #: Of the loader of the first run, the most of any rank; None if unknown
    machines: frozenset[str]  #: The known machines of the runs
    doubts: frozenset[str]  #: Reasons why runs have no verdict, such as a busy machine

    @classmethod
    def read(cls, path: Path) -> Side:
        """Read a file of results, or a folder of such files; raises ResultError and OSError."""
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise ResultError(
                f"{path}: expected a file of results, or a folder of such files, found no *.json. {WANTED}"
            )
        slowest, workers, found, machines = list[Diagnosis](), list[int | None](), dict[str, str](), set[str]()
        for file in files:
            results = _timed(file)
            slowest.append(max((each["diagnosis"] for each in results), key=_mean))
            workers.append(max((each["workers"] for each in results if "workers" in each), default=None))
            findings: list[Finding] = [each for result in results for each in result["diagnosis"].findings]
            found |= {each.key: each.name for each in findings if each.gain >= WORTH}
            machines |= {each["machine"] for each in results if "machine" in each}
        values, group = [*map(_mean, slowest)], 0
        if len(slowest) == 1:
            values, group = batch_means(_values(slowest[0]), max(1, workers[0] or 0))
        doubts = frozenset(each.reason for each in slowest if each.verdict == UNKNOWN)
        return cls(slowest[0], found, tuple(values), group, workers[0], frozenset(machines), doubts)

    def __str__(self) -> str:
        of = counted(len(self.values) * self.group, "step") if self.group else counted(len(self.values), "run")
        if self.group > 1 and len(self.values) > 1:
            of += f" in groups of {self.group}"
        first = next((each for each in self.diagnosis.findings if each.gain >= WORTH), None)
        found = f"; first to change: {first.name}{f', {first.line}' if first.line else ''}" if first else ""
        mean = milliseconds(statistics.fmean(self.values))
        return f"{mean} a step (mean of {of}); {self.diagnosis.verdict}{found}"


@dataclass(frozen=True)
class Comparison:
    """The steps before and after a change."""

    before: Side
    after: Side

    @property
    def change(self) -> Interval:
        """Relative change of the mean step: 0.1 is 10% longer, −0.5 half as long.

        The 95% interval is Welch's interval for a difference of means, without ends if a side has one value only. With
        one run each, it contains only the scatter within the run. Two runs on a shared machine may differ by more, as
        the means of several runs show.
        """
        mean = statistics.fmean(self.before.values)
        change = confidence.change(self.before.values, self.after.values)
        return Interval(change.mean / mean, max(-1.0, change.lowest / mean), change.highest / mean, change.count)

    def slower_than(self, share: float) -> bool:
        """Return whether steps surely take longer by more than this share: the whole interval lies above the share."""
        return self.change.lowest > share

    def __str__(self) -> str:
        change = self.change
        sure = "longer" if change.lowest > 0 else "shorter" if change.highest < 0 else "no sure difference"
        ends = f"{change.lowest:+.1%} to {change.highest:+.1%} with 95% confidence"
        if change.count < 2:
            ends = "no interval, since a run has fewer than two periods of its workers: time more steps, or more runs"
        lines = [
            f"before  {self.before}",
            f"after   {self.after}",
            f"change  {change.mean:+.1%} of the time of a step: {sure} ({ends})",
            *(f"gone    {name}" for name in _only_in(self.before.found, self.after.found)),
            *(f"new     {name}" for name in _only_in(self.after.found, self.before.found)),
        ]
        single = [each for each in (self.before, self.after) if each.group]
        if single:
            lines.append("One run: the interval does not include differences between runs. Give folders of runs.")
        if any(each.workers is None for each in single):
            lines.append("The number of workers is unknown: if the waits have a period, the interval is wrong.")
        lines += [f"A run without a verdict: {why}" for why in sorted(self.before.doubts | self.after.doubts)]
        if len(machines := sorted(self.before.machines | self.after.machines)) > 1:
            lines.append(f"Different machines: {'; '.join(machines)}.")
        return "\n".join(map(printable, lines))


def compare(before: str | Path, after: str | Path) -> Comparison:
    """Compare the results before a change with the results after it.

    Parameters
    ----------
    before, after : str or Path
        A file that ``stepscope run --json FILE`` wrote, or a folder of such files from repeated runs.

    Raises
    ------
    ResultError
        If a file holds no results, or no steps.
    OSError
        If a file cannot be read.
    """
    return Comparison(Side.read(Path(before)), Side.read(Path(after)))


def _timed(file: Path) -> list[dict[str, Any]]:
    """Return the results of one run that have timed steps, one result for each rank."""
    results = read(file)
    if sum("trace" in each for each in results) > 1:
        raise ResultError(f"{file}: expected one trace, found {len(results)}. Diagnose the folder of one run.")
    timed = [each for each in results if "diagnosis" in each and each["diagnosis"].steps]
    timed = [each for each in timed if _mean(each["diagnosis"]) >= LEAST]
    if not timed:
        why = next((each["problem"] for each in results if "problem" in each), WANTED)
        raise ResultError(f"{file}: expected timed steps, found none. {why}")
    return timed


def batch_means(steps: Sequence[float], period: int) -> tuple[list[float], int]:
    """Return means of successive steps that depend on each other little, and the number of steps in each mean.

    Steps of one run are not independent: workers deliver in turn, so durations repeat with a `period` of as many steps,
    and a slow moment of the machine slows several steps. So each mean takes the same number of whole periods, as many
    as leave `BATCHES` means or more; the last steps that make no whole mean are dropped. Dependence over longer times
    than a mean's remains. Without a whole period, the only value is the mean of all steps.
    """
    group = period * max(1, len(steps) // period // BATCHES)
    begins = range(0, len(steps) - group + 1, group)
    if not begins:
        return [statistics.fmean(steps)], len(steps)
    return [statistics.fmean(steps[begin : begin + group]) for begin in begins], group


def _only_in(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the names of findings whose keys are in `first`, but not in `second`."""
    return sorted(first[key] for key in first.keys() - second.keys())


def _values(diagnosis: Diagnosis) -> list[float]:
    """Return the duration of each step in ms, with its part of the work between epochs."""
    return [step + diagnosis.apart_ms for _, step in diagnosis.steps]


def _mean(diagnosis: Diagnosis) -> float:
    return statistics.fmean(_values(diagnosis))
