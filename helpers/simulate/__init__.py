"""Dials that make the lessons visible on any machine: slow storage, and a simulated accelerator.

None is a measurement of real hardware. Whatever uses one of them says so: in the notebook's text, in the figure, and in
the scoreboard's line.
"""

from helpers.simulate.accelerator import SimulatedAccelerator
from helpers.simulate.queue import SimulatedQueue
from helpers.simulate.storage import SHARED_FILE_SYSTEM, SlowStorage
from helpers.simulate.waiting import wait_until

__all__ = ["SHARED_FILE_SYSTEM", "SimulatedAccelerator", "SimulatedQueue", "SlowStorage", "wait_until"]
