"""Simulations that make the lessons visible on any machine: slow storage, a slow network, a GPU, time lines.

None is a measurement of real hardware. Each use is labelled: in the notebook's text, in the figure, and in the
scoreboard's line.
"""

from helpers.simulate.simulated_device import SimulatedDevice, SimulatedRun
from helpers.simulate.sleeping import DEMANDS, SimulatedGPU, SleepingLayer, feeds, wait_until
from helpers.simulate.slow_network import SlowNetwork
from helpers.simulate.slow_storage import SHARED_FILE_SYSTEM, SlowStorage, SlowStore, far_away
