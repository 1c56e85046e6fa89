"""A small network on a table of numbers that is in memory.

Report: pytorch/pytorch #106704 (2023-08-07); shenweichen/DeepCTR-Torch #70 (2019-12-08).
Symptom: a pass over tensors in memory takes 4.5 s with the DataLoader and 0.014 s with slices.
Truth: the loader fetches the rows one by one and stacks them again; remedy: take each batch with one index operation (batches as indices, batch_size=None).
"""
import argparse
import time

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler


class Table(Dataset):
    def __init__(self, features, labels):
        self.features, self.labels = features, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.features[index], self.labels[index]


class Tabular(nn.Module):
    def __init__(self, numbers=28, width=96):
        super().__init__()
        self.enter = nn.Linear(numbers, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
                                     for _ in range(3)])
        self.leave = nn.Linear(width, 2)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def make_loader(data, batch_size, by_batch):
    if by_batch:
        return DataLoader(data, sampler=BatchSampler(RandomSampler(data), batch_size, True), batch_size=None)
    return DataLoader(data, batch_size=batch_size, shuffle=True, drop_last=True)  # FAULT


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=1010)
    parser.add_argument("--batch-size", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(0)
    table, labels = torch.randn(60000, 28), torch.randint(0, 2, (60000,))
    loader = make_loader(Table(table, labels), args.batch_size, args.fixed)
    model = Tabular()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        correct = 0
        for x, y in loader:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (logits.argmax(1) == y).sum().item()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"epoch {epoch} loss {loss.item():.4f} accuracy {correct / len(table):.4f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
