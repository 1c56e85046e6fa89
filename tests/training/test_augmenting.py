"""Crops and flips of a batch: each image by itself, with the distribution of torchvision's transforms."""

import nbformat
import pytest
import torch
from torch import nn
from torchvision.transforms import v2

from helpers import config, simulate, training

SIDE, PADDING, COUNT = 12, 4, 4000


def marked(count=COUNT, dtype=torch.uint8):
    """Images whose pixels say where they were, and which image: rows and columns from 1 on, as 0 is from outside."""
    rows, columns = torch.meshgrid(torch.arange(SIDE) + 1, torch.arange(SIDE) + 1, indexing="ij")
    numbers = torch.arange(count).view(-1, 1, 1).expand(-1, SIDE, SIDE) % 250 + 1
    return torch.stack([rows.expand(count, -1, -1), columns.expand(count, -1, -1), numbers], dim=1).to(dtype)


def draws(images):
    """Return what was drawn for each image: rows and columns that it moved, and whether it was mirrored.

    Of the pixel in the middle, which is never from outside, and its neighbour.
    """
    middle = SIDE // 2
    row, column = images[:, 0, middle, middle].long(), images[:, 1, middle, middle].long()
    flipped = images[:, 1, middle, middle + 1].long() < column
    place = torch.where(flipped, SIDE - 1 - middle, middle)
    return torch.stack([row - 1 - middle, column - 1 - place, flipped.long()], dim=1)


def replayed(images, drawn):
    """Return the images moved and mirrored as it was drawn, one by one."""
    out = []
    for image, (down, right, flipped) in zip(v2.functional.pad(images, PADDING), drawn.tolist(), strict=True):
        moved = v2.functional.crop(image, PADDING + down, PADDING + right, SIDE, SIDE)
        out.append(moved.flip(-1) if flipped else moved)
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
def test_each_image_is_moved_and_mirrored_as_a_whole_and_stays_in_its_place(dtype):
    images = marked(300, dtype)
    before = images.clone()
    torch.manual_seed(1)
    augmented = training.crop_and_flip(images)
    assert augmented.dtype == dtype and torch.equal(images, before)
    assert torch.equal(augmented, replayed(images, draws(augmented)))
    torch.manual_seed(1)
    assert torch.equal(training.crop_and_flip(images.to(memory_format=torch.channels_last)), augmented)


@pytest.mark.parametrize("name", ["07-augment-on-device.ipynb", "recipes.py"])
def test_the_lines_of_the_notebook_and_of_its_recipe_give_the_same(name):
    source = (config.PROJECT / "notebooks" / name).read_text(encoding="utf-8")
    if name != "recipes.py":
        (source,) = (cell.source for cell in nbformat.reads(source, 4).cells if cell.id == "07-change-1")
    exec(source, defined := {"torch": torch, "nn": nn})
    images = torch.randint(0, 256, (40, 3, 9, 7), dtype=torch.uint8)
    torch.manual_seed(3)
    expected = training.crop_and_flip(images)
    torch.manual_seed(3)
    assert torch.equal(defined["crop_and_flip"](images), expected)


def test_all_pairs_of_offsets_are_as_likely_as_each_other_and_half_are_mirrored_whatever_the_offset():
    torch.manual_seed(0)
    drawn, sides = draws(training.crop_and_flip(marked())), 2 * PADDING + 1
    pairs = (drawn[:, 0] + PADDING) * sides + drawn[:, 1] + PADDING
    cells = torch.bincount(pairs * 2 + drawn[:, 2], minlength=2 * sides**2)
    expected = len(drawn) / len(cells)
    assert ((cells - expected) ** 2 / expected).sum() < 237  # chi-squared, 161 degrees of freedom: 1 in 10,000 is above


def test_a_step_augments_its_batch_and_says_so():
    step = training.Augmented(lambda images, labels: (images, labels), lambda images: images + 1)
    labels = torch.tensor([3, 4])
    augmented, same = step(torch.zeros(2, 3, 8, 8), labels)
    assert augmented.eq(1).all() and same is labels
    gpu = training.Augmented(simulate.SimulatedGPU(5), training.crop_and_flip)
    assert str(gpu) == "simulated GPU (5 ms a step), after crop_and_flip"
