"""Measures on a GPU what the course predicts: ``python -m tests.gpu RUN… --out FOLDER``; ``--list`` shows the queue.

Each run states its predictions, measures its variants in interleaved rounds, and writes a line of JSON for each into
FOLDER/results.jsonl as it goes; the same command goes on where an earlier one was stopped. Plain scripts: they need
PyTorch, torchvision, Pillow, pandas, psutil and pynvml, but neither Jupyter nor TensorBoard; where stepscope is not
installed, set PYTHONPATH=stepscope/src. To commit a card's results, copy the file to data/reference/NAME/gpu.jsonl.
"""

import argparse
import contextlib
import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from helpers import config
from tests.gpu import catalogue, results

_GRACE = 60  # seconds that a process may take after its bound, to end what it has begun


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0 if nothing is missing in the end."""
    queue = {entry.number: entry for entry in catalogue.QUEUE}
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", type=int, metavar="RUN", help="number of a run")
    parser.add_argument("--out", type=Path, help="folder for results and traces")
    parser.add_argument("--seconds", type=float, default=240, help="for each run; then it begins nothing new")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that all runs end: no results")
    parser.add_argument("--list", action="store_true", help="show the queue")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)  # measure here, as this process of several
    options = parser.parse_args(arguments)
    if options.list or not options.runs:
        print(catalogue.listing(config.PROJECT / "data" / "reference"))
        return 0
    if unknown := sorted({*options.runs} - queue.keys()):
        parser.error(f"expected runs of the queue, found {unknown}: see --list")
    if options.out is None:
        parser.error("expected a folder for the results: --out FOLDER")
    entries, options.out = [queue[number] for number in options.runs], options.out.resolve()
    if options.process is not None:
        return measure(entries[0], options)
    missing = [str(entry.number) for entry in entries if not in_processes(entry, options)]
    predictions = results.predictions()
    for entry in entries:
        lines = [line for line in results.read(options.out / results.NAME) if line["run"] == entry.number]
        stated = [each for each in predictions if each.run == entry.number]
        print("\n" + results.table(f"Run {entry.number}: {entry.proves}", lines, stated))
    if missing:
        print(f"\nMissing in run {', '.join(missing)}: see above. The same command goes on there.")
    return bool(missing)


def in_processes(entry: catalogue.Entry, options: argparse.Namespace) -> bool:
    """Measure a run in processes of its own, so that no run slows down or ends another; return whether all is there."""
    if not entry.measure:
        print(f"Run {entry.number} has no script here: {entry.instead}.")
        return True
    whole, end = True, time.monotonic() + options.seconds
    for process in range(1 if options.small else entry.processes):
        seconds = max(end - time.monotonic(), 0)
        words = f"-m tests.gpu {entry.number} --process {process} --seconds {seconds:g} {'--small' * options.small}"
        command = [sys.executable, *words.split(), "--out", str(options.out)]
        measuring = subprocess.Popen(command, cwd=config.PROJECT)
        try:
            whole &= not measuring.wait(seconds + _GRACE)
        except subprocess.TimeoutExpired:
            whole = False
            # With the processes that it has started: they would measure on the GPU beside the next run
            for each in [*psutil.Process(measuring.pid).children(recursive=True), measuring]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            measuring.wait()
            print(f"Run {entry.number} was ended {_GRACE} s after its bound of {options.seconds:g} s.")
    return whole


def measure(entry: catalogue.Entry, options: argparse.Namespace) -> int:
    """Measure a run in this process; return 0 if nothing is missing."""
    import torch  # here: the list needs none

    from tests.gpu import measuring

    if not torch.cuda.is_available():
        print("There is no GPU here, and so nothing to measure.")
        return 1
    small = options.small or not measuring.is_gpu()
    print(
        f"Run {entry.number}" + (" in small sizes: no figure is a result." if small else ". Predicted, then measured:")
    )
    print(*([] if small else [each for each in results.predictions() if each.run == entry.number]), sep="\n")
    run = measuring.Run(entry.number, options.out, options.seconds, small, options.process)
    module, _, function = entry.measure.partition(":")
    getattr(importlib.import_module(f"tests.gpu.{module}"), function)(run)
    for name, reason in run.missing.items():
        print(f"Missing in run {entry.number}: {name} ({reason})")
    return bool(run.missing)


if __name__ == "__main__":
    sys.exit(main())
