"""Problems that cost no step time: growing memory, recompilations and graph breaks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Objects:
    """Python objects that workers read."""

    place: str  # in the dataset, such as "Subset.dataset.names"
    count: int


@dataclass(frozen=True)
class Growth:
    """Growth of the workers' memory: a page that workers share with their parent is copied when it changes."""

    grown_bytes: float  # growth of all workers together
    steps: int  # number of steps during which the memory grew
    objects: tuple[Objects, ...]  # large collections of objects that may cause the growth


@dataclass(frozen=True)
class Compilation:
    """Recompilations and graph breaks of torch.compile."""

    again: int = 0  # number of recompilations
    seconds: float = 0.0  # total time of the recompilations
    at: str = ""  # place of the function that was recompiled most often
    why: str = ""  # the guard of this function that failed; "" if unknown
    limit: int = 0  # recompilations of a function after which PyTorch runs the function without compiling it
    graph_breaks: tuple[str, ...] = ()  # places of graph breaks
