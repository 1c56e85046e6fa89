"""Work for nothing in batches, beside batches that only seem to contain it: padding, and equal items of workers."""

import itertools
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stepscope.facts.batches import Batch
from stepscope.observe import batches

LENGTHS = [30, 12, 40, 25]  # of 100 positions: 107 of 400 are no padding


def padded(width=100, lengths=LENGTHS, value=0, left=False):
    """Return token numbers, padded with a value."""
    torch.manual_seed(0)
    rows = [nn.functional.pad(torch.randint(1, 500, (length,)), (0, width - length), value=value) for length in lengths]
    return torch.stack([row.flip(0) for row in rows] if left else rows)


def mask(lengths=LENGTHS, width=100):
    return (torch.arange(width) < torch.tensor(lengths)[:, None]).long()


@dataclass
class Pair:
    texts: torch.Tensor
    labels: torch.Tensor


FRAMES = mask()[..., None] * torch.rand(4, 100, 8)
LABELS = torch.tensor([1, 0, 1, 1])
WITH_PADDING = {
    "a tensor": padded(),
    "a pair": [padded(), LABELS],
    "a dict": {"texts": padded(), "labels": LABELS},
    "a dict in a tuple": ({"texts": padded()}, LABELS),
    "another mapping": UserDict(texts=padded()),
    "a dataclass": Pair(padded(), LABELS),
    "an object": SimpleNamespace(texts=padded()),
    "padded on the left": padded(left=True),
    "padded with the last number": padded(value=500),
    "padded with a number that ends each text, too": torch.cat([padded(99), torch.full((4, 1), 0)], 1),
    "a mask of numbers that repeat": {"input_ids": torch.ones(4, 100).long(), "attention_mask": mask()},
    "a mask of waves": {"input_values": torch.randn(4, 100), "attention_mask": mask().bool()},
    "a mask on the left": {"attention_mask": mask().flip(1)},
    "frames of features": (FRAMES, LABELS),
}


@pytest.mark.parametrize("name", WITH_PADDING)
def test_the_share_of_padding_is_measured(name):
    found = batches.padding(WITH_PADDING[name])
    assert found.padding == pytest.approx(1 - 107 / 400)
    assert (found.positions, found.longest) == (100, 40)
    assert found.beyond_the_longest == pytest.approx(0.6)


def test_the_largest_sequences_give_the_place_and_all_sequences_the_share():
    found = batches.padding({"question": padded(20, [20, 20, 20, 19]), "text": padded()})
    assert found == Batch(1 - (107 + 79) / 480, 100, 40, "text")


torch.manual_seed(0)
WITHOUT = {
    "full sequences": padded(100, [100] * 4),
    "a full mask": {"attention_mask": torch.ones(4, 100)},
    "no tensor": ["names", 3, None],
    "a scalar": torch.tensor(3),
    "images as bytes": torch.zeros(4, 784, dtype=torch.uint8),
    "images as whole numbers": (torch.rand(4, 28, 28) * mask([14], 28)[..., None] > 0.8).long().flatten(1) * 200,
    "grey images with dark edges": nn.functional.pad(torch.rand(4, 14, 14), (7, 7, 7, 7)),
    "classes as ones among zeros": nn.functional.one_hot(torch.tensor([1, 5, 7, 60]), 100),
    "counts of words": torch.bincount(torch.randint(0, 400, (90,)), minlength=400).reshape(4, 100) * 3,
    "numbers in which zero is one of four": torch.randint(0, 4, (4, 100)),
    "a table": torch.cat([torch.randint(1, 90, (4, 20)), torch.zeros(4, 20).long()], 1),
    "few columns": torch.tensor([[7, 3, 0, 0], [8, 0, 0, 0], [2, 4, 6, 0]]),
    "labels that leave out the prompt": torch.where(mask().bool(), -100, padded(100, [100] * 4)),
    "one class per pixel": torch.zeros(4, 100, 100).long(),
    "equal numbers": torch.full((4, 100), 7),
    "a row": padded()[:1],
    "no row": padded()[:0],
    "sparse": padded().to_sparse(),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_other_tensors_have_no_padding(name):
    assert batches.padding(WITHOUT[name]).padding < 0.05  # a column may be equal by chance


def digests(*numbers):
    return [batches.digest((torch.full((4, 9), float(number)), "text")) for number in numbers]


@pytest.mark.parametrize(
    ("passes", "equal"),
    [
        ([digests(1, 1, 2, 2, 3, 3)], True),
        ([digests(1, 2, 2, 3, 3, 4, 4, 5)], True),  # the first worker's batch came before
        ([digests(1, 1, 2, 2), digests(8, 8, 9)], True),
        ([digests(1, 2, 3, 4, 5, 6)], False),
        ([digests(1, 1, 1, 1, 1, 1)], False),  # data to try a loop with
        ([digests(1, 1, 2, 2, 1, 1)], False),
        ([digests(1, 1, 2, 3, 3, 4, 4)], False),
        ([digests(1, 1, 2, 2)], False),  # too few
        ([digests(1, 1, 1, 2, 2, 2, 3, 3, 3)], False),
        ([[None] * 6], False),
        ([], False),
    ],
)
def test_workers_are_equal_if_each_batch_comes_once_from_each(passes, equal):
    assert batches.equal_workers(passes, 2) is equal


class Stream(IterableDataset):
    """Numbers, which the workers share or do not share; with noise, no worker yields the same."""

    def __init__(self, shared=False, noise=0.0):
        self.shared, self.noise = shared, noise

    def __iter__(self):
        worker = get_worker_info()
        for number in itertools.count(worker.id if self.shared else 0, worker.num_workers if self.shared else 1):
            yield {"number": torch.tensor(float(number)) + self.noise * torch.rand(()), "text": "text"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("stream", "batch_size", "yielded"), [(Stream(), None, 2), (Stream(shared=True), 8, 1), (Stream(noise=0.1), 8, 1)]
)
def test_items_that_each_worker_yields_are_counted(facts_of, quick, stream, batch_size, yielded):
    loader = facts_of(DataLoader(stream, batch_size, num_workers=2), lambda batch: None, 4).loader
    assert loader.yielded == yielded
    assert (loader.items is None) == ("AttributeError" in loader.unknown) == stream.shared  # only a worker can load it
