"""An exercise: a training script of ordinary looks with six faults, drawn by a seed from a catalogue; and its grading.

The script is used through four of its functions: ``make_loader()``, ``make_model()``, which returns the model and its
optimizer, ``train_step(model, optimizer, images, labels)``, which returns the loss, alone or first, and
``main(epochs)``, which calls the others.

`running` times scripts interleaved, and `grading` says what a fixed one is worth: whether it does the same, and how
fast. They are not imported here: `child`, which each process of a script needs, must be there quickly.
"""

from helpers.lessons.faults.catalogue import FAULTS, Fault, draw, text
from helpers.lessons.faults.writing import NotAFile, keep, write, write_for_groups

__all__ = ["FAULTS", "Fault", "NotAFile", "draw", "keep", "text", "write", "write_for_groups"]
