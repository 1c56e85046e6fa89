"""Whole pipelines, diagnosed as they run: each with one fault, which must come first; and some without any."""

import multiprocessing
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from stepscope import diagnosis
from stepscope.diagnosis import run

# Each diagnosis takes seconds
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

CLASSES, WIDTH = 10, 64
BUSY = run.BUSY


def first(step):
    """Return the first finding for a loop of this step; None if others had the cores so long that it is not known."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "BUSY", BUSY)
        found = diagnosis.diagnose(batches(8), step, steps=5)  # of fewer, a larger batch is tried, too
    return None if found.reason.startswith("Other processes") else found.findings[0]


def line(mark):
    """Where the line with a mark stands: a comment that begins with "fault:"."""
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, each in enumerate(text, 1) if each.endswith(f"# fault: {mark}"))
    return f"test_pipelines.py:{number}: "


class Items(Dataset):
    """Numbers and their labels."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((WIDTH,), index / 4096), index % CLASSES


class Starts(Items):
    """Starts a program for each item."""

    def __getitem__(self, index):
        subprocess.run([sys.executable, "-I", "-S", "-c", "sum(range(500_000))"], check=True)  # fault: starts
        return super().__getitem__(index)


class Irregular(Items):
    """Makes a fresh connection now and then."""

    def __getitem__(self, index):
        if index % 64 == 63:
            time.sleep(0.3)  # fault: irregular
        return super().__getitem__(index)


def test_programs_that_a_dataset_starts_are_its_own_work(names):
    found = diagnosis.diagnose(DataLoader(Starts(), 1), lambda numbers, labels: numbers.sum(), steps=6)
    assert (found.verdict, names(found)[0]) == ("loading", "the dataset's own work"), str(found)
    assert line("starts") in found.findings[0].evidence


def test_items_that_seldom_take_longer_are_named_with_their_line(names):
    found = diagnosis.diagnose(DataLoader(Irregular(), 8), lambda numbers, labels: numbers.sum(), steps=16)
    assert (found.verdict, names(found)[0]) == ("loading", "irregular items"), str(found)
    assert line("irregular") in found.findings[0].evidence


class Network(nn.Module):
    """Large enough that the rest of its step is small beside it, but for a fault."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)))
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, numbers):
        return self.last(self.layers(numbers))


class Step:
    """A step that trains."""

    def __init__(self, model=None):
        self.model = Network() if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def __call__(self, numbers, labels):
        nn.functional.cross_entropy(self.model(numbers), labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def batches(size):
    """Whole batches that are there already, so that there is nothing to load."""
    return [(torch.rand(size, WIDTH), torch.arange(size) % CLASSES)] * 8


class ManyWeights(nn.Module):
    """Has many weights, and uses them all at once."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(WIDTH, CLASSES) for _ in range(200))

    def forward(self, numbers):
        return numbers @ torch.stack([*self.weights]).sum(0)


def test_an_optimizer_that_goes_weight_by_weight_is_found():
    step = Step(ManyWeights())
    step.optimizer = torch.optim.Adam(step.model.parameters(), foreach=False)
    found = first(step)
    assert found is None or found.name == "an optimizer that goes weight by weight", found
    assert found is None or "self.optimizer.step()" in found.evidence


class Table(Network):
    """Looks up a few rows of many."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.rand(20_000, WIDTH))

    def forward(self, numbers):
        return super().forward(numbers + self.rows[: len(numbers)])


def test_an_optimizer_of_a_table_of_which_a_batch_needs_little_is_found():
    step = Step(Table())
    step.optimizer = torch.optim.Adam(step.model.parameters())
    found = first(step)
    assert found is None or found.name == "an optimizer that takes most of the step", found
    assert found is None or "self.optimizer.step()" in found.evidence


class Remade:
    """Makes its DataLoader anew for each epoch."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        while True:
            yield from DataLoader(self.dataset, 64, num_workers=2, persistent_workers=True)


def test_workers_that_a_wrapper_starts_again_are_seen(names):
    found = diagnosis.diagnose(Remade(Subset(Items(), range(512))), Step(), steps=24)
    assert names(found)[0] == "workers restarted every epoch", str(found)
    assert multiprocessing.active_children() == []


EXAMINED = (
    "zip_opened_for_each_item", "concatenated_one_by_one", "arrays_through_the_queue", "confusion_counted_one_by_one",
    "validated_in_each_step", "words_as_one_hot_vectors", "distances_by_broadcasting", "first_batch_of_a_new_iterator",
    "curve_drawn_after_each_batch", "network_in_float64", "copies_and_histograms", "cells_and_text_files",
    "plain_mlp", "checkpointing",
)  # fmt: skip


@pytest.mark.parametrize("name", EXAMINED)
def test_the_first_finding_names_the_fault_or_there_is_none(name):
    import pipelines  # here, because it takes seconds

    record = {"name": name, "kind": pipelines.LOOPS[name].kind} | pipelines.in_own_process("diagnosis", name)
    assert pipelines.judged(record)["right"] or "Other processes" in record["reason"], record
