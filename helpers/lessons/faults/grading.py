"""Grades a fixed training script: by the ratio that is measured, and by what it does, which must be what it did.

Here is the clock, and here is drawn by what factor the weights of all scripts begin otherwise than they would: so a
script that stops the time itself, or knows its losses beforehand, gains nothing. Whoever is set on it can still pass,
as a script runs beside `child` in its process, and can change what that sends.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from helpers import config, timing
from helpers.confidence import Interval
from helpers.lessons.faults import catalogue, running

# Nats. On two cores rounding (threads, memory format, where it is normalized) moved a loss of the first epoch by 7e-7
# at most, a learning rate 1% lower by 2e-5 to 4e-5, and bfloat16 by 5e-5. Training carries rounding on: it moved one
# of the second epoch by 4e-5 at most, and of the fourth by 2e-4; another batch moves it by 1e-3.
TOLERANCE = 1e-5
GROWTH = 20  # of it, each epoch
PRINTED = re.compile(r"epoch (\d+): loss (\d+\.\d+), accuracy (\d+\.\d+)%")

# Of the throughput without faults. On two cores that had five times the work they could do, the same script timed twice
# had ratios of 0.5 to 2.3, with half of them between 1.0 and 1.4; one that decoded each image once only, of 2 to 13.
SLOWER = 0.9  # less leaves something to fix
IMPLAUSIBLE = 2.5  # more, in every round, is nothing that fixing gains
ORIGINAL, YOURS, FIXED = "the original", "yours", "all fixed"


@dataclass(frozen=True)
class Grade:
    """What a fixed script is worth. Printed, it is a verdict in words.

    Attributes
    ----------
    trained : mapping of str to running.Run
        Yours and the one without faults: two epochs with their own network.
    timed : timing.Comparison or None
        The original, yours, and the one without faults, interleaved; None if yours does something else, as then nothing
        is faster.
    """

    trained: Mapping[str, running.Run]
    timed: timing.Comparison | None

    @property
    def difference(self) -> float:
        """The largest difference of two losses of the same step, in nats."""
        return float(np.abs(np.subtract(self.trained[YOURS].losses, self.trained[FIXED].losses)).max())

    @property
    def change(self) -> str | None:
        """What yours does otherwise than the one without faults, as it trains or as it is timed; None if nothing."""
        change = _change(self.trained[YOURS], self.trained[FIXED], grows=True)
        if change or self.timed is None:
            return change
        right, grows = self.timed.timings[FIXED][0], config.device().type == "cuda"
        for run in self.timed.timings[YOURS]:
            if change := _change(run, right, grows):
                return f"It trains as it did, but not while it is timed. {change}"
        return None

    @property
    def same_training(self) -> bool:
        """Whether yours does the same as the one without faults."""
        return self.change is None

    @property
    def implausible(self) -> str | None:
        """Why yours cannot be as fast as it seems; None if it can."""
        if self.timed is None:
            return None
        ratio = min(self.timed.ratios(YOURS, to=FIXED))
        if ratio > IMPLAUSIBLE:
            return f"in each round it had at least {ratio:.1f} times the throughput of the script with all faults fixed"
        return None

    @property
    def passed(self) -> bool:
        """Whether yours does the same, is plausible, and is about as fast as all fixed.

        It is if at least one round found it so, and all rounds together do not show that it is slower. The interval of
        two rounds reaches almost anywhere, and could not fail a script that is half as fast; of nine rounds, one is
        lucky, and the interval is narrow.
        """
        if self.timed is None or self.change or self.implausible:
            return False
        ratios, ratio = self.timed.ratios(YOURS, to=FIXED), self.timed.ratio(YOURS, to=FIXED)
        return max(ratios) >= SLOWER and ratio.highest >= SLOWER

    def __str__(self) -> str:
        if self.change:
            return self.change
        lines = [
            f"The same training: in {len(self.trained[FIXED].losses)} steps the losses differ by "
            f"{self.difference:.1g} nats at most."
        ]
        if self.timed is None:
            return lines[0]
        mine, whole = self.timed.ratio(YOURS), self.timed.ratio(FIXED)
        lines.append(
            f"You have {mine.mean:.1f}×; with all fixed it is {whole.mean:.1f}×: {_ratio(YOURS, mine)}, "
            f"{_ratio(FIXED, whole)} the throughput of the original."
        )
        left = self.timed.ratio(YOURS, to=FIXED)
        if self.implausible:
            lines.append(
                f"Implausible: {self.implausible}. Does it load every image in every epoch, and take every step whole? "
                "What is kept from one epoch to the next, such as a pack or a cache, leave for after this check."
            )
        elif self.passed:
            lines.append("Passed: it is about as fast as with all faults fixed, or faster.")
        elif left.highest < SLOWER:
            lines.append(f"Not yet: it reaches {left.mean:.0%} of what there is. Diagnose it again, as it is now.")
        else:
            lines.append(
                f"Undecided: it reaches {left.mean:.0%} of what there is, in {left.count} rounds too different to show "
                "that it is slower. Diagnose it again, as it is now. If that finds nothing, grade it again, on a "
                "quieter machine or in a larger preset."
            )
        return "\n".join(lines)


def grade(path: Path, seed: int, images: Path) -> Grade:
    """Run a fixed script, the original and the one without faults, and say what the fixed one is worth.

    Parameters
    ----------
    path : Path
        The script to grade. It is not changed; its checkpoint beside it is.
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
        start, steps = secrets.randbits(32), 2 * catalogue.EPOCH_STEPS
        # Yours first: what is wrong with it shows at once
        trained = {name: running.run(scripts[name], steps, seed=start) for name in (YOURS, FIXED)}
        same = Grade(trained, None).same_training
        return Grade(trained, running.compare(scripts, start) if same else None)


def _change(yours: running.Run, right: running.Run, grows: bool) -> str | None:
    """Say what a run does otherwise than that of the script without faults; None if it does the same.

    `grows` says whether rounding grows from epoch to epoch: in the script's own network, and not in a simulated one,
    where it moved no loss of eight epochs by more than 2e-7.
    """
    epochs = np.arange(len(right.losses)) // catalogue.EPOCH_STEPS
    tolerance = TOLERANCE * GROWTH ** (epochs if grows else 0.0 * epochs)
    return (
        _other_losses(yours, right, tolerance)
        or _other_images(yours, right)
        or _other_output(yours, right, tolerance[:: catalogue.EPOCH_STEPS])
        or _other_checkpoint(yours, right)
    )


def _other_losses(yours: running.Run, right: running.Run, tolerance: np.ndarray) -> str | None:
    wrong = ~(np.abs(np.subtract(yours.losses, right.losses)) <= tolerance)  # so written, as nan is wrong, too
    if not wrong.any():
        return None
    step = int(wrong.argmax())
    return (
        f"Not the same training: in step {step + 1} of {len(wrong)} the loss is {yours.losses[step]:.5f} nats, and "
        f"without faults {right.losses[step]:.5f}. A speed-up that changes what is learned is none: look for what has "
        "changed with it, such as the order of the images, in this epoch or the ones before, the size of a batch, "
        "normalization, or the learning rate."
    )


def _other_images(yours: running.Run, right: running.Run) -> str | None:
    if yours.images == right.images:
        return None
    return (
        f"Not the same images: by their length the batches hold {yours.images}, and without faults {right.images}. "
        "Leave the batches as the loader makes them."
    )


def _other_output(yours: running.Run, right: running.Run, tolerance: np.ndarray) -> str | None:
    found = {line[1]: line for line in PRINTED.finditer(yours.printed)}
    for line, nats in zip(PRINTED.finditer(right.printed), tolerance, strict=False):
        mine = found.get(line[1])
        # The last digit may be another by rounding, and that of the accuracy by two, as an image more or less is one
        room = 0.0011 + nats, 0.21 + 100 * nats
        if mine is None or (np.abs(_figures(mine) - _figures(line)) > room).any():
            instead = f"'{mine[0]}'" if mine else "none"
            return (
                f"Not the same output: expected the line '{line[0]}', and found {instead}. What the script prints once "
                "an epoch belongs to it: it has to stay, and to be right."
            )
    return None


def _other_checkpoint(yours: running.Run, right: running.Run) -> str | None:
    for name in right.weights:
        if not np.isclose(yours.checkpoint.get(name, np.nan), yours.weights.get(name, np.nan), rtol=1e-6, atol=0):
            return (
                "Not the same checkpoint: after each epoch the file checkpoint.pt beside the script has to hold "
                f"{name} as it is then, and it does not. To save the model belongs to the script: it has to stay."
            )
    return None


def _figures(line: re.Match) -> np.ndarray:
    return np.array([line[2], line[3]], float)


def _ratio(name: str, ratio: Interval) -> str:
    ends = f"{ratio.lowest:.2f} to {ratio.highest:.2f} in {ratio.count} rounds"
    return (
        f"{name} {ratio.mean:.2f}× ({f'{ratio.count} rounds, too different for an interval' if ratio.wide else ends})"
    )
