"""Grades a fixed training script: it must train as before, and its faults must be gone.

The grading compares two epochs of training (the losses, the line printed for each epoch, the checkpoint). In them, and
for a first batch, it counts the calls of the function that marks each fault. Unlike a clock, this shows faults that
matter only on a GPU, and faults hidden by images that are kept from one epoch to the next. It does not show what an
earlier run has packed, a fault in other words, or a fault of the reader's own. It trusts the script.
"""

import functools
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helpers import config
from helpers.lessons import faults
from helpers.lessons.faults import catalogue, running
from helpers.lessons.faults.catalogue import Fault

# Nats. On two cores rounding (threads, memory format, place of normalization) changed a loss of the first epoch by 2e-6
# at most, a learning rate 1% lower by 5e-5 to 1e-4, and bfloat16 by 4e-5 to 9e-5. Training carries rounding on: it
# changed a loss of the second epoch by 4e-5 at most; other batches change one by 6e-2 and more.
TOLERANCE = np.repeat([1e-5, 2e-4], catalogue.EPOCH_STEPS)
PRINTED = re.compile(r"epoch (\d+): loss (\d+\.\d+), accuracy (\d+\.\d+)%")
ROOM = 0.0012, 0.22  # nats, percent: the last printed digit may differ, in the accuracy by an image or two
PLACES = {"loading": "one in loading", "loop": "one in the rest of the loop", "GPU": "one that only a GPU feels"}
GONE, LEFT, UNSEEN = "Gone", "Still there", "Not to be seen without a GPU, so read for it"


@dataclass(frozen=True)
class Grade:
    """The grade of a fixed script. Printed, it is a verdict in words."""

    change: str | None  # what the fixed script does differently from the one without faults; None if nothing
    faults: Mapping[Fault, str]  # which are `GONE`, `LEFT` or `UNSEEN`; empty if there is a change

    @property
    def passed(self) -> bool:
        """Whether the script trains the same, and no fault is visible any more."""
        return not self.change and LEFT not in self.faults.values()

    def __str__(self) -> str:
        if self.change:
            return self.change
        seen = self.faults.items()
        # The reader should find the faults that are left, so only their places and notebooks are named
        names = {f: f.name if what == GONE else f"{PLACES[f.place]} (notebook {f.notebook[:2]})" for f, what in seen}
        found = {title: [names[f] for f, what in seen if what == title] for title in (GONE, LEFT, UNSEEN)}
        if config.device().type == "cpu":
            found["No clock shows without a GPU"] = [names[f] for f in self.faults if f.place == "GPU"]
        return "\n".join([
            f"The same training: in {len(TOLERANCE)} steps the losses differ by no more than rounding.",
            *(f"{title}: {', '.join(names)}." for title, names in found.items() if names),
            "Passed." if self.passed else "Not yet: diagnose it again, as it is now.",
        ])  # fmt: skip


def grade(path: Path, seed: int, images: Path) -> Grade:
    """Run a fixed script, and grade it by the runs of the script without faults and of the original.

    The script was drawn with `seed`, and reads the training images in the folder `images`. It is not changed; the
    checkpoint beside it is. Raises `running.ScriptFailed`.
    """
    drawn = faults.draw(seed)
    yours = running.run(path, len(TOLERANCE))  # the fixed one first: its errors show at once
    right = two_epochs((), images)
    if change := changed(yours, right):
        return Grade(change, {})
    runs = yours, right, two_epochs(drawn, images)
    return Grade(None, {fault: seen(*(run.calls[fault.mark] for run in runs)) for fault in drawn})


@functools.cache
def two_epochs(kept: tuple[Fault, ...], images: Path) -> running.Run:
    """Return what the script with these faults does in two epochs; it runs once in a process."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(faults.text(kept, images), encoding="utf-8")
        return running.run(script, len(TOLERANCE))


def seen(yours: int, right: int, wrong: int) -> str:
    """Say whether a fault is gone, by its mark's calls in the fixed script, without faults, and in the original."""
    return UNSEEN if right == wrong else LEFT if (yours - right) / (wrong - right) > 0.5 else GONE


def changed(yours: running.Run, right: running.Run) -> str | None:
    """Say how two epochs differ from those of the script without faults; None if they do not."""
    wrong = ~(np.abs(np.subtract(yours.losses, right.losses)) <= TOLERANCE)  # written so that nan is wrong, too
    if wrong.any():
        step = int(wrong.argmax())
        return (
            f"Not the same training: in step {step + 1} of {len(wrong)} the loss is {yours.losses[step]:.5f} nats, but "
            f"without faults {right.losses[step]:.5f}. Look for what else has changed, such as the order of the images "
            "(in this epoch or an earlier one), the batch size, normalization, or the learning rate."
        )
    lines = {line[1]: line for line in PRINTED.finditer(yours.printed)}
    for line in PRINTED.finditer(right.printed):
        mine = lines.get(line[1])
        if mine is None or any(abs(float(mine[place]) - float(line[place])) > ROOM[place - 2] for place in (2, 3)):
            found = f"expected the line '{line[0]}', and found {mine and repr(mine[0])}"
            return f"Not the same output: {found}. Keep the line that the script prints once an epoch, and its values."
    checkpoint = "No checkpoint: after each epoch the file checkpoint.pt beside the script must hold the model."
    return None if yours.saved else checkpoint
