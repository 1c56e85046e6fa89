"""Problems that cost no step time: memory that grows, and functions that are compiled again."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Objects:
    """Python objects that workers read: their place in the dataset, such as "Subset.dataset.names"."""

    place: str
    count: int


@dataclass(frozen=True)
class Growth:
    """Memory that the workers copied while they read, since each page that a fork shares is copied when it changes."""

    grown_bytes: float  # of all workers
    steps: int
    objects: tuple[Objects, ...]


@dataclass(frozen=True)
class Compilation:
    """Work of torch.compile that repeats; `at` is the place of the function that was compiled again most often."""

    again: int = 0  # functions compiled again
    seconds: float = 0.0  # that took
    at: str = ""
    why: str = ""  # the condition that failed
    limit: int = 0  # PyTorch compiles a function so often, then runs it as it is
    graph_breaks: tuple[str, ...] = ()  # places
