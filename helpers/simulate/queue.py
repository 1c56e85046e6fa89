"""A simulated accelerator with a queue, which its host fills: what asking for a value costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd


@dataclass(frozen=True)
class SimulatedQueue:
    """An accelerator that works through a queue of launches while its host fills it. Calculated: nothing runs.

    Parameters
    ----------
    parts : sequence of (float, float)
        The parts of a step in their order: milliseconds until the host has launched it, and those that the
        accelerator then works on it; 0 if it has no part in it, such as in getting the next batch.
    """

    parts: Sequence[tuple[float, float]]

    def run(self, steps: int, asks: bool = False) -> pd.DataFrame:
        """Return when the host returns from each step, and when the accelerator has done it.

        Parameters
        ----------
        steps : int
        asks : bool
            At the end of each step the host asks for a value, and waits until the accelerator has it.

        Returns
        -------
        DataFrame
            A row a step; columns ``host`` and ``device``, in ms since the first step began.
        """
        host, device, rows = 0.0, 0.0, []
        for _ in range(steps):
            for launching, working in self.parts:
                host += launching
                if working:
                    device = max(device, host) + working
            if asks:
                host = max(host, device)
            rows.append((host, max(host, device)))
        return pd.DataFrame(rows, columns=["host", "device"])
