"""The ordinary TensorBoard, to see what our corrections correct."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from contextlib import contextmanager

from helpers import tensorboard

STOCK = """
    import sys
    from pathlib import Path
    from helpers.tensorboard import child, corrections
    corrections.apply = lambda: None
    print(child._launch(sys.argv[1]), flush=True)
    sys.stdin.read()
    child._end(Path(sys.argv[2]))
"""


@contextmanager
def stock_tensorboard(logdir, runs, folder):
    """Run TensorBoard over the `runs` in `logdir`, with the profiler's plugin as it is installed."""
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(STOCK), str(logdir), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        server = tensorboard.Server(logdir, tuple(runs), process.stdout.readline().strip(), process, folder, 0)
        while (answer := server.get("runs"))["loading"] or len(answer["runs"]) < len(runs):
            time.sleep(0.1)
        yield server
    finally:
        process.stdin.close()
        process.wait(120)
        process.stdout.close()
