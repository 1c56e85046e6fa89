"""A training script that knows nothing of stepscope: `train.py [alone]`; with `alone`, workers fail."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Images(Dataset):
    def __init__(self, alone):
        self.alone = alone

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.alone and get_worker_info() is not None:
            raise RuntimeError("no worker may read this")
        return torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index)), index % 10


def main(alone):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    loader = DataLoader(Images(alone), 8, shuffle=True)
    evaluation = DataLoader(Images(alone), 8)
    while True:  # it does not end by itself
        for images, labels in loader:
            loss = nn.functional.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            [network(images) for images, _ in evaluation]
        with open(Path("epochs.txt"), "a") as file:
            file.write(f"{loader.num_workers} {evaluation.num_workers}\n")


if __name__ == "__main__":
    main("alone" in sys.argv)
