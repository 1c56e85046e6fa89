"""Problems of a loop that cost no share of its steps: each beside a control in which nothing is found."""

import cProfile
import sys
import tracemalloc
from contextlib import contextmanager

import numpy as np
import pandas as pd
import pytest
import torch
from support import loops
from torch.utils.data import DataLoader, Subset

from stepscope.facts.hazards import Compilation, Objects
from stepscope.observe import apart, hazards


class Noise:
    """A transform with a generator of its own."""

    def __init__(self):
        self.numbers = np.random.default_rng(0)


def test_generators_that_workers_copy_are_named():
    within = DataLoader(Subset(loops.Names(loops.array, [Noise()]), range(9)), num_workers=2)
    assert hazards.copied_generators(within) == ("Subset.dataset.transform[0].numbers",)
    alone = DataLoader(within.dataset, num_workers=1)
    seeded = DataLoader(within.dataset, num_workers=2, worker_init_fn=print)
    for loader in (alone, seeded, DataLoader(loops.Names(loops.array), num_workers=2), None):
        assert hazards.copied_generators(loader) == ()


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
@pytest.mark.parametrize("kind", [list, loops.array])
def test_lists_whose_pages_workers_copy_by_reading_are_named(facts_of, quick, kind):
    loader = DataLoader(loops.Names(kind), 100, shuffle=True, num_workers=2, multiprocessing_context="fork")
    growth = facts_of(loader, lambda batch: None, 100).loader.growth
    if kind is list:
        assert (growth.steps, growth.objects) == (100, (Objects("Names.names", 200_000),))
    else:
        assert growth is None


NAMES = [f"{number:08d}.png" for number in range(40_000)]


class Photos:
    """A dataset with one attribute."""

    def __init__(self, value):
        self.value = value


WITH_OBJECTS = {
    "a list": (NAMES, 40_000),
    "a dict": (dict.fromkeys(NAMES), 40_000),
    "an array of objects": (np.array(NAMES, dtype=object), 40_000),
    "lists in an array": (np.array([[name] * 3 for name in NAMES] + [[]], dtype=object), 160_000),
    "short lists": ([NAMES[at : at + 10] for at in range(0, 40_000, 10)], 44_000),
    "rows": ([{"name": name, "size": [3, 4]} for name in NAMES[:9_000]], 45_000),
    "lists by their names": ({"train": NAMES, "test": NAMES[:20_000]}, 60_002),
    "a column of lists": (pd.DataFrame({"number": range(40_000), "sizes": [[3, 4] for _ in NAMES]}), 120_000),
    "a series of objects": (pd.Series(NAMES, dtype=object), 40_000),
}


@pytest.mark.parametrize("name", WITH_OBJECTS)
def test_the_objects_in_collections_of_any_kind_are_counted(name):
    value, count = WITH_OBJECTS[name]
    loader = DataLoader(Photos(value), num_workers=2, multiprocessing_context="fork")
    (found,) = hazards.growth(loader, {1: 0, 2: 0}, {1: 4 << 20, 2: 4 << 20}, 20).objects
    assert found.place == "Photos.value" and found.count == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize(
    "value",
    [
        np.zeros((40_000, 3)),
        np.array(NAMES, dtype="S"),
        NAMES[:100],
        "".join(NAMES),
        pd.DataFrame({"a": [1.0] * 40_000}),
    ],
)
def test_arrays_of_numbers_and_short_lists_are_not_said_to_let_memory_grow(value):
    loader = DataLoader(Photos(value), num_workers=2, multiprocessing_context="fork")
    assert hazards.growth(loader, {1: 0, 2: 0}, {1: 4 << 20, 2: 4 << 20}, 20) is None


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()


def test_graph_breaks_and_functions_that_are_compiled_again_have_their_lines(dynamo):
    def whole(numbers):
        return numbers * 2

    def broken(numbers):
        doubled = numbers * 2
        if doubled.sum().item() > 1e9:  # the graph ends here
            doubled = doubled + 1
        return doubled + 3

    torch.compile(whole, backend="eager")(torch.ones(3))
    assert hazards.compiled() == Compilation()
    compiled = torch.compile(broken, backend="eager")
    for size in (3, 3, 4):
        compiled(torch.zeros(size))
    found, line = hazards.compiled(), broken.__code__.co_firstlineno
    assert (found.graph_breaks, found.at) == ((f"test_hazards.py:{line + 2}",), f"test_hazards.py:{line}")
    assert found.again > 0 and found.limit == 8
    assert "size mismatch" in found.why or (torch.__version__ < (2, 7) and not found.why)  # which has no reasons


@contextmanager
def traced_by(start, stop):
    start()
    try:
        yield
    finally:
        stop()


def ignore(*_):
    return None


TRACERS = {
    "PyTorch's profiler": torch.autograd.profiler.profile,
    "cProfile": cProfile.Profile,
    "sys.setprofile": lambda: traced_by(lambda: sys.setprofile(ignore), lambda: sys.setprofile(None)),
    "sys.settrace": lambda: traced_by(lambda: sys.settrace(ignore), lambda: sys.settrace(None)),
    "tracemalloc": lambda: traced_by(tracemalloc.start, tracemalloc.stop),
}


@pytest.mark.parametrize("name", TRACERS)
def test_a_profiler_of_the_script_is_named_and_items_are_timed_without_those_of_python(name):
    before = hazards.tracers()
    with TRACERS[name]():
        (found,) = {*hazards.tracers()} - {*before}
        after = apart.call(lambda: hazards.stop_tracing() or hazards.tracers())
    assert found.startswith(name) and hazards.tracers() == before
    assert found not in after or name in ("PyTorch's profiler", "tracemalloc")
