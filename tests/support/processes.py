"""Other processes: a script as the ranks of a job, without `torchrun`, and forks."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers import config

needs_fork = pytest.mark.skipif(sys.platform == "win32", reason="this system cannot fork")


def forked(function: Callable, *arguments: object) -> multiprocessing.Process:
    """Start a function in a fork of this process, which has imported all that it needs."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def run(script: Path, folder: Path, ranks: int) -> list[tuple[int, str]]:
    """Run ``python SCRIPT FOLDER`` in so many processes; return the exit code of each and what it has written."""
    settings = {"WORLD_SIZE": str(ranks), "PYTHONPATH": str(config.PROJECT), "TMPDIR": str(folder)}
    settings |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = []
    try:
        for rank in range(ranks):
            own = os.environ | settings | {"RANK": str(rank)}
            processes.append(subprocess.Popen([sys.executable, script, folder], env=own, **pipes))
        written = [process.communicate()[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, text) for process, text in zip(processes, written, strict=True)]
