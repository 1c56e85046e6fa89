"""Other processes: a script as the ranks of a job, without `torchrun`, and forks."""

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def forked(function: Callable, *arguments: object) -> multiprocessing.Process:
    """Start a function in a fork of this process, which has imported all that it needs."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def run(script: Path, folder: Path, ranks: int) -> list[tuple[int, str]]:
    """Run ``python SCRIPT FOLDER`` in so many processes; return the exit code of each and what it has written.

    They are forks of a server that has imported PyTorch, which takes seconds.
    """
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.nn"])  # imported by an optimizer, and by DDP
    outputs = [folder / f"{rank}.out" for rank in range(ranks)]
    processes = [
        context.Process(target=_rank, args=(script, folder, rank, ranks, output)) for rank, output in enumerate(outputs)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    finally:
        for process in processes:
            process.kill()
    return [(process.exitcode, output.read_text()) for process, output in zip(processes, outputs, strict=True)]


def _rank(script: Path, folder: Path, rank: int, ranks: int, output: Path) -> None:
    with output.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
    tempfile.tempdir = str(folder)
    sys.argv = [str(script), str(folder)]
    runpy.run_path(sys.argv[0], run_name="__main__")
