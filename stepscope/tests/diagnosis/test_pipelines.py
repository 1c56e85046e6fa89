"""Whole pipelines, diagnosed as they run: each with one fault, which must come first; and some without any."""

import json
import multiprocessing
import queue
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from stepscope import diagnosis
from stepscope.diagnosis import run

pytestmark = [pytest.mark.processes, pytest.mark.slow]  # each diagnosis takes seconds

CLASSES, WIDTH = 10, 64


@pytest.fixture(autouse=True)
def one_thread(quick, monkeypatch):
    """Two would wait for each other on a busy machine, for longer than a small step takes."""
    monkeypatch.setattr(run, "_threads", lambda *_: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def line(mark):
    """Where the line with a mark stands: a comment that begins with "fault:"."""
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (number for number, each in enumerate(text, 1) if each.endswith(f"# fault: {mark}"))
    return f"test_pipelines.py:{number}: "


# ---------------------------------------------------------------- datasets


class Items(Dataset):
    """Numbers and their labels."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        return torch.full((WIDTH,), index / 4096), index % CLASSES


class Asks(Items):
    """Waits for the answer of another service with each item."""

    def __init__(self):
        self.answers = queue.Queue()

    def __getitem__(self, index):
        try:
            self.answers.get(timeout=0.01)  # fault: asks
        except queue.Empty:
            return super().__getitem__(index)


class Parses(Items):
    """Parses the same text for each item."""

    def __init__(self):
        self.text = json.dumps({str(number): [number] * 20 for number in range(2000)})

    def __getitem__(self, index):
        table = json.loads(self.text)  # fault: parses
        return super().__getitem__(len(table) + index)


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


# The dataset, items of a batch, steps, and what must be found first
DATASETS = {
    "asks": (Asks, 4, 6, "items that wait"),
    "parses": (Parses, 2, 6, "the dataset's own work"),
    "starts": (Starts, 1, 6, "the dataset's own work"),
    "irregular": (Irregular, 8, 16, "irregular items"),
}


@pytest.mark.parametrize("fault", DATASETS)
def test_what_a_dataset_does_is_named_with_its_line(names, fault):
    dataset, batch, steps, name = DATASETS[fault]
    found = diagnosis.diagnose(DataLoader(dataset(), batch), lambda numbers, labels: numbers.sum(), steps=steps)
    assert found.verdict == "loading"
    assert names(found)[0] == name, str(found)
    assert line(fault) in found.findings[0].evidence


# ---------------------------------------------------------------- steps


class Network(nn.Module):
    """Large enough that the rest of its step is small beside it, but for a fault."""

    def __init__(self, width=WIDTH, layers=3):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
        self.last = nn.Linear(width, CLASSES)

    def forward(self, numbers):
        return self.last(self.layers(numbers))


class Step:
    """A step that trains, and what some do besides; each function does so in another way."""

    def __init__(self, folder, model=None):
        self.folder, self.model, self.taken = folder, Network() if model is None else model, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.table = [[0] * CLASSES for _ in range(CLASSES)]

    def __call__(self, numbers, labels):
        logits = self.model(numbers)
        nn.functional.cross_entropy(logits, labels).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1
        self.besides(numbers, labels, logits.detach())

    def besides(self, numbers, labels, logits):
        """Do what a training does besides."""


class Counts(Step):
    """Counts a table of confusion in Python, over and over."""

    def besides(self, numbers, labels, logits):
        pairs = list(zip(logits.argmax(1).tolist(), labels.tolist(), strict=True))
        for row in list(range(CLASSES)) * 20:
            for column in range(CLASSES):
                self.table[row][column] += sum(pair == (row, column) for pair in pairs)  # fault: counts


class Reports(Step):
    """Sends its loss to a server, and waits until it has it."""

    def besides(self, numbers, labels, logits):
        self.send(float(logits.mean()))

    def send(self, value):
        time.sleep(0.05)  # fault: reports


class Evaluates(Step):
    """Evaluates the network on many items, in every step."""

    def besides(self, numbers, labels, logits):
        self.right = self.evaluate(torch.rand(4096, WIDTH))  # fault: evaluates

    @torch.no_grad()
    def evaluate(self, numbers):
        return [self.model(each).argmax(1) for each in numbers.chunk(4)]


class OneByOne(Step):
    """Calls the network for one item after the other."""

    def __call__(self, numbers, labels):
        with torch.no_grad():
            torch.stack([self.model(each) for each in numbers])  # fault: one by one


class OneHot(Network):
    """Looks words up by a product of a matrix that is almost all zeros."""

    def forward(self, numbers):
        words = nn.functional.one_hot(numbers.mul(9999).long(), 10000).float()  # fault: one hot
        return super().forward(words.sum(1)[:, :WIDTH])


class Distances(Network):
    """Returns the distances to many points, from a tensor of all differences."""

    def forward(self, numbers):
        distances = (super().forward(numbers)[:, None] - torch.ones(4096, CLASSES)).pow(2).sum(2)  # fault: distances
        return distances[:, :CLASSES]


class Cells(Network):
    """A recurrent network, called number by number."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(1, 128)

    def forward(self, numbers):
        state = None
        for number in numbers.split(1, dim=1):
            state = self.cell(number, state)  # fault: cells
        return super().forward(state[0][:, :WIDTH])


# The step, items of a batch, and what must be found first
STEPS = {
    "counts": (Counts, 128, "the step does something else"),
    "reports": (Reports, 128, "the step does something else"),
    "evaluates": (Evaluates, 128, "the step does something else"),
    "one by one": (OneByOne, 128, "many small operators"),
}


def batches(size):
    """Whole batches that are there already, so that there is nothing to load."""
    return [(torch.rand(size, WIDTH), torch.arange(size) % CLASSES)] * 8


@pytest.mark.parametrize("fault", STEPS)
def test_what_a_step_does_is_named_with_its_line(quick, names, fault):
    step, size, name = STEPS[fault]
    found = diagnosis.diagnose(batches(size), step(quick), steps=10)
    assert found.verdict == "host", str(found)
    assert names(found)[0] == name, str(found)
    assert fault == "reports" or "waits" not in found.findings[0].evidence  # what sleeps may wait for a core then
    assert line(fault) in found.findings[0].evidence, str(found)


class ManyWeights(nn.Module):
    """Has many weights, and uses them all at once."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.rand(WIDTH, CLASSES) for _ in range(200))

    def forward(self, numbers):
        return numbers @ torch.stack([*self.weights]).sum(0)


# The network, items of a batch, and what must be found first
NETWORKS = {
    "one hot": (OneHot, 16, "the step does something else"),
    "distances": (Distances, 64, "large elementwise operators"),
    "cells": (Cells, 64, "many small operators"),
}


@pytest.mark.parametrize("fault", NETWORKS)
def test_what_a_network_does_is_named_with_its_line(quick, names, fault):
    network, size, name = NETWORKS[fault]
    found = diagnosis.diagnose(batches(size), Step(quick, network()), steps=5)
    assert names(found)[0] == name, str(found)
    assert line(fault) in found.findings[0].evidence, str(found)


def test_an_optimizer_that_goes_weight_by_weight_is_found(quick, names):
    step = Step(quick, ManyWeights())
    step.optimizer = torch.optim.Adam(step.model.parameters(), foreach=False)
    found = diagnosis.diagnose(batches(8), step, steps=5)
    assert names(found)[0] == "an optimizer that goes weight by weight", str(found)
    assert "self.optimizer.step()" in found.findings[0].evidence


class Table(Network):
    """Looks up a few rows of many."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.rand(20_000, WIDTH))

    def forward(self, numbers):
        return super().forward(numbers + self.rows[: len(numbers)])


def test_an_optimizer_of_a_table_of_which_a_batch_needs_little_is_found(quick, names):
    step = Step(quick, Table())
    step.optimizer = torch.optim.Adam(step.model.parameters())
    found = diagnosis.diagnose(batches(8), step, steps=5)  # of fewer, a larger batch is tried, too
    assert names(found)[0] == "an optimizer that takes most of the step", str(found)
    assert "self.optimizer.step()" in found.findings[0].evidence


# ---------------------------------------------------------------- around the steps


class Logged:
    """Goes through a DataLoader, and does something with each of its batches."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        for numbers, labels in self.loader:
            json.dumps(numbers.tolist())  # fault: logged
            yield numbers, labels


class Remade:
    """Makes its DataLoader anew for each epoch."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        while True:
            yield from DataLoader(self.dataset, 64, num_workers=2, persistent_workers=True)


def test_what_a_wrapper_does_between_the_steps_is_named_with_its_line(quick, names):
    loader = DataLoader(TensorDataset(torch.rand(1024, 512), torch.arange(1024) % CLASSES), 256)
    found = diagnosis.diagnose(Logged(loader), Step(quick, Network(512)), steps=8)
    assert names(found)[0] == "work between the steps", str(found)
    assert line("logged") in found.findings[0].evidence
    assert dict(found.evidence)["DataLoader"].startswith("TensorDataset")


class Begun:
    """Gives the first batch of a new iterator each time."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        while True:
            yield next(iter(self.loader))  # fault: begun


def test_a_new_iterator_for_each_batch_is_named_with_its_line(quick, names):
    found = diagnosis.diagnose(Begun(DataLoader(Items(), 64, num_workers=1)), Step(quick), steps=5)
    assert names(found)[0] == "a new iterator for each batch", str(found)
    assert line("begun") in found.findings[0].evidence
    assert multiprocessing.active_children() == []


def test_workers_that_a_wrapper_starts_again_are_seen(quick, names):
    found = diagnosis.diagnose(Remade(Subset(Items(), range(512))), Step(quick), steps=24)
    assert names(found)[0] == "workers restarted every epoch", str(found)
    assert multiprocessing.active_children() == []


# ---------------------------------------------------------------- without any fault


def test_a_loop_over_tensors_in_memory_has_nothing_wrong(quick):
    numbers = TensorDataset(torch.rand(256, 1024), torch.arange(256) % CLASSES)
    found = diagnosis.diagnose(DataLoader(numbers, 16, shuffle=True), Step(quick, Network(1024, 8)), steps=8)
    assert (found.verdict, found.findings) == ("nothing wrong", ()), str(found)


class Seldom(Step):
    """Counts what is right with tensors, and writes a checkpoint now and then."""

    def besides(self, numbers, labels, logits):
        self.right = (logits.argmax(1) == labels).sum()
        if self.taken % 20 == 0:
            torch.save(self.model.state_dict(), self.folder / "checkpoint.pt")


def test_a_checkpoint_now_and_then_is_no_fault(quick):
    numbers = TensorDataset(torch.rand(2048, 1024), torch.arange(2048) % CLASSES)
    loader = DataLoader(numbers, batch_size=None, sampler=torch.arange(2048).view(-1, 128).tolist())
    found = diagnosis.diagnose(loader, Seldom(quick, Network(1024, 4)), steps=8)
    assert (found.verdict, found.findings) == ("nothing wrong", ()), str(found)
