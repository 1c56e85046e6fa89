"""Grades a fixed training script: by what it does, which must be what it did, and by the faults that are gone.

It compares two epochs of training (the losses, the line printed for each epoch, that there is a checkpoint), and counts
in them, and for a first batch, the calls of the function that each fault is about. Unlike a clock, this shows what only
a GPU feels, and what is hidden by images that are kept from one epoch to the next. It does not show what an earlier run
has packed, nor a fault in other words or of the reader's own, and believes the script.
"""

from __future__ import annotations

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

# Nats. On two cores rounding (threads, memory format, where it is normalized) moved a loss of the first epoch by 7e-7
# at most, a learning rate 1% lower by 2e-5 to 4e-5, and bfloat16 by 5e-5. Training carries rounding on: it moved one
# of the second epoch by 4e-5 at most; another batch moves it by 1e-3.
TOLERANCE = np.repeat([1e-5, 2e-4], catalogue.EPOCH_STEPS)
PRINTED = re.compile(r"epoch (\d+): loss (\d+\.\d+), accuracy (\d+\.\d+)%")
ROOM = 0.0012, 0.22  # nats, percent: the last digit that is printed may be another, of the accuracy by an image or two
PLACES = {"loading": "one in loading", "loop": "one in the rest of the loop", "GPU": "one that only a GPU feels"}
GONE, LEFT, UNSEEN = "Gone", "Still there", "Not to be seen without a GPU, so read for it"


@dataclass(frozen=True)
class Grade:
    """What a fixed script is worth. Printed, it is a verdict in words."""

    change: str | None  # what yours does otherwise than the script without faults; None if nothing
    faults: Mapping[Fault, str]  # which are `GONE`, `LEFT` or `UNSEEN`; none if yours does something else

    @property
    def passed(self) -> bool:
        """Whether yours does the same, and none of its faults is seen any more."""
        return not self.change and LEFT not in self.faults.values()

    def __str__(self) -> str:
        if self.change:
            return self.change
        seen = self.faults.items()
        # One that is left is to be found by the reader, so only its place is said, and where it is explained
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
    """Run a fixed script, the one without faults and the original, and say what the fixed one is worth.

    The script was drawn with `seed`, and reads the training images in the folder `images`. It is not changed; its
    checkpoint beside it is. Raises `running.ScriptFailed`.
    """
    drawn = faults.draw(seed)
    runs = [running.run(path, len(TOLERANCE))]  # yours first: what is wrong with it shows at once
    for kept in ((), drawn):
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(faults.text(kept, images), encoding="utf-8")
            runs.append(running.run(script, len(TOLERANCE)))
        if change := changed(*runs[:2]):
            return Grade(change, {})
    return Grade(None, {fault: seen(*(run.calls[fault.mark] for run in runs)) for fault in drawn})


def seen(yours: int, right: int, wrong: int) -> str:
    """Say whether a fault is gone, by the calls of its mark in yours, without faults, and in the original."""
    return UNSEEN if right == wrong else LEFT if (yours - right) / (wrong - right) > 0.5 else GONE


def changed(yours: running.Run, right: running.Run) -> str | None:
    """Say what two epochs do otherwise than those of the script without faults; None if they do the same."""
    wrong = ~(np.abs(np.subtract(yours.losses, right.losses)) <= TOLERANCE)  # so written, as nan is wrong, too
    if wrong.any():
        step = int(wrong.argmax())
        return (
            f"Not the same training: in step {step + 1} of {len(wrong)} the loss is {yours.losses[step]:.5f} nats, and "
            f"without faults {right.losses[step]:.5f}. Look for what has changed with it, such as the order of the "
            "images, in this epoch or the ones before, the size of a batch, normalization, or the learning rate."
        )
    lines = {line[1]: line for line in PRINTED.finditer(yours.printed)}
    for line in PRINTED.finditer(right.printed):
        mine = lines.get(line[1])
        if mine is None or any(abs(float(mine[place]) - float(line[place])) > ROOM[place - 2] for place in (2, 3)):
            found = f"expected the line '{line[0]}', and found {mine and repr(mine[0])}"
            return f"Not the same output: {found}. What the script prints once an epoch has to stay, and to be right."
    checkpoint = "No checkpoint: after each epoch the file checkpoint.pt beside the script has to hold the model."
    return None if yours.saved else checkpoint
