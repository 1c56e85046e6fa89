"""Times training loops: the stopwatch, interleaved comparison, two clocks, a monitor, and recording a profile.

Works on any loader and any step; see `loop` for what they are.
"""

from helpers.timing.clocks import TwoClocks, two_clocks
from helpers.timing.comparison import Comparison, conclusion, interleaved, outcome
from helpers.timing.loaders import Step, WorkerDied, batch_size, batches, call, endless
from helpers.timing.parts import phases, stages
from helpers.timing.stopwatch import Timing, call_ms, each_call_ms, loading, loop, run_ahead, warmup_steps
from helpers.timing.system import (
    forget,
    onednn,
    read_from_disk_mb,
    system_calls,
    warm,
    worker_growth_mb,
    worker_memory_mb,
)
from helpers.timing.together import interleaved_ranks, read_comparison

__all__ = [
    "Comparison",
    "Step",
    "Timing",
    "TwoClocks",
    "WorkerDied",
    "batch_size",
    "batches",
    "call",
    "call_ms",
    "conclusion",
    "each_call_ms",
    "endless",
    "forget",
    "interleaved",
    "interleaved_ranks",
    "loading",
    "loop",
    "onednn",
    "outcome",
    "phases",
    "read_comparison",
    "read_from_disk_mb",
    "run_ahead",
    "stages",
    "system_calls",
    "two_clocks",
    "warm",
    "warmup_steps",
    "worker_growth_mb",
    "worker_memory_mb",
]
