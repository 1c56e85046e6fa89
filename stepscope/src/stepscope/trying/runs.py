"""Starts a script again and again, as it is and with changed settings, and stops each run after some steps."""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from stepscope import thresholds
from stepscope.base import terminal
from stepscope.observe import launch
from stepscope.timing.comparison import shuffled
from stepscope.trying import results
from stepscope.trying.offered import GROUPS, Change, Report, candidates, left_out
from stepscope.trying.results import AS_IT_IS, FINALISTS, Trials, Tried

NOT_COPIED = (".git", ".venv", "__pycache__")


class CannotTry(RuntimeError):
    """The script as it is cannot be timed. The message says why."""


class OutOfTime(Exception):
    """A run would end after the limit."""


def run(
    command: Sequence[str],
    *,
    wanted: Sequence[str] | None = None,
    rounds: int = results.ROUNDS,
    minutes: float = 15.0,
    in_copy: bool | None = None,
    steps: int | None = None,
) -> Trials:
    """Try settings in a script, in interleaved rounds of one run each.

    Parameters
    ----------
    command : sequence of str
        A Python file or ``-m`` and a module, with arguments; or a program that starts a Python file.
    wanted : sequence of str, optional
        Some of `GROUPS`; see `candidates` for the default.
    rounds : int
        Runs of each of the settings that looked fastest in the first rounds, at most.
    minutes : float
        No run begins that is expected to end later, and none continues.
    in_copy : bool, optional
        Whether to run in a copy of the current folder; by default, if the folder has at most ``COPIED_BYTES``.
    steps : int, optional
        Steps to time in each run; by default as many as take ``TRIAL_RUN_S`` seconds.

    Raises
    ------
    FileNotFoundError
        If the program does not exist.
    CannotTry
        If the script as it is cannot be timed within the limit.
    """
    first = Path(command[0])  # by its path below this folder: a copy has another place
    inside = first.is_absolute() and first.is_relative_to(Path.cwd())
    program = launch.program_of([str(first.relative_to(Path.cwd())) if inside else command[0], *command[1:]])
    with folder_for_runs(in_copy) as folder:
        where = "here: it writes its files each time" if folder == Path.cwd() else "in a copy of this folder"
        print(f"stepscope starts the script again and again, {where}.", file=sys.stderr)
        hint = "" if folder == Path.cwd() else " It ran in a copy of this folder; with --no-in-copy it runs here."
        return tried(_Script(program, folder, minutes), wanted, rounds, steps, "The script", hint)


def tried(
    runner: Runner, wanted: Sequence[str] | None, rounds: int, steps: int | None, what: str, hint: str = ""
) -> Trials:
    """Try settings with a runner; see `run`.

    Raises CannotTry, with a `hint`, if `what` as it is cannot be timed, and ValueError for unknown groups, or no round.
    """
    if unknown := [name for name in wanted or () if name not in GROUPS]:
        raise ValueError(f"Expected settings among {', '.join(GROUPS)}; found {', '.join(unknown)}.")
    if rounds < 1:
        raise ValueError(f"Expected one round or more, found {rounds=}.")
    try:
        seen = runner.run({}, steps)
    except OutOfTime:
        seen = f"it takes more than {runner.minutes:g} minutes"
    if isinstance(seen, str):
        raise CannotTry(f"{what} as it is could not be timed: {seen}.{hint}")
    runner.control.append(seen)
    runner.steps, runner.place = seen["steps"], seen["loader"].get("place", "")
    base = Tried(AS_IT_IS, {})
    settings = [Tried(name, change) for name, change in candidates(seen, wanted).items()]
    if seen["loader"].get("stream"):  # each worker may yield all samples
        settings = runner.checked(settings)
    halfway = (time.monotonic() + runner.limit) / 2
    first = min(rounds, thresholds.LEAST_ROUNDS)
    (base, *settings), done = runner.rounds([base, *settings], first, until=halfway, later=rounds)
    if not done:
        return Trials(Tried(AS_IT_IS, {}, (seen,)), tuple(settings), 0)
    trials = Trials(base, tuple(settings), done, left_out=left_out(seen)[1] if wanted is None else "")
    best = results.promising(base, settings)
    if not best or rounds < thresholds.LEAST_ROUNDS:
        return trials
    # The fastest of many was partly lucky: new rounds decide, and of few settings, whose intervals are narrower
    last, done = runner.rounds([replace(each, runs=()) for each in (base, *best)], rounds, enough=results.narrow)
    return replace(trials, last=tuple(last)) if done > 1 else trials


class Runner(ABC):
    """Runs a training loop with changed settings, in interleaved rounds, for some minutes."""

    def __init__(self, minutes: float):
        self.minutes, self.limit = minutes, time.monotonic() + 60 * minutes
        self.steps: int | None = None
        self.place = ""  # of the training DataLoader: see `settings.place_of`
        self.control: list[Report] = []  # the first run of the loop as it is
        self.took: dict[str, float] = {}  # seconds of the longest run, by the name of the setting

    @abstractmethod
    def run(self, change: Change, steps: int | None, checks: bool = False) -> Report | str:
        """Run the loop with a change; return what its slowest rank reports, or why there is no report.

        With `checks` the report is about the samples of an epoch; see `observe.samples`.
        """

    def checked(self, settings: Sequence[Tried]) -> list[Tried]:
        """Return settings; other numbers of workers have a problem unless an epoch has the same samples with them."""
        if not any("num_workers" in each.change.get("loader", {}) for each in settings):
            return list(settings)
        found, usual = list[Tried](), self._samples({})
        unknown = results.other_samples(usual, usual)  # an epoch that cannot be compared with itself
        for each in settings:
            problem = ""
            if "num_workers" in each.change.get("loader", {}):
                problem = unknown or results.other_samples(usual, self._samples(each.change))
            found.append(replace(each, problem=problem))
        return found

    def _samples(self, change: Change) -> Report | str:
        try:
            return self.run(change, None, checks=True)
        except OutOfTime:
            return "an epoch takes too long"

    @abstractmethod
    def say(self, text: str) -> None:
        """Show a line of progress; "" ends it."""

    def rounds(
        self,
        settings: Sequence[Tried],
        rounds: int,
        *,
        until: float = math.inf,
        later: int = 0,
        enough: Callable[[Tried, Sequence[Tried]], bool] = lambda base, others: False,
    ) -> tuple[list[Tried], int]:
        """Run the loop in interleaved rounds; return the settings with their runs, and the number of whole rounds.

        The first setting is the loop as it is. A setting with a problem takes part in no further round.

        Parameters
        ----------
        settings : sequence of Tried
            The settings, without runs.
        rounds : int
            The number of rounds, at most.
        until : float
            No round but the first begins that is expected to end later, by ``time.monotonic()``.
        later : int
            Rounds of a few settings that will follow, for the time that is left.
        enough : callable
            Receives the settings after every second round, in which their order is balanced; returns whether to stop.
        """
        kept, done = list(settings), 0
        for number, order in enumerate(shuffled([each.name for each in settings], rounds)):
            left = [each for name in order for each in kept if each.name == name and not each.problem]
            if len(left) < 2 or (number and time.monotonic() + self._seconds(left) > until):
                break
            if number and number % 2 == 0 and enough(kept[0], kept[1:]):
                break
            found = dict[str, Tried]()
            try:
                for each in left:
                    seconds = self._seconds(left) * (rounds - number + later * min(1.0, FINALISTS / len(left)))
                    minutes = math.ceil(min(seconds, self.limit - time.monotonic()) / 60)
                    self.say(f"round {number + 1} of {rounds}, {each.name}: at most {max(1, minutes)} min left")
                    found[each.name] = self._run_once(each)
            except OutOfTime:
                break
            base = found[settings[0].name]
            if base.problem:  # what is known so far holds
                print(f"As it is, the loop could be timed at first, and then not: {base.problem}.", file=sys.stderr)
                break
            others = [results.judged(found.get(each.name, each), base, self.control) for each in kept[1:]]
            kept = [base, *others]
            done += 1
        self.say("")
        return kept, done

    def _run_once(self, setting: Tried) -> Tried:
        usual = statistics.median(self.took.values()) if self.took else 0.0
        begin, expected = time.monotonic(), self.took.get(setting.name, usual)
        if begin + expected > self.limit:
            raise OutOfTime
        found = self.run(setting.change, self.steps)
        self.took[setting.name] = max(self.took.get(setting.name, 0.0), time.monotonic() - begin)
        if isinstance(found, str):
            return replace(setting, problem=f"fails: {found}")
        return replace(setting, runs=(*setting.runs, found))

    def _seconds(self, settings: Sequence[Tried]) -> float:
        """Return the expected seconds of a round."""
        usual = statistics.median(self.took.values()) if self.took else math.inf
        return sum(self.took.get(each.name, usual) for each in settings)


class _Script(Runner):
    """Starts a script with changed settings, and stops it after some steps."""

    def __init__(self, program: Sequence[str], folder: Path, minutes: float):
        super().__init__(minutes)
        self.program, self.folder = program, folder

    def say(self, text: str) -> None:
        terminal.progress(sys.stderr, text)

    def run(self, change: Change, steps: int | None, checks: bool = False) -> Report | str:
        with tempfile.TemporaryDirectory(prefix="stepscope-", ignore_cleanup_errors=True) as folder:
            output = Path(folder, "output.txt")
            options = {"change": change, "place": self.place, "steps": steps, "checks": checks}
            options |= {"reports": folder, "stop": True}
            environment, patience = launch.environment_with(options), 0.0
            with open(output, "wb") as file:
                process = subprocess.Popen(
                    self.program, env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file
                )
                try:
                    found = self._reports(process, Path(folder))
                    patience = thresholds.ENDING_S
                finally:
                    _end(process, patience)
            trials = [each["trial"] for each in found if "trial" in each]
            if trials:
                slowest: Report = max(trials, key=lambda trial: float(trial.get("seconds", 0.0)))
                return slowest
            lines = output.read_text(errors="replace", encoding="utf-8").strip().splitlines() or ["it printed nothing"]
            ended = f"status {process.returncode}, {lines[-1].rstrip('.')}"
            problem = str(found[0]["problem"]).rstrip(".") if found else ""
            return problem if problem and not process.returncode else f"{problem}. {ended}".removeprefix(". ")

    def _reports(self, process: subprocess.Popen[bytes], folder: Path) -> list[Report]:
        """Wait until all ranks of this machine have reported, or the script has ended; return the reports."""
        while True:
            ended = process.poll() is not None
            found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
            if ended or (found and len(found) >= found[0]["here"]):
                return found
            if time.monotonic() > self.limit:
                raise OutOfTime
            with suppress(subprocess.TimeoutExpired):
                process.wait(launch.LOOK)


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait for the end of a process, and end it after `patience` seconds, with all processes that it has started."""
    started = list[psutil.Process]()
    with suppress(psutil.Error):
        started = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    for each in started:
        with suppress(psutil.Error):
            each.kill()
    process.wait()


_ABOVE = 3  # folders above the current one that a script may reach by "..", such as for its data


@contextmanager
def folder_for_runs(in_copy: bool | None) -> Iterator[Path]:
    """Give a copy of the current folder, or the current folder; by default a copy if it is small enough."""
    here = Path.cwd()
    small = _bytes_below(here) <= thresholds.COPIED_BYTES if in_copy is None else in_copy
    if not small:
        yield here
        return
    with tempfile.TemporaryDirectory(prefix="stepscope-", ignore_cleanup_errors=True) as folder:
        above = [each for each in here.parents if each != each.parent][:_ABOVE]
        copy = Path(folder, *(each.name for each in reversed(above)), here.name or "copy")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(here, copy, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for link in filter(Path.is_symlink, list(copy.rglob("*"))):
            if not link.exists():  # it leads out of the folder, by a relative path
                link.unlink()
                link.symlink_to((here / link.relative_to(copy)).resolve())
        for original, place in zip(above, copy.parents, strict=False):  # ../data leads to the same files
            with suppress(OSError):  # a folder that may not be listed
                for each in original.iterdir():
                    if not os.path.lexists(place / each.name):
                        (place / each.name).symlink_to(each)
        yield copy


def _bytes_below(folder: Path) -> float:
    """Return the bytes of the files in a folder, or of the first files that exceed what is copied."""
    total = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in NOT_COPIED]
        for name in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
        if total > thresholds.COPIED_BYTES:
            break
    return total
