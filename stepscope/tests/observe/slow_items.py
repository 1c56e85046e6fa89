"""A dataset that waits for each of its items."""

import time

import torch
from torch.utils.data import Dataset


class Items(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(0.001)  # fault: slow
        return {"numbers": torch.rand(32), "labels": index % 4}
