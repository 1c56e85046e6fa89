"""Whether an interval of one process holds for the next: ``python -m tests.bench.bench_processes``.

ResNet-50 of notebooks 08 to 10 is timed interleaved in several processes, one after the other, as a reader would who
restarts the kernel. Printed are each process's ratios with their 95% intervals, the mean of all, and how many of the
intervals hold that mean. If rounds were all that differs, 19 of 20 would.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

from helpers import confidence, timing
from helpers.data import cifar10
from helpers.results import rungs

PROCESSES, ROUNDS, STEPS = 8, 5, 10
NAMES = ("08 ResNet-50", "09 channels_last", "10 mixed precision")


def main() -> None:
    """Start the processes, and print what each of them found."""
    found = {name: [] for name in NAMES[1:]}
    for number in range(PROCESSES):
        command = [sys.executable, "-m", "tests.bench.bench_processes", "one"]
        lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
        for name, ratios in json.loads(lines[-1]).items():
            found[name].append(confidence.geometric(ratios))
            interval = found[name][-1]
            print(f"process {number}: {name} {interval.mean:.2f}×, {timing.conclusion(interval)}", flush=True)
    for (before, name), intervals in zip(pairwise(NAMES), found.values(), strict=True):
        of_all = confidence.geometric(each.mean for each in intervals)
        held = sum(each.lowest <= of_all.mean <= each.highest for each in intervals)
        ends = f"{of_all.lowest:.2f} to {of_all.highest:.2f}"
        print(f"{name} to {before}: {of_all.mean:.2f} ({ends}) in {PROCESSES} processes; {held} intervals hold that")


def one() -> None:
    """Time the rungs in this process, and print the ratios of its rounds as JSON."""
    data = cifar10.prepare()
    measured = {name: rungs.resnet_rung(name, data, rungs.RESNET[name]) for name in NAMES}
    runs = {name: lambda rung=rung: timing.loop(rung.loader, rung.step, STEPS) for name, rung in measured.items()}
    times = timing.interleaved(runs, ROUNDS)
    print(json.dumps({name: times.ratios(name, to=before) for before, name in pairwise(NAMES)}))


if __name__ == "__main__":
    one() if sys.argv[1:] == ["one"] else main()
