"""Simulated devices with any dials."""

from hypothesis import strategies as st

from helpers.simulate import SimulatedDevice

MICROSECONDS = st.integers(0, 100).map(float)
DEVICES = st.builds(
    SimulatedDevice,
    kernels=st.integers(4, 9),
    kernel_us=MICROSECONDS.map(lambda us: us + 1),
    launch_us=MICROSECONDS.map(lambda us: us + 1),
    copy_us=MICROSECONDS,
    loading_us=MICROSECONDS,
    streams=st.sampled_from([1, 2]),
    asks=st.booleans(),
    graph=st.booleans(),
)
