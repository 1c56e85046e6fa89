"""Two runs compared, as a table and in words."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from helpers.traces.reading import Trace
from helpers.traces.timeline import breakdown
from helpers.wording import milliseconds

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
        Index `category`; columns `before`, `after` and `change` in ms a step.
    """
    table = pd.DataFrame({"before": breakdown(before).mean() / 1e3, "after": breakdown(after).mean() / 1e3})
    table["change"] = table["after"] - table["before"]
    return table.rename_axis("category")


def sentence(change: pd.DataFrame) -> str:
    """Say a `difference` in words: "loading −61 ms, copies +2 ms".

    The largest change comes first. Changes below 2 % of the longer mean step are left out: two traces of the same
    code differ by as much.
    """
    visible = 0.02 * max(change["before"].sum(), change["after"].sum())
    ordered = change["change"].sort_values(key=abs, ascending=False, kind="stable")
    parts = [f"{PLAIN_NAMES[name]} {_signed(value)}" for name, value in ordered.items() if abs(value) >= visible]
    return ", ".join(parts) or f"no change above {visible:.2g} ms a step"


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{milliseconds(abs(value))}"
