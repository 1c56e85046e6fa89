"""A page with the results of a whole class, from the readers' scoreboards: one file, which needs no network.

Machines differ, so the page compares ratios, each to its reader's own baseline.
"""

import datetime
import random
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
APART = 1.5  # two readers disagree if even the nearest ends of their intervals differ by this factor
COLUMNS = [
    "reader", "rung", "rate", "date", "machine", "PyTorch", "preset", "images",
    "change", "outcome", "ratio", "lowest", "highest",
]  # fmt: skip


def write(folder: Path, out: Path, *, anonymous: bool = False) -> list[str]:
    """Write the page of a class, and return what was left out, and why: an entry for each unreadable file or line.

    The page says only how many. `folder` holds a folder for each reader or group, named after them, with their
    ``scoreboard.jsonl`` at any depth. An existing page `out` is replaced. `anonymous` calls the readers by numbers, in
    a new random order each time. Raises `config.CourseError` if there is no scoreboard.
    """
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob(FILE) if not staging.is_staging(path))
    if not paths:
        what = "a folder without any" if folder.is_dir() else "no such folder"
        raise config.CourseError(
            f"{folder}: expected a folder for each reader with a {FILE} in it, and found {what}. Collect the files "
            "from everybody's COURSE_RUNS, each into a folder named after its reader."
        )
    names = [path.parent.relative_to(folder).as_posix() for path in paths]
    if anonymous:
        random.SystemRandom().shuffle(paths)
        names = [f"reader {number}" for number in range(1, len(paths) + 1)]
    results, refused, left_out = {}, [], []
    for name, path in zip(names, paths, strict=True):
        results[name], errors = _read(path)
        refused += [printable(error) for error in errors]
        if errors:  # only how many: a line without a result may hold a name
            left_out.append(f"{name}: {counted(len(errors), 'line')} without a result")
    staging.write(out, _page(results, left_out))
    return refused


def _read(path: Path) -> tuple[list[scoreboard.Result], list[str]]:
    """Return the latest result of each rung, in order, and an error for each line that holds none."""
    if path.is_symlink():  # it may lead to a private file
        return [], [f"{path}: expected a scoreboard, found a link"]
    try:
        lines = scoreboard.text_of(path).splitlines()
    except config.CourseError as error:
        return [], [str(error)]
    latest, errors = {}, []
    for number, line in enumerate(lines, 1):
        try:
            result = scoreboard.parse(line, f"{path}, line {number}")
            latest[result.rung] = result
        except config.CourseError as error:
            errors.append(str(error))
    return [latest[rung] for rung in sorted(latest)], errors


def _page(results: dict[str, list[scoreboard.Result]], left_out: list[str]) -> str:
    rows = [_row(name, result) for name, own in results.items() for result in own]
    table = pd.DataFrame(rows, columns=COLUMNS)
    compared = table.dropna(subset="ratio").sort_values("rung", kind="stable").assign(rung=lambda rows: rows["change"])
    of_readers = table.groupby("reader")
    progress = pd.DataFrame({"rungs": of_readers.size(), "latest result": of_readers["date"].max()}).reindex(results)
    progress["rungs"] = [f"{number:.0f} of {table['rung'].nunique()}" for number in progress["rungs"].fillna(0)]
    rates = table.pivot(index="rung", columns="reader", values="rate")
    machines = table[["reader", "machine", "PyTorch", "preset", "images"]].drop_duplicates()
    by_change = compared.groupby("rung", sort=False)
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        date=datetime.date.today().isoformat(),
        readers=len(results),
        progress=_html(progress.rename_axis("reader").reset_index()),
        figure=figures.ratios(compared.reset_index())._repr_html_() if len(compared) else "",
        gains=_html(pd.DataFrame([_gain(change, own) for change, own in by_change])),
        questions=[question for change, own in by_change for question in _questions(change, own)],
        rates=_html(rates.rename_axis(columns=None).reset_index()),
        machines=_html(machines),
        refused=left_out,
    )


def _row(reader: str, result: scoreboard.Result) -> dict[str, object]:
    row: dict[str, object] = {
        "reader": reader,
        "rung": result.rung,
        "rate": f"{result.rate.mean:,.0f}",
        "date": result.date[:16].replace("T", " "),
        "machine": f"{result.device}, {counted(result.cores, 'core')}",
        "PyTorch": result.torch,
        "preset": result.preset,
        "images": result.data,
    }
    if result.ratio is not None:
        row |= {"change": f"{result.rung} to {scoreboard.against(result)}", "outcome": outcome(result.ratio)}
        row |= {"ratio": result.ratio.mean, "lowest": result.ratio.lowest, "highest": result.ratio.highest}
    return row


def _gain(change: str, own: pd.DataFrame) -> dict[str, object]:
    """Return a row of the table of gains: how many readers had which outcome, and their ratios."""
    counts = own["outcome"].value_counts().reindex([FASTER, SLOWER, SAME, NOISY], fill_value=0)
    spread = own["ratio"].agg(["median", "min", "max"]).rename({"min": "lowest", "max": "highest"})
    return {"rung": change, "readers": len(own), **counts, **spread.map(lambda ratio: f"{digits(ratio)}×")}


def _html(table: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):  # or long cells end with dots
        return table.to_html(index=False, border=0, na_rep="–")


def _questions(change: str, own: pd.DataFrame) -> list[str]:
    """Return a question if a change helps some readers and harms others, or helps some far more than others."""
    low, high = own.loc[own["highest"].idxmin()], own.loc[own["lowest"].idxmax()]
    if {FASTER, SLOWER} <= set(own["outcome"]):
        who = "; ".join(f"{name} for {_who(own[own['outcome'] == name])}" for name in (FASTER, SLOWER))
        return [f"{change}: {who}. What differs between them?"]
    if high["lowest"] > APART * low["highest"]:
        ends = (f"{digits(end['ratio'])}× for {end['reader']} ({end['machine']})" for end in (low, high))
        return [f"{change}: {', but '.join(ends)}. What limits each of them?"]
    return []


def _who(rows: pd.DataFrame) -> str:
    return "; ".join(f"{', '.join(own['reader'])} ({machine})" for machine, own in rows.groupby("machine", sort=False))
