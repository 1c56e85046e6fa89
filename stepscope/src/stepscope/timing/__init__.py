"""Times training loops: the stopwatch, interleaved comparison, two clocks, a monitor, and recording a profile.

Works with any loader and any step, as `loop` defines them.
"""

from stepscope.timing.clocks import TwoClocks, two_clocks
from stepscope.timing.comparison import Comparison, conclusion, interleaved, interleaved_ranks, outcome, read_comparison
from stepscope.timing.loaders import Step, WorkerDied, batches, call, endless, whole_periods
from stepscope.timing.probing import forget, phases, stages, warm, worker_growth_mb, worker_memory_mb
from stepscope.timing.stopwatch import Timing, call_ms, each_call_ms, limit, loading, loop, run_ahead, warmup_steps

__all__ = [
    "Comparison", "Step", "Timing", "TwoClocks", "WorkerDied", "batches", "call", "call_ms", "conclusion",
    "each_call_ms", "endless", "forget", "interleaved", "interleaved_ranks", "limit", "loading", "loop", "outcome",
    "phases", "read_comparison", "run_ahead", "stages", "two_clocks", "warm", "warmup_steps", "whole_periods",
    "worker_growth_mb", "worker_memory_mb",
]  # fmt: skip
