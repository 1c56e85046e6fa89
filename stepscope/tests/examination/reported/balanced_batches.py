"""Metric learning with batches of P classes and K images a class.

Report: sung-yeon-kim/Proxy-Anchor-CVPR2020 #26 (2022-05-09).
Symptom: with many classes the balanced sampler is far too slow.
Truth: the list of labels is turned into an array again for every class that is drawn; remedy: convert it once, in the constructor.
"""
import argparse
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.sampler import BatchSampler


class Images(Dataset):
    def __init__(self, count, classes):
        generator = torch.Generator().manual_seed(0)
        self.pool = torch.randint(0, 255, (512, 3, 32, 32), generator=generator, dtype=torch.uint8)
        self.ys = torch.randint(0, classes, (count,), generator=generator).tolist()

    def __len__(self):
        return len(self.ys)

    def __getitem__(self, index):
        return self.pool[index % 512].float() / 255 - 0.5, self.ys[index]


class PerClassSampler(BatchSampler):
    def __init__(self, ys, classes_per_batch, images_per_class, batches, convert):
        self.ys = np.array(ys) if convert else ys  # FAULT
        self.names = sorted(set(ys))
        self.classes_per_batch, self.images_per_class = classes_per_batch, images_per_class
        self.batches = batches
        self.random = np.random.default_rng(3)

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            batch = []
            for name in self.random.choice(self.names, self.classes_per_batch, replace=False):
                members = np.nonzero(np.asarray(self.ys) == name)[0]  # FAULT
                batch.extend(self.random.choice(members, self.images_per_class, replace=len(members) < self.images_per_class))
            yield [int(index) for index in batch]


class Embedder(nn.Module):
    def __init__(self, width=16, size=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, size))

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=1)


def contrastive(embeddings, labels, margin=0.5):
    similar = embeddings @ embeddings.t()
    same = labels[:, None] == labels[None]
    other = ~same
    same = same & ~torch.eye(len(labels), dtype=torch.bool)
    return (1 - similar)[same].mean() + (similar[other] - margin).clamp(min=0).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    parser.add_argument("--steps", type=int, default=290)
    args = parser.parse_args()
    torch.manual_seed(0)
    data = Images(60000, 5000)
    sampler = PerClassSampler(data.ys, 16, 4, 100, args.fixed)
    loader = DataLoader(data, batch_sampler=sampler)
    model = Embedder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    step, start, epoch = 0, None, 0
    while step < args.steps:
        for images, labels in loader:
            loss = contrastive(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step == 20:
                start = time.perf_counter()
            if step == args.steps:
                break
        epoch += 1
        print(f"Train Epoch: {epoch} Loss: {loss.item():.6f}", flush=True)
    print(f"step_ms={1e3 * (time.perf_counter() - start) / (step - 20):.3f}")


if __name__ == "__main__":
    main()
