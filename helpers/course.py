"""The modules of all rooms, for notebooks to import in one line. Nothing in `helpers` imports this."""

import inspect
from collections.abc import Callable
from types import ModuleType

from IPython.display import Code

from helpers.data import buckets, cifar10, photos, s3_server
from helpers.lessons import checks, exercises, faults, topics
from helpers.lessons.faults import grading, running
from helpers.loading import accidents, datasets, formats, packs, resizing, shards
from helpers.results import elsewhere, scoreboard, tour
from helpers.training import calculated, compiling, footprint, launching, models, precision, roofline
from stepscope.timing import monitor, profiling

__all__ = [
    "accidents", "buckets", "calculated", "checks", "cifar10", "compiling", "datasets", "elsewhere", "exercises",
    "faults", "footprint", "formats", "grading", "launching", "models", "monitor", "packs", "photos", "precision",
    "profiling", "resizing", "roofline", "running", "s3_server", "scoreboard", "shards", "source_of", "topics", "tour",
]  # fmt: skip


def source_of(*objects: Callable | ModuleType) -> Code:
    """Return the source of functions, methods, classes or modules, one below the other, with syntax highlighting."""
    return Code("\n".join(map(inspect.getsource, objects)), language="python")
