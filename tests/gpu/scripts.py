"""Runs 10 and 11: whole scripts: those that notebook 18 grades, and training until the network is good enough."""

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path

from helpers.lessons import faults
from helpers.lessons.faults import catalogue, grading, running
from tests.gpu import materials
from tests.gpu.measuring import Figures, Run


def faults_alone(run: Run) -> None:
    """Compare the losses of the solved script with those of a second process, and with each fault that a GPU feels."""
    data = materials.images(small=True)  # an epoch of the script has 512 images

    def measure(planted: tuple[catalogue.Fault, ...]) -> Figures:
        right = grading.two_epochs((), data.train)  # runs once
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(faults.text(planted, data.train), encoding="utf-8")
            found = running.run(script, len(grading.TOLERANCE))
        largest = max(abs(one - other) for one, other in zip(found.losses, right.losses, strict=True))
        more = sum(found.calls[fault.mark] - right.calls[fault.mark] for fault in planted)
        same = float(grading.changed(found, right) is None)
        return {"loss_difference_nats": largest, "graded_as_the_same": same, "more_calls_of_its_mark": more}

    alone = {"solved again": (), **{fault.name: (fault,) for fault in catalogue.FAULTS if fault.place == "GPU"}}
    variants = {name: lambda planted=planted: partial(measure, planted) for name, planted in alone.items()}
    run.compare("solved script", variants, rounds=1)


def until_good(run: Run) -> None:
    """Time ``train_cifar10.py`` until 99% of drawn test images are classified correctly: as it is, compiled, naive."""
    data = materials.images(run.small)
    sizes = "--width 4 --batch 64 --epochs 1" if run.small else "--epochs 5"

    def measure(name: str, option: str) -> Figures:
        log = run.folder / f"accuracy-{name.replace(' ', '-')}.jsonl"
        log.unlink(missing_ok=True)  # of an attempt that was stopped
        command = [sys.executable, materials.NOTEBOOKS / "train_cifar10.py", data.train.parent, "--log", log]
        words = f"--goal 0.99 {sizes} {option}".split()
        subprocess.run([*map(str, command), *words], check=True, timeout=max(run.left, 1))
        epochs = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        seconds = [epoch["seconds"] for epoch in epochs]
        each = [
            after - before for before, after in pairwise(seconds)
        ] or seconds  # without the first, which has the start
        return {"seconds": seconds[-1], "epoch_s": statistics.median(each), "accuracy": epochs[-1]["accuracy"]}

    ways = {"as the course has it": "", "compiled": "--compile", "naive": "--naive"}
    variants = {name: lambda name=name, option=option: partial(measure, name, option) for name, option in ways.items()}
    run.compare("until 99%", variants, rounds=1)
