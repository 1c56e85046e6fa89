"""What is wrong in a loop and costs no share of its steps: each beside a control of which nothing is said."""

import sys

import numpy as np
import pytest
import torch
from support import loops
from torch.utils.data import DataLoader, Subset

from stepscope.diagnosis import remarks


class Noise:
    """A transform with a generator of its own."""

    def __init__(self):
        self.numbers = np.random.default_rng(0)


def test_generators_that_workers_copy_are_named():
    within = DataLoader(Subset(loops.Names(loops.array, [Noise()]), range(9)), num_workers=2)
    ((_, text),) = remarks.equal_numbers(within)
    assert "Subset.dataset.transform[0].numbers" in text
    alone = DataLoader(within.dataset, num_workers=1)
    seeded = DataLoader(within.dataset, num_workers=2, worker_init_fn=print)
    for loader in (alone, seeded, DataLoader(loops.Names(loops.array), num_workers=2), None):
        assert remarks.equal_numbers(loader) == []


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks safely")
@pytest.mark.parametrize("kind", [list, loops.array])
def test_lists_whose_pages_workers_copy_by_reading_are_named(kind):
    loader = DataLoader(loops.Names(kind), 100, shuffle=True, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    before = remarks.memory(batches._workers)
    steps = sum(1 for _ in zip(range(100), batches, strict=False))
    rows = remarks.growth(loader, before, remarks.memory(batches._workers), steps)
    assert len(before) == 2
    assert [name for name, _ in rows] == ["workers' memory"] * (kind is list)
    assert all("Names.names (200,000 objects)" in text for _, text in rows)


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
    assert remarks.compiled() == []
    compiled = torch.compile(broken, backend="eager")
    for size in (3, 3, 4):
        compiled(torch.zeros(size))
    rows, line = dict(remarks.compiled()), broken.__code__.co_firstlineno
    assert f"at test_remarks.py:{line + 2}." in rows["graph breaks"]
    assert f"test_remarks.py:{line}" in rows["compiled again"] and "size mismatch" in rows["compiled again"]
