"""What the runs of a script show: which settings gain, which ones learn something else, and what to write."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stepscope import thresholds
from stepscope.base import terminal
from stepscope.base.confidence import Interval
from stepscope.base.wording import counted
from stepscope.timing.comparison import FASTER, Comparison, conclusion, outcome, with_limits
from stepscope.timing.stopwatch import Timing
from stepscope.trying.offered import Change, Report, joined, lines

_GO_ALONG = {"persistent_workers"}  # arguments that go along with others
AS_IT_IS = "as it is"
VERSION = 1  # of the file of results
SCHEMA = Path(__file__).with_name("tried.schema.json")
TOGETHER = "together"
ROUNDS = 12  # of the last comparison, at most: a machine that computes at two speeds needs as many for a gain of 1.2
FINALISTS = 4  # the script as it is, the two settings that looked fastest, and the settings that gain together


@dataclass(frozen=True)
class Tried:
    """A setting that was tried: what each run reported, and why the setting is not recommended, if it is not."""

    name: str
    change: Change
    runs: tuple[Report, ...] = ()
    problem: str = ""

    @property
    def learns(self) -> str:
        """The first losses beside those of the script as it is, in words; "" if that is unknown."""
        return str(self.runs[-1].get("learns", "")) if self.runs else ""


def judged(setting: Tried, base: Tried, control: Sequence[Report]) -> Tried:
    """Return a setting with the reason why it is not recommended, if its runs show one.

    `control` are more runs of the script as it is: how its losses differ by themselves must be known in the first
    round.
    """
    if setting.problem or not setting.runs or not base.runs:
        return setting
    if setting.change.get("network") and not setting.runs[0]["networks"]:
        return replace(setting, problem="could not be applied: no network with weights was called")
    if any(not _applied(setting.change, run) for run in setting.runs):
        return replace(setting, problem="could not be applied: the training DataLoader was made otherwise, or before")
    alike, words = _learned([*control, *base.runs], setting.runs)
    setting = replace(setting, runs=(*setting.runs[:-1], setting.runs[-1] | {"learns": words}))
    if not alike:
        return replace(setting, problem=f"learns something else: {words}")
    pairs = zip(base.runs, setting.runs, strict=False)
    best = max(_timing(mine).images_per_second / _timing(its).images_per_second for its, mine in pairs)
    if len(setting.runs) > 1 and best < thresholds.CLEARLY_SLOWER:  # one run may meet a busy moment
        return replace(setting, problem=f"slower, {best:.2f}× at best in {len(setting.runs)} rounds")
    return setting


def other_samples(usual: Report | str, its: Report | str) -> str:
    """Return why an iterable dataset does not yield the same samples with other workers; "" if it does."""
    if isinstance(usual, str) or isinstance(its, str):
        return f"its samples could not be compared: {usual if isinstance(usual, str) else its}"
    if usual["digest"] is None or its["digest"] is None:
        return f"its samples were not compared: an epoch has more than {thresholds.CHECKED_SAMPLES:,}"
    if usual["digest"] == its["digest"]:
        return ""
    if usual["samples"] == its["samples"]:
        return "other samples in an epoch, perhaps by random transforms, which cannot be compared"
    return (
        f"{its['samples']:,} samples in an epoch in place of {usual['samples']:,}: each worker must yield its own part"
    )


def compared(base: Tried, settings: Sequence[Tried]) -> Comparison:
    """Return the timings of settings in the rounds that all of them have, the script as it is first."""
    rounds = min(len(each.runs) for each in (base, *settings))
    return Comparison({each.name: tuple(map(_timing, each.runs[:rounds])) for each in (base, *settings)})


def faster(base: Tried, settings: Sequence[Tried]) -> list[Tried]:
    """Return the settings that are surely faster than the script as it is, the fastest first.

    Of numbers of workers that are about as fast, the smallest comes first.
    """
    usable = [each for each in settings if not each.problem and each.runs]
    if not usable:
        return []
    comparison = compared(base, usable)
    gains = {each.name: comparison.ratio(each.name) for each in usable}
    return _ordered([each for each in usable if outcome(gains[each.name]) == FASTER], gains)


def promising(base: Tried, settings: Sequence[Tried]) -> list[Tried]:
    """Return the settings to compare once more: the two that look fastest, and what may gain together, joined."""
    usable = [each for each in settings if not each.problem and each.runs]
    if not usable:
        return []
    comparison = compared(base, usable)
    gains = {each.name: comparison.ratio(each.name) for each in usable}
    best = _ordered([each for each in usable if gains[each.name].mean > thresholds.NEAR_BEST], gains)
    joint = without_conflicts(best)
    together = [Tried(TOGETHER, joined([each.change for each in joint]))] if len(joint) > 1 else []
    return [*best[: FINALISTS - 2], *together]


def narrow(base: Tried, settings: Sequence[Tried]) -> bool:
    """Return whether more rounds would tell little more: the ends of each setting's interval are close."""
    usable = [each for each in settings if not each.problem]
    comparison = compared(base, usable)
    ratios = [comparison.ratio(each.name) for each in usable]
    return all(each.highest < thresholds.NARROW * each.lowest for each in ratios)


def _ordered(settings: Sequence[Tried], gains: Mapping[str, Interval]) -> list[Tried]:
    """Return settings, the fastest first; of about as fast ones that with fewer changes, or workers."""
    found = sorted(settings, key=lambda each: -gains[each.name].mean)

    def simplest_first(some: Sequence[Tried], cost: Callable[[Tried], int]) -> None:
        if some:
            least = gains[some[0].name].mean / thresholds.NEAR_BEST
            simplest = min((each for each in some if gains[each.name].mean > least), key=cost)
            found.insert(found.index(some[0]), found.pop(found.index(simplest)))

    workers = [each for each in found if "num_workers" in each.change.get("loader", {})]
    simplest_first(workers, lambda each: int(each.change["loader"]["num_workers"]))
    simplest_first(tuple(found), lambda each: sum(len(values.keys() - _GO_ALONG) for values in each.change.values()))
    return found


def without_conflicts(best: Sequence[Tried]) -> list[Tried]:
    """Return settings that can be joined: of several that change the same, such as precision, the first one."""
    kept, taken = list[Tried](), set[str]()
    for each in best:
        names = set().union(*each.change.values()) - _GO_ALONG
        if not names & taken:
            kept.append(each)
            taken |= names
    return kept


@dataclass(frozen=True)
class Trials:
    """The runs of a script as it is, `base`, and with each setting; then those of the last, deciding rounds."""

    base: Tried
    settings: tuple[Tried, ...]
    rounds: int
    last: tuple[Tried, ...] = ()  # the script as it is, and the settings that looked fastest; empty if none did
    left_out: str = ""  # which settings were not tried, and why, in a sentence

    @property
    def recommended(self) -> Tried | None:
        """The change to make: one setting, or several together; None if nothing is surely faster."""
        base, *settings = self.last or (self.base, *self.settings)
        return next(iter(faster(base, settings)), None)

    def __str__(self) -> str:
        return self.text()

    def text(self, colours: bool = False) -> str:
        """Return the results as text; on a terminal with `colours` for the ratios that are surely above 1."""
        steps = counted(self.base.runs[0]["steps"], "step")
        text = [f"As it is: {_ms(self.base):.3g} ms a step. Each run timed {steps}."]
        first = _table(self.base, self.settings, colours) if self.rounds else []
        if first:
            text += [f"\nSettings, in {counted(self.rounds, 'round')}:\n", *first]
        if self.last:
            rounds = counted(len(self.last[0].runs), "new round")
            text += [f"\nThe fastest ones again, in {rounds}, which decide:\n"]
            text += _table(self.last[0], self.last[1:], colours)
        elif first and self.rounds < thresholds.LEAST_ROUNDS:
            more = "Give more --minutes, or fewer --settings."
            text.append(f"\nOnly {counted(self.rounds, 'round')} fitted into the time, too few to be sure. {more}")
        if self.left_out:
            text.append(f"\n{self.left_out}")
        if refused := [each for each in (*self.settings, *self.last) if each.problem]:
            text += ["\nNot recommended:\n", *(f"  {each.name}: {each.problem}" for each in refused)]
        return "\n".join([*text, "", *self._advice()])

    def _advice(self) -> list[str]:
        best = self.recommended
        if best is None:
            return ["Nothing to change: no setting is surely faster."]
        gain = with_limits(self._ratios()[best.name])
        return [f"Write ({best.name}: {gain}):", "", *(f"  {line}" for line in lines(best.change, self.base.runs[0]))]

    def _ratios(self) -> dict[str, Interval]:
        """Return the ratios to the script as it is; those of the last rounds, where there are any."""
        found = dict[str, Interval]()
        for base, *settings in filter(None, ((self.base, *self.settings), self.last)):
            usable = [each for each in settings if not each.problem and each.runs]
            if usable and base.runs:
                comparison = compared(base, usable)
                found |= {each.name: comparison.ratio(each.name) for each in usable}
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the results as plain values, as `SCHEMA` describes them."""
        ratios = {name: _plain(ratio) for name, ratio in (self._ratios() if self.rounds else {}).items()}
        best, seen = self.recommended, self.base.runs[0]
        return {
            "version": VERSION,
            "command": "try",
            "rounds": self.rounds,
            "steps": seen["steps"],
            "step_ms": _ms(self.base),
            "settings": [
                {
                    "name": each.name,
                    "change": each.change,
                    "problem": each.problem or None,
                    "ratio": ratios.get(each.name),
                    "memory_bytes": _bytes(each),
                    "learns": each.learns or None,
                }
                for each in self.settings
            ],
            "together": ratios.get(TOGETHER),
            "recommended": None if best is None else {"change": best.change, "lines": lines(best.change, seen)},
        }


def _table(base: Tried, settings: Sequence[Tried], colours: bool) -> list[str]:
    """Return a line for each setting without a problem, the fastest first."""
    usable = [each for each in settings if not each.problem and each.runs]
    if not usable:
        return []
    comparison, text = compared(base, usable), list[str]()
    widest = max(len(each.name) for each in usable)
    for each in sorted(usable, key=lambda each: -comparison.ratio(each.name).mean):
        ratio = comparison.ratio(each.name)
        told, gain = conclusion(ratio).partition(" (")[0], with_limits(ratio)
        if colours and outcome(ratio) == FASTER:
            gain = f"{terminal.GREEN}{gain}{terminal.PLAIN}"
        text.append(f"  {each.name:{widest}}  {gain}  {told}; {_memory(each, base)}{each.learns}")
    return text


def _learned(base: Sequence[Report], runs: Sequence[Report]) -> tuple[bool, str]:
    """Return whether a setting learns as the script as it is does, by the first losses, and the same in words."""
    if not base[0]["losses"]:
        return True, "no loss was seen"
    own = max((_distance(one, other) for one, other in itertools.combinations(base, 2)), default=0.0)
    apart = max(_distance(base[0], run) for run in runs)
    if not math.isfinite(apart):
        return False, "losses are not finite"
    if not apart:
        return True, "the same losses"
    mean = statistics.fmean(map(abs, base[0]["losses"]))
    alike = apart <= max(thresholds.OTHER_LOSSES * own, thresholds.OTHER_LOSS * mean)
    control = (
        f"by up to {_share(own, mean)} between runs of the script as it is" if own else "not between runs as it is"
    )
    return alike, f"losses differ by {_share(apart, mean)} on average, {control}"


def _share(apart: float, mean: float) -> str:
    """Return a distance as a share of the mean loss, or as it is if that is 0."""
    return f"{100 * apart / mean:.2g}%" if mean else f"{apart:.2g}"


def _applied(change: Change, run: Report) -> bool:
    """Return whether the DataLoader of a run has the changed arguments."""
    names = {
        "num_workers": "workers", "prefetch_factor": "prefetch", "pin_memory": "pinned", "in_order": "in_order",
        "persistent_workers": "persistent", "multiprocessing_context": "context",
    }  # fmt: skip
    asked = {names[name]: value for name, value in change.get("loader", {}).items() if name in names}
    return all(run["loader"].get(name) == value for name, value in asked.items())


def _distance(one: Report, other: Report) -> float:
    pairs = [*zip(one["losses"], other["losses"], strict=False)]
    return statistics.fmean(abs(mine - its) for mine, its in pairs) if pairs else 0.0


def _timing(run: Report) -> Timing:
    return Timing(len(run["durations"]), run["seconds"], tuple(run["waits"]), tuple(run["durations"]))


def _plain(ratio: Interval) -> dict[str, Any]:
    return {name: value if math.isfinite(value) else None for name, value in asdict(ratio).items()}


def _ms(setting: Tried) -> float:
    return statistics.fmean(run["seconds"] / len(run["durations"]) for run in setting.runs) * 1e3


def _memory(setting: Tried, base: Tried) -> str:
    its, more = (_bytes(each) for each in (base, setting))
    return "" if its is None or more is None else f"{more / 1e9:.2f} GB ({(more - its) / 1e9:+.2f}); "


def _bytes(setting: Tried) -> float | None:
    """Return the highest number of bytes in a setting's runs; None if it is unknown."""
    return max((run["memory_bytes"] for run in setting.runs if run["memory_bytes"] is not None), default=None)
