"""What several runs take: recipes and classes of the notebooks; drawn images as PNG files and as one file of pixels."""

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from helpers import config
from helpers.data import cifar10
from helpers.loading import datasets
from stepscope.base import machine

NOTEBOOKS = config.PROJECT / "notebooks"


def recipes() -> ModuleType:
    """Return the module of recipes."""
    if str(NOTEBOOKS) not in sys.path:
        sys.path.insert(0, str(NOTEBOOKS))
    return importlib.import_module("recipes")


def defined(notebook: str, *cells: str, **names: object) -> dict[str, object]:
    """Execute cells of a notebook, given by their ids, and return the names that they define, beside the given ones."""
    content = json.loads((NOTEBOOKS / notebook).read_text(encoding="utf-8"))["cells"]
    for cell in content:
        if cell["id"] in cells:
            exec("".join(cell["source"]), names)
    return names


def images(small: bool) -> cifar10.Prepared:
    """Draw 50,000 images to train on, or a few, unless they are there; in a folder beside the reader's images.

    With fewer than 50,000 an epoch is short, and the restarts of workers decide how long it takes.
    """
    with mock.patch.dict(os.environ, COURSE_DATA=str(config.data_dir() / "gpu"), CIFAR10_ARCHIVE=""):
        return cifar10.prepare(drawn=(600, 200) if small else (50_000, 2_000), download=False)


def packed(data: cifar10.Prepared) -> tuple[Path, torch.Tensor]:
    """Return a NumPy file of all training images, uint8 of shape (images, 3, 32, 32), and their labels, int64."""
    files = datasets.PngDataset(data.train, v2.PILToTensor())
    path = data.train.parent / "train.npy"
    if not path.exists():
        decoded = [pixels.clone() for pixels, _ in DataLoader(files, 100, num_workers=machine.cores())]
        np.save(path, torch.cat(decoded).numpy())
    return path, torch.from_numpy(files.labels)
