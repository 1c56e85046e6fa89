"""What several tests of timing use."""

import pytest
from support import loops
from support.clock import Clock

from stepscope import timing


@pytest.fixture
def clock(monkeypatch):
    """The stopwatch's clock, on which only sleeping takes time: also that of the items and steps of `loops`."""
    return Clock(monkeypatch, timing, loops)
