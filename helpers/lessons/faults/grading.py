"""Grades a fixed training script: by the ratio that is measured, and by what it does, which must be what it did.

No marks depend on it. It compares two epochs of training (the losses, the line printed for each epoch, that there is a
checkpoint), and times whole epochs by its own clock. It cannot see what is kept from one epoch to the next, such as a
pack or a cache: the faults in loading then cost nothing, and are still there. Nor does it look for code that recognizes
that it is timed, or knows its losses beforehand.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helpers.lessons import faults
from helpers.lessons.faults import catalogue, running
from stepscope import timing

# Nats. On two cores rounding (threads, memory format, where it is normalized) moved a loss of the first epoch by 7e-7
# at most, a learning rate 1% lower by 2e-5 to 4e-5, and bfloat16 by 5e-5. Training carries rounding on: it moved one
# of the second epoch by 4e-5 at most; another batch moves it by 1e-3.
TOLERANCE = np.repeat([1e-5, 2e-4], catalogue.EPOCH_STEPS)
PRINTED = re.compile(r"epoch (\d+): loss (\d+\.\d+), accuracy (\d+\.\d+)%")
ROOM = 0.0012, 0.22  # nats, percent: the last digit that is printed may be another, of the accuracy by an image or two
SLOWER = 0.9  # of the throughput without faults: less leaves something to fix
ORIGINAL, YOURS, FIXED = "the original", "yours", "all fixed"


@dataclass(frozen=True)
class Grade:
    """What a fixed script is worth. Printed, it is a verdict in words."""

    change: str | None  # what yours does otherwise than the script without faults; None if nothing
    timed: timing.Comparison | None  # the original, yours, the one without faults; None if yours does something else

    @property
    def same_training(self) -> bool:
        """Whether yours does the same as the one without faults."""
        return self.change is None

    @property
    def passed(self) -> bool:
        """Whether yours does the same, and has, in the mean of all rounds, about the throughput of all fixed."""
        return self.same_training and self.timed.ratio(YOURS, to=FIXED).mean >= SLOWER

    def __str__(self) -> str:
        if not self.same_training:
            return self.change
        left = self.timed.ratio(YOURS, to=FIXED)
        reached = f"it reaches {left.mean:.0%} of what there is. Diagnose it again, as it is now."
        if self.passed:
            verdict = "Passed: it is about as fast as with all faults fixed, or faster."
        elif left.highest < SLOWER:
            verdict = f"Not yet: {reached}"
        else:
            verdict = (
                f"Undecided, as the rounds differ: {reached} If that finds nothing, grade it again, in more rounds."
            )
        return (
            f"The same training: in {len(TOLERANCE)} steps the losses differ by no more than rounding.\n"
            f"{self.timed.verdict(YOURS)}\n{self.timed.verdict(FIXED)}\n{verdict}"
        )


def grade(path: Path, seed: int, images: Path) -> Grade:
    """Run a fixed script, the original and the one without faults, and say what the fixed one is worth.

    The script was drawn with `seed`, and reads the training images in the folder `images`. It is not changed; its
    checkpoint beside it is. Raises `running.ScriptFailed`.
    """
    with tempfile.TemporaryDirectory() as folder:
        original, fixed = (Path(folder, name, "train.py") for name in ("original", "fixed"))
        for script, its_faults in ((original, faults.draw(seed)), (fixed, ())):
            script.parent.mkdir()
            script.write_text(faults.text(its_faults, images), encoding="utf-8")
        # Yours first: what is wrong with it shows at once
        change = changed(*(running.run(script, len(TOLERANCE)) for script in (path, fixed)))
        return Grade(change, None if change else running.compare({ORIGINAL: original, YOURS: path, FIXED: fixed}))


def changed(yours: running.Run, right: running.Run) -> str | None:
    """Say what two epochs do otherwise than those of the script without faults; None if they do the same."""
    wrong = ~(np.abs(np.subtract(yours.losses, right.losses)) <= TOLERANCE)  # so written, as nan is wrong, too
    if wrong.any():
        step = int(wrong.argmax())
        return (
            f"Not the same training: in step {step + 1} of {len(wrong)} the loss is {yours.losses[step]:.5f} nats, and "
            f"without faults {right.losses[step]:.5f}. A speed-up that changes what is learned is none: look for what "
            "has changed with it, such as the order of the images, in this epoch or the ones before, the size of a "
            "batch, normalization, or the learning rate."
        )
    lines = {line[1]: line for line in PRINTED.finditer(yours.printed)}
    for line in PRINTED.finditer(right.printed):
        mine = lines.get(line[1])
        if mine is None or any(abs(float(mine[place]) - float(line[place])) > ROOM[place - 2] for place in (2, 3)):
            return (
                f"Not the same output: expected the line '{line[0]}', and found {mine and repr(mine[0])}. What the "
                "script prints once an epoch belongs to it: it has to stay, and to be right."
            )
    if not yours.saved:
        return (
            "No checkpoint: after each epoch the file checkpoint.pt beside the script has to hold the model. To save "
            "it belongs to the script, and has to stay."
        )
    return None
