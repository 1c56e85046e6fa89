"""Dials that make the lessons visible on any machine: slow storage, a slow network, an accelerator, time lines.

None is a measurement of real hardware. Whatever uses one of them says so: in the notebook's text, in the figure, and in
the scoreboard's line.
"""

from helpers.simulate.accelerator import SimulatedAccelerator
from helpers.simulate.device import SimulatedDevice, SimulatedRun
from helpers.simulate.far import far_away
from helpers.simulate.link import Link, SlowStore
from helpers.simulate.network import SleepingLayer, SlowNetwork
from helpers.simulate.storage import SHARED_FILE_SYSTEM, SlowStorage
from helpers.simulate.waiting import wait_until

__all__ = [
    "SHARED_FILE_SYSTEM",
    "Link",
    "SimulatedAccelerator",
    "SimulatedDevice",
    "SimulatedRun",
    "SleepingLayer",
    "SlowNetwork",
    "SlowStorage",
    "SlowStore",
    "far_away",
    "wait_until",
]
