"""Grades a fixed training script: by the ratio that is measured, and by the losses, which must be what they were."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helpers import timing
from helpers.confidence import Interval
from helpers.lessons.faults import catalogue, child, running

# Nats. Of the first epoch of the script on two cores: rounding (threads, memory format, where it is normalized) moved a
# loss by 2e-7 at most, a weight decay of 5e-4 by 4e-5, bfloat16 by 5e-5, a learning rate 1 % lower by 1e-4.
TOLERANCE = 2e-5
SLOWER = 0.9  # of the fixed script's throughput: less leaves something to fix
ORIGINAL, YOURS, FIXED = "the original", "yours", "all fixed"


@dataclass(frozen=True)
class Grade:
    """What a fixed script is worth. Printed, it is a verdict in words.

    Attributes
    ----------
    losses : dict of str to tuple of float
        Of the original and of yours: nats of each step of the first epoch.
    timed : timing.Comparison or None
        The original, yours, and the one without faults, interleaved; None if the losses differ, as then nothing is
        faster.
    """

    losses: dict[str, tuple[float, ...]]
    timed: timing.Comparison | None

    @property
    def difference(self) -> float:
        """The largest difference of two losses of the same step, in nats."""
        return float(np.abs(np.subtract(self.losses[YOURS], self.losses[ORIGINAL])).max())

    @property
    def same_training(self) -> bool:
        """Whether the losses are those of the original."""
        return self.difference <= TOLERANCE

    @property
    def passed(self) -> bool:
        """Whether the losses are those of the original, and at least one round found it about as fast as all fixed."""
        return self.same_training and max(self.timed.ratios(YOURS, to=FIXED)) >= SLOWER

    def __str__(self) -> str:
        steps = len(self.losses[ORIGINAL])
        if not self.same_training:
            step = int(np.argmax(~np.isclose(*self.losses.values(), rtol=0, atol=TOLERANCE)))
            return (
                f"Not the same training: in step {step + 1} of {steps} the loss is {self.losses[YOURS][step]:.5f} "
                f"nats, and was {self.losses[ORIGINAL][step]:.5f}. A speed-up that changes what is learned is none: "
                "look for what has changed with it, such as the order of the images, the size of a batch, "
                "normalization, or the learning rate."
            )
        mine, whole = self.timed.ratio(YOURS), self.timed.ratio(FIXED)
        lines = [
            f"The same training: in {steps} steps the losses differ by {self.difference:.1g} nats at most.",
            f"You have {mine.mean:.1f} of {whole.mean:.1f}×: {_ratio(YOURS, mine)}, "
            f"{_ratio(FIXED, whole)} the throughput of the original.",
        ]
        if self.passed:
            lines.append("Passed: it is about as fast as with all faults fixed, or faster.")
        else:
            left = self.timed.ratio(YOURS, to=FIXED).mean
            lines.append(f"Not yet: it reaches {left:.0%} of what there is. Diagnose it again, as it is now.")
        return "\n".join(lines)


def grade(path: Path, seed: int, images: Path) -> Grade:
    """Run a fixed script, the original and the one without faults interleaved, and say what the fixed one is worth.

    Parameters
    ----------
    path : Path
        The script to grade. It is not changed.
    seed : int
        The seed that it was drawn with.
    images : Path
        Folder of the training images.

    Raises
    ------
    running.ScriptFailed, running.ScriptLacking, running.ScriptNeverEnds, running.ScriptDied
    """
    with tempfile.TemporaryDirectory() as folder:
        scripts = {
            ORIGINAL: Path(folder, "original", "train.py"),
            YOURS: path,
            FIXED: Path(folder, "fixed", "train.py"),
        }
        for name, faults in ((ORIGINAL, catalogue.draw(seed)), (FIXED, ())):
            scripts[name].parent.mkdir()
            scripts[name].write_text(catalogue.text(faults, images), encoding="utf-8")
        # Yours first: what is wrong with it shows at once
        losses = {name: running.run(child.losses, scripts[name], catalogue.EPOCH_STEPS) for name in (YOURS, ORIGINAL)}
        same = Grade(losses, None).same_training
        return Grade(losses, running.compare(scripts) if same else None)


def _ratio(name: str, ratio: Interval) -> str:
    return f"{name} {ratio.mean:.2f}× ({ratio.lowest:.2f} to {ratio.highest:.2f} in {ratio.count} rounds)"
