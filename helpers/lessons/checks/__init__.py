"""Checks of code that the reader writes in a notebook: each check runs the code and says what it expected and found.

A check tests behaviour, never text: all code that gives the right result is right. A check takes the function or file
from the cell above it, prints a line, and returns whether the code is right. It never shows a solution. With
`unless_solved` the notebook's solution replaces no answer that a check found right.

By part of the course: `measuring` (notebooks 00 to 03), `feeding` (04 to 07, and 15), `computing` (08 to 13),
`parallel` and `overlapping` (16), `storing` (14 and 17). `answering` has what all of them share.
"""

from helpers.lessons.checks.answering import unless_solved
from helpers.lessons.checks.computing import (
    accumulated_step,
    attainable,
    channel_norm,
    one_ahead,
    one_linear,
    recompute_halves,
)
from helpers.lessons.checks.feeding import crop_pairs, mean_and_std, packed_images, resize, split
from helpers.lessons.checks.measuring import best_workers, host_waits, items_per_second, share_of_waiting
from helpers.lessons.checks.overlapping import overlap
from helpers.lessons.checks.parallel import data_parallel
from helpers.lessons.checks.storing import merged, whole_checkpoint
