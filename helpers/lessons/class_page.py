"""A page with the results of a whole class, from the readers' scoreboards: one file, which needs no network.

Machines differ, so what is compared are ratios, each to its reader's own baseline.
"""

from __future__ import annotations

import datetime
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import pandas as pd

from helpers import config, figures
from helpers.results import scoreboard
from stepscope.base import staging
from stepscope.base.wording import counted, digits, printable
from stepscope.timing.comparison import FASTER, NOISY, SAME, SLOWER, outcome

FILE = "scoreboard.jsonl"
TEMPLATE = Path(__file__).with_name("class_page.html")
APART = 1.5  # two readers disagree if even the nearer ends of their intervals are so many times apart
Class = Mapping[str, Sequence[scoreboard.Result]]


def write(folder: Path, out: Path, *, anonymous: bool = False) -> list[str]:
    """Write the page of a class.

    Parameters
    ----------
    folder : Path
        Holds a folder for each reader or group, named after them, with their ``scoreboard.jsonl`` at any depth.
    out : Path
        The page; one that is there is replaced.
    anonymous : bool
        Call the readers by numbers, in an order that is drawn anew each time.

    Returns
    -------
    list of str
        What was left out, and why: a line a file or a line of it that holds no result.

    Raises
    ------
    config.CourseError
    """
    paths = _paths(Path(folder))
    shown = {name: name for name in paths}
    if anonymous:
        shuffled = random.SystemRandom().sample(list(paths), len(paths))
        shown = {name: f"reader {number}" for number, name in enumerate(shuffled, 1)}
    readers, refused, refused_here = {}, [], []
    for name, title in shown.items():
        readers[title], errors = _read(paths[name])
        refused += [printable(error) for error in errors]
        if anonymous:  # what stands in a foreign line may be a name
            errors = [f"{title}: {counted(len(errors), 'line')} without a result"] if errors else []
        refused_here += [error.replace(str(paths[name]), f"{title}, {FILE}") for error in errors]
    staging.write(out, _page(readers, refused_here))
    return refused


def _paths(folder: Path) -> dict[str, Path]:
    """Return each scoreboard by its reader's name: its folder in `folder`, with those below if it has two."""
    found = sorted(path for path in folder.rglob(FILE) if not staging.is_staging(path))
    if not found:
        what = "a folder without any" if folder.is_dir() else "no such folder"
        raise config.CourseError(
            f"{folder}: expected a folder for each reader with a {FILE} in it, and found {what}. Collect the files "
            "from everybody's COURSE_RUNS, each into a folder named after its reader."
        )
    parts = [path.parent.relative_to(folder).parts or (folder.resolve().name,) for path in found]
    firsts = [each[0] for each in parts]
    return {
        each[0] if firsts.count(each[0]) == 1 else "/".join(each): path for each, path in zip(parts, found, strict=True)
    }


def _read(path: Path) -> tuple[list[scoreboard.Result], list[str]]:
    """Return the latest result of each rung, in order, and an error for each line that holds none."""
    if path.is_symlink() or not path.is_file():  # a pipe has no end, and a link may lead to what nobody should see
        return [], [f"{path}: expected a scoreboard, found a link, or no regular file"]
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        return [], [f"{path}: expected a scoreboard, found a file that cannot be read: {error}"]
    latest, errors = {}, []
    for number, line in enumerate(lines, 1):
        try:
            result = scoreboard.parse(line, f"{path}, line {number}")
            latest[result.rung] = result
        except scoreboard.DamagedScoreboard as error:
            errors.append(str(error))
    return [latest[rung] for rung in sorted(latest)], errors


def _page(readers: Class, refused: list[str]) -> str:
    table = _ratios(readers)
    rungs = sorted({result.rung for results in readers.values() for result in results})
    rates = {name: {each.rung: f"{each.rate.mean:,.0f}" for each in own} for name, own in readers.items()}
    machines = {name: {} for name in readers}  # of each reader, with the images that were trained on there
    for name, result in ((name, result) for name, own in readers.items() for result in own):
        machines[name].setdefault((_machine(result), result.torch, result.preset), {})[result.data] = None
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        date=datetime.date.today().isoformat(),
        readers=readers,
        rungs=rungs,
        rates=rates,
        figure=figures.ratios(table)._repr_html_() if len(table) else "",
        outcomes=(FASTER, SLOWER, SAME, NOISY),
        counts=[_counts(rung, own) for rung, own in table.groupby("rung", sort=False)],
        questions=[question for rung, own in table.groupby("rung", sort=False) for question in _questions(rung, own)],
        machines=machines,
        refused=refused,
    )


def _ratios(readers: Class) -> pd.DataFrame:
    """Return a row for each result with a ratio, in the order of the rungs."""
    rows = [
        {
            "rung": f"{result.rung} to {scoreboard.against(result)}",
            "reader": name,
            "machine": _machine(result),
            "ratio": result.ratio.mean,
            "lowest": result.ratio.lowest,
            "highest": result.ratio.highest,
            "outcome": outcome(result.ratio),
        }
        for name, results in readers.items()
        for result in results
        if result.ratio is not None
    ]
    columns = ["rung", "reader", "machine", "ratio", "lowest", "highest", "outcome"]
    return pd.DataFrame(rows, columns=columns).sort_values("rung", kind="stable", ignore_index=True)


def _machine(result: scoreboard.Result) -> str:
    return f"{result.device}, {counted(result.cores, 'core')}"


def _counts(rung: str, own: pd.DataFrame) -> dict:
    spread = {"median": statistics.median(own["ratio"]), "lowest": own["ratio"].min(), "highest": own["ratio"].max()}
    return {"rung": rung, "readers": len(own), **own["outcome"].value_counts()} | {
        name: f"{digits(value)}×" for name, value in spread.items()
    }


def _questions(rung: str, own: pd.DataFrame) -> list[str]:
    """Return what to discuss about a rung: where readers disagree, or nobody gains, or most do not know."""
    faster, slower, noisy = (own[own["outcome"] == name] for name in (FASTER, SLOWER, NOISY))
    low, high = own.loc[own["highest"].idxmin()], own.loc[own["lowest"].idxmax()]
    if len(faster) and len(slower):
        return [f"{rung}: faster for {_who(faster)}; slower for {_who(slower)}. What differs between them?"]
    if high["lowest"] > APART * low["highest"]:
        ends = (f"{digits(end['ratio'])}× for {end['reader']} ({end['machine']})" for end in (low, high))
        return [f"{rung}: {', but '.join(ends)}. What limits each of them?"]
    if 1 < len(own) == len(slower):
        return [f"{rung}: slower for all {len(own)} who measured it. When would it be faster?"]
    if 1 < len(own) < 2 * len(noisy):
        return [f"{rung}: too noisy to say for {len(noisy)} of {len(own)}. What else ran meanwhile?"]
    return []


def _who(rows: pd.DataFrame) -> str:
    return "; ".join(f"{', '.join(own['reader'])} ({machine})" for machine, own in rows.groupby("machine", sort=False))
