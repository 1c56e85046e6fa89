"""What notebooks import in one line: modules of all rooms, by their own names. Nothing in `helpers` imports this."""

from helpers.data import cifar10, photos, stores
from helpers.lessons import checks, exercises, faults, topics
from helpers.lessons.faults import child, grading, running
from helpers.lessons.sources import source_of
from helpers.loading import accidents, datasets, formats, packs, resident, resizing, shards
from helpers.results import scoreboard, tour
from helpers.timing import monitor, profiling
from helpers.training import compiling, launching, models, precision, roofline

__all__ = [
    "accidents", "checks", "child", "cifar10", "compiling", "datasets", "exercises", "faults", "formats", "grading",
    "launching", "models", "monitor", "packs", "photos", "precision", "profiling", "resident", "resizing", "roofline",
    "running", "scoreboard", "shards", "source_of", "stores", "topics", "tour",
]  # fmt: skip
