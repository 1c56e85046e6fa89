"""Datasets, a step that takes a known time and no CPU time, and an error as a dataset raises it."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset


class UnreadableImage(OSError):
    """What a dataset raises."""


@dataclass
class SleepDataset(Dataset):
    """Items of `seconds` each; one in every `hiccup_every` takes `hiccup_seconds`."""

    count: int
    seconds: float
    hiccup_every: int | None = None
    hiccup_seconds: float = 0.0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        hiccup = self.hiccup_every and index % self.hiccup_every == self.hiccup_every - 1
        time.sleep(self.hiccup_seconds if hiccup else self.seconds)
        return torch.zeros(3), index


class Calls(Dataset):
    """Items that call a function with their index."""

    def __init__(self, function):
        self.function = function

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.function(index)
        return torch.zeros(1), index


class Names(Dataset):
    """Reads the length of one of 200,000 file names, which `kind` makes a list or an array."""

    def __init__(self, kind, transform=None):
        self.names, self.transform = kind(f"train/{index:08d}.png" for index in range(200_000)), transform

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        return len(self.names[index])


def array(names):
    """Return strings as an array of bytes."""
    return np.array([*names], dtype="S")


@dataclass(frozen=True)
class SleepStep:
    """A training step of `step_ms` milliseconds: an operator of its own, so that it is found by name in a trace."""

    step_ms: float

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        torch.ops.stepscope_tests.sleep(images, self.step_ms / 1e3)


@torch.library.custom_op("stepscope_tests::sleep", mutates_args=())
def _sleep(images: torch.Tensor, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
