"""Tries settings in an unedited training script, each in runs of its own: ``stepscope try``.

`offered` says which settings may help, `runs` starts the script with each setting in interleaved rounds, `loops` does
so with a loop of this process, and `results` says which settings gain, and what to write.
"""

from stepscope.trying.loops import tries
from stepscope.trying.offered import GROUPS
from stepscope.trying.results import Trials, Tried
from stepscope.trying.runs import CannotTry, run

__all__ = ["GROUPS", "CannotTry", "Trials", "Tried", "run", "tries"]
