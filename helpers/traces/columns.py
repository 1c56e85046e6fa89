"""Tables as plain arrays: what is computed of a trace is computed with these, and is a DataFrame only at the end.

To make a DataFrame, to cut it or to add a column takes 0.1 to 0.5 ms, however few its rows are. With the dozens of
steps from a trace to a table, that was most of the time for a trace of a few MB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


class Columns(dict):
    """Columns of the same length by name: arrays, or Categoricals. Nobody writes to them: tables share them."""

    def rows(self, chosen: np.ndarray) -> Columns:
        """Return some of the rows: `chosen` are their places, or a mask."""
        return Columns({name: values[chosen] for name, values in self.items()})

    def copy(self, deep: bool = False) -> Columns:
        """Return columns to which others may be added."""
        return Columns(self)

    def table(self) -> pd.DataFrame:
        """Return a DataFrame. Text stays the object that it is, whatever pandas would make of it."""
        import pandas as pd

        texts = {name: pd.Series(each, dtype=object, copy=False) for name, each in self.items() if each.dtype == object}
        return pd.DataFrame(self | texts, copy=False)
