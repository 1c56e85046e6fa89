"""What several tests of timing use."""

import pytest
from support.clock import Clock

from helpers import simulate, timing
from helpers.loading import datasets


@pytest.fixture
def clock(monkeypatch):
    """The stopwatch's clock, on which only the items of a SleepDataset and simulated steps take time."""
    return Clock(monkeypatch, timing, datasets, simulate)
