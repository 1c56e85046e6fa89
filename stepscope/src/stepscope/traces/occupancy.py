"""Estimates a kernel's occupancy: the share of a multiprocessor's threads that it keeps resident.

PyTorch's profiler writes its own estimate into the trace. It is 0 for every kernel with more than 48 KiB of shared
memory, which such a kernel must ask for: the profiler leaves out the asking, and finds that the kernel cannot run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

# Blocks that may be resident on a multiprocessor, by compute capability. CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability": 12.9 for 5.0 to 7.2, 13.1 for 7.5 and later.
MAX_BLOCKS = {
    **dict.fromkeys([(5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2), (7, 0), (7, 2)], 32),
    (7, 5): 16,
    (8, 0): 32,
    (8, 6): 16,
    (8, 7): 16,
    (8, 9): 24,
    **dict.fromkeys([(9, 0), (10, 0), (10, 3)], 32),
    **dict.fromkeys([(11, 0), (12, 0), (12, 1)], 24),
}

# How registers and shared memory are given out, from compute capability 5.0 to 12.1: `cuda_occupancy.h` of CUDA.
_REGISTERS_AT_ONCE = 256  # per warp
_PARTITIONS = 4  # of a multiprocessor, each with its part of the registers
_SHARED_MEMORY_AT_ONCE = {7: 256}  # bytes, by major compute capability; 128 on others
_RESERVED_SHARED_MEMORY = 1024  # bytes of each block, for the system, from compute capability 8.0 on
_WARP = 32  # threads
_PROPERTIES = (
    "computeMajor",
    "computeMinor",
    "numSms",
    "maxThreadsPerMultiprocessor",
    "regsPerMultiprocessor",
    "sharedMemPerMultiprocessor",
    "warpSize",
)


def estimate(
    grid: Sequence[int] | None,
    block: Sequence[int] | None,
    registers: float | None,
    shared_memory: float | None,
    device: dict | None,
) -> float:
    """Return a kernel's occupancy in %, or NaN if it is unknown.

    As many blocks are resident on a multiprocessor as there are for it, or as its threads, its registers, its shared
    memory and its limit of blocks allow, whichever is least. The estimate takes the grid as evenly spread.

    Parameters
    ----------
    grid, block : sequence of three int
        Blocks of the grid, threads of a block.
    registers, shared_memory : int
        Registers per thread; shared memory per block, static and dynamic, in bytes.
    device : dict
        The device's entry of the trace's ``deviceProperties``.

    NaN if a parameter is None or no number, if the entry lacks a property (AMD's do), if the compute capability is
    unknown, or if the device could not run such a kernel.
    """
    try:
        numbers = (*grid, *block, registers, shared_memory, *(device[name] for name in _PROPERTIES))
    except (KeyError, TypeError):
        return math.nan
    if not all(isinstance(each, Real) and math.isfinite(each) for each in numbers):
        return math.nan
    blocks, threads = math.prod(grid), math.prod(block)
    major, minor, multiprocessors, max_threads, max_registers, max_shared_memory, warp = numbers[-len(_PROPERTIES) :]
    if (major, minor) not in MAX_BLOCKS or warp != _WARP or min(multiprocessors, max_threads, blocks, threads) <= 0:
        return math.nan
    warps = math.ceil(threads / _WARP)
    limits = [MAX_BLOCKS[major, minor], max_threads // (_WARP * warps)]
    if registers > 0:
        of_warp = _round_up(registers * _WARP, _REGISTERS_AT_ONCE)
        limits.append(max_registers // _PARTITIONS // of_warp * _PARTITIONS // warps)
    of_block = shared_memory + (_RESERVED_SHARED_MEMORY if major >= 8 else 0)
    if of_block > 0:
        limits.append(max_shared_memory // _round_up(of_block, _SHARED_MEMORY_AT_ONCE.get(major, 128)))
    resident = min(blocks / multiprocessors, *limits)
    return 100 * resident * threads / max_threads or math.nan


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
