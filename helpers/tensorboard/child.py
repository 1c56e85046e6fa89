"""The process that is TensorBoard: ``python -m helpers.tensorboard.child LOGDIR FOLDER PARENT``.

It is the ordinary TensorBoard with its profiler tab corrected, on a port that the operating system chooses, and lives
as long as the process that started it. Its address, its log and its temporary files are in FOLDER.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil

from helpers import staging
from helpers.tensorboard import corrections


def main(logdir: str, folder: Path, parent: int) -> None:
    """Run TensorBoard over `logdir` until the process `parent` ends, or this one is terminated."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    tempfile.tempdir = str(folder)  # so that what the plugin leaves behind goes with the folder
    owner = psutil.Process(parent)  # with its start: a later process of the same number is another one
    staging.write(folder / "address", _launch(logdir))
    try:
        while _lives(owner):
            time.sleep(0.5)
    finally:
        _end(folder)


def _launch(logdir: str) -> str:
    # The traces are parsed in processes of their own. To fork them saves 7 s, but is safe on Linux only.
    os.environ["TORCH_PROFILER_START_METHOD"] = "fork" if sys.platform == "linux" else "spawn"
    from tensorboard.plugins.core.core_plugin import CorePluginLoader
    from tensorboard.program import TensorBoard
    from torch_tb_profiler.plugin import TorchProfilerPlugin

    corrections.apply()
    # Only the profiler's plugin, and no data server, which is for scalars: ready 0.5 s earlier, one process less.
    board = TensorBoard(plugins=[CorePluginLoader(), TorchProfilerPlugin])
    board.configure(logdir=logdir, host="127.0.0.1", port=0, load_fast="false", reload_interval=0)
    return board.launch()


def _lives(process: psutil.Process) -> bool:
    """Whether `process` still runs.

    A pipe from the parent would not show it: its forks, such as the workers of a DataLoader, inherit the other end and
    may outlive it.
    """
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def _end(folder: Path) -> None:
    for process in psutil.Process().children(recursive=True):  # those that still parse
        process.kill()
    shutil.rmtree(folder, ignore_errors=True)
    sys.stderr.flush()
    os._exit(0)  # the plugin's threads wait for ever for what was parsed


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
