"""A training script that knows nothing of stepscope: `train.py FAULT STEPS`, with one of the faults below, or none."""

import builtins
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset


class Items(Dataset):
    def __init__(self, slow):
        self.items, self.slow = torch.randn(4096, 64), slow

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        if self.slow:
            time.sleep(0.0005)  # fault: slow
        return self.items[index], index % 10


def main(fault, steps):
    torch.manual_seed(0)
    torch.set_num_threads(1)  # several would wait for each other where others have the cores
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    sampler, data = None, Items(fault == "slow" or fault == "ranks")
    if fault == "apart":
        data = Subset(data, range(640))
    if fault == "ranks":
        torch.distributed.init_process_group("gloo")
        model, sampler = nn.parallel.DistributedDataParallel(model), DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    workers = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}
    loader = DataLoader(data, 32, shuffle=sampler is None, sampler=sampler, **(workers if fault == "validates" else {}))
    validation = DataLoader(TensorDataset(torch.randn(2048, 64), torch.zeros(2048).long()), 128)

    def evaluate():
        with torch.no_grad():
            return [nn.functional.cross_entropy(model(images), labels).item() for images, labels in validation]

    def own():
        """Give batches without a DataLoader."""
        while True:
            numbers = [float(index % 7) for index in range(200_000)]  # fault: own
            yield torch.tensor(numbers[: 32 * 64]).view(32, 64), torch.zeros(32).long()

    taken, batches = 0, 0
    while taken < steps:
        if fault == "apart" and taken:
            time.sleep(0.4)  # fault: apart
        for images, labels in own() if fault == "own" else loader:
            nn.functional.cross_entropy(model(images), labels).backward()
            batches += 1
            if fault == "validates" and batches % 2:
                continue  # gradients of two batches
            optimizer.step()
            optimizer.zero_grad()
            if fault == "validates":
                evaluate()  # fault: validates
            taken += 1
            if taken == steps:
                break
    weights = sum(weight.sum().item() for weight in model.parameters())
    print(f"{taken} steps of {batches} batches, weights {weights}, site: {getattr(builtins, 'site', None)}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.exit(3)
