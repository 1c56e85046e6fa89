"""Two runs compared, as a table and in words."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from helpers import confidence
from helpers.traces.reading import Trace
from helpers.traces.timeline import breakdown

if TYPE_CHECKING:
    import pandas as pd

PLAIN_NAMES = {
    "Kernel": "kernels",
    "Memcpy": "copies",
    "Memset": "memory fills",
    "Communication": "communication",
    "Runtime": "runtime calls",
    "DataLoader": "loading",
    "CPU Exec": "operators on the CPU",
    "Other": "other",
}


def difference(before: str | Path | Trace, after: str | Path | Trace) -> pd.DataFrame:
    """Compare two runs: the mean step of each, category by category.

    Returns
    -------
    DataFrame
        Index `category`; columns `before`, `after` and `change` in ms a step, and the 95% interval of the change,
        `lowest` and `highest`, which follows from how much the recorded steps differ. How much two recordings of the
        same code differ it does not include.
    """
    import pandas as pd

    steps = breakdown(before) / 1e3, breakdown(after) / 1e3
    rows = {}
    for name in steps[0].columns:
        first, second = (table[name].to_list() for table in steps)
        found = confidence.change(first, second)
        rows[name] = [statistics.fmean(first), statistics.fmean(second), found.mean, found.lowest, found.highest]
    columns = ["before", "after", "change", "lowest", "highest"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns).rename_axis("category")


def sentence(change: pd.DataFrame) -> str:
    """Say a `difference` in words: "loading −61 ms (−70 to −52), copies +2.0 ms (+1.5 to +2.5)".

    The largest change comes first. Left out are changes below 2% of the longer mean step, since two traces of the same
    code differ by as much, and those whose interval holds 0: the steps differ too much to say. But if one of those is
    the largest of all, that is said.
    """
    least = 0.02 * max(change["before"].sum(), change["after"].sum())
    clear = (change["change"].abs() >= least) & ((change["lowest"] > 0) | (change["highest"] < 0))
    ordered = change[clear].sort_values("change", key=abs, ascending=False, kind="stable")
    surely = ", ".join(
        f"{PLAIN_NAMES[name]} {_signed(row.change)} ms ({_ends(row)})" for name, row in ordered.iterrows()
    )
    largest = change.loc[change["change"].abs().idxmax()]
    if abs(largest.change) < least:
        return f"no change of {_signed(least)[1:]} ms a step or more"
    if clear[largest.name]:
        return surely
    perhaps = f"{PLAIN_NAMES[largest.name]} {_signed(largest.change)} ms, but the steps differ too much to be sure"
    return "; ".join(filter(None, (surely, f"{perhaps} ({_ends(largest)})")))


def _ends(row: pd.Series) -> str:
    return f"{_signed(row.lowest)} to {_signed(row.highest)}"


def _signed(ms: float) -> str:
    size = abs(ms)
    return f"{'−' if ms < 0 else '+'}{size:.0f}" if size >= 10 else f"{'−' if ms < 0 else '+'}{size:.2g}"
